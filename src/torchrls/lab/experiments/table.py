"""The table of a panel: final and best accuracy, cost, and the time to reach a target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchrls.lab.experiments.curve import text_of
from torchrls.lab.experiments.panel import Panel
from torchrls.lab.experiments.tasks import TASKS

HEADINGS = (
    "",
    "final %",
    "best %",
    "loss",
    "s/epoch",
    "x {reference}",
    "epochs to {target:.2f} %",
    "seconds",
)
PAPER_EPOCHS, PAPER_SEEDS = 100, 5


def target_of(panel: Panel, target: float | None = None) -> float:
    """Return the given target, else the final accuracy of the reference."""
    return panel.reference.final[0] if target is None else target


def table(panel: Panel, target: float | None = None) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows, a row for each curve."""
    goal, reference = target_of(panel, target), panel.reference
    base = reference.seconds_per_epoch
    headings = [text.format(reference=reference.label, target=goal) for text in HEADINGS]
    rows = []
    for curve in panel.curves:
        epochs, seconds = curve.epochs_to(goal), curve.seconds_to(goal)
        rows.append(
            [
                curve.label,
                text_of(curve.final),
                f"{curve.best[0]:.2f}",
                f"{curve.final_loss:.2g}",
                f"{curve.seconds_per_epoch:.2f}",
                f"{curve.seconds_per_epoch / base:.2f}" if panel.has_comparable_times else "?",
                f"> {panel.epochs}" if epochs is None else str(epochs),
                "never" if seconds is None else f"{seconds:.1f}",
            ]
        )
    return headings, rows


def markdown(panel: Panel, target: float | None = None) -> str:
    """Return the table and its title in Markdown."""
    headings, rows = table(panel, target)
    lines = [headings, ["---"] * len(headings), *rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"**{panel.title}** ({summary(panel)})\n\n{text}\n"


def summary(panel: Panel) -> str:
    """Return seeds, epochs and differences from the paper in one line."""
    text = f"seeds: {panel.seeds}, epochs: {panel.epochs}"
    if panel.unlike_paper:
        text += f"; {reduction(panel)}"
    if not panel.has_comparable_times:
        text += "; ?: threads, jobs or devices of the runs differ"
    return text


def settings(panel: Panel) -> dict[str, str]:
    """Return the settings of the panel's runs in words, by their names."""
    task, sessions = TASKS[panel.task], panel.sessions
    machines = [session["machine"] for session in sessions]
    words = {
        "seeds": f"{panel.seeds} (the paper: {PAPER_SEEDS})",
        "epochs": f"{panel.epochs} (the paper: {PAPER_EPOCHS})",
        "RLS": "λ 1, k 0.1, η 1, P₀ = I, unless the figure varies them",
        "+M, +R": f"momentum α 0.5, L1 factor γ {task.l1:g}",
        "gradients": f"clipped to an L2 norm of {task.clip:g}",
        "Adam": "at its defaults",
        **{key.replace("_", " "): _text(value) for key, value in panel.choices.items()},
        "samples": _known(_samples(session) for session in sessions),
    }
    if panel.unlike_paper:
        words["unlike the paper"] = reduction(panel)
    for key in ("processor", "torch", "torchrls", "commit", "threads"):
        words[key] = _known(str(machine.get(key)) for machine in machines)
    words["device"] = _known(str(session["device"]) for session in sessions)
    words["jobs at a time"] = _known(str(session["jobs"]) for session in sessions)
    if not panel.has_comparable_times:
        words["times"] = "not comparable: devices, threads or jobs differ"
    if panel.missing:
        words["not run, or too short"] = ", ".join(panel.missing)
    return words


def _samples(session: dict[str, Any]) -> str:
    """Return the sizes of training and test set, or "None" if they were not recorded."""
    if "samples" not in session:
        return "None"
    return "{:,} for training, {:,} for testing".format(*session["samples"])


def _known(values: Iterable[str]) -> str:
    """Join the different values, without "None"."""
    return ", ".join(sorted(set(values) - {"None"})) or "unknown"


def reduction(panel: Panel) -> str:
    """Return the choices that are not the paper's, in words."""
    choices = panel.unlike_paper.items()
    return ", ".join(f"{key.replace('_', ' ')} {_text(value)}" for key, value in choices)


def _text(value: object) -> str:
    """Format the value of a choice."""
    return "all" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
