"""Findings: what is unusual about a training run, and what to try. ``optimizer.explain()``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchrls.common.numerics import MAX_GROWTH, statistics_dtype
from torchrls.layers.layer import Layer
from torchrls.reporting.notices import is_small_rate
from torchrls.routing.routing import clean

if TYPE_CHECKING:
    from torchrls.optimizer import RLS

#: The ``step_size`` above which a step is too large: it changes a weight by more than its norm.
LARGE_STEP = 1.0
#: The largest usual scale of inputs for each kind of step.
SCALE = {"gain": 10.0, "adaptive": 1000.0}
#: The ratio of the inputs' means to their deviation from which means are large.
LARGE_MEAN = 30.0
#: The share of dead inputs from which it is unusual, in hidden layers and in data (can be sparse).
DEAD, DEAD_DATA = 0.5, 0.9
#: The number of rows below which no finding is about dead inputs.
FEW_ROWS = 32
#: The share of inputs that do not vary from which it is unusual.
CONSTANT = 0.5
#: The h above which it is unusual, times n eps. P along the inputs becomes P / h, which at
#: h = 1 / (n eps) is as small as the rounding errors n eps P.
HEIGHT = 0.01
#: The growth of P from which it is unusual, as a share of its bound.
WOUND_UP = 0.9
#: The share of parameters that RLS has no rule for above which it is unusual.
FALLBACK = 0.5
#: The kinds of findings about single layers, the most telling first.
ORDER = ("scale", "mean", "constant", "dead", "height", "growth")

Group = dict[str, Any]
Numbers = dict[str, float]


class Finding(NamedTuple):
    """Something unusual.

    Attributes:
        kind: its name, one word.
        layer: the name of the layer that it is about; None if it is about the whole run.
        what: the observation.
        advice: what to try.
    """

    kind: str
    layer: str | None
    what: str
    advice: str

    def __str__(self) -> str:
        where = "" if self.layer is None else f"layer {self.layer!r}: "
        return f"{where}{self.what}.\n    Try: {self.advice}."


def text(findings: list[Finding], *, watched: bool, trained: bool) -> str:
    """Return the findings as a numbered list, with a hint if the optimizer did not watch."""
    lines = [f"{number}. {finding}" for number, finding in enumerate(findings, start=1)]
    lines = lines or ["Nothing unusual." if trained else "No step has been taken yet."]
    if not watched:
        lines.append(
            "Inputs and steps were not watched: call optimizer.watch(), train for some steps, "
            "and ask again."
        )
    return "\n".join(lines)


def unusual(
    optimizer: RLS, numbers: dict[str, Numbers], fallback: dict[str, tuple[int, str]]
) -> list[Finding]:
    """Return everything unusual, the most telling first.

    Args:
        numbers: the diagnostics of each layer.
        fallback: the size of every parameter that the fallback trains, and the reason.
    """
    group_of = optimizer._group_of()
    layers = [(layer, group_of[layer.weight], numbers[layer.name]) for layer in optimizer.layers]
    single = [finding for entry in layers for finding in _about_layer(optimizer, *entry)]
    return [
        *_about_steps(optimizer, layers),
        *sorted(single, key=lambda finding: ORDER.index(finding.kind)),
        *_about_training(optimizer, numbers, fallback),
    ]


def _about_steps(optimizer: RLS, layers: list[tuple[Layer, Group, Numbers]]) -> Iterator[Finding]:
    """Yield a finding if steps were skipped, and one about the layer with the largest steps."""
    if optimizer.skipped_steps:
        what = f"{_times(optimizer.skipped_steps, 'step')} skipped: a value was not finite"
        advice = (
            "if the loss had been growing, a smaller lr; with step='gain', max_grad_norm=5.0; else "
            "look for NaN in the data (torch.autograd.set_detect_anomaly(True) finds where)"
        )
        yield Finding("skipped", None, what, advice)
    small = [float(g["lr"]) for g in optimizer.param_groups if is_small_rate(g)]
    if small:
        what = f"lr={small[0]:g} is far below 1, of which lr is a factor in the default step"
        yield Finding("rate", None, what, "RLS(model) without lr, or lr=0.3 to tread carefully")
    large = [entry for entry in layers if entry[2].get("largest_step_size", 0.0) > LARGE_STEP]
    if large:
        layer, group, numbers = max(large, key=lambda entry: entry[2]["largest_step_size"])
        what = (
            f"its steps are too large: the last one was {numbers['step_size']:.3g} times its "
            f"weight, the largest {numbers['largest_step_size']:.3g} times"
        )
        if len(large) > 1:
            what += f" (of {len(large)} layers with such steps, it has the largest)"
        advice = f"a smaller lr than {float(group['lr']):g}"
        if group["step"] == "gain":
            advice += ", max_grad_norm=5.0 (recurrent networks 1.0), "
            advice += "or the default step of RLS(model)"
        yield Finding("steps", layer.name, what, advice)


def _about_layer(optimizer: RLS, layer: Layer, group: Group, numbers: Numbers) -> Iterator[Finding]:
    """Yield findings about h and P of a layer, and about its inputs if it was watched."""
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
    can_grow = group["forgetting"] != 1 and group["step"] != "adaptive"
    if can_grow and numbers.get("growth", 0.0) >= WOUND_UP * MAX_GROWTH:
        what = (
            f"P has wound up to {numbers['growth']:.3g} times P_0, where it is bounded: with "
            f"forgetting={group['forgetting']:g}, directions that inputs seldom have grow"
        )
        advice = "forgetting=1.0 or nearer to it, or the default step of RLS(model)"
        yield Finding("growth", layer.name, what, advice)

    if optimizer._monitor is None or layer not in optimizer._monitor.layers:
        return
    seen = optimizer._monitor.layers[layer]
    scale, deviation = numbers.get("input_scale", 0.0), numbers.get("input_deviation", 0.0)
    state = optimizer.state.get(layer.weight, {})
    is_scaled = int(state.get("scaled", 0)) > 0  # by the adaptive step
    if scale > SCALE[group["step"]] and not is_scaled:
        what = f"its inputs are large: their root mean square is {scale:.3g}"
        advice = "inputs scaled to about [0, 1], or a norm before this layer"
        if group["step"] == "gain":
            advice += "; initial_inverse='auto' takes P_0 from their variance"
        yield Finding("scale", layer.name, what, advice)
    constant, dead = numbers["constant_inputs"], numbers["dead_inputs"]
    offset = max(scale**2 - deviation**2, 0.0) ** 0.5
    if constant < CONSTANT and offset > LARGE_MEAN * deviation and bool(seen.judged):
        what = (
            f"the means of its inputs, {offset:.3g}, are large compared with their "
            f"deviation, {deviation:.3g}"
        )
        advice = "inputs with their mean subtracted, or a norm before this layer"
        yield Finding("mean", layer.name, what, advice)
    if constant >= CONSTANT:
        what = f"{100 * constant:.3g} % of its inputs do not vary within a minibatch"
        advice = (
            "shuffled minibatches; if it is the data, leaving those columns out; in a hidden "
            "layer, units are saturated: a smaller lr, or a norm before their activation"
        )
        yield Finding("constant", layer.name, what, advice)
    if dead >= (DEAD_DATA if seen.are_data else DEAD) and seen.rows >= FEW_ROWS:
        what = f"{100 * dead:.3g} % of its inputs were zero in all steps that were watched"
        advice = "a check of the data, which has hardly any values but zeros here"
        if not seen.are_data:
            advice = (
                "a smaller lr, or an activation that does not die (LeakyReLU, GELU): units before "
                "this layer are dead and do not come back"
            )
        yield Finding("dead", layer.name, what, advice)


def _about_training(
    optimizer: RLS, numbers: dict[str, Numbers], fallback: dict[str, tuple[int, str]]
) -> Iterator[Finding]:
    """Yield findings about repaired P, layers that were never observed, and the fallback."""
    if optimizer.repaired_inverses:
        names = [layer.name for layer in optimizer.layers]
        known = [repr(name) for name in names if optimizer._notices.has(f"repaired {name}")]
        what = f"{_times(optimizer.repaired_inverses, 'P')} repaired after rounding"
        what += f" (of {', '.join(known)})" if known else ""
        advice = "inputs scaled to about [0, 1], a smaller ratio, or a model in float64"
        yield Finding("repaired", None, what, advice)
    started = any(optimizer.state.values())
    modules = {module: clean(name) for name, module in optimizer.model.named_modules()}
    for layer in optimizer.layers:
        noticed = optimizer._notices.has(f"unobserved {layer.name}")
        is_trained = bool(optimizer.state.get(layer.weight))
        if is_trained and not layer.has_rows:  # a matrix that no adapter covers never has a P
            continue
        fresh = "trace" not in numbers[layer.name] and layer.weight.requires_grad
        if fresh and (started or noticed):
            what = "it has never been observed with a gradient, so it "
            what += "has no P from data" if is_trained or noticed else "is not trained"
            advice = "whether the loss depends on it"
            module = modules.get(layer.users[0][0]) if layer.has_rows else ""
            if module is None:  # it has been replaced
                advice = "a new optimizer: the layer is not in the model any more"
            elif module:
                advice += "; if its weight is used without calling the module, "
                advice += f"exclude=[{module!r}]"
            yield Finding("unobserved", layer.name, what, advice)
    total = sum(p.numel() for p in optimizer._group_of() if p.requires_grad)
    chosen = {name: size for name, (size, reason) in fallback.items() if reason != "excluded"}
    share = sum(chosen.values()) / max(total, 1)
    if share > FALLBACK:
        largest = sorted(chosen, key=lambda name: -chosen[name])
        reasons = [f"{name!r}, {fallback[name][1]}" for name in largest[:3]]
        more = f" and {len(largest) - 3} more" if len(largest) > 3 else ""
        kind = type(optimizer.fallback).__name__
        what = (
            f"RLS has no rule for {100 * share:.3g} % of the parameters, "
            f"which {kind} trains ({'; '.join(reasons)}{more})"
        )
        advice = (
            "if they are linear layers of your own, torchrls.register; another optimizer for them "
            "is fallback=lambda params: torch.optim.Adam(params, lr=1e-3)"
        )
        yield Finding("fallback", None, what, advice)


def _times(number: int, noun: str) -> str:
    """Return "1 step was" or "2 steps were", for a number and a noun."""
    return f"1 {noun} was" if number == 1 else f"{number} {noun}s were"
