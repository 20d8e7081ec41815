"""Param groups: each of the user's is split into one for RLS and one for the fallback."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchrls.common.hyperparameters import PAPER, check
from torchrls.common.shards import is_sharded
from torchrls.common.torch_private import fused_devices

Group = dict[str, Any]
Factory = Callable[[list[Group]], Optimizer]

#: The keys that are no hyperparameters: labels, and what schedulers write.
LABELS = {"name", "initial_lr"}


def adam(params: list[Group], lr: float = 1e-3) -> Optimizer:
    """Make the fallback beside the paper's step: Adam, fused if torch has kernels for all of it."""
    tensors = [p for item in params for p in (item["params"] if isinstance(item, dict) else [item])]
    devices = fused_devices()
    fused = all(
        p.is_floating_point()
        and p.device.type in devices
        and not is_sharded(p)
        and torch.empty_like(p, device="meta").stride() == p.stride()  # no gaps in memory
        for p in tensors
    )
    return torch.optim.Adam(params, lr=lr, fused=fused or None)


def as_groups(params: Any) -> list[Group]:
    """Return ``params`` in a form of ``torch.optim``, parameters or dicts, as checked dicts."""
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            f"params must be an iterable of parameters or of dicts, got {type(params).__name__}"
        )
    items = list(params)
    if not items:
        raise ValueError("params is empty: give it parameters, or None for the whole model")
    if not any(isinstance(item, dict) for item in items):
        items = [{"params": items}]
    groups = []
    for item in items:
        if not isinstance(item, dict):
            raise TypeError(f"params mixes dicts with {type(item).__name__}: use one or the other")
        if "params" not in item:
            raise ValueError(f"a param group needs the key 'params', got {sorted(item)}")
        given = item["params"]
        if isinstance(given, set):
            raise TypeError("the parameters of a group must be ordered: use a list, not a set")
        given = [given] if isinstance(given, Tensor) else given
        parameters = []
        for entry in given:
            is_named = isinstance(entry, tuple) and len(entry) == 2
            name, parameter = entry if is_named else ("of params", entry)
            if not isinstance(parameter, Tensor):
                raise TypeError(f"params must hold tensors, got {type(parameter).__name__}")
            if not parameter.is_leaf:
                raise ValueError(
                    f"params holds a tensor that is no leaf, of shape {tuple(parameter.shape)}"
                )
            check_trainable(parameter, name)
            parameters.append(parameter)
        groups.append({**item, "params": parameters})
    check_disjoint([parameter for group in groups for parameter in group["params"]])
    return groups


def check_disjoint(parameters: list[Any], known: Iterable[Any] = ()) -> None:
    """Raise if a parameter is given twice, or is one of the known ones."""
    if len({*parameters, *known}) < len(parameters) + len({*known}):
        raise ValueError("some parameters appear more than once in the param groups")


def split(
    group: Group, capable: Set[Any], trained: Set[Any], fallback: Optimizer | None, shares_lr: bool
) -> tuple[Group, Group]:
    """Split a user's group into one for RLS and one for the fallback; either may be empty.

    Hyperparameters of RLS go to its group, other options to the fallback's. If RLS has a rule for
    no parameter of the group, all options go to the fallback.

    Args:
        capable: the parameters that RLS has a rule for.
        trained: those of them that RLS trains at present.
        fallback: the fallback, whose options are checked; None if it has not been made.
        shares_lr: the fallback is ours, whose ``lr`` is a factor as that of RLS is.
    """
    ours = [parameter for parameter in group["params"] if parameter in capable]
    known = PAPER.keys() | LABELS if ours else set()
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    mine = {key: value for key, value in options.items() if key in known}
    rest = {key: value for key, value in options.items() if key not in known}
    check({**mine, "max_grad_norm": options.get("max_grad_norm")})
    if rest and len(ours) == len(group["params"]):
        raise ValueError(
            _unknown(rest.keys(), PAPER) + ". RLS trains all of this group, so options of the "
            "fallback have no use in it"
        )
    if "weight_decay" in mine and len(ours) < len(group["params"]):
        rest["weight_decay"] = mine["weight_decay"]
    if "max_grad_norm" in mine:
        rest["max_grad_norm"] = mine["max_grad_norm"]
    if "lr" in mine and shares_lr:
        rest["lr"] = mine["lr"]
    if fallback is not None:
        check_fallback_options(rest, fallback)
    by_rls = [parameter for parameter in group["params"] if parameter in trained]
    others = [parameter for parameter in group["params"] if parameter not in trained]
    return {"params": by_rls, **mine}, {"params": others, **rest}


def check_fallback_options(options: Mapping[str, Any], fallback: Optimizer) -> None:
    """Raise ValueError for options that the fallback does not have."""
    known = fallback.defaults.keys() | LABELS | {"params", "max_grad_norm"}
    if options.keys() - known:
        raise ValueError(
            f"{_unknown(options.keys() - known, known - {'params'})} (of the fallback); and in "
            f"groups with layers that RLS trains, {', '.join(sorted(PAPER))}"
        )


def _unknown(keys: Iterable[str], known: Iterable[str]) -> str:
    wrong = ", ".join(repr(key) for key in sorted(keys))
    return f"a param group has the unknown key {wrong}; known here are {', '.join(sorted(known))}"


def make_fallback(factory: Any, group: Group) -> Optimizer:
    """Make the fallback optimizer of a group, and check that RLS can step it.

    The factory is given parameters, or a dict of them if the group has options of its own. In
    place of an empty list it is given a placeholder, which is then removed.
    """
    if not callable(factory):
        raise TypeError(
            f"fallback must make an optimizer from parameters, such as torch.optim.AdamW or "
            f"lambda params: torch.optim.SGD(params, lr=0.1), got {_short(factory)}"
        )
    given = group["params"] or [nn.Parameter(torch.zeros(1))]
    options = {k: v for k, v in group.items() if k not in ("params", "max_grad_norm")}
    fallback = factory([{"params": [*given], **options}] if options else [*given])
    if not isinstance(fallback, Optimizer):
        raise TypeError(f"fallback must return a torch.optim.Optimizer, got {_short(fallback)}")
    closure = inspect.signature(fallback.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"fallback cannot be {type(fallback).__name__}: its step needs a closure of its own"
        )
    if {*given} != {parameter for made in fallback.param_groups for parameter in made["params"]}:
        raise ValueError("fallback must train exactly the parameters that it is given")
    for made in fallback.param_groups if not group["params"] else ():
        made["params"] = []
    return fallback


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"


def is_row_of_theta(bias: Any, group_of: Mapping[Any, Group]) -> bool:
    """Return whether a bias is trained by RLS, as a row of Theta."""
    if bias is None or not bias.requires_grad or bias not in group_of:
        return False
    return bool(group_of[bias]["method"] == "rls")


def clip_factor(group: Group, norm: float | None) -> float:
    """Return the factor by which ``clip_grad_norm_`` would scale gradients of the norm ``norm``."""
    if norm is None or group["max_grad_norm"] is None:
        return 1.0
    return min(1.0, float(group["max_grad_norm"]) / (norm + 1e-6))


def check_trainable(parameter: Any, name: str) -> None:
    """Raise if a parameter is complex or sparse, which neither RLS nor the fallback trains."""
    if parameter.is_complex():
        raise ValueError(
            f"parameter {name!r} is complex ({parameter.dtype}); RLS trains real parameters: "
            f"store its real and imaginary parts"
        )
    if parameter.layout != torch.strided:
        raise ValueError(
            f"parameter {name!r} has layout {parameter.layout}; RLS trains dense parameters"
        )
