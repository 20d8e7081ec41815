"""Checkpoints: whether one fits, and how its tensors keep their precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrls.common import hyperparameters
from torchrls.common.numerics import statistics_dtype
from torchrls.step.default import tile_shape
from torchrls.version import __version__

if TYPE_CHECKING:
    from torchrls.optimizer import RLS

State = dict[str, Any]

#: How a ``state_dict`` is laid out. 0 had no number; all up to this one can be loaded.
FORMAT = 1

#: What stays on the host and in its own dtype.
COUNTERS = ("step", "memory", "scale", "penalty_age", "explained", "first", "size", "hurry")

#: What has the shape of its parameter, in RLS and in the optimizers of torch.
ALIKE = (
    *("momentum", "square", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"),
    "square_avg",
)

#: Those of them that are means of squares.
SQUARES = ("square", "exp_avg_sq", "max_exp_avg_sq", "square_avg")

#: What every saved group has.
REQUIRED = ("params", "param_names", "param_shapes", "method", "pair", "optimizer")

#: What a saved group has beside what a live one has.
EXTRAS = ("param_shapes", "optimizer", "format", "version")


def describe(saved: State, optimizer: RLS) -> None:
    """Add to a ``state_dict`` what it takes to check it when it is loaded."""
    kinds = {"rls": type(optimizer).__name__, "fallback": type(optimizer.fallback).__name__}
    for packed, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        packed["param_shapes"] = [list(parameter.shape) for parameter in group["params"]]
        packed["optimizer"] = kinds[group["method"]]
        packed["format"], packed["version"] = FORMAT, __version__


def prepare(optimizer: Any, state_dict: State) -> State:
    """The last hook before loading: refuse what does not fit, and arrange the groups alike."""
    check(state_dict, optimizer)
    adopt_membership(state_dict, optimizer)
    optimizer._loading = state_dict
    groups = state_dict["param_groups"]
    plain = [{key: group[key] for key in group if key not in EXTRAS} for group in groups]
    return {**state_dict, "param_groups": plain}


def check(state_dict: State, optimizer: RLS) -> None:
    """Raise if ``state_dict`` was not taken from an optimizer like this one."""
    groups: Any = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    if not _are_groups(groups) or not isinstance(state_dict.get("state"), dict):
        raise ValueError(
            "this is not a state_dict of torchrls.RLS: its param groups say nothing of methods "
            "and shapes. Load it into the optimizer that it was taken from"
        )
    _check_format(groups)
    try:
        _check_parameters(dict(_entries(groups)), optimizer)
        _check_arrangement(groups, optimizer)
        _check_hyperparameters(groups)
        _check_states(state_dict, optimizer)
    except (AttributeError, RuntimeError, TypeError) as error:  # something is of another type
        raise ValueError(f"the checkpoint is damaged: {error}") from error


def _are_groups(groups: Any) -> bool:
    if not isinstance(groups, list) or not groups:
        return False
    return all(isinstance(group, dict) and group.keys() >= {*REQUIRED} for group in groups)


def _check_format(groups: list[State]) -> None:
    for group in groups:
        if group.get("format", 0) not in range(FORMAT + 1):
            raise ValueError(
                f"the checkpoint was written by torchrls {group.get('version')} in format "
                f"{group['format']}; this is torchrls {__version__}, which can load formats up to "
                f"{FORMAT}: install the other version"
            )


def _entries(groups: list[State]) -> Iterator[tuple[str, list[int]]]:
    for group in groups:
        yield from zip(group["param_names"], group["param_shapes"], strict=True)


def _check_parameters(saved: dict[str, list[int]], optimizer: RLS) -> None:
    current = dict(_entries(optimizer._own_state_dict()["param_groups"]))
    for name in filter(current.__contains__, optimizer._names.values()):
        layer = _layer_of(name)
        if name not in saved:
            raise ValueError(
                f"the checkpoint is of another model: it has no layer {layer!r} ({name!r}); "
                f"its first parameters are {', '.join(list(saved)[:4])}"
            )
        if saved[name] != current[name]:
            raise ValueError(
                f"the checkpoint is of another model: layer {layer!r} has {name!r} of shape "
                f"{tuple(current[name])} here and {tuple(saved[name])} in the checkpoint"
            )
    for name in saved:
        if name not in current:
            raise ValueError(
                f"the checkpoint is of another model: it has a layer {_layer_of(name)!r} "
                f"({name!r}) that is not here"
            )


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0] or name


def _check_arrangement(groups: list[State], optimizer: RLS) -> None:
    current = optimizer._own_state_dict()["param_groups"]
    ours, theirs = ([group["optimizer"] for group in both] for both in (current, groups))
    sides = [[(group["method"], group["pair"]) for group in both] for both in (current, groups)]
    if ours != theirs or sides[0] != sides[1]:
        raise ValueError(
            f"the checkpoint has the param groups {theirs}, this optimizer has {ours}: "
            f"make it with the same params, exclude and fallback"
        )
    movable = {layer.bias for layer in optimizer.layers}
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        for parameter, name in zip(group["params"], group["param_names"], strict=True):
            if name not in saved["param_names"] and parameter not in movable:
                raise ValueError(
                    f"layer {_layer_of(name)!r} is in another param group in the checkpoint "
                    f"({name!r}): make the optimizer with the same params and exclude"
                )


def _check_hyperparameters(groups: list[State]) -> None:
    for group in groups:
        if group["method"] == "rls":
            hyperparameters.check(group)


def _check_states(state_dict: State, optimizer: RLS) -> None:
    entries = list(_entries(state_dict["param_groups"]))
    methods = [g["method"] for g in state_dict["param_groups"] for _ in g["param_names"]]
    layers = {optimizer._names.get(layer.weight): layer for layer in optimizer.layers}
    strays = [key for key in state_dict["state"] if isinstance(key, int) and key >= len(entries)]
    for index, state in numbered(state_dict):
        if strays or not isinstance(state, dict):
            raise ValueError(
                f"the checkpoint is damaged: it has a state {[*strays, index][0]} of type "
                f"{type(state).__name__} for {len(entries)} parameters"
            )
        name, shape = entries[index]
        _check_alike(state, name, tuple(shape))
        if methods[index] == "rls":
            _check_numbers(state, name)
        if name in layers:
            _check_inverse(state, layers[name])
            _check_trace(state, layers[name])


def _check_alike(state: State, name: str, shape: tuple[int, ...]) -> None:
    """Kernels of torch do not look at the shapes of what they are given."""
    for key in filter(state.__contains__, ALIKE):
        found, value = None, state[key]
        if isinstance(value, Tensor):
            found = tuple(value.shape)
        if found != shape and value is not None:  # SGD has None where there is no momentum
            raise ValueError(
                f"the checkpoint's {key!r} of {name!r} must be a tensor of shape {shape}, got "
                f"{type(value).__name__ if found is None else found}"
            )
        if found is not None:
            _check_finite(value, key, name)
            if key in SQUARES and not bool((value >= 0).all()):
                raise ValueError(
                    f"the checkpoint's {key!r} of {name!r} has negative values, but it is a mean "
                    f"of squares"
                )


def _check_finite(value: Tensor, key: str, name: str) -> None:
    """Steps with what is not finite are skipped, so that no state of a sound file has it."""
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"the checkpoint's {key!r} of {name!r} has values that are not finite")


def _check_numbers(state: State, name: str) -> None:
    for key, value in state.items():
        _check_finite(value, key, name)
        if key in COUNTERS and value.dim() > 0:
            raise ValueError(
                f"the checkpoint's {key!r} of {name!r} must be a number, got a tensor of shape "
                f"{tuple(value.shape)}"
            )


def _check_inverse(state: State, layer: Any) -> None:
    several = (layer.groups,) if layer.groups > 1 else ()
    sizes = (layer.inputs, layer.inputs + 1)
    for key, fits in (
        ("inverse", [(*several, size, size) for size in sizes]),
        ("directions", [(*several, "r", size) for size in sizes]),
        ("mean", [(*several, layer.inputs)]),
        ("ranges", [(*several, layer.inputs)]),
        ("lost", [several]),
        ("outputs", [tile_shape(layer) or ()]),
    ):
        shape = tuple(state[key].shape) if key in state else fits[0]
        if not any(_same_shape(shape, fit) for fit in fits):
            what = "P" if len(fits) > 1 else repr(key)
            expected = " or ".join(_text(fit) for fit in fits)
            raise ValueError(
                f"the checkpoint's {what} of layer {layer.name!r} has shape {shape}, "
                f"expected {expected}"
            )


def _check_trace(state: State, layer: Any) -> None:
    """P and Q are positive definite, to rounding."""
    for key, name in (("inverse", "P"), ("outputs", "Q")):
        if key not in state:
            continue
        trace = state[key].diagonal(dim1=-2, dim2=-1).sum(-1)
        if bool((trace < 0).any()):
            raise ValueError(
                f"the checkpoint's {name} of layer {layer.name!r} is not positive definite: its "
                f"trace is {trace.min().item():g}"
            )


def numbered(state_dict: State) -> Iterator[tuple[int, State]]:
    """The states by the places of their parameters; distributed checkpoints have names there."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    places = {key: place for place, key in enumerate(keys)}
    return ((places[key], state) for key, state in state_dict["state"].items() if key in places)


def _same_shape(shape: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    """A letter stands for any size."""
    if len(shape) != len(wanted):
        return False
    return all(isinstance(w, str) or s == w for s, w in zip(shape, wanted, strict=True))


def _text(shape: tuple[Any, ...]) -> str:
    return f"({', '.join(str(size) for size in shape)})"


def adopt_membership(state_dict: State, optimizer: RLS) -> None:
    """Biases may have changed groups since the optimizer was made; put them where they were."""
    parameters = {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
    }
    for saved, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        group["params"] = [parameters[name] for name in saved["param_names"]]
        group["param_names"] = list(saved["param_names"])


def restore_precision(state_dict: State, optimizer: RLS) -> None:
    """P and momentum as they were saved: torch has cast them to the parameter's dtype."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    methods = [group["method"] for group in optimizer.param_groups for _ in group["params"]]
    for index, state in numbered(state_dict):
        if methods[index] == "rls":
            parameter = parameters[index]
            dtype = statistics_dtype(parameter.dtype)
            optimizer.state[parameter] = {
                key: value.clone() if key in COUNTERS else _as(value, parameter.device, dtype)
                for key, value in state.items()
            }


def _as(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A copy on a device; whole numbers, such as signs, stay whole."""
    return value.to(device, dtype if value.is_floating_point() else value.dtype, copy=True)


def move_state(
    state: State,
    old: tuple[torch.dtype, torch.device],
    new: tuple[torch.dtype, torch.device],
    method: str,
) -> None:
    """Take a parameter's state along to its new dtype and device.

    The state of RLS has the dtype of the statistics. In the fallback's, what had the dtype of
    the parameter gets the new one, and step counters stay where torch wants them.
    """
    dtypes = {old[0]: new[0]}
    if method == "rls":
        dtypes = {statistics_dtype(old[0]): statistics_dtype(new[0])}
    for key, value in state.items():
        if isinstance(value, Tensor) and key not in (COUNTERS if method == "rls" else ("step",)):
            state[key] = value.to(new[1], dtypes.get(value.dtype, value.dtype))
