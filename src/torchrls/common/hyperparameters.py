"""The hyperparameters of RLS: their names, ranges, the defaults and the paper's values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Real
from typing import Any, ParamSpec

import torch

#: The values of section VI of the paper, without its two improvements, momentum and L1.
PAPER: dict[str, Any] = {
    "lr": 1.0,
    "forgetting": 1.0,
    "ratio": 0.1,
    "momentum": 0.0,
    "l1": 0.0,
    "initial_inverse": 1.0,
    "time_scaling": True,
    "max_grad_norm": None,
    "rank": None,
    "factored": True,
    "averages": 1,
    "step": "gain",
    "weight_decay": 0.0,
    "total_steps": None,
}
#: The values of ``RLS(model)``; docs/convergence.md has the measurements.
DEFAULTS: dict[str, Any] = {
    **PAPER,
    "momentum": 0.9,
    "initial_inverse": "auto",
    "time_scaling": False,
    "rank": "auto",
    "averages": 16,
    "step": "adaptive",
}
#: The kinds of steps: the default one, and the paper's, which is the gain of RLS itself.
STEPS = ("adaptive", "gain")

#: Arguments of other optimizers, and what to use instead.
ELSEWHERE = {
    "learning_rate": "lr is a factor of steps that fit each layer, 1 by default",
    "betas": "momentum is the first of them, and the second is 0.99 for all",
    "beta1": "it is momentum here",
    "beta2": "it is 0.99 for all",
    "eps": "P is damped by a share of its inputs' energy, which needs no number",
    "amsgrad": "there is no such variant",
    "nesterov": "there is no such variant",
    "fused": "the fused kernel is used where torch has one",
    "foreach": "layers of one shape are always stacked",
    "warmup_steps": "total_steps brings warm-up and decay; a torch scheduler works as well",
}
P = ParamSpec("P")

_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda v: v >= 0, "at least 0"),
    "forgetting": (lambda v: 0 < v <= 1, "in (0, 1]"),
    "ratio": (lambda v: v >= 0, "at least 0"),
    "momentum": (lambda v: 0 <= v < 1, "in [0, 1)"),
    "l1": (lambda v: v >= 0, "at least 0"),
    "initial_inverse": (lambda v: v > 0, 'greater than 0, or "auto"'),
    "max_grad_norm": (lambda v: v > 0, "greater than 0, or None"),
    "weight_decay": (lambda v: v >= 0, "at least 0"),
}
#: The hyperparameters that are whole numbers, with the other values allowed and a hint for errors.
_WHOLE = {
    "averages": ("", ""),
    "rank": (', "auto" or None', "; None keeps the whole matrix"),
    "total_steps": (" or None", "; None for a run without a known end"),
}
#: The values allowed that are no numbers.
_OTHERS: dict[str, tuple[str | None, ...]] = {
    "initial_inverse": ("auto",),
    "max_grad_norm": (None,),
    "rank": ("auto", None),
    "total_steps": (None,),
}


def explained(init: Callable[P, None]) -> Callable[P, None]:
    """Decorate the constructor of RLS: wrong arguments raise an error that says what to write."""
    known = inspect.signature(init).parameters

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        if len(args) > 2:  # self and the model
            raise TypeError(
                f"RLS takes the model, and all else by name; got {args[2]!r} as well. Write "
                f"RLS(model): its lr is a factor, 1 by default, and Adam's rates are not for it"
            )
        if "model" not in kwargs and len(args) < 2:
            raise TypeError(
                "RLS takes the model itself, since it has to see the inputs of its layers: write "
                "RLS(model), and params= beside it for param groups"
            )
        for name in kwargs:
            if name not in known:
                hint = ELSEWHERE.get(name, f"it has {', '.join(list(known)[2:])}")
                raise TypeError(f"RLS has no argument {name!r}: {hint}. RLS(model) needs none")
        init(*args, **kwargs)

    return checked


def check_step(values: Mapping[str, Any]) -> None:
    """Raise if a hyperparameter of the paper's step is given to the default step."""
    reasons = {
        "initial_inverse": "P of the default step begins with I, whatever the scale of the inputs",
        "time_scaling": "P of the default step learns directions, and not lengths",
        "rank": "P of the default step is in tiles of 64 inputs, which take little memory",
    }
    for name, reason in reasons.items() if values["step"] == "adaptive" else ():
        if values[name] not in (DEFAULTS[name], None):
            call = f"{name}={values[name]!r}"
            raise ValueError(f'{call} is for step="gain", as in RLS.paper(model, {call}): {reason}')


def check(values: Mapping[str, Any]) -> None:
    """Raise if a hyperparameter is of the wrong type or out of range; ignore other names."""
    for name, value in values.items():
        if (value is None or isinstance(value, str)) and value in _OTHERS.get(name, ()):
            continue
        if name in ("time_scaling", "factored"):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        elif name == "step":
            if value not in STEPS:
                raise ValueError(f"step must be one of {', '.join(STEPS)}, got {value!r}")
        elif name in _WHOLE:
            others, hint = _WHOLE[name]
            if isinstance(value, bool) or not isinstance(value, int):
                text = f"a whole number of at least 1{others}"
                raise TypeError(f"{name} must be {text}, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}{hint}")
        elif name in _RANGES:
            inside, text = _RANGES[name]
            is_tensor = isinstance(value, torch.Tensor)
            scalar = is_tensor and value.numel() == 1 and not value.is_complex()
            if isinstance(value, bool) or not (isinstance(value, Real) or scalar):
                raise TypeError(f"{name} must be a number {text}, got {value!r}")
            if not math.isfinite(value):
                raise ValueError(f"{name} must be finite and {text}, got {value}")
            if not inside(float(value)):
                raise ValueError(f"{name} must be {text}, got {value}")
