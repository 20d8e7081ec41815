"""The plots of the experiments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrls.lab.experiments.contenders import Contender
from torchrls.lab.experiments.curve import Band, Curve
from torchrls.lab.experiments.panel import Panel

#: The colours of Okabe and Ito, which the colour-blind can tell apart, and dashes for grey.
_STYLES: tuple[tuple[str, Any], ...] = (
    ("#000000", (0, (4, 1.5))),
    ("#0072B2", "-"),
    ("#E69F00", (0, (5, 1))),
    ("#009E73", (0, (3, 1, 1, 1))),
    ("#D55E00", "-"),
)
_LABELS = (
    ("Adam",),
    ("RLS", "HRLS", "k = 0.1", "η = 1"),
    ("RLS+M", "HRLS+M", "k = 0.01", "η = 0.01"),
    ("RLS+R", "HRLS+R", "k = 1", "η = 0.1"),
    ("RLS+M+R", "HRLS+M+R", "k = 10", "η = 10"),
)
STYLES = {label: style for labels, style in zip(_LABELS, _STYLES, strict=True) for label in labels}
STYLES |= {
    "RLS default": ("#D55E00", "-"),
    "SGD": ("#999999", (0, (1, 1))),
    "AdamW": ("#56B4E9", (0, (5, 1))),
    "Muon": ("#E69F00", (0, (3, 1, 1, 1))),
    "SOAP": ("#009E73", (0, (5, 1))),
    "Shampoo": ("#CC79A7", (0, (3, 1, 1, 1))),
    "Kron": ("#D55E00", (0, (1, 1))),
}


def accuracy_curves(results: Mapping[Contender, Curve], path: Path, line: float) -> Path:
    """Draw the test accuracy after each epoch, a panel for each loss, as means and ranges."""
    panels: dict[str, dict[str, Band]] = {}
    for contender, curve in results.items():
        panels.setdefault(f"trained with {contender.loss}", {})[curve.label] = curve.accuracy()
    return bands(panels, path, ylabel="test accuracy, %", ylim=(84, 100), line=line)


def curves(panels: Mapping[str, Mapping[str, Sequence[float]]], path: Path, **options: Any) -> Path:
    """Draw single curves, given by panel and name; options are those of :func:`bands`."""
    with_band = {
        title: {name: [(v, v, v) for v in values] for name, values in panel.items()}
        for title, panel in panels.items()
    }
    return bands(with_band, path, **options)


def bands(
    panels: Mapping[str, Mapping[str, Band]],
    path: Path,
    *,
    ylabel: str,
    xlabel: str = "epoch",
    every: int = 1,
    ylim: tuple[float, float] | None = None,
    line: float | None = None,
    log: bool = False,
) -> Path:
    """Draw curves with their ranges, the panels side by side; return the path of the PNG.

    Args:
        panels: the bands by the title of the panel and the name of the curve.
        every: the distance between points on the x axis.
        line: the height of a dotted horizontal line.
        log: whether the y axis is logarithmic.
    """
    figure = new_figure(1 + 4 * max(len(panels), 1.25), 3.6)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, panel) in zip(axes, panels.items(), strict=True):
        for name, band in panel.items():
            _draw(axis, name, range(every, every * len(band) + 1, every), band)
        axis.set(title=title, xlabel=xlabel, yscale="log" if log else "linear", ylim=ylim)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False)
        if line is not None:
            axis.axhline(line, color="black", linewidth=0.6, linestyle=":")
    axes[0].set_ylabel(ylabel)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def draw_panel(panel: Panel, stem: Path) -> tuple[Path, Path]:
    """Draw accuracy and loss of a panel against epochs and seconds; return paths of PNG and SVG."""
    figure = new_figure(10.5, 6.8)
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    low, high = _accuracy_range(panel.curves)
    for curve in panel.curves:
        below = "" if curve.final[0] >= low else f" (below: {curve.final[0]:.0f} %)"
        epochs, seconds = range(1, curve.length + 1), curve.seconds()
        for axis, xs in zip(axes[0], (epochs, seconds), strict=True):
            _draw(axis, curve.label, xs, curve.accuracy(), curve.label + below)
        for axis, xs in zip(axes[1], (epochs, seconds), strict=True):
            _draw(axis, curve.label, xs, curve.loss())
    axes[0][0].set(ylabel="test accuracy, %", ylim=(low, high))
    axes[1][0].set(ylabel="training loss", xlabel="epoch", yscale="log")
    axes[1][0].set_ylim(_loss_range(panel.curves))
    axes[1][1].set(xlabel="seconds of training")
    axes[1][0].xaxis.get_major_locator().set_params(integer=True)
    for axis in axes.flat:
        axis.grid(alpha=0.25, which="both")
    axes[0][1].legend(frameon=False, loc="lower right")
    seeds = f"{panel.seeds} seed{'s' * (panel.seeds > 1)}"
    figure.suptitle(f"{panel.title}\nmean and range over {seeds}", fontsize=11)
    return _save(figure, stem)


def draw_races(title: str, races: Sequence[Curve], target: float, stem: Path) -> Path:
    """Draw the scores of all rivals against epochs and seconds; return the path of the PNG.

    The x axis of seconds ends at three times Adam's, or with the slowest rival.
    """
    figure = new_figure(10.5, 3.8)
    axes = figure.subplots(1, 2, sharey=True)
    for curve in races:
        for axis, xs in zip(axes, (range(1, curve.length + 1), curve.seconds()), strict=True):
            _draw(axis, curve.label, xs, curve.accuracy())
    best = max(high for curve in races for _, _, high in curve.accuracy())
    late = [c.accuracy()[max(0, c.length // 5 - 1)][0] for c in races if c.final[0] > target - 15]
    low = max(min(late), target - 25)
    axes[0].set(ylabel="score, %", xlabel="epoch", ylim=(low, best + 0.06 * (best - low)))
    reference = next((c for c in races if c.label == "Adam"), races[0]).seconds()[-1]
    longest = min(max(curve.seconds()[-1] for curve in races), 3 * reference)
    axes[1].set(xlabel="seconds of training", xlim=(0, 1.02 * longest))
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.axhline(target, color="black", linewidth=0.6, linestyle=":")
    axes[1].legend(frameon=False, loc="lower right")
    figure.suptitle(f"{title}; dotted: the target", fontsize=11)
    figure.savefig(Path(f"{stem}.png"), dpi=110)
    return Path(f"{stem}.png")


def _accuracy_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return limits of the y axis that show all curves which end within 15 points of the best.

    The first epoch is ignored if there are five or more.
    """
    best = max(curve.final[0] for curve in curves)
    sound = [curve.accuracy() for curve in curves if curve.final[0] > best - 15]
    first = int(curves[0].length >= 5)
    low = min(low for band in sound for _, low, _ in band[first:])
    high = max(high for band in sound for _, _, high in band)
    margin = 0.06 * max(high - low, 0.5)
    return low - margin, min(high + margin, 100.0)


def _loss_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return limits of the y axis, from below the least loss to 1.5 times the first epoch's median.

    The upper limit is at most 1,500 times the least loss.
    """
    firsts = sorted(curve.loss()[0][0] for curve in curves)
    every = [mean for curve in curves for mean, _, _ in curve.loss() if math.isfinite(mean)]
    positive = [value for value in every if value > 0] or [1.0]
    return 0.8 * min(positive), 1.5 * min(firsts[len(firsts) // 2], 1e3 * min(positive))


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches, which needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, stem: Path) -> tuple[Path, Path]:
    """Save a figure as PNG and SVG and return the paths; equal figures make equal files."""
    from matplotlib import rc_context

    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = Path(f"{stem}.png"), Path(f"{stem}.svg")
    figure.savefig(png, dpi=130)
    with rc_context({"svg.hashsalt": "torchrls"}):
        figure.savefig(svg, metadata={"Date": None})
    return png, svg


def _draw(axis: Any, name: str, xs: Sequence[float], band: Band, label: str | None = None) -> None:
    """Draw a curve and its range in the style of its name; a single point gets a marker."""
    middle, low, high = zip(*band, strict=True)
    colour, dashes = STYLES.get(name, (None, "-"))
    marker = "o" if len(middle) == 1 else None
    axis.plot(
        xs,
        middle,
        color=colour,
        linestyle=dashes,
        label=label or name,
        linewidth=1.6,
        marker=marker,
    )
    axis.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
