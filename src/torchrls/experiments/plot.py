"""Plots of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchrls.experiments.demo import TARGET, Result

COLOURS = {"Adam": "#8c8c8c", "RLS": "#1f77b4", "RLS+M+R": "#d62728", "HRLS": "#2ca02c"}


def accuracy_curves(results: list[Result], path: Path) -> Path:
    """Test accuracy after each epoch, a panel for each loss, mean and range over the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    losses = list(dict.fromkeys(result.contender.loss for result in results))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(losses), sharey=True, squeeze=False)[0]
    for axis, loss in zip(axes, losses, strict=True):
        for result in results:
            if result.contender.loss == loss:
                _draw(axis, result)
        _decorate(axis, loss)
    axes[0].set_ylabel("test accuracy, %")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _draw(axis: Any, result: Result) -> None:
    curve = result.curve()
    epochs = range(1, len(curve) + 1)
    middle, low, high = zip(*curve, strict=True)
    name = result.contender.name
    axis.plot(epochs, middle, color=COLOURS[name], label=name, linewidth=1.8)
    axis.fill_between(epochs, low, high, color=COLOURS[name], alpha=0.15, linewidth=0)


def _decorate(axis: Any, loss: str) -> None:
    axis.set(title=f"trained with {loss}", xlabel="epoch", ylim=(84, 100))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.axhline(TARGET, color="black", linewidth=0.6, linestyle=":")
    axis.grid(alpha=0.25)
    axis.legend(loc="lower right", frameon=False)
