"""The races: data, search, records and leaderboard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from torchrls.lab.cli import app
from torchrls.lab.convergence import leaderboard, series
from torchrls.lab.convergence.data import characters, text
from torchrls.lab.convergence.models import CharacterLSTM, small_cnn
from torchrls.lab.convergence.race import Race, best_rates, races, trials
from torchrls.lab.convergence.rivals import ALL, OURS, RIVALS
from torchrls.lab.convergence.tasks import TASKS
from torchrls.lab.experiments.curve import Curve
from torchrls.lab.experiments.data import Store
from torchrls.lab.experiments.records import recorded
from torchrls.lab.experiments.training import Epoch


@pytest.fixture
def short(monkeypatch):
    """Tasks that need no files, with two epochs."""
    for name in ("tabular", "drift"):
        monkeypatch.setitem(TASKS, name, replace(TASKS[name], epochs=2))
    monkeypatch.setitem(ALL, "Adam", replace(ALL["Adam"], grid=(1e-3, 1e-2)))


def test_race_search_and_table(short, tmp_path):
    arguments = ["converge", "--seeds", "2", "--out", str(tmp_path)]
    tasks = ["--task", "tabular", "--task", "drift", "--rival", "RLS", "--rival", "Adam"]
    result = CliRunner().invoke(app, [*arguments, *tasks])
    assert result.exit_code == 0, result.output
    table = (tmp_path / "report" / "leaderboard.md").read_text()
    assert "| RLS |" in table
    assert "Adam, lr " in table
    assert "of 2 tasks" in table
    assert (tmp_path / "report" / "drift.png").stat().st_size > 10_000
    names = {path.name.rsplit("-", 1)[0] for path in (tmp_path / "drift").iterdir()}
    assert {"RLS-seed0", "RLS-seed1", "Adam-lr0.01-search"} <= names
    again = CliRunner().invoke(app, [*arguments, *tasks, "--only-table"])
    assert "RLS is ahead in epochs" in again.output
    best = best_rates(recorded(tmp_path, Race.parsed), "drift")
    assert best["Adam"] in (1e-3, 1e-2)


def test_a_search_looks_at_no_test_sample():
    task = TASKS["tabular"]
    whole = task.load(Store(None), 1_000)
    split = task.split(Store(None), 0, search=True)
    assert len(split.train_x) + len(split.test_x) == len(whole.train_x)
    known = {tuple(row) for row in whole.train_x.tolist()}
    assert all(tuple(row) in known for row in split.test_x.tolist())
    stream = TASKS["drift"]
    searched, raced = (stream.split(Store(None), 0, search=flag) for flag in (True, False))
    assert not torch.equal(searched.train_x, raced.train_x)


def test_a_stream_comes_in_order_and_only_once():
    split = series.drift(0, segments=3, segment=20)
    generator = torch.Generator()
    parts = [list(split.batches(8, generator, epoch=epoch)) for epoch in range(3)]
    rows = torch.cat([x for part in parts for x, _ in part])
    assert torch.equal(rows, split.train_x)
    assert torch.equal(next(iter(split.batches(8, generator, 1, 2)))[0], parts[2][1][0])


def test_a_stream_that_was_stopped_goes_on(short):
    race = Race("drift", OURS, None, 0)
    whole, first, second = (race.training(Store(None), "cpu") for _ in range(3))
    list(whole.run(2))
    for number, _ in enumerate(first.advance()):
        if number == 30:
            break
    second.load_state_dict(first.state_dict())
    list(second.run(2))
    scores = [[epoch.test_accuracy for epoch in training.epochs] for training in (whole, second)]
    assert scores[0] == scores[1]


def test_tasks_and_networks():
    assert len(TASKS) == 10
    split = characters()
    assert split.train_x.shape[1] == 64
    assert torch.equal(split.train_x[0, 1:], split.train_y[0, :-1])
    assert CharacterLSTM(text()[1])(split.train_x[:2]).shape == (2, 64, text()[1])
    assert small_cnn(norm=True)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    chaos = series.chaos(train=300, test=100)
    assert torch.equal(chaos.train_x[0, series.AHEAD :], chaos.train_y[0, : -series.AHEAD])


def test_runs_take_turns():
    assert [race.rival for race in races("drift", {"RLS": None, "Adam": 0.1}, 2)] == [
        *("RLS", "Adam"),
        *("RLS", "Adam"),
    ]
    assert len(trials("drift", ["SGD", "Adam"])) == 8
    assert set(RIVALS) < set(ALL)


def test_leaderboard_says_who_is_ahead():
    def curve(name, *scores):
        epochs = [Epoch(i, 1.0, s, 1.0, s, 2.0, {}) for i, s in enumerate(scores, 1)]
        return Curve(name, {0: epochs})

    curves = {"RLS": curve("RLS", 80.0, 91.0), "Adam": curve("Adam", 70.0, 80.3)}
    board = leaderboard.Board("drift", curves, {"Adam": 0.01})
    assert board.target == 80.0
    assert board.row("RLS")[:3] == ["RLS", "1", "2.0"]
    assert board.row("Adam")[:3] == ["Adam, lr 0.01", "2", "4.0"]
    lines = leaderboard._summary([board])
    assert "**1** | 2 | **2.0** | 4.0" in lines[4]
    assert not leaderboard.is_better("never", "3")
    assert leaderboard.is_better("3", "never")


def test_rivals_that_are_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ["converge", "--rival", "SOAP", "--rival", "Adam", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    words = " ".join(result.output.replace("│", " ").split())
    assert "SOAP need pytorch-optimizer, which is not installed: pip install '.[bench]'" in words
    assert not list(tmp_path.iterdir())
