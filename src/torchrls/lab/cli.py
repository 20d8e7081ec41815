"""The commands of ``torchrls``. The entry point is in ``torchrls.__main__``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from torchrls.common.version import __version__
from torchrls.lab.bench.commands import app as bench_app
from torchrls.lab.convergence.commands import converge
from torchrls.lab.experiments import commands, demo, plot
from torchrls.lab.experiments.contenders import Contender
from torchrls.lab.experiments.curve import Curve, text_of
from torchrls.selftest import doctor

#: The file formats of plots.
PLOTS = (".png", ".pdf", ".svg")

app = typer.Typer(
    help="Train deep networks with recursive least squares.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("reproduce")(commands.reproduce)
app.command("plot")(commands.plot)
app.command("converge")(converge)
app.command("complexity")(commands.complexity_command)
app.add_typer(bench_app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchrls {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show it and exit."),
    ] = False,
) -> None:
    """Train deep networks with recursive least squares."""


@app.command("demo")
def demo_command(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each contender.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each run.")] = 20,
    out: Annotated[Path, typer.Option(help="Where to save the plot.")] = Path("runs/demo.png"),
) -> None:
    """Compare RLS with Adam on handwritten digits: under a minute, and no downloads."""
    if out.suffix.lower() not in PLOTS:
        raise typer.BadParameter(f"{out} must end in {', '.join(PLOTS)}", param_hint="--out")
    run_demo(seeds, epochs, out)


@app.command("doctor")
def doctor_command() -> None:
    """Show versions, devices and memory, and run a short self-test; exits with 1 if it fails."""
    raise typer.Exit(doctor.run())


def run_demo(seeds: int, epochs: int, out: Path) -> None:
    """Train all contenders with a progress bar, print the table and save the plot."""
    console = Console()
    sizes = "-".join(str(size) for size in demo.SIZES)
    console.print(
        f"Handwritten digits (scikit-learn), a {sizes} network, batches of {demo.BATCH_SIZE}, "
        f"{seeds} seeds, {epochs} epochs. "
        f"Adam and RLS default are at their defaults, RLS and HRLS have the paper's values."
    )
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    records = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=demo.steps(seeds, epochs))
        for contender, seed, epoch in demo.run(seeds, epochs):
            records.append((contender, seed, epoch))
            text = f"seed {seed}, {contender.name}: {epoch.test_accuracy:.1f} %"
            progress.update(task, advance=1, description=text)
        progress.update(task, description="trained")
    results = demo.results(records)
    console.print(_table(results, seeds))
    path = plot.accuracy_curves(results, out, line=demo.TARGET)
    console.print(f"Plot saved to [bold]{path.resolve()}[/bold]", soft_wrap=True)


def _table(results: dict[Contender, Curve], seeds: int) -> Table:
    """Return the table of the last epoch: a row for each contender, a section for each loss."""
    table = Table(title=f"After the last epoch, seeds: {seeds}")
    for heading in ("trained with", "optimizer"):
        table.add_column(heading, no_wrap=True)
    for heading in ("accuracy %", "loss", "s/epoch", f"epochs to {demo.TARGET:.0f} %"):
        table.add_column(heading, justify="right")
    losses = [contender.loss for contender in results]
    for i, (contender, curve) in enumerate(results.items()):
        reached = curve.epochs_to(demo.TARGET)
        table.add_row(
            contender.loss,
            contender.name,
            text_of(curve.final, digits=1),
            f"{curve.final_loss:.4f}",
            f"{curve.seconds_per_epoch:.3f}",
            f"> {curve.length}" if reached is None else str(reached),
            end_section=losses[i : i + 2] != [contender.loss] * 2,
        )
    return table
