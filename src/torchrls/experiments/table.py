"""The table of a panel: final and best accuracy, cost, and the way to a target."""

from __future__ import annotations

from torchrls.experiments.panel import Panel

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


def target_of(panel: Panel, target: float | None = None) -> float:
    """The one that is asked for, else the final accuracy of the reference."""
    return panel.reference.final[0] if target is None else target


def table(panel: Panel, target: float | None = None) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, as text."""
    goal, reference = target_of(panel, target), panel.reference
    headings = [text.format(reference=reference.label, target=goal) for text in HEADINGS]
    rows = []
    for curve in panel.curves:
        epochs, seconds = curve.epochs_to(goal), curve.seconds_to(goal)
        rows.append(
            [
                curve.label,
                "{:.2f} ± {:.2f}".format(*curve.final),
                f"{curve.best[0]:.2f}",
                f"{curve.final_loss:.2g}",
                f"{curve.seconds_per_epoch:.2f}",
                f"{curve.seconds_per_epoch / reference.seconds_per_epoch:.2f}",
                f"> {panel.epochs}" if epochs is None else f"{epochs:.1f}",
                "never" if seconds is None else f"{seconds:.1f}",
            ]
        )
    return headings, rows


def markdown(panel: Panel, target: float | None = None) -> str:
    """The table with its title, for documents."""
    headings, rows = table(panel, target)
    lines = [headings, ["---"] * len(headings), *rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"**{panel.title}** ({summary(panel)})\n\n{text}\n"


def summary(panel: Panel) -> str:
    """Seeds, epochs, and what is not as in the paper."""
    text = f"seeds: {panel.seeds}, epochs: {panel.epochs}"
    return f"{text}; reduced: {reduction(panel)}" if panel.unlike_paper else text


def settings(panel: Panel) -> dict[str, str]:
    """What the panel was made with, in words."""
    machines = [session["machine"] for session in panel.sessions]
    found = {
        "seeds": str(panel.seeds),
        "epochs": str(panel.epochs),
        **{key.replace("_", " "): _text(value) for key, value in panel.choices.items()},
    }
    if panel.unlike_paper:
        found["other than the paper's"] = reduction(panel)
    for key in ("processor", "torch", "torchrls", "commit", "threads"):
        found[key] = ", ".join(sorted({str(machine.get(key)) for machine in machines}))
    found["device"] = ", ".join(sorted({str(session["device"]) for session in panel.sessions}))
    found["jobs at a time"] = ", ".join(sorted({str(s["jobs"]) for s in panel.sessions}))
    if panel.missing:
        found["not run"] = ", ".join(panel.missing)
    return found


def reduction(panel: Panel) -> str:
    """The choices that are not the paper's, in words."""
    found = panel.unlike_paper.items()
    return ", ".join(f"{key.replace('_', ' ')} {_text(value)}" for key, value in found)


def _text(value: object) -> str:
    return "all" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
