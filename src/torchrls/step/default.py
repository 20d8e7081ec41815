r"""The default step: Adam, in coordinates that recursive least squares has whitened.

For a layer with weight W, bias b and the gradients G and g of the loss,

.. math::
    D = Q\, G\, P, \qquad W \leftarrow W + \mathrm{Adam}(D), \qquad
    b \leftarrow b + \mathrm{Adam}(g)

with steps of the size :math:`\eta \rho / (n + \nu)` for n inputs.

*Whiten the inputs.* P is the inverse autocorrelation matrix of the layer's inputs, by the recursion
of RLS (:mod:`torchrls.matrix.recursion`). It learns the mean rows of sets of samples.

*Whiten the outputs.* Q is the inverse autocorrelation matrix of the gradients of the outputs, by
the same recursion: with a fixed random S of entries :math:`\pm 1`, it learns :math:`B = (G P S)^T`,
of which only the directions count.

*In tiles.* Inputs and outputs are taken in tiles of at most 128 neighbours, each with a P or a Q of
its own, so that time and memory grow with the size of a layer and not with its square.

*Keep the size.* P and Q have the mean eigenvalue 1; what the recursion makes them smaller goes into
a gain. So the directions of a step are whitened, and its length is left to Adam.

*Damp.* Whatever P and Q learn, they learn a share of its energy on the diagonal as well, at a few
places that take turns (:func:`torchrls.matrix.recursion.damped`).

*Move.* As Adam does, by torch's fused kernel. Where weights began smaller than is usual, steps are
shorter (:func:`rate_of`).

P and Q learn in every step at first, then at intervals that grow; such a step counts for all since
the last one. In between nothing is observed, and a step is D and one call of the kernel. A layer
whose rows are never seen has no P; it is trained all the same.

*The network's inputs*, to which no gradient flows, are standardized: their layer is taken as
:math:`W r \cdot (x - \mu) / r + b'` with :math:`b' = b + W \mu`, where :math:`\mu` is their running
mean and r their ranges in the first minibatch (:func:`ranges_of_inputs`). So it matters little how
a user has scaled them. Ranges grow where inputs do (:func:`grown`).

A step has the functions of :mod:`torchrls.step.paper`. The same algorithm, written naively, is
:func:`torchrls.selftest.naive.default_step`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrls.common import shards
from torchrls.common.numerics import MAX_GROWTH, counter, on_device, roots_of
from torchrls.common.torch_private import foreach_norm
from torchrls.layers.layer import Layer
from torchrls.layers.rows import ranges_of, sizes_of
from torchrls.matrix.adam import adam_
from torchrls.matrix.inverse import Dense
from torchrls.matrix.lowrank import LowRank
from torchrls.matrix.recursion import Lesson, damped, learn_, lesson_of, renew_, root_of, trace_of
from torchrls.observe.record import Observation
from torchrls.routing.groups import clip_factor
from torchrls.routing.relative import DECAY
from torchrls.step.gradient import Factored, factored_gradient
from torchrls.step.slots import Inverse, Slot, State, stored, tile_shape

#: rho and nu: at lr = 1, steps of a layer with n inputs are of the size rho / (n + nu).
RATE, OFFSET = 1.38, 30.0
#: Weights that begin smaller than USUAL / sqrt(max(n, o)) get shorter steps, by this power of how
#: much smaller they are. LEAST stands for USUAL where they are smaller still, so that they can
#: begin with zeros.
USUAL, POWER, LEAST = 0.5, 1.5, 0.1
#: Ranges grow where inputs turn out to be so many times as large.
FARTHER = 4.0
#: What V and Q keep from step to step, so that they remember a hundred.
MEMORY = 0.99
#: The size of gradients that are rounding.
TINY = 1e-10
#: P and Q learn in each step before EARLY, then at intervals that grow in proportion to the steps,
#: up to EVERY. It is longer where learning would take more than SHARE of the operations of a
#: training step; LEARNING is what it takes for each entry of P.
EARLY, EVERY, SHARE, LEARNING = 128, 8, 0.2, 100
#: Damping of P and of Q, as a share of the energy that they learn.
RIDGE, Q_RIDGE = 0.1, 1.0
#: The trace of c B P B^T may be at most this over the dtype's epsilon; beyond it c is reduced.
MOST_ENERGY = 1e-4
#: c of Q, and the columns of S.
Q_RATIO, COLUMNS = 0.5, 16


@dataclass
class Response:
    """The response of a slot to the rows of a step.

    Attributes:
        number: the number of this step; the first one is 1.
        learnt: the count of earlier steps in which P and Q have learnt.
        counts_for: how many steps this one counts for in P and Q; 0 if they learn nothing.
        every: the longest interval between steps in which P and Q learn.
        P: None if no rows of the layer have ever been seen.
        is_stored: P is what the state holds.
        delta: the scale of P_0 of each layer: in the units of the rows it is 1.
        units: the squared unit of the rows of each layer, 1 over which they are multiplied by.
        gain: what P would have to be multiplied by, of each group; None for P of low rank.
        ranges: what the columns of the network's inputs are divided by, (n,) or (g, n); None for
            other layers.
        mean: mu, which is subtracted from them before where a bias can make up for it.
        x, u: the damped rows B of the sets, and U = B P; None if P learns nothing.
        energy: tr(B P B^T) of each group.
        time: T of each group, or None for c = k; ``times`` are its numbers.
        c, margins: c and c tr(B P B^T) of each group, once they are settled.
        lesson: what P is going to learn, once it is settled.
    """

    slot: Slot
    number: int
    learnt: int
    counts_for: int
    every: int
    P: Inverse | None
    is_stored: bool
    delta: list[float]
    units: list[float]
    gain: Tensor | None
    ranges: Tensor | None
    mean: Tensor | None
    factored: Factored | None = None
    x: Tensor | None = None
    u: Tensor | None = None
    energy: Tensor | None = None
    time: Tensor | None = None
    times: list[float] | None = None
    c: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    lesson: Lesson | None = None


def is_due(state: State, number: int | None = None) -> bool:
    """Return whether P and Q learn in the next step of a layer with this state.

    Args:
        number: the number of that step, if it is known.

    Example:
        >>> state = {"step": 1000, "last": 996, "every": 8}
        >>> is_due(state), is_due({**state, "step": 1003}), is_due({**state, "last": 0, "step": 63})
        (False, True, True)
    """
    number = int(state.get("step", 0)) + 1 if number is None else number
    interval = min(max(1, 2 * number // EARLY), int(state.get("every", EVERY)))
    return number - int(state.get("last", 0)) >= interval


def respond(slot: Slot, rows: Observation | None) -> Response:
    """Standardize and damp the rows, and compute B P, if P learns in this step. Changes nothing."""
    state, group, inputs = slot.state[0], slot.group, slot.layer.inputs
    number = int(state.get("step", 0)) + 1
    counts_for = number - int(state.get("last", 0)) if is_due(state, number) else 0
    delta, is_scaled = [1.0] * len(slot.layers), int(state.get("scaled", 0)) > 0
    response = Response(
        slot=slot,
        number=number,
        learnt=int(state.get("learnt", 0)),
        counts_for=counts_for,
        every=int(state.get("every", EVERY)),
        P=slot.held(),
        is_stored=True,
        delta=delta,
        units=delta,
        gain=None,
        ranges=slot.read("ranges") if is_scaled else None,
        mean=slot.read("mean") if is_scaled else None,
    )
    if rows is None or counts_for == 0:
        if response.P is not None:
            response.factored = factored_gradient(slot, response.P)
        return response

    # the mean row of each set, times the root of its share of all rows
    sums, counts = rows.sums.tensor_split([inputs], -1)
    total = counts.sum(-2, keepdim=True)
    B, roots = sums / counts.clamp(min=1), (counts / total).sqrt_()
    is_first = response.P is None
    if is_first and rows.extent is not None and group["initial_inverse"] == "auto":
        response.ranges = ranges_of_inputs(slot, rows.extent)
    if response.ranges is not None:
        now = sums.sum(-2) / total.squeeze(-2)
        share = min(1.0, counts_for * max(1 - MEMORY, 1 / (response.learnt + 1)))
        response.mean = now if response.mean is None else response.mean.lerp(now, share)
        if slot.bias is not None:
            B = B - response.mean.unsqueeze(-2)
        if not is_first:
            response.ranges = grown(response.ranges, B.where(roots > 0, 0.0))
        B = B / response.ranges.unsqueeze(-2)
    B = B * roots

    # the units of the rows, and the form of P
    if is_first:
        response.counts_for = 1
        least = 1e-30 if response.ranges is None else 1e-6
        first, count = first_units(B, total, slot, least)
        response.units = slot.scales() or first
        response.every = every_of(slot.layer, count)
    else:
        response.units = slot.scales() or delta
    response.P, response.is_stored = inverse_of(slot)
    response.factored = factored_gradient(slot, response.P)
    root = roots_of(response.units, B)
    B *= root if isinstance(root, float) else root.unsqueeze(-1)
    if isinstance(response.P, Dense):
        B = B if B.shape[-1] == response.P.size else in_tiles(B.mT, response.P.P).mT
        if response.is_stored and "inverse_gain" in state:
            response.gain = slot.read("inverse_gain")
            B = B * response.gain.sqrt()[..., None, None]
        if inputs:
            B = damped(B, RIDGE, response.learnt)
    response.x, response.time = B, rows.time if group["time_scaling"] else None
    answer(response)
    return response


def answer(response: Response) -> None:
    """Compute U = B P and tr(B P B^T)."""
    assert response.P is not None
    assert response.x is not None
    response.u = response.P.times_rows(response.x)
    response.energy = trace_of(response.x, response.u)


def settle(response: Response, numbers: list[float]) -> bool:
    """Take note of the traces; return False if P is not positive definite."""
    group, counts_for = response.slot.group, response.counts_for
    ratio, times = float(group["ratio"] * counts_for), response.times or [1.0]
    tiles = len(numbers) // len(times)
    response.c = [ratio * time for time in times for _ in range(tiles)]
    response.margins = [c * energy for c, energy in zip(response.c, numbers, strict=True)]
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
    slot, ranges = response.slot, response.ranges
    learn(response)
    g = slot.bias_gradient()
    mean = None if g is None else response.mean
    D = direction(response, g)

    # weight decay, decoupled from the gradients, as in AdamW
    for part in slot.parts:
        group = part.group
        if (group["l1"] > 0 or group["weight_decay"] > 0) and part.has_gradient:
            share = float(group["lr"]) * DECAY
            for parameter in part.parameters:
                here = shards.local(parameter)
                here.sub_(here.sign(), alpha=share * group["l1"])
                here.mul_(1 - share * group["weight_decay"])

    # inputs of the network: W x + b = W r ((x - mu) / r) + b' for b' = b + W mu
    W, is_direct = slot.weight.value()
    moves = [(slot.weight, W, D)]
    if slot.bias is not None and g is not None:
        b, is_bias_direct = slot.bias.value()
        moves.append((slot.bias, b, g))
        if mean is not None:
            add_product_(b, W, mean, 1)
    if ranges is not None:
        W.mul_(ranges.unsqueeze(-2))

    # as Adam does, each layer at its own rate
    rates = [rate_of(layer, slot.states[layer.weight]) for layer in slot.layers]
    is_plain = min(rates) == max(rates)
    changes = [value if is_plain else torch.zeros_like(value) for _, value, _ in moves]
    is_one_group = all(part.group is slot.group for part, _, _ in moves)
    for some in [slice(None)] if is_one_group else [slice(i, i + 1) for i in range(len(moves))]:
        parts, group = [part for part, _, _ in moves[some]], moves[some][0][0].group
        clip = 1.0 if norm is None else clip_factor(group, norm)
        adam_(
            changes[some],
            [D if clip == 1 else D * clip for _, _, D in moves[some]],
            [part.memory("momentum", slot.states) for part in parts],
            [part.memory("square", slot.states) for part in parts],
            response.number,
            rate=float(group["lr"]) * max(rates),
            beta1=float(group["momentum"]),
            beta2=MEMORY,
            eps=TINY,
        )
    if not is_plain:
        shares = on_device([rate / max(rates) for rate in rates], W)
        for (_, value, _), change in zip(moves, changes, strict=True):
            value.addcmul_(change, shares.view(-1, *[1] * (value.dim() - 1)))

    if ranges is not None:
        W.div_(ranges.unsqueeze(-2))
    if slot.bias is not None and g is not None:
        if mean is not None:
            add_product_(b, W, mean, -1)
        if not is_bias_direct:
            slot.bias.copy_(b)
    if not is_direct:
        slot.weight.copy_(W)


def learn(response: Response) -> None:
    """Let P learn, if it does in this step, and count the step."""
    slot, P, counts_for = response.slot, response.P, response.counts_for
    slot.state = [slot.states[layer.weight] for layer in slot.layers]
    if response.lesson is not None:
        forgetting = float(slot.group["forgetting"] ** counts_for)
        if isinstance(P, Dense):
            gain = P.P.new_ones(P.P.shape[:-2]) if response.gain is None else response.gain
            renew_(P.P, gain, response.lesson, forgetting)
            slot.write("inverse_gain", gain)
        else:  # a P of low rank keeps its mean eigenvalue: it differs from I in few directions
            assert P is not None
            learn_(P, response.lesson, forgetting, 1 / MAX_GROWTH)  # never beyond P_0
            slot.write("inverse_gain", None)
        if not (response.is_stored and isinstance(P, Dense)):  # else it has changed in place
            slot.keep(P, response.units)
        if response.ranges is not None or "ranges" not in slot.state[0]:
            slot.write("mean", zeros_for(slot) if response.mean is None else response.mean)
            slot.write("ranges", zeros_for(slot) if response.ranges is None else response.ranges)
            slot.note(scaled=int(response.ranges is not None), every=response.every)
    numbers = {"step": response.number}
    if counts_for > 0:
        numbers |= {"learnt": response.learnt + 1, "last": response.number}
    slot.note(**numbers)
    if not float(slot.state[0].get("size", 0.0)):  # also in states of earlier versions
        # where inputs are divided by their ranges, the size of weights says nothing
        sizes = sizes_of_weights(slot) if response.ranges is None else [1.0] * len(slot.state)
        for state, size in zip(slot.state, sizes, strict=True):
            state["size"] = counter(size)
    slot.wants_rows = is_due(slot.state[0], response.number + 1)


def direction(response: Response, g: Tensor | None) -> Tensor:
    """Return D = Q G P of the weight; Q learns on the way.

    Args:
        g: the gradient of the bias. Without it, the network's inputs cannot be centred.
    """
    slot, P, ranges, factored = response.slot, response.P, response.ranges, response.factored
    mean = None if g is None else response.mean

    # D is left @ right where G = E^T X is known by its factors, else right
    left = None
    if factored is not None:
        right, left = factored.factors.X, factored.factors.E.T
        left = left if factored.scale == 1 else left * factored.scale
        right = right if mean is None else right - mean
    else:
        right = slot.weight.gradient()
        if mean is not None and g is not None:
            if g.dim() == 1:
                right = torch.addr(right, g, mean, alpha=-1)
            else:
                right = torch.baddbmm(right, g.unsqueeze(-1), mean.unsqueeze(-2), alpha=-1)
    if ranges is not None:
        right = right / ranges.unsqueeze(-2)
    if isinstance(P, Dense) and P.size != right.shape[-1]:
        right = whiten(P.P, right.mT).mT
    elif P is not None:
        right = P.times_rows(right)  # (63)

    Q = q_of(slot)
    if Q is None:
        return right if left is None else left @ right
    is_cut = slot.layer.is_sharded and not slot.layer.is_gathered
    if response.counts_for > 0:
        S = random_signs(slot.layer.inputs, slot.dtype, Q.device)
        columns = right @ S if left is None else left @ (right @ S)
        columns = shards.rows_of_all(columns, slot.layer.weight) if is_cut else columns
        gain, forgetting = slot.read("gain").view(-1), slot.group["forgetting"]
        learn_columns_(Q, gain, columns, forgetting, response.learnt, response.counts_for)
    if is_cut:
        return whiten_shard(Q, right, slot.layer)
    return whiten(Q, right) if left is None else whiten(Q, left) @ right


def rate_of(layer: Layer, state: State) -> float:
    """Return the size of a layer's steps at lr = 1.

    Example:
        >>> from torchrls.layers.layer import Block
        >>> layer = Layer("query", Block(), torch.nn.Parameter(torch.zeros(128, 128)), None)
        >>> round(rate_of(layer, {"size": torch.tensor(0.05)}), 5)  # as torch begins
        0.00873
        >>> round(rate_of(layer, {"size": torch.tensor(0.02)}), 5)  # as BERT does
        0.00266
    """
    relative = float(state["size"]) * math.sqrt(max(layer.inputs, layer.all_outputs))
    shorter = min(1.0, max(relative, LEAST) / USUAL)
    return RATE / (layer.inputs + OFFSET) * math.pow(shorter, POWER)


def sizes_of_weights(slot: Slot) -> list[float]:
    """Return the root mean square of each layer's weight; 1e-30 if that is zero."""
    weights = [shards.local(parameter.detach()) for parameter in slot.weight.parameters]
    norms = torch.stack([norm.to(slot.dtype) for norm in foreach_norm(weights)])
    if slot.layer.is_sharded:
        norms = shards.total(norms.square(), slot.layer.weight).sqrt()
    sizes = norms / max(slot.layer.weight.numel(), 1) ** 0.5
    return [max(float(size), 1e-30) for size in sizes.tolist()]


def add_product_(b: Tensor, W: Tensor, mean: Tensor, sign: int) -> None:
    """b <- b + sign W mu, for one matrix or several."""
    if W.dim() == 2:
        b.addmv_(W, mean, alpha=sign)
    else:
        b.unsqueeze(-1).baddbmm_(W, mean.unsqueeze(-1), alpha=sign)


# -- what the first minibatch decides --------------------------------------------------------------


def first_units(B: Tensor, total: Tensor, slot: Slot, least: float) -> tuple[list[float], int]:
    """Return what makes the energy of each layer's rows B 1, and the number of rows.

    Args:
        total: the number of rows of each group.
        least: an energy that is rounding.
    """
    energies = B.square().sum((-2, -1)).view(-1)
    if len(slot.layers) == 1:
        energies = energies.mean(-1, keepdim=True)
    *numbers, count = torch.cat([energies, total.view(-1)[:1]]).tolist()
    return [1 / energy if least < energy < math.inf else 1.0 for energy in numbers], int(count)


def every_of(layer: Layer, rows: int) -> int:
    """Return the interval at which learning takes SHARE of a training step of the layer.

    Example:
        >>> from torchrls.layers.layer import Block
        >>> weight = torch.nn.Parameter(torch.zeros(10, 8192))
        >>> every_of(Layer("head", Block(), weight, None), rows=32)
        2134
    """
    training = 6 * rows * layer.inputs * layer.all_outputs  # forwards, and twice backwards
    learning = LEARNING * layer.inputs * tile_shape(layer.inputs)[-1]
    return max(EVERY, math.ceil(learning / (SHARE * max(training, 1))))


def inverse_of(slot: Slot) -> tuple[Inverse, bool]:
    """Return P in the form that it has to have, and whether the state holds it: if not, P_0 = I."""
    layer, asked, held = slot.layer, slot.group["rank"], slot.held()
    if asked in (None, "auto") or asked >= layer.inputs:
        if isinstance(held, Dense):
            return held, True
        tiles, size, _ = tile_shape(layer.inputs, slot.count)
        return Dense.first(tiles, size, 1.0, like=layer.weight), False
    if isinstance(held, LowRank):
        P = stored(slot.state[0], int(asked))
        assert P is not None
        return P, True
    first = LowRank.first(layer.groups, layer.inputs, 1.0, like=layer.weight, rank=int(asked))
    return first, False


def ranges_of_inputs(slot: Slot, extent: Tensor) -> Tensor | None:
    """Return a third of each column's range in the first minibatch, (n,) or (g, n).

    The range is the largest distance from the mean, which a bias can take out; else from zero.
    Columns that have not varied yet get the mean of the others.
    """
    distances = ranges_of(extent) if slot.bias is not None else sizes_of(extent)
    return usable(distances[0] if slot.layer.groups == 1 else distances).to(slot.dtype)


def usable(ranges: Tensor) -> Tensor:
    """Return a third of each range; of columns that have not varied yet, the mean of the others.

    It is rounded to a power of 2, so that weights are multiplied and divided by it exactly.

    Example:
        >>> usable(torch.tensor([3.0, 0.0, 9.0]))
        tensor([1., 2., 4.])
    """
    varied = ranges > 0
    count = varied.sum(-1, keepdim=True)
    mean = torch.where(count > 0, ranges.sum(-1, keepdim=True) / count.clamp(min=1), 3.0)
    thirds = (torch.where(varied, ranges, mean) / 3).clamp(1e-15, 1e15)  # squares stay finite
    return thirds.log2().round().exp2()


def grown(ranges: Tensor, B: Tensor) -> Tensor:
    """Return the ranges, larger where inputs are now FARTHER times as far from their mean.

    Without it, inputs whose first minibatch was not like the rest would get far too long steps.

    Args:
        B: the centred mean rows of the sets, (sets, n) or (g, sets, n).

    Example:
        >>> grown(torch.tensor([1.0, 1.0]), torch.tensor([[11.0, 50.0], [-3.0, -100.0]]))
        tensor([ 1., 32.])
    """
    distances = B.abs().amax(-2)
    return torch.where(distances > 3 * FARTHER * ranges, usable(distances), ranges)


def zeros_for(slot: Slot) -> Tensor:
    """Return zeros of the shape of the mean, (n,) or (g, n)."""
    several = (slot.count,) if slot.count > 1 else ()
    device = slot.layer.weight.device
    return torch.zeros(*several, slot.layer.inputs, dtype=slot.dtype, device=device)


# -- Q ---------------------------------------------------------------------------------------------


def q_of(slot: Slot) -> Tensor | None:
    """Return Q from the state, (tiles, n, n), made if there is none; None for a single output.

    It has the mean eigenvalue 1. What that takes is "gain" in the state, (tiles,).
    """
    shape = slot.tile_shape
    if shape is None:
        return None
    for state in slot.state:
        if "outputs" not in state:
            eye = torch.eye(shape[-1], dtype=slot.dtype, device=slot.layer.weight.device)
            state["outputs"] = eye.expand(shape).clone()
            state["gain"] = eye.new_ones(shape[:1])
    return slot.read("outputs").view(-1, *shape[1:])


@functools.lru_cache(maxsize=256)
def random_signs(inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return S, (inputs, 16): the same in every run; torch's own random numbers are not touched."""
    generator = torch.Generator().manual_seed(inputs)
    bits = torch.randint(0, 2, (inputs, COLUMNS), generator=generator, device="cpu")
    return (2 * bits - 1).to(dtype).to(device, non_blocking=True)


def learn_columns_(
    Q: Tensor, gain: Tensor, columns: Tensor, forgetting: float, learnt: int, counts_for: int
) -> None:
    """gain Q <- (lambda A + c o (B^T B / ||B||^2 + damping))^-1 for B = columns^T, A = (gain Q)^-1.

    Example:
        >>> Q, gain = torch.eye(2).unsqueeze(0), torch.ones(1)
        >>> same = torch.ones(2, COLUMNS)  # what comes in through both outputs alike
        >>> for learnt in range(100):
        ...     learn_columns_(Q, gain, same, 1.0, learnt, 1)
        >>> whiten(Q, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))  # so it counts less
        tensor([[ 0.5029,  1.4971],
                [ 0.5029, -1.4971]])
    """
    ratio, forgetting = counts_for * Q_RATIO, min(MEMORY, forgetting) ** counts_for
    B = in_tiles(columns, Q).mT
    B = B / B.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(B.dtype).tiny)
    energy = B.square().sum((-2, -1), keepdim=True).clamp(min=1)  # 0, or at least 1
    root = (ratio * B.shape[-1] * gain[:, None, None] / energy).sqrt_()
    B = damped(B * root, Q_RIDGE, learnt)
    U = B @ Q
    L, _ = root_of(B, U, forgetting)
    renew_(Q, gain, Lesson(B, U, L), forgetting)


def whiten(Q: Tensor, D: Tensor) -> Tensor:
    """Return Q D for D of (o, m) or (g, o, m)."""
    if len(Q) == 1 and D.shape[:-1] == Q.shape[1:2]:
        return Q[0] @ D
    tiles = torch.bmm(Q, in_tiles(D, Q))
    return tiles.view(*D.shape[:-2], -1, D.shape[-1])[..., : D.shape[-2], :]


def whiten_shard(Q: Tensor, D: Tensor, layer: Layer) -> Tensor:
    """Return Q D of the rows on this rank; tiles that are cut need rows of other ranks."""
    size = Q.shape[-1]
    rows, start, own = shards.whole_tiles(D, layer.weight, size)
    tiles = Q[start // size : -(-(start + len(rows)) // size)]
    return whiten(tiles, rows)[own - start : own - start + len(D)]


def in_tiles(M: Tensor, Q: Tensor) -> Tensor:
    """Return (o, m) or (g, o, m) as (tiles, n, m); a group's last tile may have zeros below."""
    tiles, size, _ = Q.shape
    missing = tiles // math.prod(M.shape[:-2]) * size - M.shape[-2]
    M = pad(M, (0, 0, 0, missing)) if missing else M
    return M.reshape(tiles, size, M.shape[-1])


def reserve(slot: Slot) -> None:
    """Make the state that a step would make, and take none: loaders need a place to load to."""
    slot.reserve(inverse_of(slot)[0])
    slot.note(step=0, learnt=0, last=0, scaled=0, every=EVERY, size=0.0)
    if "inverse" in slot.state[0]:
        slot.write("inverse_gain", torch.ones_like(slot.state[0]["inverse"].sum((-2, -1))))
    for name in ("mean", "ranges"):
        slot.write(name, zeros_for(slot))
    q_of(slot)
    for part in slot.parts:
        if part.has_gradient:
            part.memory("square", slot.states)
