"""Slots, the units of a step: one layer each, or a stack of small layers of equal shape.

A step of a small layer takes as long as its calls of torch, whatever its size. So equal small
layers are stacked: the same code runs once for all of them, in the canonical shapes with one more
dimension (:mod:`torchrls.matrix.inverse`). The state of each layer then holds slices of common
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrls.common import shards
from torchrls.common.numerics import counter, on_device, statistics_dtype
from torchrls.common.torch_private import foreach_add_, foreach_copy_
from torchrls.layers.layer import Layer
from torchrls.matrix.inverse import Dense
from torchrls.matrix.lowrank import LowRank
from torchrls.matrix.whitening import Whitening, tile_shape
from torchrls.observe.deferred import computed
from torchrls.observe.record import Observation
from torchrls.routing.groups import Group, is_row_of_theta

State = dict[str, Any]
Inverse = Dense | LowRank

#: With ``rank="auto"``, a P that would take more bytes than this is of rank ``AUTO_RANK``.
DENSE_BYTES, AUTO_RANK = 1 << 28, 64
#: Layers are stacked if neither the weight nor P has more entries than this, for each kind of step.
SMALL = {"adaptive": 1 << 15, "gain": 1 << 12}
#: The fewest layers of a stack.
FEWEST = 3
#: For ``initial_inverse="auto"``: kappa = tr(P_0 Sigma) with the covariance Sigma of the inputs,
#: and the bounds of the scale of P_0.
FIRST_ENERGY, LEAST_FIRST, MOST_FIRST = 5.0, 1e-6, 1e6
#: The names of the gains of P and Q in the state of a weight, in the default step.
GAINS = {"inverse": "inverse_gain", "outputs": "gain"}
#: The names of P's tensors in the state of a weight, in both forms.
KEYS = ("inverse", "directions", "scale", "lost")


class Part:
    """The weights, or the biases, of a slot.

    Attributes:
        parameters: one for each layer of the slot.
        group: the param group of all of them.
        dtype: the dtype of the statistics, in which steps are computed.
        is_plain: there is a single parameter, and it has the canonical shape.
    """

    def __init__(
        self, layers: Sequence[Layer], parameters: Sequence[nn.Parameter], group: Group
    ) -> None:
        self.parameters, self.group, self.layer = parameters, group, layers[0]
        self.dtype = statistics_dtype(parameters[0].dtype)
        self.is_weight = parameters[0] is layers[0].weight
        self.is_stacked = len(parameters) > 1
        self.is_plain = False
        if not (self.is_stacked or self.layer.is_sharded):
            self.is_plain = self.canonical(parameters[0]) is parameters[0]
        self._slices: dict[str, tuple[Tensor, Sequence[Tensor]]] = {}

    @property
    def has_gradient(self) -> bool:
        """Whether all parameters have a gradient."""
        return all(parameter.grad is not None for parameter in self.parameters)

    def canonical(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the parameter's shape, or a stack of such, in the canonical shape."""
        layer = self.layer
        if not self.is_stacked:
            return layer.matrix(tensor) if self.is_weight else layer.vector(tensor)
        if not self.is_weight:
            return tensor
        stored = tensor.reshape(len(tensor), *layer.stored_shape)
        return stored.mT if layer.block.inputs_first else stored

    def gradient(self) -> Tensor:
        """Return the gradient in the canonical shape and ``dtype``; a deferred one is computed."""
        gradient: Any = self.parameters[0].grad
        if type(gradient) is not Tensor or not self.is_plain:
            parts = [computed(parameter.grad) for parameter in self.parameters]
            whole = torch.stack(parts) if self.is_stacked else self.layer.here(parts[0])
            gradient = self.canonical(whole)
        same = gradient.dtype == self.dtype
        return gradient if same else gradient.to(self.dtype)  # type: ignore[no-any-return]

    def room(self) -> Tensor:
        """Return an uninitialised tensor of the canonical shape."""
        layer = self.layer
        groups = len(self.parameters) if self.is_stacked else layer.groups
        shape: tuple[int, ...] = (layer.outputs, layer.inputs)[: 1 + self.is_weight]
        shape = shape if groups == 1 else (groups, *shape)
        return torch.empty(shape, dtype=self.dtype, device=layer.weight.device)

    def add_(self, step: Tensor) -> None:
        """Add a step of the canonical shape to the parameters."""
        self._write(Tensor.add_, foreach_add_, step)

    def copy_(self, value: Tensor) -> None:
        """Copy a value of the canonical shape into the parameters."""
        self._write(Tensor.copy_, foreach_copy_, value)

    def _write(self, one: Callable[..., Any], many: Callable[..., Any], value: Tensor) -> None:
        parameter, layer = self.parameters[0], self.layer
        if self.is_stacked:
            stored = value.mT if self.is_weight and layer.block.inputs_first else value
            parts = [part.reshape(parameter.shape) for part in stored.unbind()]
            many(self.parameters, [part.to(parameter.dtype) for part in parts])
        elif self.is_weight:
            value = layer.unmatrix(value)
            here = shards.part_of(value, parameter) if layer.is_gathered else value
            one(shards.local(parameter), here)
        elif layer.is_gathered:
            whole = shards.whole(parameter).clone()
            one(layer.vector(whole), value)
            shards.local(parameter).copy_(shards.part_of(whole, parameter))
        else:
            one(layer.vector(shards.local(parameter)), value)

    def value(self) -> tuple[Tensor, bool]:
        """Return the value in the canonical shape, and whether writing to it writes the parameter.

        If not, it is a copy in ``dtype``.
        """
        parameter, layer = self.parameters[0], self.layer
        if self.is_plain:
            is_direct = parameter.dtype == self.dtype and parameter.is_contiguous()
            return parameter if is_direct else parameter.to(self.dtype, copy=True), is_direct
        if self.is_stacked:
            Theta = torch.stack([parameter.detach() for parameter in self.parameters])
            return self.canonical(Theta).to(self.dtype), False
        Theta, own = layer.here(parameter.detach()), parameter.dtype == self.dtype
        is_direct = own and not layer.is_gathered and Theta.is_contiguous()
        return self.canonical(Theta if is_direct else Theta.to(self.dtype, copy=True)), is_direct

    def memories(self, states: Mapping[Any, State], *names: str) -> list[Tensor]:
        """Return entries of the state in the canonical shape, to be changed in place.

        Missing entries are added as zeros, in the state with the shape of the parameter.
        """
        layer, memories = self.layer, []
        own = [states[parameter] for parameter in self.parameters]
        for name in names:
            for parameter, state in zip(self.parameters, own, strict=True):
                if name not in state:
                    here = layer.here(parameter)
                    zeros = torch.zeros(here.shape, dtype=self.dtype, device=here.device)
                    state[name] = zeros if layer.is_gathered else shards.like(parameter, zeros)
                elif not self.is_stacked and state[name]._is_view():
                    state[name] = state[name].clone()  # slices of stacks can be rounded differently
            if self.is_stacked:
                memory = self.stacked(name, own)
            else:
                memory = own[0][name]
                memory = memory if self.is_plain else shards.local(memory)
            memories.append(memory if self.is_plain else self.canonical(memory))
        return memories

    def forget(self, name: str, states: Mapping[Any, State]) -> None:
        """Remove an entry from the state."""
        self._slices.pop(name, None)
        for parameter in self.parameters:
            states[parameter].pop(name, None)

    def stacked(self, name: str, states: Sequence[State]) -> Tensor:
        """Return one tensor (states, ...), and make its slices the states' entries of this name."""
        whole, slices = self._slices.get(name, (None, ()))
        if whole is None or any(s[name] is not p for s, p in zip(states, slices, strict=True)):
            whole = torch.stack([state[name] for state in states]).contiguous()
            self.put(name, whole, states)
        return whole

    def put(self, name: str, whole: Tensor, states: Sequence[State]) -> None:
        """Put the slices of a tensor (states, ...) into the states."""
        if self._slices.get(name, (None, ()))[0] is not whole:
            self._slices[name] = (whole, whole.unbind())
        for state, part in zip(states, self._slices[name][1], strict=True):
            state[name] = part


class Slot:
    """One layer, or several small ones of equal shape, with their groups and state.

    Attributes:
        layers, layer: the layers, and the first of them, which has the shapes of all.
        group: the param group of the weights.
        count: g, the number of matrices Theta: groups of the layer, or layers of the stack.
        weight, bias: the parts of Theta; the bias is None if RLS does not train it.
        algorithm: the module of the step, with ``respond``, ``answer``, ``settle`` and ``move``.
        states: the optimizer's state of every parameter.
        wants_rows: the next step needs rows.
        Q_shape: (tiles, n, n) of one layer's Q; None for a single output, which has no Q.
        state: the state of each weight. Before the first step, these dicts are not in ``states``.
    """

    def __init__(
        self, layers: Sequence[Layer], group_of: Mapping[Any, Group], states: Mapping[Any, State]
    ) -> None:
        layer = layers[0]
        self.layers, self.layer, self.states = layers, layer, states
        self.group, self.dtype = group_of[layer.weight], statistics_dtype(layer.weight.dtype)
        self.count = len(layers) if len(layers) > 1 else layer.groups
        self.weight = Part(layers, [x.weight for x in layers], self.group)
        self.bias: Part | None = None
        if layer.bias is not None and is_row_of_theta(layer.bias, group_of):
            biases: Any = [x.bias for x in layers]
            self.bias = Part(layers, biases, group_of[layer.bias])
        self.parts = [self.weight] if self.bias is None else [self.weight, self.bias]
        self.algorithm: Any = None
        self.wants_rows = True
        self.Q_shape = output_tiles(layer)
        self.state: list[State] = [states.get(x.weight) or {} for x in layers]

    def bias_gradient(self) -> Tensor | None:
        """Return the gradient of the bias in the canonical shape; None if there is none."""
        if self.bias is None or any(p.grad is None for p in self.bias.parameters):
            return None
        return self.bias.gradient()

    def read(self, *names: str) -> list[Tensor]:
        """Return tensors of the weight's state; those of a stack as one, (layers, ...)."""
        if len(self.state) > 1:
            return [self.weight.stacked(name, self.state) for name in names]
        (state,) = self.state
        for name in names:
            if state[name]._is_view():  # slices of stacks can be rounded differently
                state[name] = state[name].clone()
        return [state[name] for name in names]

    def write(self, name: str, tensor: Tensor | None) -> None:
        """Put a tensor, or its slices for a stack, into the weights' state; None removes it."""
        if tensor is None:
            self.weight.forget(name, self.states)
        elif len(self.state) > 1:
            self.weight.put(name, tensor, self.state)
        else:
            self.state[0][name] = tensor

    def whitening(self, name: str) -> Whitening:
        """Return P ("inverse") or Q ("outputs") in the default step: views of the state."""
        W, gain = self.read(name, GAINS[name])
        return (
            Whitening(W, gain)
            if len(self.state) == 1
            else Whitening(W.flatten(0, 1), gain.view(-1))
        )

    def write_whitening(self, name: str, matrix: Whitening) -> None:
        """Put P ("inverse") or Q ("outputs") into the weights' state."""
        count = len(self.state)
        for key, tensor in zip((name, GAINS[name]), matrix, strict=True):
            self.write(key, tensor.unflatten(0, (count, -1)) if count > 1 else tensor)  # type: ignore[no-untyped-call]

    def inverse(self, rows: Observation | None) -> tuple[Inverse, bool, list[float]]:
        """Return P for this step, whether it is the state's own, and each layer's delta.

        It is a new tensor if the layer is new, or if the size or form of P has changed, as when a
        bias is frozen.

        Args:
            rows: the rows of the first minibatch, for ``initial_inverse="auto"``.
        """
        state, group = self.state, self.group
        size, count = self.layer.inputs + int(self.bias is not None), len(state)
        if group["initial_inverse"] != "auto":
            deltas = [float(group["initial_inverse"])] * count
        elif all(map(is_from_data, state)):
            deltas = [float(own["first"]) for own in state]
        else:
            deltas = [1.0] * count if rows is None else first_deltas(rows, count)
        rank = rank_for(group["rank"], self.count, size, self.dtype.itemsize)
        known = [stored(own, rank) for own in state]
        if rank is None and all(isinstance(P, Dense) and P.P.shape[-1] == size for P in known):
            if count > 1:
                return Dense(self.weight.stacked("inverse", state)), True, deltas
            P = known[0]
            assert isinstance(P, Dense)
            if P.P._is_view():  # slices of stacks can be rounded differently
                state[0]["inverse"] = P.P = P.P.clone()
            return P, True, deltas
        triples = zip(known, deltas, self.layers, strict=True)
        parts: list[Any] = [fitted(P, delta, size, rank, layer) for P, delta, layer in triples]
        if len(parts) == 1:
            return parts[0], parts[0] is known[0], deltas
        return Dense(torch.stack([part.P for part in parts])), False, deltas

    def delta_of(self, delta: Sequence[float]) -> Tensor | float:
        """Return the deltas as one number if all are equal, else as a tensor (layers,)."""
        if len(set(delta)) == 1:
            return delta[0]
        return on_device(delta, torch.empty(0, dtype=self.dtype, device=self.layer.weight.device))

    def keep(self, P: Inverse, delta: Sequence[float], is_stored: bool = False) -> None:
        """Put P into the state, and with ``initial_inverse="auto"`` delta as "first".

        Args:
            is_stored: P is the state's own.
        """
        if is_stored and isinstance(P, Dense):  # it has changed in place
            return
        tensors = P.state()
        for state, own in zip(self.state, delta, strict=True):
            for key in KEYS:
                if key not in tensors:
                    state.pop(key, None)
            if self.group["initial_inverse"] == "auto" and not is_from_data(state):
                state["first"] = counter(own)
        for key, tensor in tensors.items():
            self.write(key, tensor)

    def reserve(self) -> None:
        """Make the state that a first step makes, without a step, so that a loader can fill it."""
        P, _, deltas = self.inverse(None)
        self.state = [self.states[x.weight] for x in self.layers]
        self.keep(P, deltas)
        for part in self.parts:
            if part.has_gradient and part.group["momentum"] > 0:
                part.memories(self.states, "momentum")
        if self.group["initial_inverse"] == "auto":
            self.state[0]["first"] = counter(0.0)


def rank_for(asked: Any, groups: int, size: int, itemsize: int) -> int | None:
    """Return the rank of P for the hyperparameter ``rank``; None for a dense P."""
    if asked == "auto":
        asked = AUTO_RANK if groups * size * size * itemsize > DENSE_BYTES else None
    return None if asked is None or asked >= size else int(asked)


def stored(state: State, rank: int | None) -> Inverse | None:
    """Return P of the state of a weight; None if there is none, or only a reserved one."""
    if ("first" in state or "learnt" in state) and not is_from_data(state):
        return None
    if "inverse" in state:
        return Dense(state["inverse"])
    if "directions" not in state:
        return None
    V = state["directions"]
    return LowRank(V, float(state["scale"]), state["lost"], rank or max(V.shape[-2], 1))


def is_from_data(state: State) -> bool:
    """Return whether the state has a P made from data: that of the default step, or of "auto"."""
    is_there = "inverse" in state or "directions" in state
    return is_there and float(state.get("first", 0) or state.get("learnt", 0)) > 0


def fitted(P: Inverse | None, delta: float, size: int, rank: int | None, layer: Layer) -> Inverse:
    """Return P of one layer with n = size, of rank ``rank`` or dense; P_0 if there is no P."""
    if P is None and rank is None:
        return Dense.first(layer.groups, size, delta, like=layer.weight)
    if P is None:
        assert rank is not None
        return LowRank.first(layer.groups, size, delta, like=layer.weight, rank=rank)
    if P.size != size:
        P = P.without_last() if P.size > size else P.with_last(delta)
    if rank is None and isinstance(P, LowRank):
        return Dense(P.matrix())
    if rank is not None and isinstance(P, Dense):
        return LowRank.of_matrix(P.P, delta, rank)
    return P


def output_tiles(layer: Layer) -> tuple[int, int, int] | None:
    """Return the shape of Q, (tiles, n, n); None for a single output, which has no Q."""
    return None if layer.all_outputs < 2 else tile_shape(layer.all_outputs, layer.groups)


def first_deltas(rows: Observation, layers: int) -> list[float]:
    """Return delta of P_0 = delta I for each layer of a slot, from the first minibatch.

    It is kappa / tr(Sigma) with the covariance Sigma of the inputs, so that their scale has no
    effect. For inputs that do not vary, it is kappa over their mean square length.
    """
    if rows.squares is None:
        return [1.0] * layers
    mean = rows.sums[..., :-1].sum(-2) / rows.sums[..., -1:].sum(-2)
    power = rows.squares / rows.sums[..., -1].sum(-1)
    varying = (power - mean.square().sum(-1)).clamp(min=0)
    if layers == 1:
        varying, power = varying.mean(), power.mean()
    deltas = []
    for variance, whole in torch.stack([varying, power]).view(2, -1).T.tolist():
        size = variance if variance > 1e-6 * whole else whole
        usable = 0 < size < float("inf")
        deltas.append(min(max(FIRST_ENERGY / size, LEAST_FIRST), MOST_FIRST) if usable else 1.0)
    return deltas


class Slots:
    """The slots of an optimizer, kept as long as nothing about layers and groups changes."""

    def __init__(self) -> None:
        self._group_of: Mapping[Any, Group] | None = None
        self._known: dict[tuple[Layer, ...], Slot] = {}
        self._kinds: dict[Layer, Any] = {}

    def arrange(
        self,
        observations: Mapping[Layer, Observation | None],
        group_of: Mapping[Any, Group],
        states: Mapping[Any, State],
    ) -> list[tuple[Slot, Observation | None]]:
        """Return the slots of all layers with their rows; equal small layers share a slot."""
        if group_of is not self._group_of:
            self._group_of, self._known, self._kinds = group_of, {}, {}
        together: dict[Any, list[Layer]] = {}
        for layer, rows in observations.items():
            kind = None
            if len(observations) >= FEWEST:
                if layer not in self._kinds:
                    self._kinds[layer] = kind_of(layer, group_of)
                kind = self._kinds[layer]
            if kind is not None:
                group, state = group_of[layer.weight], states.get(layer.weight) or {}
                kind = _kind_now(kind, layer, rows, group, state)
            together.setdefault(layer if kind is None else kind, []).append(layer)
        arranged, before, self._known = [], self._known, {}  # drops slots that are not used now
        for layers in together.values():
            stacks = [layers] if len(layers) >= FEWEST else [[layer] for layer in layers]
            for members in map(tuple, stacks):
                slot = before.get(members) or Slot(members, group_of, states)
                self._known[members] = slot
                slot.state = [states.get(x.weight) or {} for x in members]
                seen = [observations[layer] for layer in members]
                rows = seen[0] if len(seen) == 1 else Observation.stacked(seen)
                arranged.append((slot, rows))
        return arranged


def kind_of(layer: Layer, group_of: Mapping[Any, Group], small: int | None = None) -> Any:
    """Return a key that layers of one stack have in common; None for a layer that stays alone.

    Args:
        small: the most entries of the weight and of P; None for ``SMALL``.
    """
    weight, block, group = layer.weight, layer.block, group_of[layer.weight]
    if layer.is_sharded or layer.groups > 1 or block.bias_part != (None, None):
        return None
    small = SMALL[group["step"]] if small is None else small
    if layer.inputs * max(layer.inputs, layer.outputs) > small:
        return None
    bias = layer.bias if is_row_of_theta(layer.bias, group_of) else None
    shapes = (weight.shape, block.inputs_first, weight.dtype, weight.device)
    return (*shapes, id(group), None if bias is None else id(group_of[bias]))


def _kind_now(kind: Any, layer: Layer, rows: Observation | None, group: Group, state: State) -> Any:
    """Return the key of a layer in this step: its kind and counters; None if it stays alone."""
    if layer.bias is not None and layer.bias.requires_grad and layer.bias.grad is None:
        return None
    begun = is_from_data(state)
    if group["step"] == "adaptive":  # layers of the network's inputs have ranges
        is_input = not begun and rows is not None and rows.extent is not None
        if is_input or state.get("scaled"):
            return None
    else:
        itemsize = statistics_dtype(layer.weight.dtype).itemsize
        if rank_for(group["rank"], 1, layer.inputs + 1, itemsize) is not None:
            return None
    counters = [state.get(key) for key in ("step", "learnt", "last", "every")]
    timed = None if rows is None else rows.time is None
    return (*kind, timed, begun, *counters)
