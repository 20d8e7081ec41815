r"""The default step: Adam, in coordinates that recursive least squares has whitened.

For a layer with weight W, bias b and the gradients G and g of the loss,

.. math::
    D = Q\, G\, P, \qquad W \leftarrow W - \mathrm{Adam}(D), \qquad
    b \leftarrow b - \mathrm{Adam}(g)

with steps of the size :math:`\eta \rho / (n + \nu)` for a layer of n inputs, where :math:`\eta` is
``lr`` times the factor of the step in the course of the run (:mod:`torchrls.step.decay`).

*Whiten the inputs.* P is the inverse autocorrelation matrix of the layer's inputs, by the recursion
of RLS. It learns the mean rows of sets of samples.

*Whiten the outputs.* Q is the inverse autocorrelation matrix of the gradients of the outputs. It
learns the columns of G P S, with a fixed random S of entries :math:`\pm 1`. P and Q are whitening
matrices: tiles of at most 64 inputs or outputs, with the mean eigenvalue 1 and a damped diagonal
(:mod:`torchrls.matrix.whitening`).

*Move.* Adam's step, by torch's fused kernel. It is shorter for weights that began smaller than is
usual (:func:`rate_of`).

P and Q learn in every step at first, then at growing intervals; a step in which they learn counts
for all steps since the last such one. In the steps between, no rows are observed. A layer whose
rows are never observed has no P, and is trained by Q and Adam. Inputs of the network are
standardized (:mod:`torchrls.step.inputs`).

The functions are those of :mod:`torchrls.step.paper`. The same algorithm, written naively, is
:func:`torchrls.selftest.naive.default_step`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrls.common import shards
from torchrls.common.numerics import on_device
from torchrls.common.torch_private import foreach_norm
from torchrls.layers.layer import Layer
from torchrls.matrix.adam import adam_
from torchrls.matrix.recursion import trace_of
from torchrls.matrix.whitening import (
    Lesson,
    Whitening,
    lesson_of,
    random_signs,
    renew_,
    tile_shape,
    whiten,
    whiten_rows,
)
from torchrls.observe.deferred import Deferred
from torchrls.observe.record import Observation
from torchrls.routing.groups import clip_factor
from torchrls.routing.relative import DECAY
from torchrls.step import check
from torchrls.step.gradient import factored_gradient
from torchrls.step.inputs import first_ranges, standardized
from torchrls.step.slots import GAINS, Slot, State, is_from_data

#: rho and nu: at lr = 1, steps of a layer with n inputs are of the size rho / (n + nu).
RATE, OFFSET = 1.38, 30.0
#: A weight whose root mean square begins at r / sqrt(max(n, o)) with r < USUAL gets steps shorter
#: by (max(r, LEAST) / USUAL)^POWER. Because of LEAST, a weight can begin with zeros.
USUAL, POWER, LEAST = 0.5, 1.5, 0.1
#: Adam's beta2, and the largest lambda of Q: a memory of a hundred steps.
MEMORY = 0.99
#: Adam's eps: gradients of this size are rounding errors.
TINY = 1e-10
#: P and Q learn in each step s < EARLY, then at intervals of 2 s / EARLY steps, up to EVERY, or to
#: a longer interval where learning would take more than SHARE of a training step of the layer. It
#: takes LEARNING operations for each entry of P. The torch calls of a training step take as long
#: as CALLS operations, those of learning four times as long.
EARLY, EVERY, SHARE, LEARNING, CALLS = 128, 16, 0.1, 100, 3e6
#: c of Q over the number of outputs of a tile. c of P is k, the ``ratio``.
Q_RATIO = 0.5


@dataclass(kw_only=True)
class Response(check.Response):
    """The results of a step for a slot before a value is changed.

    Attributes:
        number: the number of this step; the first one is 1.
        learnt: the count of earlier steps in which P and Q have learnt.
        counts_for: how many steps this one counts for in P and Q; 0 if they do not learn.
        every: the longest interval between steps in which P and Q learn.
        P: None if no rows of the layer have ever been observed.
        mean, ranges: mu and r of the network's inputs, (n,) or (g, n); None for other layers.
        x: B, the mean row of each set, times the root of its share, (sets, n) or (g, sets, n); None
            if P does not learn in this step.
        lesson: what P learns from B.
        energy: tr(B P B^T) of each tile, (tiles,).
        margins: the largest energy of each layer.
    """

    number: int
    learnt: int
    counts_for: int
    every: int
    P: Whitening | None = None
    mean: Tensor | None = None
    ranges: Tensor | None = None
    lesson: Lesson | None = None


def is_due(state: State) -> bool:
    """Return whether P and Q learn in the next step of a layer with this state.

    Example:
        >>> [is_due({"step": 1000, "last": last, "every": 8}) for last in (996, 993)]
        [False, True]
        >>> is_due({"step": 63, "last": 63, "every": 8})
        True
    """
    number = int(state.get("step", 0)) + 1
    longest = state.get("every", EVERY)
    return bool(number - state.get("last", 0) >= min(max(1, 2 * number // EARLY), longest))


def respond(slot: Slot, rows: Observation | None) -> Response:
    """Return the response: state, factors of G, and the lesson of P if due. No value changes."""
    state, layer = slot.state[0], slot.layer
    number, learnt = state.get("step", 0) + 1, state.get("learnt", 0)
    counts_for = number - state.get("last", 0) if is_due(state) else 0
    every = state.get("every", EVERY)
    response = Response(slot=slot, number=number, learnt=learnt, counts_for=counts_for, every=every)
    if is_from_data(state):
        response.P = slot.whitening("inverse")
        if state["scaled"]:
            response.mean, response.ranges = slot.read("mean", "ranges")
    if type(layer.weight.grad) is Deferred:
        response.factored = factored_gradient(slot, response.P is not None)
    if rows is None or counts_for == 0 or layer.inputs == 0:
        return response

    B, shares = rows.set_means()
    if response.P is None:  # the first minibatch
        response.P = Whitening.first(tile_shape(layer.inputs, slot.count), layer.weight)
        response.is_stored, response.counts_for = False, 1
        response.every = every_of(layer, int(rows.sums[..., -1].reshape(slot.count, -1)[0].sum()))
        if rows.extent is not None:
            response.ranges = first_ranges(rows.extent, slot.bias is not None).to(slot.dtype)
    if response.ranges is not None:  # inputs of the network
        B, response.mean, response.ranges = standardized(
            *(B, shares, response.mean, response.ranges),
            *(slot.bias is not None, learnt, response.counts_for),
        )
    response.x = B * shares.sqrt()
    response.delta = [1.0] * len(slot.layers)
    answer(response)
    return response


def answer(response: Response) -> None:
    """Compute the lesson of P from ``x``, and tr(B P B^T) of each tile."""
    P, x, group = response.P, response.x, response.slot.group
    assert P is not None
    assert x is not None
    response.lesson = lesson_of(
        *(x.mT, P),
        weight=group["ratio"] * response.counts_for,
        forgetting=group["forgetting"] ** response.counts_for,
        turn=response.learnt,
    )
    response.energy = trace_of(response.lesson.terms)


def settle(response: Response, energies: list[float]) -> bool:
    """Store the largest trace of each layer; return False if P is not positive definite.

    Where it is not, the stored trace is one that is negative or not finite.
    """
    tiles, response.margins = len(energies) // len(response.slot.layers), []
    for start in range(0, len(energies), tiles):
        own = energies[start : start + tiles]
        wrong = [energy for energy in own if not 0 <= energy < math.inf]
        response.margins.append(wrong[0] if wrong else max(own))
    return all(0 <= margin < math.inf for margin in response.margins)


def move(response: Response, norm: float | None) -> None:
    """Update the counters of the state, P and Q, then the parameters.

    Args:
        norm: the norm of all gradients together; None if no group clips it.
    """
    slot, ranges = response.slot, response.ranges
    slot.state = [slot.states[layer.weight] for layer in slot.layers]
    if not slot.state[0].get("rate"):
        begin(slot, is_scaled=ranges is not None)
    numbers = {"step": response.number}
    if response.counts_for > 0:
        numbers.update(learnt=response.learnt + 1, last=response.number)
    if not response.is_stored:
        numbers.update(every=response.every, scaled=int(ranges is not None))
    for state in slot.state:
        state.update(numbers)
    slot.wants_rows = is_due(slot.state[0])
    if response.P is not None and not response.is_stored:  # a stored P is updated in place
        slot.write_whitening("inverse", response.P)
    if response.lesson is not None and ranges is not None:
        slot.write("mean", response.mean)
        slot.write("ranges", ranges)

    g = slot.bias_gradient()
    mean = None if g is None else response.mean
    D = learn_and_whiten(response, g, mean)

    # L1 and weight decay, decoupled from the gradients, as in AdamW
    for part in slot.parts:
        group = part.group
        if (group["l1"] > 0 or group["weight_decay"] > 0) and part.has_gradient:
            share = float(group["lr"]) * DECAY
            for parameter in part.parameters:
                here = shards.local(parameter)
                here.sub_(here.sign(), alpha=share * group["l1"])
                here.mul_(1 - share * group["weight_decay"])

    # for inputs of the network, Adam moves W r and b' = b + W mu: W x + b = W r ((x - mu) / r) + b'
    W, is_direct = slot.weight.value()
    parts, values, gradients = [slot.weight], [W], [D]
    if slot.bias is not None and g is not None:
        b, is_bias_direct = slot.bias.value()
        parts, values, gradients = [slot.weight, slot.bias], [W, b], [D, g]
    memories = [part.memories(slot.states, "momentum", "square") for part in parts]
    if mean is not None:
        add_product_(b, W, mean, 1)
    if ranges is not None:
        W.mul_(ranges.unsqueeze(-2))

    # Adam's step; in a stack it is computed at the largest rate, then scaled for each layer
    rates = [state["rate"] for state in slot.state]
    is_plain = min(rates) == max(rates)
    changes = values if is_plain else [torch.zeros_like(value) for value in values]
    is_one_group = all(part.group is slot.group for part in parts)
    for some in [slice(None)] if is_one_group else [slice(i, i + 1) for i in range(len(parts))]:
        group = parts[some][0].group
        clip = 1.0 if norm is None else clip_factor(group, norm)
        adam_(
            changes[some],
            [G if clip == 1 else G * clip for G in gradients[some]],
            *([M for M, _ in memories[some]], [V for _, V in memories[some]]),
            response.number,
            rate=float(group["lr"]) * max(rates),
            beta1=float(group["momentum"]),
            beta2=MEMORY,
            eps=TINY,
        )
    if not is_plain:
        shares = on_device([rate / max(rates) for rate in rates], W)
        for value, change in zip(values, changes, strict=True):
            value.addcmul_(change, shares.view(-1, *[1] * (value.dim() - 1)))

    if ranges is not None:
        W.div_(ranges.unsqueeze(-2))
    if mean is not None:
        add_product_(b, W, mean, -1)
    if slot.bias is not None and g is not None and not is_bias_direct:
        slot.bias.copy_(b)
    if not is_direct:
        slot.weight.copy_(W)


def learn_and_whiten(response: Response, g: Tensor | None, mean: Tensor | None) -> Tensor:
    """Let P and Q learn, if they do in this step; return D = Q ((G - g mu^T) / r) P of the weight.

    Args:
        g: the gradient of the bias, (o,) or (g, o).
        mean: mu; None where no mean is subtracted.
    """
    slot, P, ranges, factored = response.slot, response.P, response.ranges, response.factored
    group, count = slot.group, response.counts_for
    Q = None if slot.Q_shape is None else slot.whitening("outputs")

    # the gradient is left @ right with left = E^T and right = X, or right alone if not factored
    left = None
    if factored is not None:
        right, left = factored.factors.X, factored.factors.E.T
        left = left if factored.scale == 1 else left * factored.scale
        right = right if mean is None else right - mean
    else:
        right = slot.weight.gradient()
        if mean is not None and g is not None:
            right = torch.addcmul(right, g.unsqueeze(-1), mean.unsqueeze(-2), value=-1)
    if ranges is not None:
        right = right / ranges.unsqueeze(-2)

    # the inputs: P learns, then whitens
    if response.lesson is not None:
        assert P is not None
        renew_(P, response.lesson, group["forgetting"] ** count)
    if P is not None:
        right = whiten_rows(right, P.W)

    # the outputs: Q learns, then whitens
    if Q is None:  # a single output
        return right if left is None else left @ right
    is_cut = slot.layer.is_sharded and not slot.layer.is_gathered
    if count > 0:
        S = random_signs(slot.layer.inputs, slot.dtype, Q.W.device)
        columns = right @ S if left is None else left @ (right @ S)
        columns = shards.rows_of_all(columns, slot.layer.weight) if is_cut else columns
        weight, forgetting = Q_RATIO * Q.W.shape[-1] * count, min(MEMORY, group["forgetting"])
        options = {"weight": weight, "forgetting": forgetting**count, "turn": response.learnt}
        lesson = lesson_of(columns, Q, **options)
        renew_(Q, lesson, forgetting**count)
    if is_cut:  # a tile of Q can span rows of W that other ranks have
        size = Q.W.shape[-1]
        rows, start, own = shards.whole_tiles(right, slot.layer.weight, size)
        some = Q.W[start // size : -(-(start + len(rows)) // size)]
        return whiten(some, rows)[own - start : own - start + len(right)]
    return whiten(Q.W, right) if left is None else whiten(Q.W, left) @ right


def rate_of(layer: Layer, size: float) -> float:
    """Return the size of the steps of a layer's entries at lr = 1.

    Args:
        size: the root mean square of the weight before the first step.

    Example:
        >>> from torchrls.layers.layer import Block
        >>> layer = Layer("query", Block(), torch.nn.Parameter(torch.zeros(128, 128)), None)
        >>> round(rate_of(layer, 0.05), 5), round(rate_of(layer, 0.02), 5)  # torch, BERT
        (0.00873, 0.00266)
    """
    relative = size * math.sqrt(max(layer.inputs, layer.all_outputs))
    shorter = min(1.0, max(relative, LEAST) / USUAL)
    return RATE / (layer.inputs + OFFSET) * math.pow(shorter, POWER)


def sizes_of_weights(slot: Slot) -> list[float]:
    """Return the root mean square of each layer's weight."""
    weights = [shards.local(parameter.detach()) for parameter in slot.weight.parameters]
    norms = torch.stack([norm.to(slot.dtype) for norm in foreach_norm(weights)])
    if slot.layer.is_sharded:
        norms = shards.total(norms.square(), slot.layer.weight).sqrt()
    sizes: list[float] = (norms / max(slot.layer.weight.numel(), 1) ** 0.5).tolist()
    return sizes


def every_of(layer: Layer, rows: int) -> int:
    """Return the interval, at least EVERY, at which learning takes SHARE of a step with ``rows``.

    Example:
        >>> from torchrls.layers.layer import Block
        >>> weight = torch.nn.Parameter(torch.zeros(10, 8192))
        >>> every_of(Layer("head", Block(), weight, None), rows=32)
        35
    """
    training = CALLS + 6 * rows * layer.inputs * layer.all_outputs  # forwards, twice backwards
    learning = 4 * CALLS + LEARNING * layer.inputs * tile_shape(layer.inputs)[-1]
    return max(EVERY, math.ceil(learning / (SHARE * training)))


def add_product_(b: Tensor, W: Tensor, mean: Tensor, sign: int) -> None:
    """Add sign W mu to b in place, for (o, n) or (g, o, n)."""
    if W.dim() == 2:
        b.addmv_(W, mean, alpha=sign)
    else:
        b.unsqueeze(-1).baddbmm_(W, mean.unsqueeze(-1), alpha=sign)


def begin(slot: Slot, is_scaled: bool) -> None:
    """Make the state of new layers: all but P and Adam's M and V.

    Args:
        is_scaled: inputs are divided by their ranges. The weights' size then says nothing, and
            steps are not shortened.
    """
    like = slot.layer.weight
    several = (slot.count,) if slot.count > 1 else ()
    zeros = torch.zeros(*several, slot.layer.inputs, dtype=slot.dtype, device=like.device)
    for name in ("mean", "ranges"):
        slot.write(name, zeros.clone())
    for name in ("inverse", GAINS["inverse"]):  # that a loader has made room for
        slot.write(name, None)
    if slot.Q_shape is not None:
        tiles, *sizes = slot.Q_shape
        slot.write_whitening("outputs", Whitening.first((tiles * len(slot.layers), *sizes), like))
    sizes_of = [1.0] * len(slot.state) if is_scaled else sizes_of_weights(slot)
    for state, size in zip(slot.state, sizes_of, strict=True):
        rate = rate_of(slot.layer, size)
        state.update(step=0, learnt=0, last=0, scaled=0, every=EVERY, rate=rate)


def reserve(slot: Slot) -> None:
    """Make the state that a first step makes, without a step, so that a loader can fill it."""
    slot.state = [slot.states[layer.weight] for layer in slot.layers]
    begin(slot, is_scaled=True)
    slot.state[0]["rate"] = 0.0  # a first step makes the state anew
    if slot.layer.has_rows:
        shape = tile_shape(slot.layer.inputs, slot.count)
        slot.write_whitening("inverse", Whitening.first(shape, slot.layer.weight))
    for part in slot.parts:
        if part.has_gradient:
            part.memories(slot.states, "momentum", "square")
