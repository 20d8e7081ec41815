"""One layer's part in a step: nothing is changed until :meth:`Update.apply`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchrls.layers import Layer
from torchrls.matrix import factors
from torchrls.matrix import signs as penalty
from torchrls.matrix.factors import Factors
from torchrls.matrix.inverse import (
    Dense,
    FactoredProduct,
    Product,
    is_exact,
    largest_gradient,
)
from torchrls.matrix.signs import Penalty
from torchrls.observe.deferred import Deferred
from torchrls.observe.record import Observation, Sighting
from torchrls.routing.groups import Group
from torchrls.step.form import has_begun, store
from torchrls.step.part import Kept, Part, State
from torchrls.step.start import first_scale

#: A weight with at most so many entries is joined with its bias: fewer operations.
SMALL = 1 << 15


class Update:
    """The step of one observed layer, after section 2 of the design.

    Numbers are fetched from the device for all layers at once: :meth:`questions` says which,
    :meth:`accept` takes the answers.

    Attributes:
        u: P x, equation (54).
        heights: h of each group, equation (55), once it has been fetched.
        margins: c x.u of each group, by which h is more than lambda.
        ranges: what the columns of the inputs are divided by, if they are.
        is_suspect: the probe found something in the gradient that may not be finite, or too large.
    """

    ranges: Tensor | None = None
    is_suspect = False
    _covers_bias = False  # its gradient is the one that the factors say
    _x: Tensor | None = None
    _product: FactoredProduct | None = None  # P G, if it had to be known before the step

    def __init__(
        self, layer: Layer, observation: Observation, state: Mapping[Any, State], kept: Kept
    ) -> None:
        self.layer, self._states = layer, state
        self._own = own = state.get(layer.weight) or {}
        self.group, self.dtype = kept.group, kept.dtype
        self.weight, self.bias = kept.weight, kept.bias
        self._trained = [part for part in kept.parts if part.parameter.grad is not None]
        self._seen = observation
        size = self._size(observation)
        self._time = observation.time if self.group["time_scaling"] else None
        first = self.group["initial_inverse"]
        self._first = self._first_scale(own, observation) if first == "auto" else float(first)
        self.P, self._is_same = kept.inverse(own, size, self._first)
        self._scale, self._factors = 1.0, self._found_factors()
        self._both = self._joined() if self._factors is None else None

    def _first_scale(self, state: State, observation: Observation) -> float:
        """delta of P_0, where it comes from the data."""
        if has_begun(state):
            return float(state["first"])
        return 1.0 if observation.squares is None else first_scale(observation)

    @property
    def x(self) -> Tensor:
        """What P is going to learn."""
        if self._x is None:
            self._x = self._excitation(self._seen, self.bias is not None)
        return self._x

    def _excitation(self, observation: Observation, augmented: bool) -> Tensor:
        return observation.mean(augmented)

    def _size(self, observation: Observation) -> int:
        """n. Of a single call, x may not be asked for at all."""
        if isinstance(observation, Sighting):
            return self.layer.inputs + int(self.bias is not None)
        return self.x.shape[-1]

    def _joined(self) -> Tensor | None:
        """G with that of the bias, where it is so small that this saves time."""
        weight, bias = self.weight, self.bias
        if bias is None or len(self._trained) < 2 or self.layer.groups > 1:
            return None
        if self.layer.block.bias_part != (None, None):  # others have a part in the bias, too
            return None
        if self.layer.outputs * self.layer.inputs > SMALL or not isinstance(self.P, Dense):
            return None
        return torch.cat([weight.gradient, bias.gradient.unsqueeze(-1)], -1)

    def _response(self) -> Tensor:
        """P x, equation (54), which is the mean of the rows of X P where that is wanted anyway."""
        if self._factors is None or not (self._has_all_rows and is_exact(self._factors.E)):
            return self.P.times(self.x)
        self._product = self._factored()
        return self._product.mean_row()

    @property
    def _has_all_rows(self) -> bool:
        """The factors are those of all that has been observed."""
        found, seen = self._factors, self._seen
        if found is None or not self._is_certain or not isinstance(seen, Sighting):
            return False
        return seen.matrix is not None and seen.matrix is found.rows(True)

    def _factored(self) -> FactoredProduct:
        assert self._factors is not None
        rows = self._factors.rows(self.bias is not None)
        return self.P.factored(rows, self._factors.E, self.layer.inputs, self._scale)

    def _found_factors(self) -> Factors | None:
        """Those of G for sure, or those to try: the probe then says if they are."""
        gradient = self.layer.weight.grad
        if type(gradient) is not Deferred or not self.group["factored"]:
            return None
        found, self._is_certain = gradient.source.factors, gradient.source.is_untouched
        complete = self.bias is None or (self.bias.has_gradient and found.sums is not None)
        if (
            not complete
            or found.X.dtype != self.dtype
            or found.X.device != self.layer.weight.device
        ):
            return None
        if self._is_certain:
            return None if self._has_changed_bias(found) else found
        pays = factors.pay(found.X.shape[0], self.layer.inputs, self.layer.outputs)
        return found if pays and isinstance(self.P, Dense) else None

    def _has_changed_bias(self, found: Factors) -> bool:
        """Whether somebody wrote to the gradient of the bias; accelerators are asked later."""
        if self.bias is None or found.sums is None or not found.sums.is_cpu:
            return False
        self._covers_bias = torch.equal(self.bias.gradient, found.sums)
        return not self._covers_bias

    @property
    def _forgetting(self) -> float:
        """lambda."""
        return float(self.group["forgetting"])

    @property
    def _ratio(self) -> float:
        """k."""
        return float(self.group["ratio"])

    @property
    def layers(self) -> list[Layer]:
        """The one that it is about."""
        return [self.layer]

    @property
    def levels(self) -> list[float]:
        """h of its layer, for diagnostics: the largest of the groups."""
        return [self.group["forgetting"] + max(self.margins)]

    @property
    def is_factored(self) -> bool:
        """Whether P G comes from the factors of G; known from the answers until the step."""
        return self._factors is not None

    @property
    def broken(self) -> list[Layer]:
        """Whose P is not sound, if that has been found."""
        return [self.layer]

    def inputs(self) -> Iterator[tuple[str, Tensor]]:
        """Its name and its mean row."""
        yield self.layer.name, self.x

    @property
    def gradient(self) -> tuple[Tensor, Tensor | None]:
        """G, its weight and bias parts."""
        return self.weight.gradient, self._bias_gradient

    @property
    def _bias_gradient(self) -> Tensor | None:
        known = self.bias is not None and self.bias.has_gradient
        return self.bias.gradient if known else None  # type: ignore[union-attr]

    @property
    def probed(self) -> list[nn.Parameter]:
        """Of whose gradients the answers tell if they are finite."""
        if self._factors is None:
            return [] if self._both is None else [part.parameter for part in self._trained]
        if self._covers_bias and self.bias is not None:
            return [self.weight.parameter, self.bias.parameter]
        return [self.weight.parameter]

    def questions(self) -> list[Tensor]:
        """x.u and T of each group, and what there is to know of the factors."""
        found, asked = self._factors, [] if self._time is None else [self._time]
        if found is not None and self._is_certain:
            asked += found.bounds(None if self._covers_bias else self._bias_gradient)
        elif found is not None:
            asked += found.probe(*self.gradient)
        elif self._both is not None:
            flat = self._both.view(-1)
            asked.append(torch.dot(flat, flat))
        self.u = self._response()  # after all else: products leave nothing in the caches
        return [self._energy(), *asked]

    def _energy(self) -> Tensor:
        """x.u of each group."""
        if self._product is not None and self._factors is not None:
            return self._product.energy(self._factors.rows(self.bias is not None), self.u)
        return torch.dot(self.x, self.u) if self.x.dim() == 1 else (self.x * self.u).sum(-1)

    def accept(self, answers: list[list[float]]) -> bool:
        """Take note of the answers; False if h is not sound."""
        energies, *rest = answers
        self.c = [self._ratio] * len(energies)
        if self._time is not None:
            self.c = [self._ratio * time for time in rest.pop(0)]
        if self._factors is not None:
            self._judge(self._factors, rest)
        elif self._both is not None:
            self.is_suspect = not rest[0][0] < largest_gradient(self.dtype) ** 2
        sound = self._note_heights(energies)
        if not sound and self._product is not None:  # rounding of X P, where x is almost zero
            self.u = self.P.times(self.x)
            sound = self._note_heights([torch.dot(self.x, self.u).item()])
        return sound

    def _judge(self, found: Factors, numbers: list[list[float]]) -> None:
        """Whether G is what its factors say, and can be finite."""
        most = largest_gradient(self.dtype)
        if self._is_certain:
            (square,), *changed = numbers
            self.is_suspect = not square < most**2
            explained = not changed or changed[0][0] == 0
        else:
            self._scale = numbers[0][0]
            self.is_suspect = not all(abs(n) < most for some in numbers for n in some)
            explained = found.explain(numbers)
        if not explained:
            self._factors = self._product = None

    def _note_heights(self, energies: list[float]) -> bool:
        forgetting, sound = self.group["forgetting"], True
        self.margins: list[float] = []
        self.heights: list[float] = []
        self._gain: list[float] = []
        for c, energy in zip(self.c, energies, strict=True):
            h = forgetting + c * energy  # (55), (86), (96)
            self.margins.append(c * energy)
            self.heights.append(h)
            self._gain.append(c / h if h else 0.0)
            sound = sound and 0 <= c * energy < math.inf
        return sound

    def repair(self) -> bool:
        """Make P positive definite again; False if that does not help."""
        self.P, self._is_same = self.P.repaired(self._first), False
        self.u = self._response()
        return self._note_heights(self._energy().view(-1).tolist())

    def apply(self, norm: float | None) -> None:
        """Equations (63), (53) and (98) to (100), in this order.

        Args:
            norm: of all gradients, for groups that clip it.
        """
        self._state = self._states[self.layer.weight]
        parts, regularized = self._trained, False
        for part in parts:
            regularized = regularized or part.group["l1"] > 0
        for part in parts:
            self._aim(part, norm, regularized)
        growth = self._update_inverse_first()
        product = self._product or self._precondition()  # caches are cold after it: all is ready
        for part in reversed(parts):
            product.add_(part.step, beta=part.beta, alpha=part.alpha)  # (63), (99)
        del product
        self._product = None
        if growth is None:
            growth = self._update_inverse()
        if regularized or "penalty" in self._state:
            self._regularize(parts if regularized else [], growth)
        for part in parts:
            target, step = part.target, part.step
            if step is not target:
                target.add_(step)  # (100)
            if not part.is_target:
                part.add_(target)
            del part.target, part.step

    def _aim(self, part: Part, norm: float | None, regularized: bool) -> None:
        """Make everything ready for a part's step."""
        group, heights = part.group, self.heights
        if group["weight_decay"] > 0:
            part.decay_()
        state = self._state if part is self.weight else self._states[part.parameter]
        part.is_target = direct = part.is_direct
        target = part.theta() if direct else self._zeros(part)
        step, beta = part.momentum(state, self.dtype), group["momentum"]
        if step is None:
            in_place = not (direct and regularized)  # the signs are still asked for
            step, beta = target if in_place else self._zeros(part), 1.0
        rate = -float(group["lr"])
        if norm is not None:
            rate *= clip_factor(group, norm)
        part.target, part.step, part.beta = target, step, beta
        part.alpha = [rate / heights[0]] if len(heights) == 1 else [rate / h for h in heights]

    def reserve(self) -> None:
        """Make the state that a step would make, and take none: loaders need a place to load to."""
        self._state = self._states[self.layer.weight]
        store(self.P, self._state)
        for part in self._trained:
            part.momentum(self._states[part.parameter], self.dtype)
        if self.group["initial_inverse"] == "auto":
            self._state["first"] = torch.tensor(0.0, dtype=torch.float64)

    def _precondition(self) -> Product:
        """P G, equations (62), (63), (97)."""
        if self._factors is not None:
            return self._factored()
        if self._both is not None and isinstance(self.P, Dense):
            return self.P.joined_product(self._both)
        return self.P.product(*self.gradient)

    def _update_inverse_first(self) -> Tensor | float | None:
        """The paper's step is with the P before: it can be changed if X P is known."""
        return None if self._product is None else self._update_inverse()

    def _update_inverse(self) -> Tensor | float:
        """Equation (53)."""
        growth = self._change_inverse(self._forgetting, self._first)
        if self.group["initial_inverse"] == "auto" and not has_begun(self._state):
            self._state["first"] = torch.tensor(self._first, dtype=torch.float64)
        if not (isinstance(self.P, Dense) and self._state.get("inverse") is self.P.P):
            store(self.P, self._state)
        return growth

    def _change_inverse(self, forgetting: float, first: float) -> Tensor | float:
        return self.P.update_(self.u, self._gain, forgetting, first)

    def _regularize(self, parts: list[Part], growth: Tensor | float) -> None:
        """Add -gamma P_s sgn(Theta_(s-1)) to the targets, equation (98)."""
        kept = bool(parts) and isinstance(self.P, Dense) and penalty.is_kept(self.layer)
        if not (kept and self._is_same) and "penalty" in self._state:
            penalty.forget(self._state)
        if not parts:
            return
        weight = self.weight.theta().to(self.dtype)
        bias = None if self.bias is None else self.bias.theta().to(self.dtype)
        if kept:
            Q = self._kept_penalty(weight, bias, growth).Q
            for part in parts:
                columns = Q[:, : weight.shape[1]] if part is self.weight else Q[:, -1]
                part.target.add_(columns, alpha=-part.group["l1"])
            return
        for rows, product in penalty.products(self.P, weight, bias):
            for part in parts:
                alpha = [-part.group["l1"]] * len(self.c)
                product.add_(part.target[rows], beta=1.0, alpha=alpha)

    def _kept_penalty(self, weight: Tensor, bias: Tensor | None, growth: Tensor | float) -> Penalty:
        """Q for the new P and the signs of Theta."""
        assert isinstance(self.P, Dense)
        P, signs = self.P.P, penalty.signs_of(weight, bias)
        found = Penalty.of(self._state, len(P))
        if found is None:
            found = Penalty.first(P, signs)
        else:
            self._follow(found, growth)
            found.turn_(P, signs)
        self._state.update(found.state())
        return found

    def _follow(self, found: Penalty, growth: Tensor | float) -> None:
        found.update_(self.x, self.u, self._gain[0], growth)

    def _zeros(self, part: Part) -> Tensor:
        return self._empty(part).zero_()

    def _empty(self, part: Part) -> Tensor:
        """Room for something of a part's canonical shape."""
        groups = (self.layer.groups,) if self.layer.groups > 1 else ()
        shape = (*groups, self.layer.outputs, self.layer.inputs)
        shape = shape if part is self.weight else shape[:-1]
        return torch.empty(shape, dtype=self.dtype, device=self.layer.weight.device)


def clip_factor(group: Group, norm: float | None) -> float:
    """The factor of ``clip_grad_norm_``."""
    if norm is None or group["max_grad_norm"] is None:
        return 1.0
    return min(1.0, float(group["max_grad_norm"]) / (norm + 1e-6))
