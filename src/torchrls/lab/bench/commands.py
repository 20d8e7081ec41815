"""The commands of ``torchrls bench``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from torchrls.lab.bench import compare as comparison
from torchrls.lab.bench import growth, memory, plot, profile, results, step_time
from torchrls.lab.bench.contenders import FIRST_ORDER, OURS, PEERS, Make, contenders
from torchrls.lab.bench.networks import NETWORKS

app = typer.Typer(
    help="Time and memory of a training step, beside SGD, Adam and peers. Each command prints a "
    "table and saves JSON and a plot.",
    no_args_is_help=True,
)
Only = Annotated[str, typer.Option(help="Networks with this in their name.")]
Out = Annotated[Path, typer.Option(help="Where to save the results; the plot goes beside them.")]


def _chosen(only: str, known: dict[str, Any]) -> dict[str, Any]:
    """Return the networks whose names contain ``only``; it is an error if there are none."""
    networks = {name: value for name, value in known.items() if only.lower() in name.lower()}
    if not networks:
        raise typer.BadParameter(
            f"no network has {only!r} in its name; there are {'; '.join(known)}",
            param_hint="--only",
        )
    return networks


def _save(console: Console, kind: str, measured: Any, out: Path) -> None:
    """Save the measured values and their plot, and print the paths."""
    saved = results.save(kind, measured, out)
    drawn = plot.draw(saved, out.with_suffix(".png"))
    console.print(f"Saved {out} and {drawn}", soft_wrap=True)


@app.command("step-time")
def step_time_command(
    only: Only = "",
    peers: Annotated[bool, typer.Option(help="With the peers that are installed.")] = True,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="These only, beside SGD and Adam; may be given several times."),
    ] = None,
    turns: Annotated[
        int, typer.Option(min=0, help="How many; 0 for the number of each network.")
    ] = 0,
    keep_memory: Annotated[
        bool, typer.Option(help="Without page faults: freed memory is kept (glibc only).")
    ] = False,
    out: Out = Path("runs/bench/step-time.json"),
) -> None:
    """Time whole training steps of all contenders, which take turns in one process."""
    console, measured = Console(), {}
    makes = contenders(peers=peers)
    if contender:
        _check_known(contender, makes)
        makes = {k: make for k, make in makes.items() if k in contender or k in FIRST_ORDER}
    missing = [name for name in PEERS if name not in makes]
    if peers and missing and not contender:
        text = f"Not installed: {', '.join(missing)}. To measure them: pip install '.[bench]'"
        console.print(text, markup=False)
    for name, network in _chosen(only, NETWORKS).items():
        with console.status(name) as status:
            tell = lambda text, name=name, status=status: status.update(f"{name}: {text}")  # noqa: E731
            spec = replace(network, turns=turns or network.turns)
            measured[name] = step_time.measure(spec, makes, tell, keep_memory=keep_memory)
        console.print(_step_table(name, measured[name]))
    _save(console, "step-time", measured, out)


def _check_known(names: list[str], makes: dict[str, Make]) -> None:
    """Raise if one of the names is no contender."""
    for name in names:
        if name not in makes:
            raise typer.BadParameter(
                f"{name!r} is none of {'; '.join(makes)}", param_hint="--contender"
            )


def _step_table(title: str, by_contender: dict[str, Any]) -> Table:
    """Return the table of one network, a row for each contender."""
    table = Table(title=title)
    table.add_column("optimizer", no_wrap=True)
    for heading in ("ms", "x Adam", "x fused Adam", "x SGD", "page faults"):
        table.add_column(heading, justify="right")
    for name, result in by_contender.items():
        if "failure" in result:
            table.add_row(name, f"fails: {result['failure']}", "", "", "", "")
        else:
            ratios = [f"{result[f'to {other}']:.2f}" for other in ("Adam", "Adam, fused", "SGD")]
            faults = f"{result['page faults']:,.0f}"
            table.add_row(name, f"{1e3 * result['seconds']:.2f}", *ratios, faults)
    return table


@app.command("memory")
def memory_command(
    only: Only = "",
    peers: Annotated[bool, typer.Option(help="With the peers that are installed.")] = False,
    out: Out = Path("runs/bench/memory.json"),
) -> None:
    """Measure peak and state memory, each contender in a process of its own."""
    console = Console()
    measured: dict[str, dict[str, Any]] = {}
    networks = _chosen(only, {**NETWORKS, **memory.LARGE})
    with console.status("") as status:
        for network, name, result in memory.measure_all(networks, contenders(peers=peers)):
            status.update(f"{network}: {name}")
            measured.setdefault(network, {})[name] = result
    for network, by_contender in measured.items():
        console.print(_memory_table(network, by_contender))
    _save(console, "memory", measured, out)


def _memory_table(title: str, by_contender: dict[str, Any]) -> Table:
    """Return the table of one network, a row for each contender."""
    table = Table(title=title)
    table.add_column("optimizer", no_wrap=True)
    for heading in ("peak MB", "state MB", "P MB", "peak without P, x Adam"):
        table.add_column(heading, justify="right")
    reference = by_contender.get("Adam", {}).get("peak")
    for name, result in by_contender.items():
        if "failure" in result:
            table.add_row(name, f"fails: {result['failure']}", "", "", "")
            continue
        sizes = [f"{result[key] / 1e6:,.1f}" for key in ("peak", "state", "P")]
        ratio = (result["peak"] - result["P"]) / reference if reference else float("nan")
        table.add_row(name, *sizes, f"{ratio:.2f}")
    return table


@app.command("growth")
def growth_command(out: Out = Path("runs/bench/growth.json")) -> None:
    """Measure time and memory against width, batch and depth, and fit exponents."""
    console, measured = Console(), {}
    with console.status("") as status:
        for axis in growth.AXES:
            measured[axis] = growth.measure(axis, tell=status.update)
    for axis, by_contender in measured.items():
        console.print(_growth_table(axis, by_contender))
    _save(console, "growth", measured, out)


def _growth_table(axis: str, by_contender: dict[str, Any]) -> Table:
    """Return the table of fitted exponents beside the paper's, a row for each contender."""
    table = Table(title=f"exponents of {axis}, fitted to the last {growth.LAST} points")
    table.add_column("optimizer", no_wrap=True)
    for heading in ("step", "Table I", "update alone", "bytes", "Table II"):
        table.add_column(heading, justify="right")
    for name, result in by_contender.items():
        fitted, paper = result["exponents"], growth.predicted(axis, name)
        cells = (
            fitted["seconds"],
            paper.get("seconds"),
            fitted["update"],
            fitted["bytes"],
            paper.get("bytes"),
        )
        table.add_row(
            name, *("" if cell is None else f"{round(cell, 2) + 0.0:.2f}" for cell in cells)
        )
    return table


@app.command("profile")
def profile_command(
    only: Only = "FNN",
    contender: Annotated[
        list[str] | None, typer.Option(help="Which RLS; may be given several times.")
    ] = None,
    out: Out = Path("runs/bench/profile.json"),
) -> None:
    """Time the parts of an RLS step."""
    console, measured = Console(), {}
    names = contender or ["RLS+M", "RLS+M+R", "RLS+M, rank 64"]
    _check_known(names, OURS)
    for network, spec in _chosen(only, NETWORKS).items():
        measured[network] = {
            name: profile.measure(spec, name, spec.steps * spec.turns) for name in names
        }
        console.print(_profile_table(network, measured[network]))
    _save(console, "profile", measured, out)


def _profile_table(title: str, by_contender: dict[str, dict[str, float]]) -> Table:
    """Return the table of one network: a row for each part, a column for each contender."""
    table = Table(title=f"{title}: microseconds of a step")
    table.add_column("part")
    for name in by_contender:
        table.add_column(name, justify="right")
    runs = by_contender.values()
    for part in dict.fromkeys(part for parts in runs for part in parts):
        table.add_row(part, *(f"{1e6 * parts.get(part, 0.0):,.0f}" for parts in runs))
    totals = (f"{1e6 * sum(parts.values()):,.0f}" for parts in runs)
    table.add_section()
    table.add_row("all", *totals)
    return table


@app.command("compare")
def compare_command(
    before: Annotated[Path, typer.Argument(help="A file of results.")],
    after: Annotated[Path, typer.Argument(help="A later one.")],
    tolerance: Annotated[float, typer.Option(help="An increase up to this is noise.")] = 0.2,
) -> None:
    """List what got slower (relative to Adam) or larger; exits with 1 if something did."""
    console = Console()
    try:
        files = results.load(before), results.load(after)
        changes = comparison.compare(*files)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if len({"--keep-memory" in str(file.get("command")) for file in files}) > 1:
        console.print("Only one of the files is of a run with --keep-memory: they tell little.")
    table = Table(title=f"{before} and {after}: {comparison.UNITS[files[0]['kind']]}")
    for heading in ("network", "optimizer", "before", "after", "change"):
        table.add_column(heading)
    for change in changes:
        worse = change.ratio > 1 + tolerance
        style = "bold red" if worse else "green" if change.ratio < 1 - tolerance else None
        figures = [f"{value:,.4g}" for value in (change.before, change.after)]
        percent = f"{100 * (change.ratio - 1):+.0f} %"
        table.add_row(change.network, change.contender, *figures, percent, style=style)
    console.print(table)
    count = sum(change.ratio > 1 + tolerance for change in changes)
    console.print(f"{count} of {len(changes)} figures got worse by more than {tolerance:.0%}")
    if count:
        raise typer.Exit(1)
