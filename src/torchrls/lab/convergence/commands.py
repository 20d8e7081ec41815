"""The command ``torchrls converge``, which races optimizers."""

from __future__ import annotations

import importlib.util
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torchrls.lab.convergence import leaderboard
from torchrls.lab.convergence.race import Race, best_rates, races, trials
from torchrls.lab.convergence.rivals import ALL, OURS, RIVALS
from torchrls.lab.convergence.tasks import TASKS
from torchrls.lab.experiments.commands import carry_out_shown, check_writable, fail
from torchrls.lab.experiments.data import DataError, Store
from torchrls.lab.experiments.records import RecordError, recorded
from torchrls.lab.experiments.work import Order, WorkerError

RECORDS = Path("runs/convergence")

RivalName = Enum("RivalName", {name: name for name in ALL}, type=str)  # type: ignore[misc]
TaskName = Enum("TaskName", {name: name for name in TASKS}, type=str)  # type: ignore[misc]


def converge(
    task: Annotated[list[TaskName] | None, typer.Option(help="All ten by default.")] = None,
    rival: Annotated[
        list[RivalName] | None,
        typer.Option(help="RLS, SGD, Adam and AdamW by default; the others take their time."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Races of each optimizer.")] = 5,
    data: Annotated[
        Path | None, typer.Option(help="The folder of the data sets.", envvar="TORCHRLS_DATA")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the records.")] = RECORDS,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; they share the cores.")] = 1,
    only_table: Annotated[bool, typer.Option(help="Run nothing: make the leaderboard.")] = False,
    report: Annotated[Path | None, typer.Option(help="Where to put table and plots.")] = None,
) -> None:
    """Race RLS with default arguments against optimizers with searched learning rates."""
    console = Console()
    names = [str(chosen.value) for chosen in task] if task else list(TASKS)
    rivals = [str(chosen.value) for chosen in rival] if rival else list(RIVALS)
    failures = 0
    if not only_table:
        _check_installed(rivals)
    try:
        check_writable(out)
        for name in [] if only_table else names:
            failures += _race(console, name, rivals, seeds, data, out, jobs)
        path = leaderboard.write(recorded(out, Race.parsed), names, report or out / "report")
        console.print(path.read_text(), markup=False, highlight=False, soft_wrap=True)
        console.print(f"Table and plots: {path.resolve()}", soft_wrap=True)
    except (DataError, RecordError, WorkerError, OSError) as error:
        fail(error)
    if failures:
        raise typer.Exit(1)


def _check_installed(rivals: list[str]) -> None:
    """Raise if the rivals need pytorch-optimizer and it is not installed."""
    others = [name for name in rivals if name not in RIVALS]
    if others and importlib.util.find_spec("pytorch_optimizer") is None:
        names = " and ".join(others)
        raise typer.BadParameter(
            f"{names} need pytorch-optimizer, which is not installed: pip install '.[bench]'",
            param_hint="--rival",
        )


def _race(
    console: Console,
    task: str,
    rivals: list[str],
    seeds: int,
    data: Path | None,
    out: Path,
    jobs: int,
) -> int:
    """Search for learning rates on a task, then race; return the number of failed runs."""
    TASKS[task].fetch(Store(data))

    def run(runs: list[Race]) -> int:
        order = Order(runs, out, TASKS[task].epochs, data=data, jobs=jobs)
        title = f"{TASKS[task].title}: {len(runs)} runs of {order.epochs} epochs"
        return carry_out_shown(console, order, title)

    tuned = trials(task, [name for name in rivals if name != OURS])
    failures = run(tuned) if tuned else 0
    rates = best_rates(recorded(out, Race.parsed), task)
    chosen = {name: rates.get(name) for name in rivals if name == OURS or name in rates}
    return failures + run(races(task, chosen, seeds))
