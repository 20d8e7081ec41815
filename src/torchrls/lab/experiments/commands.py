"""The commands of the paper's experiments: reproduce, plot, complexity."""

from __future__ import annotations

import tempfile
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torchrls.lab.experiments import complexity, report, tensorboard
from torchrls.lab.experiments.data import DataError, Store
from torchrls.lab.experiments.panel import Panel, panels
from torchrls.lab.experiments.progress import follow
from torchrls.lab.experiments.records import RecordError
from torchrls.lab.experiments.runs import runs_of
from torchrls.lab.experiments.table import summary, table
from torchrls.lab.experiments.tasks import TASKS, Choices
from torchrls.lab.experiments.work import Order, WorkerError, carry_out

RECORDS = Path("runs/reproduction")


class FigureName(str, Enum):
    """The figures as an enumeration, which typer turns into the choices of an argument."""

    fig2 = "fig2"
    fig3 = "fig3"
    fig4 = "fig4"
    fig5 = "fig5"


class TaskName(str, Enum):
    """The tasks as choices of an option."""

    mnist = "mnist"
    cifar10 = "cifar10"
    imdb = "imdb"


class ScaleName(str, Enum):
    """The scales as choices of an option."""

    paper = "paper"
    standard = "standard"
    quick = "quick"


class ScalingName(str, Enum):
    """The scalings of pixels as choices of an option."""

    unit = "unit"
    standard = "standard"


Records = Annotated[Path, typer.Option(help="The folder of the records.")]
Target = Annotated[
    float | None,
    typer.Option(min=0, max=100, help="Test accuracy, per cent; by default Adam's at the end."),
]


def reproduce(
    figure: Annotated[list[FigureName], typer.Argument(help="Figures of the paper.")],
    task: Annotated[list[TaskName], typer.Option(help="May be given several times.")] = [  # noqa: B006
        TaskName.mnist
    ],
    scale: Annotated[
        ScaleName,
        typer.Option(
            help="quick: a subset, in minutes; standard: hours on two cores; "
            "paper: 100 epochs, 5 seeds.",
        ),
    ] = ScaleName.quick,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each contender.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of each run.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Training samples.")] = None,
    test_limit: Annotated[int | None, typer.Option(min=1, help="Test samples.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples of a minibatch.")] = None,
    width: Annotated[
        float | None,
        typer.Option(min=0.01, max=16, help="Factor of all hidden sizes; the paper: 1."),
    ] = None,
    scaling: Annotated[
        ScalingName | None,
        typer.Option(
            help="Of pixels: to [0, 1], or to mean 0 and deviation 1.",
        ),
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(min=3, help="Words of IMDB.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Words of a review.")] = None,
    embedding: Annotated[int | None, typer.Option(min=1, help="Numbers of a word.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="The folder of the data sets.", envvar="TORCHRLS_DATA"),
    ] = None,
    out: Records = RECORDS,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, mps, ...")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; they share the cores.")] = 1,
    keep_checkpoints: Annotated[
        bool, typer.Option(help="Of finished runs too: more epochs can then be added.")
    ] = False,
    tensorboard_files: Annotated[
        bool, typer.Option("--tensorboard", help="Write files for TensorBoard, too.")
    ] = False,
) -> None:
    """Run figures of the paper's section VI; stopped runs go on, finished ones are not repeated."""
    console = Console()
    names, tasks = [f.value for f in dict.fromkeys(figure)], [t.value for t in dict.fromkeys(task)]
    given = {
        "limit": limit,
        "test_limit": test_limit,
        "batch_size": batch_size,
        "width": width,
        "scaling": scaling.value if scaling else None,
        "vocabulary": vocabulary,
        "length": length,
        "embedding": embedding,
    }
    chosen = _choices(tasks, scale.value, {k: v for k, v in given.items() if v is not None})
    _check_device(device)
    if tensorboard_files:
        try:
            tensorboard.check()
        except ModuleNotFoundError as error:
            raise typer.BadParameter(str(error), param_hint="--tensorboard") from None
    failures = 0
    try:
        for name in tasks:
            TASKS[name].fetch(Store(data))
        check_writable(out)
        for name in tasks:
            usual = TASKS[name].scales[scale.value]
            order = Order(
                runs=runs_of(names, [name], seeds or usual.seeds, chosen),
                root=out,
                epochs=epochs or usual.epochs,
                data=data,
                device=device,
                jobs=jobs,
                keep_checkpoints=keep_checkpoints,
                tensorboard=tensorboard_files,
            )
            failures += carry_out_shown(console, order, _heading(order, chosen[name]))
        path = report.write(panels(out), out / "report")
        for name in tasks:
            usual = TASKS[name].scales[scale.value]
            drawn = panels(
                out, names, [name], epochs=epochs or usual.epochs, seeds=seeds or usual.seeds
            )
            _show(console, [p for p in drawn if p.choices == chosen[name]], None)
        console.print(f"Figures and report: [bold]{path.resolve()}[/bold]", soft_wrap=True)
    except (DataError, RecordError, WorkerError, OSError) as error:
        fail(error)
    if failures:
        raise typer.Exit(1)


def _choices(tasks: list[str], scale: str, given: dict[str, Any]) -> dict[str, Choices]:
    """Return the choices of each task: the task's own, then those of the scale, then the given.

    It is an error to give a choice that none of the tasks has.
    """
    known = {choice for name in tasks for choice in TASKS[name].choices}
    for unknown in sorted(given.keys() - known):
        raise typer.BadParameter(
            f"{' and '.join(tasks)} has no such choice",
            param_hint="--" + unknown.replace("_", "-"),
        )
    choices: dict[str, Choices] = {}
    for name in tasks:
        task = TASKS[name]
        own = {k: v for k, v in given.items() if k in task.choices}
        choices[name] = {**task.choices, **task.scales[scale].choices, **own}
    return choices


def check_writable(folder: Path) -> None:
    """Make the folder if needed; raise OSError if no file can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _check_device(device: str) -> None:
    """Raise if torch cannot use the device."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise typer.BadParameter(
            f"{device!r} cannot be used: {reason}", param_hint="--device"
        ) from None


def _heading(order: Order, chosen: Choices) -> str:
    """Return the line that is printed before the runs of a task begin."""
    first = order.runs[0]
    choices = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in chosen.items())
    return (
        f"{TASKS[first.task].title}: {len(order.runs)} runs of {order.epochs} epochs ({choices}); "
        f"records in {order.root / first.task}"
    )


def carry_out_shown(console: Console, order: Order, heading: str) -> int:
    """Carry out an order with progress bars, and print errors; return the number of failed runs.

    An interrupt ends the command with the exit code 130.
    """
    console.print(heading, highlight=False, soft_wrap=True)
    try:
        failures = follow(carry_out(order), order, console)
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on from the last checkpoints.")
        raise typer.Exit(130) from None
    notes: dict[str, list[str]] = {}
    for event in failures:
        notes.setdefault(event.note, []).append(order.runs[event.index].label)
    for note, labels in notes.items():
        text = escape("; ".join(labels))
        console.print(f"[red]failed:[/red] {text}\n{escape(note)}", soft_wrap=True)
    return len(failures)


def _show(console: Console, drawn: list[Panel], target: float | None) -> None:
    """Print the tables of panels."""
    if not drawn:
        console.print("There are not enough records for a table.")
    for panel in drawn:
        headings, rows = table(panel, target)
        shown = Table(
            title=panel.title,
            caption=summary(panel),
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for i, heading in enumerate(headings):
            text = heading.replace("epochs to ", "epochs to\n")
            shown.add_column(text, justify="right" if i else "left", no_wrap=True)
        for row in rows:
            shown.add_row(*row)
        console.print(shown, "")


def plot(
    records: Annotated[Path, typer.Argument(help="The folder of the records.")] = RECORDS,
    out: Annotated[
        Path | None, typer.Option(help="Where to put the figures; by default RECORDS/report.")
    ] = None,
    target: Target = None,
) -> None:
    """Draw the figures of all records (PNG and SVG), and write an HTML report and tables.md."""
    try:
        drawn = panels(records)
        if not drawn:
            raise RecordError(
                f"{records} has no records that make a figure; torchrls reproduce makes them"
            )
        path = report.write(drawn, out or records / "report", target)
        _show(console := Console(), drawn, target)
        console.print(f"Figures and report: [bold]{path.resolve()}[/bold]", soft_wrap=True)
    except (RecordError, OSError) as error:
        fail(error)


def complexity_command() -> None:
    """Print Tables I and II of the paper, beside operations and bytes of real layers."""
    console = Console()
    with console.status("counting"):
        counts = [complexity.count(layer) for layer in complexity.LAYERS]
    for shown in (_formulas(), _time_table(counts), _space_table(counts)):
        console.print(shown)
    console.print(
        "Real multiplications are those of matrix products, counted by torch. The formulas leave "
        "lower orders out, such as the product of P and the mean row. Ours is the ratio of the "
        "factored step, the default: it takes the gradient apart where that is less work.",
        highlight=False,
    )


def _formulas() -> Table:
    """Return the table of the paper's formulas."""
    shown = Table(title="The paper's formulas")
    for heading in ("layer", "", "SGD", "RLS"):
        shown.add_column(heading)
    for layer in {layer.kind: layer for layer in complexity.LAYERS}.values():
        shown.add_row(layer.kind, "time", layer.sgd, layer.rls)
        shown.add_row("", "space", layer.sgd_space, layer.rls_space, end_section=True)
    return shown


def _time_table(counts: list[complexity.Count]) -> Table:
    """Return the multiplications by Table I and the real ones."""
    shown = Table(title="Table I: millions of multiplications of a step")
    shown.add_column("layer", no_wrap=True)
    for heading in ("SGD", "real", "RLS", "real", "ratio", "real", "ours"):
        shown.add_column(heading, justify="right")
    for c in counts:
        cells = [c.predicted[0], c.measured[0], c.predicted[1], c.measured[1]]
        ratios = [
            c.predicted[1] / c.predicted[0],
            c.measured[1] / c.measured[0],
            c.factored / c.measured[0],
        ]
        figures = [f"{v / 1e6:,.0f}" for v in cells] + [f"{v:.2f}" for v in ratios]
        shown.add_row(c.layer.name, *figures)
    return shown


def _space_table(counts: list[complexity.Count]) -> Table:
    """Return the bytes by Table II and the real ones."""
    shown = Table(title="Table II: kilobytes of weights and state")
    shown.add_column("layer", no_wrap=True)
    for heading in ("SGD", "real", "RLS", "real", "ratio", "real"):
        shown.add_column(heading, justify="right")
    for c in counts:
        (sgd, rls), (real_sgd, real_rls) = c.predicted_bytes, c.measured_bytes
        figures = [f"{v / 1e3:,.0f}" for v in (sgd, real_sgd, rls, real_rls)]
        shown.add_row(c.layer.name, *figures, f"{rls / sgd:.2f}", f"{real_rls / real_sgd:.2f}")
    return shown


def fail(error: Exception) -> NoReturn:
    """Print an error and end the command with the exit code 1."""
    typer.echo(f"torchrls: {error}", err=True)
    raise typer.Exit(1) from None
