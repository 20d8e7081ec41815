"""Small layers of equal shape, updated together as the groups of one batched matrix.

What a step of a small layer costs is calling its operations. A bundle of g layers calls them once,
in the batched shapes of ``torchrls.matrix.inverse``. Their P and momentum are parts of common
tensors; the state of every weight holds its own part.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrls.common.shards import is_sharded
from torchrls.layers import Layer
from torchrls.matrix import signs as penalty
from torchrls.matrix.inverse import Dense
from torchrls.observe.record import Observation
from torchrls.routing.groups import Group
from torchrls.step.adaptive import AdaptiveUpdate
from torchrls.step.block import BlockUpdate
from torchrls.step.form import KEYS, inverse_of, rank_for
from torchrls.step.part import Kept, State, is_row_of_theta
from torchrls.step.update import Update, clip_factor

#: Layers whose weights and P have at most so many entries; larger ones gain nothing from it.
SMALL = 1 << 15
#: And at least so many of them.
FEWEST = 3
#: What belongs to another form of P, to the L1 term and to the factors.
_ALONE = {*KEYS, *penalty.KEYS} - {"inverse"}

Member = tuple[Layer, Observation]


def arranged(
    members: list[Member],
    group_of: Mapping[Any, Group],
    state: Mapping[Any, State],
    stacks: Stacks,
    kept: dict[Layer, Kept],
) -> list[Update | Bundle]:
    """The updates of all observed layers: equal small ones together, the others alone."""
    if len(members) < FEWEST:
        return [update_of(*member, group_of, state, kept) for member in members]
    alike: dict[Any, list[Member]] = {}
    for member in members:
        key = _key(*member, group_of)
        alike.setdefault(member[0] if key is None else key, []).append(member)
    found: list[Update | Bundle] = []
    for key, some in alike.items():
        if isinstance(key, tuple) and len(some) >= FEWEST:
            found.append(Bundle(key, some, group_of, state, stacks))
        else:
            found += [update_of(*member, group_of, state, kept) for member in some]
    return found


def update_of(
    layer: Layer,
    observation: Observation,
    group_of: Mapping[Any, Group],
    state: Mapping[Any, State],
    kept: dict[Layer, Kept],
) -> Update:
    """The update of one layer."""
    own = kept.get(layer)
    if own is None or own.group_of is not group_of:
        own = kept[layer] = Kept(layer, group_of)
    kind: type[Update] = BlockUpdate if observation.has_sets else Update
    if own.group["step"] == "adaptive":
        kind = AdaptiveUpdate
    return kind(layer, observation, state, own)


def _key(layer: Layer, observation: Observation, group_of: Mapping[Any, Group]) -> Any:
    """What layers of one bundle have in common; None if this one is better alone."""
    if observation.has_sets or is_sharded(layer.weight):
        return None
    if layer.groups > 1 or layer.inputs * max(layer.inputs, layer.outputs) > SMALL:
        return None
    if layer.block.bias_part != (None, None):
        return None
    weight, group = layer.weight, group_of[layer.weight]
    if group["step"] == "adaptive" or group["initial_inverse"] == "auto":
        return None
    if rank_for(group["rank"], 1, layer.inputs + 1, observation.sums.itemsize) is not None:
        return None
    bias = layer.bias if is_row_of_theta(layer.bias, group_of) else None
    if bias is not None and bias.grad is None:
        return None
    if any(group_of[p]["weight_decay"] > 0 for p in (weight, bias) if p is not None):
        return None
    second = None if bias is None else id(group_of[bias])
    kind = (weight.shape, layer.block.inputs_first, weight.dtype, weight.device)
    return (*kind, id(group), second, observation.time is None)


class _Stack(NamedTuple):
    """A common tensor, its parts, and the states that hold them under a name."""

    whole: Tensor
    parts: list[Tensor]
    owners: list[State]
    name: str

    def release(self) -> None:
        """Give every owner a tensor of its own again."""
        for state, part in zip(self.owners, self.parts, strict=True):
            if state.get(self.name) is part:
                state[self.name] = part.clone()


class Stacks:
    """The common tensors of bundles, as long as the parts in the state are parts of them."""

    def __init__(self) -> None:
        self._known: dict[Any, _Stack] = {}
        self._used: set[Any] = set()

    def find(self, key: Any, parts: list[Tensor]) -> Tensor:
        """The tensor that these are the parts of, or a new one with their values."""
        known = self._known.get(key)
        if known is None or len(known.parts) != len(parts):
            return torch.stack(parts)
        same = all(map(operator.is_, known.parts, parts))
        return known.whole if same else torch.stack(parts)

    def keep(self, key: Any, whole: Tensor, owners: list[State], name: str) -> None:
        """Put its parts into the state."""
        self._used.add(key)
        known = self._known.get(key)
        if known is not None and known.whole is whole:
            return
        stack = _Stack(whole, list(whole.unbind()), owners, name)
        for state, part in zip(owners, stack.parts, strict=True):
            state[name] = part
        if known is not None:
            known.release()
        self._known[key] = stack

    def sweep(self) -> None:
        """After a step: what it did not use is taken apart, or it would keep memory."""
        for key in self._known.keys() - self._used:
            self._known.pop(key).release()
        self._used.clear()

    def dissolve(self) -> None:
        """Take everything apart, before the state is saved or copied."""
        self._used.clear()
        self.sweep()


class Bundle:
    """The step of some equal layers; as :class:`torchrls.step.update.Update` in everything."""

    is_suspect = False
    probed = ()
    is_factored = False
    ranges = None

    def __init__(
        self,
        key: Any,
        members: list[Member],
        group_of: Mapping[Any, Group],
        state: Mapping[Any, State],
        stacks: Stacks,
    ) -> None:
        self.layers = [layer for layer, _ in members]
        self._key, self._state, self._stacks = key, state, stacks
        first = self.layers[0]
        self.group = group_of[first.weight]
        self._weights: list[Any] = [layer.weight for layer in self.layers]
        self._biases: list[Any] = []
        if is_row_of_theta(first.bias, group_of):
            self._biases = [layer.bias for layer in self.layers]
            self._bias_group = group_of[first.bias]
        augmented = bool(self._biases)
        sums = torch.stack([observation.sums for _, observation in members])
        self.x = Observation(sums, None).mean(augmented)
        self._time = None
        if self.group["time_scaling"] and members[0][1].time is not None:
            self._time = torch.stack([observation.time for _, observation in members])  # type: ignore[misc]
        self.P = Dense(stacks.find(("inverse", key), self._inverses()))

    def _inverses(self) -> list[Tensor]:
        size, itemsize = self.x.shape[-1], self.x.element_size()
        found = []
        for layer in self.layers:
            own, first = self._state.get(layer.weight, {}), self.group["initial_inverse"]
            P, _ = inverse_of(own, layer, size, self.group, itemsize, first)
            assert isinstance(P, Dense)
            found.append(P.P)
        return found

    def inputs(self) -> Iterator[tuple[str, Tensor]]:
        """The name and the mean row of every layer."""
        return zip((layer.name for layer in self.layers), self.x.unbind(), strict=True)

    def questions(self) -> list[Tensor]:
        """x.u and T of each layer."""
        self.u = self.P.times(self.x)
        asked = [(self.x * self.u).sum(-1)]
        return asked if self._time is None else [*asked, self._time]

    def accept(self, answers: list[list[float]]) -> bool:
        """Take note of the answers; False if h of some layer is not sound."""
        energies, *rest = answers
        times = rest[0] if rest else [1.0] * len(energies)
        self.c = [self.group["ratio"] * time for time in times]
        return self._note_heights(energies)

    def _note_heights(self, energies: list[float]) -> bool:
        margins = [c * energy for c, energy in zip(self.c, energies, strict=True)]
        self.heights = [self.group["forgetting"] + margin for margin in margins]  # (55)
        sound = [0 <= margin < math.inf for margin in margins]
        self.broken = [layer for layer, fine in zip(self.layers, sound, strict=True) if not fine]
        return all(sound)

    @property
    def levels(self) -> list[float]:
        """h of every layer."""
        return self.heights

    def repair(self) -> bool:
        """Make every P that is not definite so again; False if that does not help."""
        P, broken = self.P.P.clone(), self.broken
        for i, layer in enumerate(self.layers):
            if layer in broken:
                P[i] = Dense(P[i]).repaired(self.group["initial_inverse"]).P
        self.P = Dense(P)
        self.u = self.P.times(self.x)
        helped = self._note_heights((self.x * self.u).sum(-1).tolist())
        self.broken = broken
        return helped

    def apply(self, norm: float | None) -> None:
        """Equations (63), (53) and (98) to (100), in this order."""
        parts = [(self._weights, self.group)]
        if self._biases:
            parts.append((self._biases, self._bias_group))
        gradients = [self._stacked([p.grad for p in some]) for some, _ in parts]
        product = self.P.product(gradients[0], gradients[1] if self._biases else None)
        steps = []
        for some, group in parts:
            step, beta = self._momentum(some, group), group["momentum"] or 1.0
            rate = -float(group["lr"]) * clip_factor(group, norm)
            product.add_(step, beta=beta, alpha=[rate / h for h in self.heights])  # (63), (99)
            steps.append(step)
        self._update_inverse()
        steps = self._regularized(parts, steps)
        for (some, _), step in zip(parts, steps, strict=True):
            self._add(some, step)  # (100)

    def _update_inverse(self) -> None:
        """Equation (53)."""
        gain = [c / h for c, h in zip(self.c, self.heights, strict=True)]
        first, forgetting = self.group["initial_inverse"], self.group["forgetting"]
        self.P.update_(self.u, gain, forgetting, first)
        states = [self._state[weight] for weight in self._weights]
        for state in states:
            if state.keys() & _ALONE:  # what a layer has when it is updated alone
                for key in _ALONE:
                    state.pop(key, None)
        self._stacks.keep(("inverse", self._key), self.P.P, states, "inverse")

    def _regularized(
        self, parts: list[tuple[list[nn.Parameter], Group]], steps: list[Tensor]
    ) -> list[Tensor]:
        """The steps with -gamma P_s sgn(Theta_(s-1)), equation (98)."""
        rates = [group["l1"] for _, group in parts]
        if not any(rates):
            return steps
        signs = [self._stacked(some).sign() for some, _ in parts]
        product = self.P.product(signs[0], signs[1] if len(signs) > 1 else None)
        found = [step.clone() for step in steps]  # the momentum is not to have it
        for step, rate in zip(found, rates, strict=True):
            product.add_(step, beta=1.0, alpha=[-rate] * len(self.layers))
        return found

    def _stacked(self, tensors: list[Any]) -> Tensor:
        """Parameters or gradients in one tensor of the canonical shape."""
        return self._canonical(torch.stack([t.detach() for t in tensors]).to(self.x.dtype))

    def _canonical(self, stack: Tensor) -> Tensor:
        """(g, o, i) or (g, o) of a stack of weights or biases."""
        if stack.dim() == 2:
            return stack
        layer = self.layers[0]
        found = stack.view(len(stack), *layer.stored_shape)
        return found.mT if layer.block.inputs_first else found

    def _momentum(self, parameters: list[Any], group: Group) -> Tensor:
        """Omega of all layers, or zeros where there is no momentum."""
        states = [self._state[parameter] for parameter in parameters]
        first = parameters[0]
        if group["momentum"] == 0:
            for state in states:
                state.pop("momentum", None)
            shape = (len(parameters), *first.shape)
            return self._canonical(self.x.new_zeros(shape))
        for state in states:
            if "momentum" not in state:
                state["momentum"] = self.x.new_zeros(first.shape)
        found = [state["momentum"] for state in states]
        key = ("momentum", first.shape, self._key)
        stack = self._stacks.find(key, found)
        self._stacks.keep(key, stack, states, "momentum")
        return self._canonical(stack)

    def _add(self, parameters: list[Any], step: Tensor) -> None:
        """Add its part of the step to every parameter."""
        if step.dim() == 3 and self.layers[0].block.inputs_first:
            step = step.mT
        parts = [part.reshape(parameters[0].shape) for part in step.unbind()]
        if parameters[0].dtype == step.dtype:
            torch._foreach_add_(parameters, parts)
        else:
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.add_(part)
