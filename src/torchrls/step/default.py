r"""The default step: centre, whiten the inputs by P, whiten the outputs by Q, move as Adam does.

RLS makes the inputs of a layer alike; nothing in it knows how large the gradients of the outputs
are, and these differ by orders of magnitude between layers, losses and stages of training. So the
direction is that of RLS, for inputs and outputs, and its length is normalised:

.. math::
    D &= Q_s\, P_s G_c, \qquad \Omega \leftarrow \alpha \Omega + (1 - \alpha) D, \qquad
    V \leftarrow \beta_s V + (1 - \beta_s) D^2 \\
    \Theta &\leftarrow \Theta - \frac{\eta\, \rho}{(n + \nu) \sqrt{1 + m_s / \tau}}\,
    \frac{\hat\Omega}{\sqrt{V}}, \qquad m_s = \lambda m_{s-1} + 1

Omega-hat is the unbiased average, n the inputs of the layer. :math:`\beta_s = \min(\beta, 1 -
s^{-4/5})`: gradients of the first steps, which are often the largest, are soon forgotten.
:math:`m_s` is the number of steps that RLS remembers: for lambda = 1 steps fall like the gain of
RLS on noisy data does, with forgetting they stop falling.

*Centred*: the layer is taken as :math:`W (x - \mu) + b'`, with the running mean :math:`\mu` of its
inputs. P learns the mean rows :math:`x - \mu` of sets of samples, :math:`G_c = G - g_b \mu^T` is
the gradient of W, and b moves by :math:`-\Delta W \mu` beside its own step. So a large mean, which
would dominate P, has no influence. Layers without a bias of their own are not centred.

*Damped*: a learning step adds a little to the diagonal of A, at r places :math:`J_s` that take
turns (:func:`torchrls.matrix.recursion.damped`): :math:`\epsilon` times the mean variance of the
inputs. A P of low rank cannot hold it.

*Q* is the inverse autocorrelation matrix of the output gradients. It whitens outputs as P whitens
inputs, by the same recursion. It learns from signed sums of the columns of D = P G: with a fixed
random S of entries :math:`\pm 1` and o outputs,

.. math::
    B = (D S)^T, \qquad A_s = \lambda A_{s-1} + c\, o \left( \frac{B^T B}{\|B\|^2}
    + \frac{\epsilon}{r} \sum_{j \in J_s} e_j e_j^T \right), \qquad
    D \leftarrow \frac{o}{\mathrm{tr}(Q_s)}\, Q_s D.

Only directions matter: every step counts alike, however large its gradients are. Outputs are taken
in tiles of at most 128, each with a Q of its own; lambda is at most 0.99.

The network's inputs are taken in ranges of their own: :mod:`torchrls.step.ranges`.

A step has the functions of :mod:`torchrls.step.paper`. The same algorithm, written naively,
is :func:`torchrls.selftest.naive.default_step`.
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
from torchrls.matrix.inverse import Dense
from torchrls.matrix.recursion import Lesson, damped, learn_, lesson_of, root_of, trace_of
from torchrls.observe.record import Observation
from torchrls.routing.groups import clip_factor
from torchrls.step import ranges
from torchrls.step.gradient import Factored, factored_gradient
from torchrls.step.slots import FIRST_ENERGY, Inverse, Part, Slot, tile_shape

#: rho and nu: steps at lr = 1 and n inputs are of the size rho / (n + nu).
RATE, OFFSET = 1.38, 30.0
#: tau: how many steps it takes until steps begin to fall.
STEADY = 100.0
#: beta: the memory of V in the long run, and the exponent with which it grows.
SQUARES, GROWTH = 0.99, 0.8
#: The running mean takes at least this share of each minibatch: it forgets no slower.
MEAN = 0.01
#: Entries of D below this, times the mean eigenvalue of P, are rounding: those of a bias before a
#: norm, or of a constant input.
TINY = 1e-8
#: P, Q and mu learn in each of the first EARLY steps, then in every EVERY-th, which counts for all.
EARLY, EVERY = 64, 2
#: epsilon of P.
RIDGE = 0.1
#: The trace of c B P B^T may be at most this over the dtype's epsilon; beyond it c is reduced.
MOST_ENERGY = 1e-4
#: c and epsilon of Q, Q_0 = Q_FIRST I, and the most that lambda is: gradients change more than
#: inputs do.
Q_RATIO, Q_RIDGE, Q_FIRST, Q_MEMORY = 0.1, 1.0, 5.0, 0.99
#: Columns of S.
COLUMNS = 16


@dataclass
class Response:
    """The response of a slot to the rows of a step.

    Attributes:
        rows: what was observed.
        number: the number of this step; the first one is 1.
        turn: the count of earlier steps in which P and Q have learnt.
        counts_for: how many steps this one counts for in P and Q; 0 if they learn nothing.
        delta: the scale of P_0 of each layer.
        factored: the factors of G, if it has some.
        mean: mu, (n,) or (g, n); None where the layer is not centred.
        ranges: what the columns of the inputs are divided by, (n,) or (g, n), or None.
        x, u: the centred and damped rows B of the sets, and U = B P.
        energy: tr(B P B^T) of each group.
        time: T of each group, or None for c = k; ``times`` are its numbers.
        c, margins: c and c tr(B P B^T) of each group, once they are settled.
        lesson: what P is going to learn, once it is settled.
    """

    slot: Slot
    rows: Observation
    number: int
    turn: int
    counts_for: int
    P: Inverse
    delta: list[float]
    factored: Factored | None
    mean: Tensor | None
    ranges: Tensor | None
    x: Tensor
    time: Tensor | None
    u: Tensor = field(init=False)
    energy: Tensor = field(init=False)
    times: list[float] | None = None
    c: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    lesson: Lesson | None = None


def schedule(number: int) -> tuple[int, int]:
    """Return how often P and Q have learnt before a step, and how many steps it counts for.

    Example:
        >>> schedule(64), schedule(65), schedule(66)
        ((63, 1), (64, 0), (64, 2))
    """
    if number <= EARLY:
        return number - 1, 1
    late, rest = divmod(number - EARLY, EVERY)
    return EARLY + late - (rest == 0), 0 if rest else EVERY


def respond(slot: Slot, rows: Observation) -> Response:
    """Centre and damp the rows, and compute B P. Values do not change."""
    state, inputs, has_bias = slot.state[0], slot.layer.inputs, slot.bias is not None
    number = int(state.get("step", 0)) + 1
    turn, counts_for = schedule(number)
    if has_bias and "mean" not in state:
        counts_for = counts_for or 1  # the bias is new
    divisors = ranges.ranges_for(slot, rows, number)
    scaled = divisors is not None and number == 1  # then columns have a variance of about 1
    P, delta, _ = slot.inverse(inputs, rows, FIRST_ENERGY / inputs if scaled else None)
    factored = None
    if type(slot.layer.weight.grad) is not Tensor:
        factored = factored_gradient(slot, P)

    # B: the mean row of each set, centred, times the root of the set's share of all rows
    mean = slot.read("mean") if has_bias and "mean" in state else None
    sums, counts = rows.sums.tensor_split([inputs], -1)
    B = sums[..., :0, :]  # nothing to learn
    if counts_for > 0:
        total = counts.sum(-2, keepdim=True)
        B = sums / counts.clamp(min=1)
        if has_bias:
            now = sums.sum(-2) / total.squeeze(-2)
            mean = now if mean is None else mean.lerp(now, counts_for * max(MEAN, 1 / number))
            B -= mean.unsqueeze(-2)
        if divisors is not None:
            B /= divisors.unsqueeze(-2)
        B.mul_((counts / total).sqrt_())
        if inputs and isinstance(P, Dense):
            B = damped(B, RIDGE, turn)

    time = rows.time if slot.group["time_scaling"] else None
    what = (slot, rows, number, turn, counts_for, P, delta, factored)
    response = Response(*what, mean, divisors, B, time)
    answer(response)
    return response


def answer(response: Response) -> None:
    """Compute U = B P and tr(B P B^T); nothing in a step in which P does not learn."""
    B = response.x
    if response.counts_for == 0:
        response.u, response.energy = B, B.new_zeros(response.slot.count)
    else:
        response.u = response.P.times_rows(B)
        response.energy = trace_of(B, response.u)


def settle(response: Response, energies: list[float]) -> bool:
    """Take note of the traces; return False if P is not positive definite."""
    group, counts_for = response.slot.group, response.counts_for
    ratio = float(group["ratio"] * counts_for)
    response.c = [ratio * time for time in response.times or [1.0] * len(energies)]
    response.margins = [c * energy for c, energy in zip(response.c, energies, strict=True)]
    if counts_for == 0:
        return True
    forgetting = float(group["forgetting"] ** counts_for)
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
    mean, divisors = response.mean, response.ranges

    # P learns. It may not grow beyond P_0, so that what damps it, I / delta, is not forgotten:
    # learn_ bounds it by MAX_GROWTH times the scale that it is given
    if response.lesson is not None:
        bound = slot.scale_of([delta / MAX_GROWTH for delta in response.delta])
        learn_(P, response.lesson, float(group["forgetting"] ** response.counts_for), bound)
    slot.keep(P, response.delta)
    memory = group["forgetting"] * float(slot.state[0].get("memory", 0.0)) + 1
    write_state(slot, number, memory, mean, divisors)
    size, hurry = (1.0, 1.0) if divisors is None else ranges.look_at_sizes(slot, response)

    # the weight moves against D = Q P G_c
    g = slot.bias_gradient()
    D = direction(response, g)
    fall = (1 + memory / STEADY) ** -0.5
    tiny = TINY * P.mean_eigenvalue()
    tiny = tiny[:, None, None] if slot.count > 1 else tiny
    change, factor = advance(slot.weight, slot, D, norm, number, (fall, size), tiny, divisors)

    # the bias moves against its own gradient, and makes up for the mean of the weight's change
    if slot.bias is not None and g is not None:
        shift = None if mean is None else ranges.times(change, mean).mul_(factor)
        advance(slot.bias, slot, g.clone(), norm, number, (fall, size, hurry), TINY, None, shift)


def direction(response: Response, g: Tensor | None) -> Tensor:
    """Return D = Q P G_c of the weight; Q learns on the way.

    Args:
        g: the gradient of the bias. Without it, G_c cannot be computed, and G is taken.
    """
    slot, P, divisors, factored = response.slot, response.P, response.ranges, response.factored
    centre = None if g is None else response.mean
    D, Q, alpha = slot.weight.room(), q_of(slot), [1.0] * slot.count
    if factored is not None:  # G_c = E^T (X - mu)
        X, E = factored.factors.X, factored.factors.E
        X = X if centre is None else X - centre
        X = X if divisors is None else X / divisors
        product = P.factored(X, E, slot.layer.inputs, factored.scale)
        if Q is not None:
            learn_outputs_(Q, product.times, response)
            product.E = whiten_outputs(Q, E.T).T  # fewer operations than on D
        product.add_(D, beta=0.0, alpha=alpha)
        return D
    G = slot.weight.gradient()
    if centre is not None and g is not None:
        G = G - g.unsqueeze(-1) * centre.unsqueeze(-2)
    G = G if divisors is None else G / divisors.unsqueeze(-2)
    P.product(G, None).add_(D, beta=0.0, alpha=alpha)
    if Q is None:
        return D
    learn_outputs_(Q, D.__matmul__, response)
    if slot.layer.is_sharded and not slot.layer.is_gathered:
        return whiten_shard(Q, D, slot.layer)
    return whiten_outputs(Q, D)


def advance(
    part: Part,
    slot: Slot,
    D: Tensor,
    norm: float | None,
    number: int,
    factors: tuple[float, ...],
    tiny: Tensor | float,
    divisors: Tensor | None = None,
    shift: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Move the weight or the bias against D, which is overwritten.

    Args:
        number: the number of the step.
        factors: numbers by which the rate, lr rho / (n + nu), is multiplied.
        tiny: the size of D that is rounding, added to the root of V.
        divisors: the ranges of the columns: the change of scaled weights is divided by them, too.
        shift: is subtracted from the parameter as well.

    Returns:
        The change of the parameter but for ``shift``: a tensor and its factor.
    """
    group, alpha = part.group, part.group["momentum"]
    rate = float(group["lr"]) * RATE / (slot.layer.inputs + OFFSET)
    for factor in factors:
        rate *= factor
    if norm is not None and (clip := clip_factor(group, norm)) != 1:
        D.mul_(clip)
    names = ("square", "momentum") if alpha > 0 else ("square",)
    Theta, is_direct, (V, *momentum) = part.open(slot.states, *names)
    beta = min(SQUARES, 1 - number**-GROWTH)
    V.mul_(beta).addcmul_(D, D, value=1 - beta)
    Omega = D
    if momentum:
        Omega = momentum[0].lerp_(D, 1 - alpha)
    else:
        part.forget("momentum", slot.states)
    root = V.sqrt()
    if divisors is None:
        root.add_(tiny)
    else:
        columns = divisors.unsqueeze(-2)
        torch.addcmul(tiny * columns, root, columns, out=root)
    change, factor = torch.div(Omega, root, out=D), -rate / float(1 - alpha**number)
    Theta = Theta if is_direct else Theta.to(slot.dtype)
    if group["l1"] > 0:  # decoupled from the gradient, as weight decay is in AdamW
        Theta.sub_(Theta.sign(), alpha=rate * group["l1"])
    if group["weight_decay"] > 0:
        Theta.mul_(1 - rate * group["weight_decay"])
    Theta.add_(change, alpha=factor)
    if shift is not None:
        Theta.sub_(shift)
    if not is_direct:
        part.copy_(Theta)
    return change, factor


def write_state(
    slot: Slot, number: int, memory: float, mean: Tensor | None, divisors: Tensor | None
) -> None:
    """Put the counters, the mean and the ranges of the inputs into the state.

    A size of 0 says that there are no ranges.
    """
    step, memories = counter(number), counter(memory)
    for state, layer in zip(slot.state, slot.layers, strict=True):
        state["step"], state["memory"] = step, memories
        if divisors is not None or "ranges" not in state:
            state["ranges"] = ranges.ones_for(layer, slot.dtype) if divisors is None else divisors
        for name, value in (("size", float(divisors is not None)), ("hurry", 1.0)):
            if name not in state:
                state[name] = counter(value)
    slot.write("mean", mean)


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


def learn_outputs_(Q: Tensor, times: Callable[[Tensor], Tensor], response: Response) -> None:
    """Let Q learn D S of all ranks, in steps in which P learns.

    Args:
        times: returns D times a matrix.
    """
    slot, layer, counts_for = response.slot, response.slot.layer, response.counts_for
    if counts_for == 0:
        return
    columns = times(random_signs(layer.inputs, slot.dtype, Q.device))
    if layer.is_sharded and not layer.is_gathered:
        columns = shards.rows_of_all(columns, layer.weight)
    learn_columns_(Q, columns, slot.group["forgetting"], response.turn, counts_for)


def learn_columns_(
    Q: Tensor, columns: Tensor, forgetting: float, turn: int, counts_for: int
) -> None:
    """Q <- (lambda A + c o (B^T B / ||B||^2 + damping))^-1 for B = columns^T.

    Example:
        >>> Q = Q_FIRST * torch.eye(2).unsqueeze(0)
        >>> same = torch.ones(2, COLUMNS)  # what comes in through both outputs alike
        >>> for turn in range(100):
        ...     learn_columns_(Q, same, 1.0, turn, 1)
        >>> whiten_outputs(Q, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))  # so it counts less
        tensor([[ 0.5029,  1.4971],
                [ 0.5029, -1.4971]])
    """
    ratio, forgetting = counts_for * Q_RATIO, min(Q_MEMORY, forgetting) ** counts_for
    B = in_tiles(columns, Q).mT
    B = B / B.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(B.dtype).tiny)
    energy = B.square().sum((-2, -1), keepdim=True).clamp(min=1)  # 0, or at least 1
    B = damped(B * (ratio * B.shape[-1] / energy).sqrt_(), Q_RIDGE, turn)
    U = B @ Q
    L, _ = root_of(B, U, forgetting)
    learn_(Dense(Q), Lesson(B, U, L), forgetting, Q_FIRST / MAX_GROWTH)


def whiten_outputs(Q: Tensor, D: Tensor) -> Tensor:
    """Return Q D, with Q of mean eigenvalue 1, for D of (o, m) or (g, o, m)."""
    mean = Q.diagonal(dim1=-2, dim2=-1).mean(-1)
    tiles = (Q / mean[:, None, None]) @ in_tiles(D, Q)
    return tiles.view(*D.shape[:-2], -1, D.shape[-1])[..., : D.shape[-2], :]


def whiten_shard(Q: Tensor, D: Tensor, layer: Layer) -> Tensor:
    """Return Q D of the rows on this rank; tiles that are cut need the rows of other ranks."""
    size = Q.shape[-1]
    rows, start, own = shards.whole_tiles(D, layer.weight, size)
    tiles = Q[start // size : -(-(start + len(rows)) // size)]
    return whiten_outputs(tiles, rows)[own - start : own - start + len(D)]


def in_tiles(M: Tensor, Q: Tensor) -> Tensor:
    """Return (o, m) or (g, o, m) as (tiles, n, m); a group's last tile may have zeros below."""
    tiles, size, _ = Q.shape
    missing = tiles // math.prod(M.shape[:-2]) * size - M.shape[-2]
    M = pad(M, (0, 0, 0, missing)) if missing else M
    return M.reshape(tiles, size, M.shape[-1])


def reserve(slot: Slot) -> None:
    """Make the state that a step would make, and take none: loaders need a place to load to."""
    zeros = torch.zeros_like(ranges.ones_for(slot.layer, slot.dtype))
    write_state(slot, 0, 0.0, None if slot.bias is None else zeros, None)
    q_of(slot)
    for part in slot.parts:
        if part.has_gradient:
            part.open(slot.states, "square")
