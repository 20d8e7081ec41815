"""What is unusual about a training run, and what to try: ``optimizer.explain()``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchrls.common.numerics import MAX_GROWTH, statistics_dtype
from torchrls.layers.layer import Layer
from torchrls.reporting import diagnostics
from torchrls.reporting import summary as report
from torchrls.reporting.diagnostics import Numbers

if TYPE_CHECKING:
    from torchrls.optimizer import RLS

#: A step that changes a weight by more than its own norm.
LARGE_STEP = 1.0
#: The largest usual scale of inputs for the paper's step, and for the adaptive one.
SCALE = {"gain": 10.0, "adaptive": 1000.0}
#: Means of inputs that are so many times their deviation.
LARGE_MEAN = 30.0
#: Shares of dead inputs that are unusual: of hidden layers, and of data, which can be sparse.
DEAD, DEAD_DATA = 0.5, 0.9
#: Of so few rows, nothing is said about dead inputs.
FEW_ROWS = 32
#: The share of inputs that do not vary.
CONSTANT = 0.5
#: P along the inputs becomes P / h, but rounding leaves n eps P: the share of that bound of h.
HEIGHT = 0.01
#: The share of the bound of P's growth.
WOUND_UP = 0.9
#: The share of the parameters that the fallback trains because RLS has no rule for them.
FALLBACK = 0.5

Group = dict[str, Any]


class Finding(NamedTuple):
    """Something unusual.

    Attributes:
        kind: one word for it.
        layer: the name of the layer that it is about; None if it is about all of the training.
        what: what was found.
        advice: what to try.
    """

    kind: str
    layer: str | None
    what: str
    advice: str

    def __str__(self) -> str:
        where = "" if self.layer is None else f"layer {self.layer!r}: "
        return f"{where}{self.what}.\n    Try: {self.advice}."


def text(found: list[Finding], *, watched: bool, trained: bool) -> str:
    """Findings for people."""
    lines = [f"{number}. {finding}" for number, finding in enumerate(found, start=1)]
    if not found:
        lines = ["Nothing unusual." if trained else "No step has been taken yet."]
    if not watched:
        lines.append(
            "Inputs and steps were not watched: call optimizer.watch(), train for some steps, "
            "and ask again."
        )
    return "\n".join(lines)


def found(optimizer: RLS) -> list[Finding]:
    """All that is unusual, most telling first."""
    numbers = diagnostics.numbers(optimizer, condition=False)
    group_of = optimizer._group_of()
    layers = [(layer, group_of[layer.weight], numbers[layer.name]) for layer in optimizer.layers]
    each = (_scale, _mean, _constant, _dead, _height, _growth)
    return [
        *_skipped(optimizer),
        *_steps(layers),
        *(one for look in each for entry in layers for one in look(optimizer, *entry)),
        *_repaired(optimizer),
        *_unobserved(optimizer),
        *_fallback(optimizer),
    ]


def _skipped(optimizer: RLS) -> Iterator[Finding]:
    if optimizer.skipped_steps:
        what = f"{_times(optimizer.skipped_steps, 'step')} skipped: a value was not finite"
        advice = (
            "if the loss had been growing, a smaller lr; with step='gain', max_grad_norm=5.0; else "
            "look for NaN in the data (torch.autograd.set_detect_anomaly(True) finds where)"
        )
        yield Finding("skipped", None, what, advice)


def _steps(layers: list[tuple[Layer, Group, Numbers]]) -> Iterator[Finding]:
    """The layer with the largest step, if that is too large."""
    large = [entry for entry in layers if _largest(entry) > LARGE_STEP]
    if not large:
        return
    layer, group, numbers = max(large, key=_largest)
    what = (
        f"its steps are too large: the last one was {numbers['step_size']:.3g} times its weight, "
        f"the largest {numbers['largest_step_size']:.3g} times"
    )
    if len(large) > 1:
        what += f" (of {len(large)} layers with such steps, it has the largest)"
    advice = f"a smaller lr than {float(group['lr']):g}"
    if group["step"] == "gain":
        advice += ", max_grad_norm=5.0 (recurrent networks 1.0), or the default step of RLS(model)"
    yield Finding("steps", layer.name, what, advice)


def _largest(entry: tuple[Layer, Group, Numbers]) -> float:
    return entry[2].get("largest_step_size", 0.0)


def _scale(optimizer: RLS, layer: Layer, group: Group, numbers: Numbers) -> Iterator[Finding]:
    """The adaptive step scales the network's inputs by itself."""
    scale = numbers.get("input_scale", 0.0)
    if scale > SCALE[group["step"]] and not float(optimizer.state[layer.weight].get("size", 0.0)):
        what = f"its inputs are large: their root mean square is {scale:.3g}"
        advice = "inputs scaled to about [0, 1], or a norm before this layer"
        if group["step"] == "gain":
            advice += "; initial_inverse='auto' takes P_0 from their variance"
        yield Finding("scale", layer.name, what, advice)


def _mean(optimizer: RLS, layer: Layer, group: Group, numbers: Numbers) -> Iterator[Finding]:
    if "input_scale" not in numbers or numbers["constant_inputs"] >= CONSTANT:
        return
    deviation = numbers["input_deviation"]
    offset = max(numbers["input_scale"] ** 2 - deviation**2, 0.0) ** 0.5
    if offset > LARGE_MEAN * deviation and _judged(optimizer, layer):
        what = (
            f"the means of its inputs, {offset:.3g}, are large compared with their "
            f"deviation, {deviation:.3g}"
        )
        advice = "inputs with their mean subtracted, or a norm before this layer"
        yield Finding("mean", layer.name, what, advice)


def _constant(optimizer: RLS, layer: Layer, group: Group, numbers: Numbers) -> Iterator[Finding]:
    share = numbers.get("constant_inputs", 0.0)
    if share >= CONSTANT:
        what = f"{_percent(share)} of its inputs do not vary within a minibatch"
        advice = (
            "shuffled minibatches; if it is the data, leaving those columns out; in a hidden "
            "layer, units are saturated: a smaller lr, or a norm before their activation"
        )
        yield Finding("constant", layer.name, what, advice)


def _dead(optimizer: RLS, layer: Layer, group: Group, numbers: Numbers) -> Iterator[Finding]:
    share = numbers.get("dead_inputs", 0.0)
    if share < DEAD or optimizer._monitor is None:
        return
    inputs = optimizer._monitor.layers[layer].inputs
    if share >= (DEAD_DATA if inputs.are_data else DEAD) and inputs.rows >= FEW_ROWS:
        what = f"{_percent(share)} of its inputs were zero in all steps that were watched"
        advice = "a check of the data, which has hardly any values but zeros here"
        if not inputs.are_data:
            advice = (
                "a smaller lr, or an activation that does not die (LeakyReLU, GELU): units before "
                "this layer are dead and do not come back"
            )
        yield Finding("dead", layer.name, what, advice)


def _height(optimizer: RLS, layer: Layer, group: Group, numbers: Numbers) -> Iterator[Finding]:
    bound = 1 / (layer.inputs * torch.finfo(statistics_dtype(layer.weight.dtype)).eps)
    if numbers.get("h", 0.0) > HEIGHT * bound:
        what = (
            f"h is {numbers['h']:.3g}: the larger it is, the fewer digits of P are left, and near "
            f"{bound:.2g} there are none"
        )
        advice = (
            "inputs of a smaller scale, a smaller initial_inverse (or 'auto') or ratio, and "
            "time_scaling=False for long sequences"
        )
        yield Finding("height", layer.name, what, advice)


def _growth(optimizer: RLS, layer: Layer, group: Group, numbers: Numbers) -> Iterator[Finding]:
    """The adaptive step does not let P grow beyond its first trace."""
    if group["forgetting"] == 1 or group["step"] == "adaptive":
        return
    if numbers.get("growth", 0.0) >= WOUND_UP * MAX_GROWTH:
        what = (
            f"P has wound up to {numbers['growth']:.3g} times P_0, where it is bounded: with "
            f"forgetting={group['forgetting']:g}, directions that inputs seldom have grow"
        )
        advice = "forgetting=1.0 or nearer to it, or the default step of RLS(model)"
        yield Finding("growth", layer.name, what, advice)


def _repaired(optimizer: RLS) -> Iterator[Finding]:
    if optimizer.repaired_inverses:
        names = [layer.name for layer in optimizer.layers]
        known = [name for name in names if optimizer._notices.has(f"repaired {name}")]
        what = f"{_times(optimizer.repaired_inverses, 'P')} repaired after rounding"
        what += f" (of {_listed(known)})" if known else ""
        advice = "inputs scaled to about [0, 1], a smaller ratio, or a model in float64"
        yield Finding("repaired", None, what, advice)


def _unobserved(optimizer: RLS) -> Iterator[Finding]:
    """Layers without a P, though others have been trained."""
    started = any(optimizer.state.values())
    for layer in optimizer.layers:
        noticed = optimizer._notices.has(f"unobserved {layer.name}")
        fresh = not report.has_inverse(optimizer, layer) and layer.weight.requires_grad
        if fresh and (started or noticed):
            what = "it has never been observed with a gradient, so it is not trained"
            advice = (
                "whether the loss depends on it; if its weight is used without calling the module, "
                f"exclude=[{layer.name!r}]"
            )
            yield Finding("unobserved", layer.name, what, advice)


def _fallback(optimizer: RLS) -> Iterator[Finding]:
    """If RLS, as a rule, has no rule."""
    sizes, total = report.fallback_sizes(optimizer)
    chosen = {name: size for name, (size, reason) in sizes.items() if reason != "excluded"}
    if total and sum(chosen.values()) > FALLBACK * total:
        largest = sorted(chosen, key=lambda name: -chosen[name])
        reasons = [f"{name!r}, {sizes[name][1]}" for name in largest[:3]]
        more = f" and {len(largest) - 3} more" if len(largest) > 3 else ""
        kind = type(optimizer.fallback).__name__
        what = (
            f"RLS has no rule for {_percent(sum(chosen.values()) / total)} of the parameters, "
            f"which {kind} trains ({'; '.join(reasons)}{more})"
        )
        advice = (
            "another rate for them (fallback=lambda params: torch.optim.Adam(params, lr=1e-3)), "
            "or, for linear layers of your own, torchrls.register"
        )
        yield Finding("fallback", None, what, advice)


def _judged(optimizer: RLS, layer: Layer) -> bool:
    """Whether minibatches had more than one row."""
    return optimizer._monitor is not None and bool(optimizer._monitor.layers[layer].inputs.judged)


def _times(number: int, noun: str) -> str:
    return f"1 {noun} was" if number == 1 else f"{number} {noun}s were"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _listed(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)
