r"""The default step: gradients that P and Q have whitened, each entry by its own size.

RLS makes the inputs of a layer alike; nothing in it knows how large the gradients of the outputs
are, and these differ by orders of magnitude between layers, losses and stages of training. So the
direction is that of RLS, for inputs and outputs (:mod:`torchrls.step.outputs`), and its length is
normalised:

.. math::
    D &= Q_s\, P_s G_c, \qquad \Omega \leftarrow \alpha \Omega + (1 - \alpha) D, \qquad
    V \leftarrow \beta_s V + (1 - \beta_s) D^2 \\
    \Theta &\leftarrow \Theta - \frac{\eta\, \rho}{(n + \nu) \sqrt{1 + m_s / \tau}}\,
    \frac{\hat\Omega}{\sqrt{V}}, \qquad m_s = \lambda m_{s-1} + 1

Omega-hat is the unbiased average, n the inputs of the layer. :math:`\beta_s = \min(\beta, 1 -
s^{-4/5})`: gradients of the first steps, which are often the largest, are soon forgotten.
:math:`m_s` is the number of steps that RLS remembers: for lambda = 1 steps fall like the gain of
RLS on noisy data does, with forgetting they stop to.

*Centred*: the layer is taken as :math:`W (x - \mu) + b'`, with the running mean :math:`\mu` of its
inputs. P learns the rows :math:`x - \mu` of sets of samples, :math:`G_c = G - g_b \mu^T` is the
gradient of W, and b moves by :math:`-\Delta W \mu` beside its own step. So a large mean, which
dominates P otherwise, has no influence. Layers without a bias of their own are not centred.

*Damped*: P forgets P_0 in the long run, and directions in which inputs hardly vary are whitened
until the noise of their gradients is all that is left of a step. So every step adds a little to
the diagonal of A, at r coordinates :math:`J_s` that take turns (as Ljung and Söderström regularize
RLS): with the rows B of the sets,

.. math:: A_s = \lambda A_{s-1} + c B^T B + \frac{c\, \gamma}{r}\, \mathrm{tr}(B^T B)
          \sum_{j \in J_s} e_j e_j^T,

that is :math:`\gamma` times the mean variance of the inputs. A P of low rank cannot hold it.

*Scaled*: columns of the network's inputs (where no gradient flows back) are divided by a third of
their range in the first minibatch, as if the data had been standardized (of their largest size,
where a layer is not centred). Weights were not made for such inputs: if those of the scaled
columns are larger than usual, steps are so too, and the bias moves faster as long as
:math:`b + W \mu` is larger than what varies.

*Tamed*: torch makes weights for inputs of size 1. Where it is seen in the first step that weights
are still as torch made them (none of the network is larger than :math:`1 / \sqrt n`), columns
that are more than three times larger than they would be for scaled inputs are made smaller, and b
moves by what they said on the average. And where :math:`W \mu` is more than three times larger than
b and all that varies, b loses it: units would be dead, or always on. So it matters little that
inputs were not standardized; weights that have been trained are not touched by this, and neither
are those of inputs of usual sizes. (The mean is here that of the inputs, without padding.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchrls.common import shards
from torchrls.layers.extent import sizes_of
from torchrls.matrix.inverse import MAX_GROWTH, FactoredProduct, Product
from torchrls.observe.record import Observation
from torchrls.step.block import BlockUpdate, damped
from torchrls.step.form import has_begun, rank_for
from torchrls.step.outputs import Outputs, shape_of, signs
from torchrls.step.part import Part, State
from torchrls.step.start import FIRST_ENERGY
from torchrls.step.turns import turn_of
from torchrls.step.update import clip_factor

#: rho and nu: steps at lr = 1 and n inputs are of the size rho / (n + nu).
RATE, OFFSET = 1.38, 30.0
#: tau: how many steps it takes until steps begin to fall.
STEADY = 100.0
#: beta: the memory of V in the long run, and how it grows.
SQUARES, GROWTH = 0.99, 0.8
#: gamma: what is added to the diagonal of A.
RIDGE = 0.1
#: The running mean forgets no faster than this.
MEAN = 0.01
#: What a bias moves faster, at most.
MOST_HURRY = 100.0
#: Ranges beyond these count as these, so that no square of a number is infinite.
LEAST_RANGE, MOST_RANGE = 1e-15, 1e15
#: How often the sizes of the weights of scaled inputs are looked at.
EVERY = 8
#: A column of weights this many times larger than torch makes them for scaled inputs is made
#: smaller in the first step, if no weight is larger than torch's own, and their squares are more
#: than this share of those.
LARGE, FRESH = 3.0, 0.5
#: If W mu is this many times larger than b and what varies, in the first step, b makes up for it.
MOST_OFFSET = 3.0
#: Gradients below this are rounding: those of a bias before a norm, or of a constant input.
TINY = 1e-8


class AdaptiveUpdate(BlockUpdate):
    """The step of one layer. P is of the weight alone; the bias needs none where rows are centred.

    Attributes:
        mean: mu, or None where the layer is not centred.
        ranges: what the columns of the inputs are divided by, or None.
    """

    mean: Tensor | None = None
    most_energy = 1e-4

    def _excitation(self, observation: Observation, augmented: bool) -> Tensor:
        if not observation.has_sets:
            sums = observation.sums.unsqueeze(-2)
            observation = observation.but(sums=sums, has_sets=True)
        sums, rows = observation.sums[..., :-1], observation.sums[..., -1:]
        self._step = int(self._own.get("step", 0)) + 1
        self._turn = turn_of(self._step)
        self._seen_first = observation if self._step == 1 else None
        self.ranges = self._first_ranges(observation, augmented)
        if self._rests and augmented and "mean" not in self._own:  # the bias is new
            self._turn = self._turn._replace(weight=1)
        if self._rests:
            self.mean = self._own["mean"] if augmented else None
            return sums[..., :0, :]
        total = rows.sum(-2, keepdim=True)
        means = sums / rows.clamp(min=1)
        if augmented:
            self.mean = self._running(sums.sum(-2) / total.squeeze(-2))
            means -= self.mean.unsqueeze(-2)
        if self.ranges is not None:
            means /= self.ranges.unsqueeze(-2)
        return self._damped(means.mul_((rows / total).sqrt_()))

    def _size(self, observation: Observation) -> int:
        return self.x.shape[-1]

    def _joined(self) -> Tensor | None:
        """G is centred first."""
        return None

    def _damped(self, B: Tensor) -> Tensor:
        """B with the rows of the diagonal below it."""
        n = B.shape[-1]
        if not n or rank_for(self.group["rank"], self.layer.groups, n, B.itemsize) is not None:
            return B
        return damped(B, RIDGE, self._turn.number)

    def _running(self, mean: Tensor) -> Tensor:
        """mu with the rows of this step."""
        if "mean" not in self._own:
            return mean
        known: Tensor = self._own["mean"]
        return known.lerp(mean, self._turn.weight * max(MEAN, 1 / self._step))

    def _first_ranges(self, observation: Observation, augmented: bool) -> Tensor | None:
        """Distances from the mean, which a bias can take out; else from zero."""
        if self._step > 1:
            return self._own["ranges"] if float(self._own["size"]) > 0 else None
        if observation.ranges is None or observation.extent is None:
            return None
        found = observation.ranges if augmented else sizes_of(observation.extent)
        found = found.to(observation.sums)
        return usable(found[0] if self.layer.groups == 1 else found)

    def _first_scale(self, state: State, observation: Observation) -> float:
        """Scaled columns have a variance of about 1."""
        if self.ranges is not None and not has_begun(state):
            return FIRST_ENERGY / self.layer.inputs
        return super()._first_scale(state, observation)

    @property
    def _rests(self) -> bool:
        """P and Q learn nothing in this step."""
        return self._turn.weight == 0

    @property
    def _forgetting(self) -> float:
        return float(self.group["forgetting"] ** self._turn.weight)

    @property
    def _ratio(self) -> float:
        return float(self.group["ratio"] * self._turn.weight)

    @property
    def levels(self) -> list[float]:
        """As in :class:`torchrls.step.update.Update`; nan while P rests."""
        return [math.nan] if self._rests else super().levels

    def _response(self) -> Tensor:
        return self.x if self._rests else super()._response()

    def _energy(self) -> Tensor:
        return self.x.new_zeros(self.layer.groups) if self._rests else super()._energy()

    def _note_heights(self, energies: list[float]) -> bool:
        if not self._rests:
            return super()._note_heights(energies)
        self.heights, self.margins = [1.0] * len(energies), [0.0] * len(energies)
        return True

    def _centred(self, rows: Tensor) -> Tensor:
        """As P sees them."""
        if self._is_centred:
            assert self.mean is not None
            rows = rows - self.mean
        return rows if self.ranges is None else rows / self.ranges

    @property
    def _is_centred(self) -> bool:
        """Without its bias's gradient, that of a centred weight is not known."""
        return self.mean is not None and self.bias is not None and self.bias.has_gradient

    def _precondition(self) -> Product:
        """P G_c."""
        if self._factors is None:
            return self.P.product(self._centred_gradient(), None)
        X, E, *_ = self._factors
        return self.P.factored(self._centred(X), E, self.layer.inputs, self._scale)

    def _whitened(self) -> Tensor:
        """D, of the weight."""
        product, Q = self._precondition(), self._outputs()
        if Q is None:
            return self._built(product)
        if isinstance(product, FactoredProduct):
            self._learn(Q, product.times)
            product.E = Q.times(product.E.T).T  # fewer operations than on D
            return self._built(product)
        D = self._built(product)
        self._learn(Q, D.__matmul__)
        return self._alike(Q, D)

    def _built(self, product: Product) -> Tensor:
        found = self._empty(self.weight)
        product.add_(found, beta=0.0, alpha=[1.0] * len(self.c))
        return found

    def _outputs(self) -> Outputs | None:
        """Q; None for a layer with a single output."""
        shape = shape_of(self.layer)
        if shape is not None and "outputs" not in self._state:
            self._state["outputs"] = Outputs.first(shape, self.x).Q
        return None if shape is None else Outputs(self._state["outputs"])

    def _learn(self, Q: Outputs, times: Callable[[Tensor], Tensor]) -> None:
        """Let Q learn D S, of all ranks."""
        if self._rests:
            return
        columns = times(signs(self.layer.inputs, self.dtype, self.x.device))
        if self._is_cut:
            columns = shards.rows_of_all(columns, self.layer.weight)
        Q.learn_(columns, self.group["forgetting"], self._turn)

    def _alike(self, Q: Outputs, D: Tensor) -> Tensor:
        """Q D. Blocks that are cut need the rows of other ranks."""
        if not self._is_cut:
            return Q.times(D)
        size = Q.Q.shape[-1]
        rows, start, first = shards.whole_blocks(D, self.layer.weight, size)
        blocks = Q.Q[start // size : -(-(start + len(rows)) // size)]
        return Outputs(blocks).times(rows)[first - start : first - start + len(D)]

    @property
    def _is_cut(self) -> bool:
        """This rank has some of the outputs only."""
        return not self.layer.is_gathered and shards.is_sharded(self.layer.weight)

    def _centred_gradient(self) -> Tensor:
        """G_c."""
        found, bias = self.gradient
        if self._is_centred:
            assert self.mean is not None
            assert bias is not None
            found = found - bias.unsqueeze(-1) * self.mean.unsqueeze(-2)
        return found if self.ranges is None else found / self.ranges.unsqueeze(-2)

    def apply(self, norm: float | None) -> None:
        """Change P, then the parameters."""
        self._state = self._states[self.layer.weight]
        self._update_inverse()
        self._grow_old()
        tiny = TINY * self.P.mean_eigenvalue()
        if self.layer.groups > 1:
            tiny = tiny[:, None, None]
        looks = self.layer.all_outputs and self._step % EVERY == 1
        if self.ranges is not None and looks and self.weight.group["lr"] > 0:
            self._look_at_sizes()
        change, factor = self._move(self.weight, self._whitened(), norm, tiny, self.ranges)
        if self.bias is not None and self.bias.has_gradient:
            shift = None if self.mean is None else product_with(change, self.mean).mul_(factor)
            self._move(self.bias, self.bias.gradient.clone(), norm, TINY, shift=shift)

    def _look_at_sizes(self) -> None:
        """Weights that nobody made for such inputs; and how fast weight and bias have to move."""
        assert self.ranges is not None
        weight = self.weight.theta().to(self.dtype)
        columns = (weight * self.ranges.unsqueeze(-2)).square().sum(-2)
        mean = self._mean_of_inputs()
        others = [weight.square().sum().view(1), *self._offset_energies(weight, mean)]
        energies = self._of_all_outputs(torch.cat([columns.view(-1), *others]))
        columns = energies[: columns.numel()].view_as(columns)
        factors = tamed(columns * self.layer.groups)
        found = [columns.sum(), (columns * factors.square()).sum()]
        numbers = torch.cat([torch.stack(found), energies[columns.numel() :]]).tolist()
        varying, after, power, *offsets = numbers
        shifted, own, offset = offsets or [0.0] * 3
        fresh = self._seen_first is not None and self._seen_first.fresh
        if fresh and power > FRESH / 3:  # torch's own, up to 1 / sqrt(n), have 1 / 3
            if shifted > MOST_OFFSET**2 * (varying + own):
                offset = own
                self._write(self.bias, self._bias_theta() - product_with(weight, mean))
            if after < varying:
                varying = after
                self._tame(weight, factors, mean)
        self._note_sizes(varying, offset if offsets else None)

    def _mean_of_inputs(self) -> Tensor | None:
        """mu; in a first step without the zeros that stand beside inputs in convolutions."""
        extent = None if self._seen_first is None else self._seen_first.extent
        if extent is None or self.mean is None:
            return self.mean
        found = (extent[0] / extent[1].clamp(min=1)).to(self.mean)
        return found[0] if self.layer.groups == 1 else found

    def _offset_energies(self, weight: Tensor, mean: Tensor | None) -> list[Tensor]:
        """Of W times the mean of inputs, of b, and of b + W mu."""
        if not self._is_centred:
            return []
        shift, bias = product_with(weight, mean), self._bias_theta()
        offset = bias + product_with(weight, self.mean)
        return [part.square().sum().view(1) for part in (shift, bias, offset)]

    def _bias_theta(self) -> Tensor:
        assert self.bias is not None
        return self.bias.theta().to(self.dtype)

    def _tame(self, weight: Tensor, factors: Tensor, mean: Tensor | None) -> None:
        """Make columns smaller; what they have to say on the average, the bias says instead."""
        smaller = weight * factors.unsqueeze(-2)
        if self._is_centred:
            said = product_with(weight - smaller, mean)
            self._write(self.bias, self._bias_theta() + said)
        self._write(self.weight, smaller)

    def _write(self, part: Part | None, value: Tensor) -> None:
        assert part is not None
        part.theta().copy_(value) if part.is_direct else part.copy_(value)

    def _note_sizes(self, varying: float, offset: float | None) -> None:
        size = (3 * varying) ** 0.5  # of torch's own: 1
        if self._step > 1:
            size = min(size, float(self._state["size"]))
        self._state["size"] = torch.tensor(max(size, 1.0), dtype=torch.float64)
        if offset is not None:
            hurry = min((1 + offset / max(varying, 1e-30)) ** 0.5, MOST_HURRY)
            self._state["hurry"] = torch.tensor(hurry, dtype=torch.float64)

    def _of_all_outputs(self, sums: Tensor) -> Tensor:
        """Means over the outputs of all groups, on whatever rank."""
        if not self.layer.is_gathered:
            sums = shards.total(sums, self.layer.weight)
        return sums / (self.layer.groups * self.layer.all_outputs)

    def _change_inverse(self, forgetting: float, first: float) -> Tensor | float:
        """With forgetting, P grows back to its first trace and no further.

        So what damps it, I / delta, is not forgotten: directions that inputs seldom have do not
        take over.
        """
        return 1.0 if self._rests else super()._change_inverse(forgetting, first / MAX_GROWTH)

    def _grow_old(self) -> None:
        """Count the step, and keep what there is to keep."""
        state, counter = self._state, torch.tensor
        memory = self.group["forgetting"] * float(state.get("memory", 0.0)) + 1
        state["step"] = counter(self._step)
        state["memory"] = counter(memory, dtype=torch.float64)
        self._fall = (1 + memory / STEADY) ** -0.5
        self._keep()

    def _keep(self) -> None:
        """A size of 0 says that there are no ranges."""
        state, counter = self._state, torch.tensor
        if self.ranges is not None or "ranges" not in state:
            state["ranges"] = self._ones() if self.ranges is None else self.ranges
        state["mean"] = self.mean
        if self.mean is None:
            del state["mean"]
        for name, first in (("size", float(self.ranges is not None)), ("hurry", 1.0)):
            state.setdefault(name, counter(first, dtype=torch.float64))

    def _ones(self) -> Tensor:
        return self.x.new_ones(*self.x.shape[:-2], self.layer.inputs)

    def reserve(self) -> None:
        """As in :class:`Update`."""
        super().reserve()
        state, counter = self._state, torch.tensor
        for part in self._trained:
            part.memory("square", self._states[part.parameter], self.dtype)
        state["step"], state["memory"] = counter(0), counter(0.0, dtype=torch.float64)
        self._outputs()
        self.mean, self.ranges = None if self.bias is None else 0 * self._ones(), None
        self._keep()

    def _move(
        self,
        part: Part,
        D: Tensor,
        norm: float | None,
        tiny: Tensor | float,
        ranges: Tensor | None = None,
        shift: Tensor | None = None,
    ) -> tuple[Tensor, float]:
        """Move the weight or the bias along D.

        Returns:
            By how much, but for ``shift``: a tensor, in the place of D, and its factor.
        """
        group, state = part.group, self._states[part.parameter]
        rate = float(group["lr"]) * RATE / (self.layer.inputs + OFFSET) * self._fall
        if self.ranges is not None:
            rate *= float(self._state["size"])
            rate *= float(self._state["hurry"]) if part is self.bias else 1.0
        clip = clip_factor(group, norm)
        if clip != 1:
            D.mul_(clip)
        change, factor = self._normalised(part, D, state, tiny, ranges), -rate / self._missing(part)
        target = part.theta() if part.is_direct else part.theta().to(self.dtype)
        regularize_(target, group, rate)
        target.add_(change, alpha=factor)
        if shift is not None:
            target.sub_(shift)
        if not part.is_direct:
            part.copy_(target)
        return change, factor

    def _normalised(
        self, part: Part, D: Tensor, state: State, tiny: Tensor | float, ranges: Tensor | None
    ) -> Tensor:
        """Omega over the root of V, and over the ranges, in the place of D."""
        V = part.memory("square", state, self.dtype)
        beta = min(SQUARES, 1 - self._step**-GROWTH)
        V.mul_(beta).addcmul_(D, D, value=1 - beta)
        Omega = part.momentum(state, self.dtype)
        if Omega is None:
            Omega = D
        else:
            Omega.lerp_(D, 1 - part.group["momentum"])
        root = V.sqrt()
        if ranges is None:
            root.add_(tiny)
        else:
            columns = ranges.unsqueeze(-2)
            torch.addcmul(tiny * columns, root, columns, out=root)
        return torch.div(Omega, root, out=D)

    def _missing(self, part: Part) -> float:
        """What the average Omega, which began at zero, has to be divided by."""
        return float(1 - part.group["momentum"] ** self._step)


def usable(ranges: Tensor) -> Tensor:
    """A third of each range; of columns that have not varied yet, the mean of the others.

    Example:
        >>> usable(torch.tensor([3.0, 0.0, 9.0]))
        tensor([1., 2., 3.])
    """
    varied = ranges > 0
    count = varied.sum(-1, keepdim=True)
    mean = torch.where(count > 0, ranges.sum(-1, keepdim=True) / count.clamp(min=1), 3.0)
    return (torch.where(varied, ranges, mean) / 3).clamp(LEAST_RANGE, MOST_RANGE)


def tamed(energies: Tensor) -> Tensor:
    """What columns of weights with these mean squares, for scaled inputs, are to be multiplied by.

    Example:
        >>> tamed(torch.tensor([1.0, 1.0, 100.0]) / 9)  # torch's own, for three inputs: 1 / 9
        tensor([1.0000, 1.0000, 0.3000])
    """
    excess = (3 * energies.shape[-1] * energies).sqrt()
    return LARGE / excess.clamp(min=LARGE)


def product_with(matrix: Tensor, vector: Tensor | None) -> Tensor:
    """Of each group."""
    assert vector is not None
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def regularize_(target: Tensor, group: Mapping[str, Any], rate: float) -> None:
    """Decoupled from the gradient, as in AdamW: weight decay and L1."""
    if group["l1"] > 0:
        target.sub_(target.sign(), alpha=rate * group["l1"])
    if group["weight_decay"] > 0:
        target.mul_(1 - rate * group["weight_decay"])
