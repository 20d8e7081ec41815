r"""The default step: Adam, in coordinates that recursive least squares has whitened.

For a layer with weight W, bias b and the gradients G and g of the loss,

.. math::
    D &= Q\, (G - g \mu^T)\, P \\
    W &\leftarrow W + \Delta, \qquad \Delta = \mathrm{Adam}(D), \qquad
    b \leftarrow b + \mathrm{Adam}(g) - \Delta \mu

with steps of the size :math:`\eta \rho / (n + \nu)` for n inputs.

*Centre.* The layer is taken as :math:`W (x - \mu) + b'` with the running mean :math:`\mu` of its
inputs, so that a large mean does not dominate P. A layer without a bias is not centred.

*Whiten the inputs.* P is the inverse autocorrelation matrix of the centred inputs, by the recursion
of RLS (:mod:`torchrls.matrix.recursion`). It learns the mean rows of sets of samples.

*Whiten the outputs.* Q is the inverse autocorrelation matrix of the gradients of the outputs, by
the same recursion: with a fixed random S of entries :math:`\pm 1`, it learns :math:`B = (D S)^T`
scaled to the norm :math:`\sqrt{o}` for o outputs, so that only directions count. Outputs are taken
in tiles of at most 128, each with a Q of its own.

*Damp.* Whatever P and Q learn, they learn a share of its energy on the diagonal as well, at a few
places that take turns (:func:`torchrls.matrix.recursion.damped`).

*Move.* As Adam does, by torch's fused kernel.

P, Q and mu learn in every step at first, then at intervals; such a step counts for all since the
last one. In between, nothing is observed, and a step is D and one call of the kernel. A layer whose
rows are never seen has no P and no mean; it is trained all the same.

The columns of the network's inputs, to which no gradient flows, are divided by their ranges
(:func:`ranges_of_inputs`) before P, and so are the changes of their weights. So it matters little
that inputs were not standardized.

A step has the functions of :mod:`torchrls.step.paper`. The same algorithm, written naively, is
:func:`torchrls.selftest.naive.default_step`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrls.common import shards
from torchrls.common.numerics import MAX_GROWTH, counter
from torchrls.layers.layer import Layer
from torchrls.layers.rows import ranges_of, sizes_of
from torchrls.matrix.adam import adam_
from torchrls.matrix.inverse import Dense
from torchrls.matrix.recursion import Lesson, damped, learn_, lesson_of, root_of, trace_of
from torchrls.observe.record import Observation
from torchrls.routing.groups import clip_factor
from torchrls.step.gradient import Factored, factored_gradient
from torchrls.step.slots import Inverse, Part, Slot, State, scales_for, tile_shape

#: rho and nu: at lr = 1, steps of a layer with n inputs are of the size rho / (n + nu).
RATE, OFFSET = 1.38, 30.0
#: The memory of V, and the size of gradients that are rounding.
SQUARES, TINY = 0.99, 1e-10
#: P, Q and mu learn in each of the first EARLY steps, then in every EVERY-th.
EARLY, EVERY = 32, 8
#: The running mean takes at least this share of each minibatch: it forgets no slower.
MEAN = 0.01
#: Damping of P and of Q, as a share of the energy that they learn.
RIDGE, Q_RIDGE = 0.1, 1.0
#: The trace of c B P B^T may be at most this over the dtype's epsilon; beyond it c is reduced.
MOST_ENERGY = 1e-4
#: c of Q, Q_0 = Q_FIRST I, and the most that lambda is: gradients change more than inputs do.
Q_RATIO, Q_FIRST, Q_MEMORY = 0.1, 5.0, 0.99
#: Columns of S.
COLUMNS = 16
#: Weight decay at lr = 1 is that of AdamW at this learning rate.
DECAY = 1e-3
#: Ranges beyond these count as these, so that no square of a number is infinite.
LEAST_RANGE, MOST_RANGE = 1e-15, 1e15


@dataclass
class Response:
    """The response of a slot to the rows of a step.

    Attributes:
        number: the number of this step; the first one is 1.
        learnt: the count of earlier steps in which P and Q have learnt.
        counts_for: how many steps this one counts for in P and Q; 0 if they learn nothing.
        P: None if no rows of the layer have ever been seen.
        delta: the scale of P_0 of each layer.
        factored: the factors of G, if it has some.
        mean: mu, (n,) or (g, n); None where the layer is not centred.
        ranges: what the columns of the inputs are divided by, (n,) or (g, n), or None.
        x, u: the centred and damped rows B of the sets, and U = B P; None if P learns nothing.
        energy: tr(B P B^T) of each group.
        time: T of each group, or None for c = k; ``times`` are its numbers.
        c, margins: c and c tr(B P B^T) of each group, once they are settled.
        lesson: what P is going to learn, once it is settled.
    """

    slot: Slot
    number: int
    learnt: int
    counts_for: int
    P: Inverse | None
    delta: list[float]
    factored: Factored | None
    mean: Tensor | None
    ranges: Tensor | None
    x: Tensor | None = None
    u: Tensor | None = None
    energy: Tensor | None = None
    time: Tensor | None = None
    times: list[float] | None = None
    c: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    lesson: Lesson | None = None


def is_due(state: State) -> bool:
    """Return whether P and Q learn in the next step of a layer with this state."""
    step, learnt, last = (int(state.get(key, 0)) for key in ("step", "learnt", "last"))
    return learnt < EARLY or step + 1 - last >= EVERY


def respond(slot: Slot, rows: Observation | None) -> Response:
    """Centre and damp the rows, and compute B P, if P learns in this step. Values do not change."""
    state, has_bias, group = slot.state[0], slot.bias is not None, slot.group
    number, learnt, last = (int(state.get(key, 0)) for key in ("step", "learnt", "last"))
    number += 1
    counts_for = number - last if is_due(state) else 0
    mean = slot.read("mean") if has_bias and "mean" in state else None
    divisors = slot.read("ranges") if int(state.get("scaled", 0)) else None
    P, delta = slot.held(), slot.scales() or [1.0] * len(slot.layers)
    response = Response(slot, number, learnt, counts_for, P, delta, None, mean, divisors)
    if rows is None or counts_for == 0:
        response.factored = None if P is None else factored_gradient(slot, P)
        return response

    # B: the mean row of each set, centred, times the root of the set's share of all rows
    sums, counts = rows.sums.tensor_split([slot.layer.inputs], -1)
    total = counts.sum(-2, keepdim=True)
    B = sums / counts.clamp(min=1)
    if P is None:
        response.counts_for = 1
        if rows.extent is not None and group["initial_inverse"] == "auto":
            response.ranges = divisors = ranges_of_inputs(slot, rows.extent).to(B)
    if divisors is not None:
        B /= divisors.unsqueeze(-2)
    if has_bias:
        now = sums.sum(-2) / total.squeeze(-2)
        share = min(1.0, counts_for * max(MEAN, 1 / (learnt + 1)))
        response.mean = mean = now if mean is None else mean.lerp(now, share)
        B -= (mean if divisors is None else mean / divisors).unsqueeze(-2)
    B.mul_((counts / total).sqrt_())

    def first() -> list[float]:
        means = sums / (counts * total).sqrt().clamp(min=1)
        means = means if divisors is None else means / divisors.unsqueeze(-2)
        energies = (part.square().sum((-2, -1)) for part in (B, means))
        return scales_for(*energies, len(slot.layers))

    P, response.delta, _ = slot.inverse(slot.layer.inputs, first, rank_of(slot, P))
    response.P, response.factored = P, factored_gradient(slot, P)
    if slot.layer.inputs and isinstance(P, Dense):
        B = damped(B, RIDGE, learnt)
    response.x, response.time = B, rows.time if group["time_scaling"] else None
    answer(response)
    return response


def answer(response: Response) -> None:
    """Compute U = B P and tr(B P B^T)."""
    assert response.P is not None
    assert response.x is not None
    response.u = response.P.times_rows(response.x)
    response.energy = trace_of(response.x, response.u)


def settle(response: Response, energies: list[float]) -> bool:
    """Take note of the traces; return False if P is not positive definite."""
    group, counts_for = response.slot.group, response.counts_for
    ratio = float(group["ratio"] * counts_for)
    response.c = [ratio * time for time in response.times or [1.0] * len(energies)]
    response.margins = [c * energy for c, energy in zip(response.c, energies, strict=True)]
    forgetting = float(group["forgetting"] ** counts_for)
    assert response.x is not None
    assert response.u is not None
    response.lesson = lesson_of(
        response.x, response.u, response.c, response.margins, MOST_ENERGY, forgetting
    )
    return response.lesson is not None


def move(response: Response, norm: float | None) -> None:
    """Change P and Q, then the parameters.

    Args:
        norm: the norm of all gradients, for groups that clip it.
    """
    slot, P, group, number = response.slot, response.P, response.slot.group, response.number
    mean, divisors, counts_for = response.mean, response.ranges, response.counts_for

    # P learns. It may not grow beyond P_0, so that what damps it, I / delta, is not forgotten:
    # learn_ bounds it by MAX_GROWTH times the scale that it is given
    if response.lesson is not None:
        assert P is not None
        bound = slot.scale_of([delta / MAX_GROWTH for delta in response.delta])
        learn_(P, response.lesson, float(group["forgetting"] ** counts_for), bound)
        slot.keep(P, response.delta)
        slot.write("mean", mean)
        if response.learnt == 0 or "ranges" not in slot.state[0]:
            slot.write("ranges", zeros_for(slot) if divisors is None else divisors)
            slot.note(scaled=int(divisors is not None))
    learns = int(counts_for > 0)
    last = number if learns else int(slot.state[0].get("last", 0))
    slot.note(step=number, learnt=response.learnt + learns, last=last)
    slot.wants_rows = is_due(slot.state[0])

    # the weight moves against D = Q (G - g mu^T) P
    g = slot.bias_gradient()
    change = advance(slot.weight, slot, direction(response, g), norm, number)
    if divisors is not None:
        change = change / divisors.unsqueeze(-2)
    slot.weight.add_(change)

    # the bias moves against its own gradient, and makes up for the mean of the weight's change
    if slot.bias is not None and g is not None:
        shift = advance(slot.bias, slot, g, norm, number)
        if mean is not None:
            shift = shift - (change @ mean.unsqueeze(-1)).squeeze(-1)
        slot.bias.add_(shift)


def direction(response: Response, g: Tensor | None) -> Tensor:
    """Return D = Q (G - g mu^T) P of the weight; Q learns on the way.

    Args:
        g: the gradient of the bias. Without it, nothing can be centred.
    """
    slot, P, divisors, factored = response.slot, response.P, response.ranges, response.factored
    mean = None if g is None else response.mean

    # D is left @ right where G = E^T X is known by its factors, else right
    left = None
    if factored is not None:
        right, left = factored.factors.X, factored.factors.E.T * factored.scale
        right = right if mean is None else right - mean
    else:
        right = slot.weight.gradient()
        if mean is not None and g is not None:
            right = right - g.unsqueeze(-1) * mean.unsqueeze(-2)
    if divisors is not None:
        right = right / divisors.unsqueeze(-2)
    if P is not None:
        right = P.times_rows(right)  # (63), for centred rows

    Q = q_of(slot)
    scale = slot.scale_of(response.delta)  # D is in units of the gradient: P_0 counts as I
    if Q is None:
        D = right if left is None else left @ right
        return D / (scale if isinstance(scale, float) else scale[:, None, None])
    if response.counts_for > 0:
        S = random_signs(slot.layer.inputs, slot.dtype, Q.device)
        columns = right @ S if left is None else left @ (right @ S)
        if slot.layer.is_sharded and not slot.layer.is_gathered:
            columns = shards.rows_of_all(columns, slot.layer.weight)
        forgetting = slot.group["forgetting"]
        learn_columns_(Q, columns, forgetting, response.learnt, response.counts_for)
    if slot.layer.is_sharded and not slot.layer.is_gathered:
        return whiten_shard(Q, right, slot.layer, scale)
    D = whiten_outputs(Q, right if left is None else left, scale)
    return D if left is None else D @ right


def advance(part: Part, slot: Slot, D: Tensor, norm: float | None, number: int) -> Tensor:
    """Return the change of the weight or the bias against D; decay what is there."""
    group = part.group
    lr = float(group["lr"])
    if norm is not None and (clip := clip_factor(group, norm)) != 1:
        D = D * clip
    rate = lr * RATE / (slot.layer.inputs + OFFSET)
    if group["weight_decay"] > 0 or group["l1"] > 0:  # decoupled from the gradient, as in AdamW
        for parameter in part.parameters:
            here = shards.local(parameter)
            if group["l1"] > 0:
                here.sub_(here.sign(), alpha=lr * DECAY * group["l1"])
            here.mul_(1 - lr * DECAY * group["weight_decay"])
    M, V = (part.memory(name, slot.states) for name in ("momentum", "square"))
    options = {"beta1": float(group["momentum"]), "beta2": SQUARES, "eps": TINY}
    (change,) = adam_([D], [M], [V], number, rate=rate, **options)
    return change


def rank_of(slot: Slot, P: Inverse | None) -> int | None:
    """Return the rank that P is to have; None if it is to be dense."""
    return slot.rank_of(slot.layer.inputs)


def ranges_of_inputs(slot: Slot, extent: Tensor) -> Tensor:
    """Return a third of each column's range in the first minibatch, (n,) or (g, n).

    The range is the largest distance from the mean, which a bias can take out; else from zero.
    Columns that have not varied yet get the mean of the others.
    """
    distances = ranges_of(extent) if slot.bias is not None else sizes_of(extent)
    return usable(distances[0] if slot.layer.groups == 1 else distances)


def usable(ranges: Tensor) -> Tensor:
    """Return a third of each range; of columns that have not varied yet, the mean of the others.

    Example:
        >>> usable(torch.tensor([3.0, 0.0, 9.0]))
        tensor([1., 2., 3.])
    """
    varied = ranges > 0
    count = varied.sum(-1, keepdim=True)
    mean = torch.where(count > 0, ranges.sum(-1, keepdim=True) / count.clamp(min=1), 3.0)
    return (torch.where(varied, ranges, mean) / 3).clamp(LEAST_RANGE, MOST_RANGE)


def zeros_for(slot: Slot) -> Tensor:
    """Return zeros of the shape of the mean, (n,) or (g, n)."""
    several = (slot.count,) if slot.count > 1 else ()
    device = slot.layer.weight.device
    return torch.zeros(*several, slot.layer.inputs, dtype=slot.dtype, device=device)


# -- Q ---------------------------------------------------------------------------------------------


def q_of(slot: Slot) -> Tensor | None:
    """Return Q from the state, (tiles, n, n), made if there is none; None for a single output."""
    shape = tile_shape(slot.layer)
    if shape is None:
        return None
    for state in slot.state:
        if "outputs" not in state:
            eye = torch.eye(shape[-1], dtype=slot.dtype, device=slot.layer.weight.device)
            state["outputs"] = eye.mul_(Q_FIRST).expand(shape).clone()
    return slot.read("outputs").view(-1, *shape[1:])


@functools.lru_cache(maxsize=256)
def random_signs(inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return S, (inputs, 16): the same in every run; torch's own random numbers are not touched."""
    generator = torch.Generator().manual_seed(inputs)
    bits = torch.randint(0, 2, (inputs, COLUMNS), generator=generator, device="cpu")
    return (2 * bits - 1).to(dtype).to(device, non_blocking=True)


def learn_columns_(
    Q: Tensor, columns: Tensor, forgetting: float, learnt: int, counts_for: int
) -> None:
    """Q <- (lambda A + c o (B^T B / ||B||^2 + damping))^-1 for B = columns^T.

    Example:
        >>> Q = Q_FIRST * torch.eye(2).unsqueeze(0)
        >>> same = torch.ones(2, COLUMNS)  # what comes in through both outputs alike
        >>> for learnt in range(100):
        ...     learn_columns_(Q, same, 1.0, learnt, 1)
        >>> whiten_outputs(Q, torch.tensor([[1.0, 1.0], [1.0, -1.0]]), 1.0)  # so it counts less
        tensor([[ 0.5029,  1.4971],
                [ 0.5029, -1.4971]])
    """
    ratio, forgetting = counts_for * Q_RATIO, min(Q_MEMORY, forgetting) ** counts_for
    B = in_tiles(columns, Q).mT
    B = B / B.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(B.dtype).tiny)
    energy = B.square().sum((-2, -1), keepdim=True).clamp(min=1)  # 0, or at least 1
    B = damped(B * (ratio * B.shape[-1] / energy).sqrt_(), Q_RIDGE, learnt)
    U = B @ Q
    L, _ = root_of(B, U, forgetting)
    learn_(Dense(Q), Lesson(B, U, L), forgetting, Q_FIRST / MAX_GROWTH)


def whiten_outputs(Q: Tensor, D: Tensor, scale: Tensor | float) -> Tensor:
    """Return Q D / scale, with Q of mean eigenvalue 1, for D of (o, m) or (g, o, m)."""
    factor = Q.diagonal(dim1=-2, dim2=-1).mean(-1)
    factor = factor * (scale if isinstance(scale, float) else scale.repeat_interleave(len(Q) // len(scale)))
    tiles = (Q / factor[:, None, None]) @ in_tiles(D, Q)
    return tiles.view(*D.shape[:-2], -1, D.shape[-1])[..., : D.shape[-2], :]


def whiten_shard(Q: Tensor, D: Tensor, layer: Layer, scale: Tensor | float) -> Tensor:
    """Return Q D / scale of the rows on this rank; tiles that are cut need rows of other ranks."""
    size = Q.shape[-1]
    rows, start, own = shards.whole_tiles(D, layer.weight, size)
    tiles = Q[start // size : -(-(start + len(rows)) // size)]
    return whiten_outputs(tiles, rows, scale)[own - start : own - start + len(D)]


def in_tiles(M: Tensor, Q: Tensor) -> Tensor:
    """Return (o, m) or (g, o, m) as (tiles, n, m); a group's last tile may have zeros below."""
    tiles, size, _ = Q.shape
    missing = tiles // math.prod(M.shape[:-2]) * size - M.shape[-2]
    M = pad(M, (0, 0, 0, missing)) if missing else M
    return M.reshape(tiles, size, M.shape[-1])


def reserve(slot: Slot) -> None:
    """Make the state that a step would make, and take none: loaders need a place to load to."""
    slot.reserve()
    slot.note(step=0, learnt=0, last=0, scaled=0)
    slot.write("ranges", zeros_for(slot))
    if slot.bias is not None:
        slot.write("mean", zeros_for(slot))
    q_of(slot)
    for part in slot.parts:
        if part.has_gradient:
            part.memory("square", slot.states)
