"""The paper's experiments: records that survive, commands that end with a report."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from fakes import datasets
from torchrls import RLS
from torchrls.lab.cli import app
from torchrls.lab.experiments import commands, complexity, figures
from torchrls.lab.experiments.contenders import Contender
from torchrls.lab.experiments.curve import Curve
from torchrls.lab.experiments.panel import panels
from torchrls.lab.experiments.records import CHECKPOINT, EPOCHS, Record, RecordError, recorded
from torchrls.lab.experiments.runs import Run, runs_of
from torchrls.lab.experiments.table import settings, table
from torchrls.lab.experiments.tasks import TASKS
from torchrls.lab.experiments.training import Epoch, Training, learning_state
from torchrls.lab.experiments.work import Event, Order, WorkerError, _listen, carry_out, work

SMALL = {"limit": 60, "test_limit": 30, "batch_size": 16, "width": 0.03}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return datasets.everything(tmp_path_factory.mktemp("data"))


def choices(task):
    extra = {"vocabulary": 30, "length": 8, "embedding": 6} if task == "imdb" else {}
    return {**TASKS[task].choices, **SMALL, **extra}


def order(data, root, task="mnist", names=("fig2",), epochs=2, seeds=1, **options):
    runs = runs_of(names, [task], seeds, {task: choices(task)})
    return Order(runs=runs, root=root, epochs=epochs, data=data, **options)


def numbers(root):
    """Everything in the records but times."""
    return {
        run.name: [{**vars(epoch), "seconds": None, "cpu_seconds": None} for epoch in epochs]
        for run, epochs, *_ in recorded(root)
    }


def complete(order):
    events = list(carry_out(order))
    assert not [event for event in events if event.kind == "failed"], events
    return events


# -- the paper's settings ------------------------------------------------------------------------


def test_figures_are_the_papers():
    task = TASKS["imdb"]
    alone = figures.FIGURES["fig2"].curves(task)
    assert list(alone) == ["Adam", "RLS", "RLS+M", "RLS+R", "RLS+M+R"]
    assert alone["RLS+M+R"] == Contender("RLS", "least squares", 1.0, 0.5, 1e-6, 0.1, 1.0)
    hybrid = figures.FIGURES["fig3"].curves(TASKS["cifar10"])
    assert list(hybrid) == ["Adam", "HRLS", "HRLS+M", "HRLS+R", "HRLS+M+R"]
    assert {contender.loss for contender in hybrid.values()} == {"cross-entropy"}
    assert hybrid["HRLS+R"].l1 == 1e-5
    ratios = [c.ratio for c in figures.FIGURES["fig4"].curves(task).values()]
    factors = [c.lr for c in figures.FIGURES["fig5"].curves(task).values()]
    assert ratios == factors == [0.01, 0.1, 1.0, 10.0]
    assert figures.FIGURES["fig5"].title("imdb").startswith("Fig. 5c")


def test_names_for_the_command_line_are_complete():
    for names, known in (
        (commands.FigureName, figures.FIGURES),
        (commands.TaskName, TASKS),
        (commands.ScaleName, TASKS["mnist"].scales),
    ):
        assert [name.value for name in names] == list(known)


@pytest.mark.parametrize(
    ("task", "parameters", "head"),
    [("mnist", 407_050, 5_130), ("cifar10", 4_760_906, 10_250), ("imdb", 4_359_746, 1_026)],
)
def test_networks_are_the_papers(task, parameters, head):
    model = TASKS[task].network(TASKS[task].choices)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(p.numel() for p in model.head.parameters()) == head


def test_hybrid_leaves_the_head_to_adam_and_adam_clips():
    model = TASKS["mnist"].network({"width": 0.01})
    optimizer = TASKS["mnist"].contender("HRLS", m=True).optimizer(model)
    assert [layer.weight is model.hidden[0].weight for layer in optimizer.layers] == [True]
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    TASKS["mnist"].contender("Adam").optimizer(model).step()
    total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert total.item() == pytest.approx(5.0, rel=1e-4)


def test_bad_contenders():
    with pytest.raises(ValueError, match="method must be one of Adam, RLS, HRLS"):
        Contender("SGD", "least squares")
    with pytest.raises(ValueError, match="loss must be"):
        Contender("RLS", "mse")


def test_every_run_is_there_once_and_seeds_take_turns():
    runs = runs_of(["fig2", "fig4", "fig5"], ["mnist"], 2, {"mnist": choices("mnist")})
    assert len(runs) == 2 * (5 + 3 + 3)
    assert len({run.name for run in runs}) == len(runs)
    assert [run.seed for run in runs] == [0] * 11 + [1] * 11


# -- records -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "method"), [("mnist", "RLS"), ("cifar10", "HRLS"), ("imdb", "RLS"), ("mnist", "Adam")]
)
def test_stopped_after_any_batch_it_goes_on_to_the_same_numbers(
    task, method, data, tmp_path, monkeypatch
):
    monkeypatch.setattr("torchrls.lab.experiments.work.TELL_SECONDS", 0.0)
    contender = TASKS[task].contender(method, m=True, r=True)
    runs = [Run(task, contender, 1, choices(task))]
    whole = Order(runs, tmp_path / "whole", 3, data)
    complete(whole)
    parts = Order(runs, tmp_path / "parts", 3, data, checkpoint_seconds=0.0)
    for batches in (1, 4, 6):  # of 4 an epoch
        events = work(Order(**vars(parts)))
        for _ in range(1 + batches):
            next(events, None)
        events.close()
    assert (Record(parts.root, runs[0]).folder / CHECKPOINT).exists()
    complete(parts)
    assert numbers(parts.root) == numbers(whole.root)
    (results,) = recorded(parts.root)
    assert len(results.sessions) == 4
    assert results.sessions[0]["machine"]["torch"] == torch.__version__
    assert not (Record(parts.root, runs[0]).folder / CHECKPOINT).exists()


def command(data, out, *extra):
    """The arguments of a small reproduction."""
    settings = {"limit": 60, "test-limit": 30, "batch-size": 4, "width": 0.03, "seeds": 1}
    options = [str(word) for key, value in settings.items() for word in (f"--{key}", value)]
    return ["reproduce", "fig2", "--data", str(data), "--out", str(out), *options, *extra]


def killed(arguments, out, after):
    """Run the command, and kill it when it has been at work for some time."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torchrls", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(out.rglob(EPOCHS)):
        time.sleep(0.02)
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_killed_it_goes_on_to_the_same_numbers(data, tmp_path):
    out, whole = tmp_path / "killed", tmp_path / "whole"
    arguments = command(data, out, "--epochs", "40")
    for after in (0.1, 0.7):
        killed(arguments, out, after)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert CliRunner().invoke(app, command(data, whole, "--epochs", "40")).exit_code == 0
    assert numbers(out) == numbers(whole)
    assert any(len(results.sessions) > 1 for results in recorded(out))
    assert not list(out.rglob("*.new"))


def test_a_finished_run_is_not_run_again_and_can_be_made_longer(data, tmp_path):
    first = order(data, tmp_path, epochs=2, keep_checkpoints=True)
    complete(first)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    events = complete(order(data, tmp_path, epochs=1))
    assert {event.kind for event in events} == {"finished"}
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.json*")}
    complete(order(data, tmp_path, epochs=3))
    complete(order(data, tmp_path / "new", epochs=3))
    assert numbers(tmp_path) == numbers(tmp_path / "new")
    assert {len(results.sessions) for results in recorded(tmp_path)} == {2}


def test_without_a_checkpoint_a_longer_run_begins_anew(data, tmp_path):
    complete(order(data, tmp_path, epochs=2))
    before = numbers(tmp_path)
    events = carry_out(order(data, tmp_path, epochs=3))
    for event in events:  # stopped in its first epoch: what is recorded stays
        if event.kind == "advanced":
            break
    events.close()
    assert numbers(tmp_path) == before
    complete(order(data, tmp_path, epochs=3))
    complete(order(data, tmp_path / "new", epochs=3))
    assert numbers(tmp_path) == numbers(tmp_path / "new")


def test_a_checkpoint_that_a_kill_has_left_is_removed(data, tmp_path):
    complete(order(data, tmp_path, epochs=1, keep_checkpoints=True))
    assert len(list(tmp_path.rglob(CHECKPOINT))) == 5
    complete(order(data, tmp_path, epochs=1))
    assert not list(tmp_path.rglob(CHECKPOINT))


def test_two_processes_share_the_work(data, tmp_path):
    """Each with two workers of its own: every run is run once."""
    arguments = command(data, tmp_path / "shared", "--epochs", "2", "--jobs", "2")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = partial(subprocess.Popen, [sys.executable, "-m", "torchrls", *arguments])
    processes = [run(stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    results = recorded(tmp_path / "shared")
    assert [len(entry.sessions) for entry in results] == [1] * 5
    assert all("Fig. 2a" in output for output in outputs)
    CliRunner().invoke(app, command(data, tmp_path / "alone", "--epochs", "2"))
    shared, alone = numbers(tmp_path / "shared"), numbers(tmp_path / "alone")
    for name, epochs in alone.items():  # the workers have fewer threads
        accuracies = [[e["test_accuracy"] for e in run] for run in (epochs, shared[name])]
        assert accuracies[0] == pytest.approx(accuracies[1], abs=4)


def test_workers_end_with_their_parent(data, tmp_path):
    arguments = command(data, tmp_path, "--epochs", "100000", "--jobs", "2")
    killed(arguments, tmp_path, 0.0)
    deadline = time.monotonic() + 30
    free = False
    while not free and time.monotonic() < deadline:
        time.sleep(0.2)
        with Record(tmp_path, recorded(tmp_path)[0].run).claimed() as free:
            pass
    assert free


def test_a_killed_worker_is_told_of_and_the_others_go_on(data, tmp_path):
    """Its lock is free, so that the other worker does its run."""
    events = carry_out(order(data, tmp_path, epochs=60, jobs=2))
    kinds = []
    for event in events:
        kinds.append(event.kind)
        if kinds.count("begun") == 2 and "killed" not in kinds:
            kinds.append("killed")
            multiprocessing.active_children()[0].kill()
    assert "lost" in kinds
    assert len(recorded(tmp_path)) == 5
    assert {len(results.epochs) for results in recorded(tmp_path)} == {60}


def test_a_worker_that_is_killed_while_it_speaks():
    """Half of what it had to say is no event, and nobody waits for the rest."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    theirs.send(Event("begun", 3, 0.0))
    os.write(theirs.fileno(), struct.pack("!i", 100) + b"half")
    theirs.close()
    worker = SimpleNamespace(exitcode=-9, join=lambda: None)
    assert [event.kind for event in _listen({ours: worker})] == ["begun", "lost"]


def test_if_all_workers_are_killed_that_is_an_error(data, tmp_path):
    events = carry_out(order(data, tmp_path, epochs=100000, jobs=2))
    next(event for event in events if event.kind == "begun")
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.raises(WorkerError, match="5 of 5 runs are not done"):
        list(events)


def test_an_interrupt_ends_everything_with_a_hint(data, tmp_path):
    arguments = command(data, tmp_path, "--epochs", "100000", "--jobs", "2")
    process = subprocess.Popen(
        [sys.executable, "-m", "torchrls", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(tmp_path.rglob(EPOCHS)):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert list(tmp_path.rglob(CHECKPOINT))
    assert "The same command goes on" in output
    assert "Traceback" not in output


def test_an_interrupt_waits_for_a_checkpoint(data, tmp_path):
    """In one process: the run goes on where it was stopped, not where it began."""
    stopped = order(data, tmp_path, epochs=3)
    events = carry_out(stopped)
    next(event for event in events if event.kind == "advanced" and event.done >= 1)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        list(events)
    assert len(list(tmp_path.rglob(CHECKPOINT))) == 1
    begun = [event.done for event in complete(stopped) if event.kind == "begun"]
    assert begun[0] >= 1
    complete(order(data, tmp_path / "new", epochs=3))
    assert numbers(tmp_path) == numbers(tmp_path / "new")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_folder_that_cannot_be_written(jobs, data, tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, command(data, tmp_path / "file", "--jobs", jobs))
    assert result.exit_code == 1
    assert "file" in result.output
    assert "Traceback" not in result.output


def test_a_disk_that_is_full(data, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    complete(order(data, tmp_path, epochs=1))
    before = numbers(tmp_path)
    monkeypatch.setattr("torchrls.saving.files.os.fsync", full)
    failed = [e for e in carry_out(order(data, tmp_path, epochs=2)) if e.kind == "failed"]
    assert len(failed) == 5
    assert all("No space left" in event.note for event in failed)
    assert numbers(tmp_path) == before


def test_bad_records(data, tmp_path):
    first = order(data, tmp_path, epochs=1, keep_checkpoints=True)
    complete(first)
    record = Record(tmp_path, first.runs[0])
    (record.folder / CHECKPOINT).write_bytes(b"nothing")
    failed = [e for e in carry_out(order(data, tmp_path, epochs=2)) if e.kind == "failed"]
    assert len(failed) == 1
    assert "delete it, and the run begins anew" in failed[0].note
    (record.folder / EPOCHS).write_text("{")
    with pytest.raises(RecordError, match=r"epochs\.jsonl cannot be read"):
        recorded(tmp_path)
    (record.folder / EPOCHS).unlink()
    (record.folder / "run.json").write_text("{}")
    with pytest.raises(RecordError, match="is no record of a run"):
        recorded(tmp_path)
    result = CliRunner().invoke(app, ["plot", str(tmp_path)])
    assert result.exit_code == 1
    assert "is no record of a run" in result.output


def test_a_pickle_in_the_place_of_a_checkpoint_is_not_loaded(data, tmp_path):
    first = order(data, tmp_path, epochs=1)
    record = Record(tmp_path / "x", first.runs[0])
    record.folder.mkdir(parents=True)
    torch.save(partial(Path.touch, tmp_path / "evil"), record.folder / CHECKPOINT)
    with pytest.raises(RecordError):
        record.checkpoint()
    assert not (tmp_path / "evil").exists()


def test_a_run_that_fails_does_not_keep_others(data, tmp_path, monkeypatch):
    real = Contender.optimizer

    def fail(self, model):
        if self.name == "RLS+M":
            raise RuntimeError("no such luck")
        return real(self, model)

    monkeypatch.setattr(Contender, "optimizer", fail)
    result = CliRunner().invoke(app, command(data, tmp_path, "--epochs", "1"))
    assert result.exit_code == 1
    assert "no such luck" in result.output
    assert len(recorded(tmp_path)) == 4


def test_divergence_is_recorded(data, tmp_path):
    """Losses that are not finite are null in the JSON, and can be drawn."""
    runs = runs_of(["fig5"], ["mnist"], 1, {"mnist": choices("mnist")})
    complete(Order(runs, tmp_path, 2, data))
    record = Record(tmp_path, runs[3])
    epochs = [Epoch(n, None, 10.0, None, 10.0, 1.0, {}) for n in (1, 2)]
    record.save(epochs)
    assert record.epochs() == epochs
    assert '"train_loss": null' in (record.folder / EPOCHS).read_text()
    result = CliRunner().invoke(app, ["plot", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "inf" in result.output


def test_curves_that_all_fall_can_be_drawn(data, tmp_path):
    runs = runs_of(["fig5"], ["mnist"], 1, {"mnist": choices("mnist")})
    complete(Order(runs, tmp_path, 1, data))
    for run in runs:
        high, low = (Epoch(n, 1.0, 50.0, 1.0, a, 1.0, {}) for n, a in ((1, 90.0), (2, 10.0)))
        Record(tmp_path, run).save([high, low])
    assert CliRunner().invoke(app, ["plot", str(tmp_path)]).exit_code == 0


def test_a_record_cannot_name_files_elsewhere(data, tmp_path):
    complete(order(data, tmp_path / "records", epochs=1))
    for path in (tmp_path / "records").glob("*/*/run.json"):
        results = json.loads(path.read_text())
        results["choices"]["limit"] = "x/../../../../evil"
        path.write_text(json.dumps(results))
    assert CliRunner().invoke(app, ["plot", str(tmp_path / "records")]).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["records"]
    assert not list(tmp_path.parent.glob("evil*"))


def test_learning_state():
    model = torch.nn.Linear(3, 2)
    optimizer = RLS.paper(model)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    state = learning_state(model, optimizer)
    assert state["skipped_steps"] == 0
    assert 0.5 < next(iter(state["mean_of_p"].values())) < 1
    assert set(learning_state(model, torch.optim.SGD(model.parameters()))) == {"parameter_norm"}


def test_seeds_and_batches_are_the_same_for_all_contenders(data):
    task, chosen = TASKS["mnist"], choices("mnist")
    from torchrls.lab.experiments.data import Store

    split = task.split(Store(data), chosen)
    make = partial(task.network, chosen)
    first, second = (
        Training(task.contender(method), make, split, seed=5, batch_size=16)
        for method in ("Adam", "RLS")
    )
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first.state_dict()["order"], second.state_dict()["order"])
    with torch.no_grad():
        assert first.batches == 4


# -- commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_quick_reproduction_of_all_figures(task, data, tmp_path):
    words = ["--vocabulary", "30", "--length", "8", "--embedding", "6"] if task == "imdb" else []
    arguments = [
        *("reproduce", "fig2", "fig3", "fig4", "fig5", "--task", task, "--data", str(data)),
        *("--out", str(tmp_path), "--epochs", "2", "--seeds", "2", "--limit", "60"),
        *("--width", "0.03", "--batch-size", "16", *words),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "HRLS+M+R, seed 1" in result.output
    report = (tmp_path / "report" / "report.html").read_text()
    for number in (2, 3, 4, 5):
        assert f"Fig. {number}{'abc'[list(TASKS).index(task)]}" in result.output
    assert report.count("data:image/svg+xml;base64,") == 4
    assert "http" not in report.replace("http://www.w3.org", "")  # self-contained
    assert len(list((tmp_path / "report").glob("*.png"))) == 4
    results = panels(tmp_path)
    assert [panel.figure for panel in results] == ["fig2", "fig3", "fig4", "fig5"]
    assert all(panel.seeds == 2 and panel.epochs == 2 for panel in results)
    if shutil.which("chromium"):
        look(tmp_path / "report" / "report.html", tmp_path)


def look(page, folder):
    """What a browser shows of the report: text, and curves in their colours."""
    from matplotlib.image import imread

    picture = folder / "page.png"
    flags = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    )
    subprocess.run(
        [
            *("chromium", *flags, f"--user-data-dir={folder / 'browser'}", "--hide-scrollbars"),
            *("--window-size=1000,1600", f"--screenshot={picture}", page.resolve().as_uri()),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    pixels = torch.tensor(imread(picture))[..., :3]
    assert 0.02 < (pixels < 0.9).any(-1).float().mean() < 0.5
    blue = torch.tensor([0x00, 0x72, 0xB2]) / 255
    assert ((pixels - blue).abs().amax(-1) < 0.02).sum() > 50


def test_plot_of_unfinished_records(data, tmp_path):
    full = order(data, tmp_path, epochs=3)
    complete(full)
    record = Record(tmp_path, full.runs[2])
    record.save(record.epochs()[:1])
    (panel,) = panels(tmp_path)
    assert panel.missing == ["RLS+M"]
    assert panel.epochs == 3
    target = CliRunner().invoke(app, ["plot", str(tmp_path), "--target", "99.9"])
    assert "99.90" in target.output
    assert "never" in target.output
    assert "not run, or too short" in (tmp_path / "report" / "report.html").read_text()


def test_a_short_figure_after_a_long_one(data, tmp_path):
    """They share a run, of which the short one shows what it asked for."""
    for name, epochs, seeds in (("fig2", 6, 2), ("fig4", 2, 1)):
        arguments = command(data, tmp_path, "--epochs", str(epochs), "--seeds", str(seeds))
        arguments[1] = name
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert "Fig. 4a" in result.output
    assert "seeds: 1, epochs: 2" in result.output
    report = (tmp_path / "report" / "report.html").read_text()
    assert "Fig. 2a" in report
    assert "Fig. 4a" in report


def test_times_of_different_conditions_are_not_compared(data, tmp_path):
    complete(order(data, tmp_path, epochs=1))
    assert panels(tmp_path)[0].has_comparable_times
    path = next(tmp_path.glob("*/Adam*/run.json"))
    path.write_text(path.read_text().replace('"jobs": 1', '"jobs": 3'))
    (panel,) = panels(tmp_path)
    assert not panel.has_comparable_times
    assert [row[5] for row in table(panel)[1]] == ["?"] * 5
    assert "not comparable" in settings(panel)["times"]


def test_seconds_are_the_processors_where_there_is_one_thread():
    def curve(threads):
        epochs = [Epoch(n, 0.5, 90.0, 0.4, 91.0, 9.0, {}, 2.0 if n == 1 else None) for n in (1, 2)]
        return Curve("x", {0: epochs}, frozenset({("cpu", threads, 2)}))

    assert curve(1).seconds() == [2.0, 11.0]
    assert curve(2).seconds() == [9.0, 18.0]
    assert curve(1).seconds_per_epoch == 5.5


def test_tensorboard(data, tmp_path):
    assert CliRunner().invoke(app, command(data, tmp_path, "--epochs", "1")).exit_code == 0
    arguments = command(data, tmp_path, "--epochs", "1", "--tensorboard")
    assert CliRunner().invoke(app, arguments).exit_code == 0  # of runs that are finished
    assert len(list(tmp_path.rglob("events.out.tfevents*"))) == 5
    shutil.rmtree(tmp_path)
    arguments = command(data, tmp_path, "--epochs", "2", "--tensorboard")
    assert CliRunner().invoke(app, arguments).exit_code == 0
    files = list(tmp_path.rglob("events.out.tfevents*"))
    assert len(files) == 5
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(files[0].parent))
    log.Reload()
    name = files[0].parent.parent
    epochs = [json.loads(line) for line in (name / EPOCHS).read_text().splitlines()]
    assert [event.value for event in log.Scalars("test_accuracy")] == pytest.approx(
        [epoch["test_accuracy"] for epoch in epochs]
    )


def test_tensorboard_that_is_missing(data, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(app, command(data, tmp_path, "--tensorboard"))
    assert result.exit_code == 2
    assert "torchrls[tensorboard]" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce"], "Missing argument"),
        (["reproduce", "fig6"], "fig6"),
        (["reproduce", "fig2", "--task", "svhn"], "svhn"),
        (["reproduce", "fig2", "--length", "9"], "mnist has no such choice"),
        (["reproduce", "fig2", "--task", "cifar10", "--task", "mnist", "--length", "9"], "no such"),
        (["reproduce", "fig2", "--device", "meta"], "cannot be used"),
        (["reproduce", "fig2", "--epochs", "0"], "greater than or equal to 1"),
        (["reproduce", "fig2", "--device", "nonsense"], "cannot be used"),
        (["plot", "nowhere"], "has no records that make a figure"),
    ],
)
def test_bad_arguments(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_missing_data(tmp_path, monkeypatch):
    import pooch

    def refuse(self, url, *args, **kwargs):
        raise OSError("the network is down")

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", refuse)
    result = CliRunner().invoke(app, command(tmp_path / "none", tmp_path / "out"))
    assert result.exit_code == 1
    assert "the network is down" in result.output
    assert not (tmp_path / "out").exists()


# -- Tables I and II -----------------------------------------------------------------------------


@pytest.mark.parametrize("layer", complexity.LAYERS, ids=lambda layer: layer.name)
def test_complexity(layer):
    results = complexity.count(layer)
    assert results.measured[0] == results.predicted[0]
    assert results.measured[1] == pytest.approx(results.predicted[1], rel=0.005)
    assert results.factored <= results.measured[1]
    assert results.measured_bytes == results.predicted_bytes


def test_complexity_command():
    result = CliRunner().invoke(app, ["complexity"])
    assert result.exit_code == 0
    for text in ("Table I", "Table II", "LSTM", "N*(M + N)*O", "33.03"):
        assert text in result.output
