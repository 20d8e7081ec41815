"""Plots of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrls.experiments.demo import TARGET, Result

COLOURS = {"Adam": "#8c8c8c", "RLS": "#1f77b4", "RLS+M+R": "#d62728", "HRLS": "#2ca02c"}

#: Mean, least and greatest value at each point of a curve.
Band = Sequence[tuple[float, float, float]]


def accuracy_curves(results: list[Result], path: Path) -> Path:
    """Test accuracy after each epoch, a panel for each loss, mean and range over the seeds."""
    panels: dict[str, dict[str, Band]] = {}
    for result in results:
        panel = panels.setdefault(f"trained with {result.contender.loss}", {})
        panel[result.contender.name] = result.curve()
    return bands(panels, path, ylabel="test accuracy, %", ylim=(84, 100), line=TARGET)


def curves(panels: Mapping[str, Mapping[str, Sequence[float]]], path: Path, **options: Any) -> Path:
    """Single curves, by panel and name; options as of :func:`bands`."""
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
    """Curves with their ranges, a panel beside the other, saved as PNG.

    Args:
        every: distance of the points on the x axis.
        line: where to draw a horizontal line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4 * max(len(panels), 1.25), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, panel) in zip(axes, panels.items(), strict=True):
        for name, band in panel.items():
            _draw(axis, name, band, every)
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


def _draw(axis: Any, name: str, band: Band, every: int) -> None:
    points = range(every, every * len(band) + 1, every)
    middle, low, high = zip(*band, strict=True)
    colour = COLOURS.get(name)
    axis.plot(points, middle, color=colour, label=name, linewidth=1.8)
    axis.fill_between(points, low, high, color=colour, alpha=0.15, linewidth=0)
