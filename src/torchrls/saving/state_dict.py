"""State dicts of RLS: the checks before loading one, and the dtypes of the loaded state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrls.common import hyperparameters
from torchrls.common.numerics import statistics_dtype
from torchrls.common.version import __version__
from torchrls.layers.layer import Layer
from torchrls.matrix.whitening import tile_shape
from torchrls.step.slots import output_tiles

if TYPE_CHECKING:
    from torchrls.optimizer import RLS

State = dict[str, Any]
Place = tuple[torch.dtype, torch.device]

#: The number of the layout of a ``state_dict``; format 0 has no number in it. All up to this one
#: can be loaded, except states of the default step before format 3, which had another algorithm.
FORMAT = 3
#: The numbers in the state of a parameter that are tensors: they stay on the CPU and in their own
#: dtype. Only states of earlier commits have "explained".
COUNTERS = ("scale", "penalty_age", "explained", "first")
#: The plain numbers in the state of a weight, in the default step.
NUMBERS = ("step", "learnt", "last", "every", "scaled", "rate")
#: The tensors that have the shape of their parameter, in RLS and in torch's optimizers.
ALIKE = (
    *("momentum", "square", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"),
    *("square_avg", "average"),
)
#: The ones among them that are means of squares.
SQUARES = ("square", "exp_avg_sq", "max_exp_avg_sq", "square_avg")
#: The keys that every saved group has.
REQUIRED = ("params", "param_names", "param_shapes", "method", "pair", "optimizer")
#: The keys that only a saved group has.
EXTRAS = ("param_shapes", "optimizer", "format", "version")


def describe(saved: State, optimizer: RLS) -> None:
    """Add the facts that :func:`check` needs to the groups of a ``state_dict``, in place."""
    kinds = {"rls": type(optimizer).__name__, "fallback": type(optimizer.fallback).__name__}
    for packed, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        packed["param_shapes"] = [list(parameter.shape) for parameter in group["params"]]
        packed["optimizer"] = kinds[group["method"]]
        packed["format"], packed["version"] = FORMAT, __version__


def prepare(optimizer: Any, state_dict: State) -> State:
    """Check a ``state_dict``, and return it in a form that ``torch.optim.Optimizer`` can load.

    This is a load_state_dict pre-hook. It moves parameters of ``optimizer`` to the groups that they
    were saved in, since biases can have changed sides of their pair.
    """
    check(state_dict, optimizer)
    saved_groups, groups = state_dict["param_groups"], optimizer.param_groups
    parameters: State = {}
    for group in groups:
        parameters.update(zip(group["param_names"], group["params"], strict=True))
    for saved, group in zip(saved_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in saved["param_names"]]
        group["param_names"] = list(saved["param_names"])
    optimizer._loading = state_dict
    plain = [{key: saved[key] for key in saved if key not in EXTRAS} for saved in saved_groups]
    return {**state_dict, "param_groups": plain}


def check(state_dict: State, optimizer: RLS) -> None:
    """Raise ValueError for a newer format, an old default step, or a state of another optimizer."""
    groups: Any = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    if (
        not isinstance(groups, list)
        or not groups
        or not all(isinstance(group, dict) and group.keys() >= {*REQUIRED} for group in groups)
        or not isinstance(state_dict.get("state"), dict)
    ):
        raise ValueError(
            "this is not a state_dict of torchrls.RLS: its param groups say nothing of methods "
            "and shapes. Load it into the optimizer that it was taken from"
        )
    for group in groups:
        layout = group.get("format", 0)
        if layout not in range(FORMAT + 1):
            raise ValueError(
                f"the checkpoint was written by torchrls {group.get('version')} in format "
                f"{layout}; this is torchrls {__version__}, which can load formats up to "
                f"{FORMAT}: install the other version"
            )
        is_default = group["method"] == "rls" and group.get("step", "gain") == "adaptive"
        if is_default and layout < 3 and any(state_dict["state"].values()):
            raise ValueError(
                f"the checkpoint was written in format {layout}, with a default "
                f"step that has been replaced: its state is of no use to the present one. Load "
                f"the model's own weights, and go on with a new RLS(model)"
            )
    try:
        _check_groups(groups, optimizer)
        _check_states(state_dict, optimizer)
    except (AttributeError, RuntimeError, TypeError) as error:  # something is of another type
        raise ValueError(f"the checkpoint is damaged: {error}") from error


def _check_groups(groups: list[State], optimizer: RLS) -> None:
    """Raise if the parameters, their groups or the hyperparameters do not fit."""
    own = optimizer._own_state_dict()["param_groups"]
    saved, current = dict(_shapes(groups)), dict(_shapes(own))
    for name in filter(current.__contains__, optimizer._names.values()):
        if name not in saved:
            raise ValueError(
                f"the checkpoint is of another model: it has no layer {_layer(name)!r} ({name!r}); "
                f"its first parameters are {', '.join(list(saved)[:4])}"
            )
        if saved[name] != current[name]:
            raise ValueError(
                f"the checkpoint is of another model: layer {_layer(name)!r} has {name!r} of shape "
                f"{tuple(current[name])} here and {tuple(saved[name])} in the checkpoint"
            )
    for name in saved:
        if name not in current:
            raise ValueError(
                f"the checkpoint is of another model: it has a layer {_layer(name)!r} "
                f"({name!r}) that is not here"
            )
    keys = ("optimizer", "method", "pair")
    if [[g[key] for key in keys] for g in groups] != [[g[key] for key in keys] for g in own]:
        theirs, ours = ([group["optimizer"] for group in both] for both in (groups, own))
        raise ValueError(
            f"the checkpoint has the param groups {theirs}, this optimizer has {ours}: "
            f"make it with the same params, exclude and fallback"
        )
    movable = {layer.bias for layer in optimizer.layers}
    for packed, group in zip(groups, optimizer.param_groups, strict=True):
        for parameter, name in zip(group["params"], group["param_names"], strict=True):
            if name not in packed["param_names"] and parameter not in movable:
                raise ValueError(
                    f"layer {_layer(name)!r} is in another param group in the checkpoint "
                    f"({name!r}): make the optimizer with the same params and exclude"
                )
    for group in groups:
        if group["method"] == "rls":
            hyperparameters.check(group)


def _check_states(state_dict: State, optimizer: RLS) -> None:
    """Raise if the state of a parameter has wrong shapes or impossible values."""
    shapes = list(_shapes(state_dict["param_groups"]))
    methods = [g["method"] for g in state_dict["param_groups"] for _ in g["param_names"]]
    layers = {optimizer._names.get(layer.weight): layer for layer in optimizer.layers}
    strays = [key for key in state_dict["state"] if isinstance(key, int) and key >= len(shapes)]
    for index, state in _numbered(state_dict):
        if strays or not isinstance(state, dict):
            raise ValueError(
                f"the checkpoint is damaged: it has a state {[*strays, index][0]} of type "
                f"{type(state).__name__} for {len(shapes)} parameters"
            )
        name, shape = shapes[index]
        for key, value in state.items():
            if key in ALIKE and value is not None:  # SGD has None where there is no momentum
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                if got != tuple(shape):  # torch's kernels do not check shapes
                    raise ValueError(
                        f"the checkpoint's {key!r} of {name!r} must be a tensor of shape "
                        f"{tuple(shape)}, got {got}"
                    )
            elif methods[index] != "rls":
                continue
            value, fault = torch.as_tensor(value), ""
            if not bool(torch.isfinite(value).all()):  # RLS skips steps that would make it so
                fault = "has values that are not finite"
            elif key in SQUARES and bool((value < 0).any()):
                fault = "has negative values, but it is a mean of squares"
            elif key in (*COUNTERS, *NUMBERS) and value.dim() > 0:
                fault = f"must be a number, got a tensor of shape {tuple(value.shape)}"
            if fault:
                raise ValueError(f"the checkpoint's {key!r} of {name!r} {fault}")
        if name in layers:
            _check_matrices(state, layers[name])


def _check_matrices(state: State, layer: Layer) -> None:
    """Raise if P, Q or the statistics of a layer have wrong shapes, or P or Q a negative trace."""
    several = (layer.groups,) if layer.groups > 1 else ()
    sizes = (layer.inputs, layer.inputs + 1)  # without and with the bias
    tiles = tile_shape(layer.inputs, layer.groups)
    Q = output_tiles(layer) or ()
    expected: dict[str, list[tuple[Any, ...]]] = {
        "inverse": [tiles] if "learnt" in state else [(*several, size, size) for size in sizes],
        "directions": [(*several, "r", size) for size in sizes],  # of any rank r
        "mean": [(*several, layer.inputs)],
        "ranges": [(*several, layer.inputs)],
        "lost": [several],
        "inverse_gain": [tiles[:1]],
        "outputs": [Q],
        "gain": [Q[:1]],
    }
    for key in filter(state.__contains__, expected):
        shape, fits = tuple(state[key].shape), expected[key]
        alike = [fit for fit in fits if len(fit) == len(shape)]
        if not any(all(b in (a, "r") for a, b in zip(shape, fit, strict=True)) for fit in alike):
            what = "P" if len(fits) > 1 else repr(key)
            texts = [f"({', '.join(str(size) for size in fit)})" for fit in fits]
            raise ValueError(
                f"the checkpoint's {what} of layer {layer.name!r} has shape {shape}, "
                f"expected {' or '.join(texts)}"
            )
    for key, name in (("inverse", "P"), ("outputs", "Q")):
        if key in state:
            trace = state[key].diagonal(dim1=-2, dim2=-1).sum(-1)
            if bool((trace < 0).any()):
                raise ValueError(
                    f"the checkpoint's {name} of layer {layer.name!r} is not positive definite: "
                    f"its trace is {trace.min().item():g}"
                )


def restore_precision(state_dict: State, optimizer: RLS) -> None:
    """Load the state of RLS again, floating point tensors in the dtype of the statistics.

    ``torch.optim.Optimizer`` has cast them to the dtype of the parameter. Counters stay on the CPU,
    and integers, such as signs, keep their dtype.
    """
    pairs = [(p, group["method"]) for group in optimizer.param_groups for p in group["params"]]
    for index, state in _numbered(state_dict):
        parameter, method = pairs[index]
        if method != "rls":
            continue
        wide, copies = statistics_dtype(parameter.dtype), {}
        for key, value in state.items():
            if key in NUMBERS:
                copies[key] = value.item() if isinstance(value, Tensor) else value
            elif key in COUNTERS:
                copies[key] = value.clone()
            else:
                dtype = wide if value.is_floating_point() else value.dtype
                copies[key] = value.to(parameter.device, dtype, copy=True)
        optimizer.state[parameter] = copies


def move_state(state: State, old: Place, new: Place, method: str) -> None:
    """Move a parameter's state in place to the parameter's new dtype and device.

    The state of RLS gets the new dtype of the statistics. In the fallback's state, only tensors of
    the parameter's old dtype get the new one. Counters stay on the CPU.
    """
    dtypes = {old[0]: new[0]}
    if method == "rls":
        dtypes = {statistics_dtype(old[0]): statistics_dtype(new[0])}
    for key, value in state.items():
        if isinstance(value, Tensor) and key not in ("step", *COUNTERS):
            state[key] = value.to(new[1], dtypes.get(value.dtype, value.dtype))


def _shapes(groups: list[State]) -> Iterator[tuple[str, list[int]]]:
    """Yield the name and shape of each parameter of saved groups."""
    for group in groups:
        yield from zip(group["param_names"], group["param_shapes"], strict=True)


def _layer(name: str) -> str:
    """Return the name of the layer that a parameter belongs to."""
    return name.rpartition(".")[0] or name


def _numbered(state_dict: State) -> Iterator[tuple[int, State]]:
    """Yield (index of the parameter, its state); distributed checkpoints have names as keys."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    places = {key: place for place, key in enumerate(keys)}
    return ((places[key], state) for key, state in state_dict["state"].items() if key in places)
