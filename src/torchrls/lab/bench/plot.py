"""The plots of results, one for each kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrls.lab.bench.results import Results
from torchrls.lab.experiments.plot import new_figure

COLOURS = {"ours": "#1f77b4", "first order": "#8c8c8c", "peer": "#d6a15c"}


def draw(results: Results, path: Path) -> Path:
    """Save the plot of a file of results, and return its path."""
    kinds: dict[str, Callable[[Any, Path], Path]] = {
        "step-time": step_time,
        "memory": memory,
        "growth": growth,
        "profile": profile,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    return kinds[results["kind"]](results["results"], path)


def _colour(contender: str) -> str:
    """Return the colour of a contender's bar."""
    if "RLS" in contender:
        return COLOURS["ours"]
    return COLOURS["first order" if contender.startswith(("SGD", "Adam")) else "peer"]


def step_time(networks: Any, path: Path) -> Path:
    """Draw bars of the time of a step relative to Adam, a panel for each network."""
    return _bars(networks, path, "to Adam", "time of a step, x Adam", "log", lambda v: f"{v:.2f}")


def memory(networks: Any, path: Path) -> Path:
    """Draw bars of the peak memory, a panel for each network."""
    label = "peak memory of three steps beyond that of an empty process, MB"
    return _bars(networks, path, "peak", label, "linear", lambda v: f"{v / 1e6:,.0f} MB")


def _bars(
    networks: Any, path: Path, key: str, label: str, scale: str, text: Callable[[float], str]
) -> Path:
    """Draw a panel for each network with a bar for each contender.

    Args:
        networks: the results of the contenders of each network.
        key: the quantity in these results that is drawn.
        label: the label of the x axis.
        scale: "log", or "linear" for bytes in units of 1e6.
        text: formats the value beside its bar.
    """
    columns = min(len(networks), 3)
    rows = -(-len(networks) // columns)
    figure = new_figure(1 + 4.6 * columns, 0.6 + 4.0 * rows)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes[len(networks) :]:
        axis.set_visible(False)
    for axis, (network, contenders) in zip(axes, networks.items(), strict=False):
        names = [name for name, result in contenders.items() if key in result][::-1]
        values = [contenders[name][key] for name in names]
        bars = axis.barh(names, values, color=[_colour(name) for name in names])
        axis.bar_label(bars, [text(value) for value in values], padding=3, fontsize=8)
        axis.set(title=network, xscale=scale)
        if scale == "log":
            axis.set_xlim(0.5 * min(values), 3 * max(values))
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.xaxis.set_minor_formatter(lambda value, _: "")
        else:
            axis.set_xlim(0, 1.25 * max(values))
            axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g}")
        axis.tick_params(labelsize=8)
        axis.grid(axis="x", alpha=0.25)
    figure.supxlabel(label)
    figure.savefig(path, dpi=130)
    return path


def growth(quantities: Any, path: Path) -> Path:
    """Draw time and bytes against width, batch and depth, with the fitted exponents."""
    figure = new_figure(14, 7.5)
    axes = figure.subplots(2, len(quantities), squeeze=False)
    for column, (axis, contenders) in enumerate(quantities.items()):
        for row, (key, label) in enumerate((("seconds", "seconds"), ("bytes", "bytes"))):
            panel = axes[row][column]
            for name, result in contenders.items():
                xs = [point[axis] for point in result["points"]]
                ys = [point[key] for point in result["points"]]
                exponent = round(result["exponents"][key], 1) + 0.0  # no -0.0
                panel.plot(xs, ys, marker="o", markersize=3, label=f"{name} ({exponent:.1f})")
            panel.set(xscale="log", yscale="log", xlabel=axis, title=f"{label} against {axis}")
            panel.set_xscale("log", base=2)
            panel.grid(alpha=0.25)
            panel.legend(framealpha=0.9, fontsize=7, title="exponent", title_fontsize=8)
    figure.savefig(path, dpi=130)
    return path


def profile(networks: Any, path: Path) -> Path:
    """Draw stacked bars of the parts of a step, in per cent, for each network and contender."""
    from matplotlib import colormaps

    names = [f"{network}\n{contender}" for network, runs in networks.items() for contender in runs]
    runs = [parts for runs in networks.values() for parts in runs.values()]
    every = list(dict.fromkeys(part for parts in runs for part in parts))
    figure = new_figure(12, 1.6 + 0.55 * len(names))
    axis = figure.subplots()
    axis.set_prop_cycle(color=list(colormaps["tab20"](range(20))))
    left = [0.0] * len(names)
    for part in every:
        shares = [100 * parts.get(part, 0.0) / sum(parts.values()) for parts in runs]
        axis.barh(names, shares, left=left, label=part)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.set(xlabel="share of a step, %", xlim=(0, 100))
    axis.invert_yaxis()
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=130)
    return path
