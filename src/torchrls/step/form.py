"""Which form P has: dense, or of low rank where that would be too large."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchrls.layers import Layer
from torchrls.matrix.inverse import Dense, Inverse
from torchrls.matrix.lowrank import LowRank

if TYPE_CHECKING:
    from torchrls.routing.groups import Group

#: With ``rank="auto"``, a P that would take more bytes than this is of rank ``AUTO_RANK``.
DENSE_BYTES = 1 << 28
AUTO_RANK = 64

#: The names of P's tensors in the state of a weight, in all forms.
KEYS = ("inverse", "directions", "scale", "lost")


def rank_for(asked: Any, groups: int, size: int, itemsize: int) -> int | None:
    """The rank that P is to have, or None if it is to be dense."""
    if asked == "auto":
        asked = AUTO_RANK if groups * size * size * itemsize > DENSE_BYTES else None
    return None if asked is None or asked >= size else int(asked)


def inverse_of(
    state: dict[str, Any], layer: Layer, size: int, group: Group, itemsize: int, first: float
) -> tuple[Inverse, bool]:
    """P as it has to be now, and whether it is what the state has; changes nothing.

    The bias may have been frozen or have come back, and ``rank`` may have been changed.

    Args:
        first: the scale of P_0.
    """
    rank = rank_for(group["rank"], layer.groups, size, itemsize)
    found = stored(state, rank)
    if found is None and rank is None:
        return Dense.first(layer.groups, size, first, like=layer.weight), False
    if found is None:
        assert rank is not None
        return LowRank.first(layer.groups, size, first, like=layer.weight, rank=rank), False
    P = resized(found, size, first)
    if rank is None and isinstance(P, LowRank):
        P = P.dense()
    elif rank is not None and isinstance(P, Dense):
        P = LowRank.of_dense(P, first, rank)
    return P, P is found


def own_storage(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is a part of a larger one: rounding depends on alignment."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def stored(state: dict[str, Any], rank: int | None) -> Inverse | None:
    """P as it is in the state of a weight."""
    if "first" in state and not has_begun(state):
        return None
    if "inverse" in state:
        return Dense(state["inverse"])
    if "directions" not in state:
        return None
    V = state["directions"]
    return LowRank(V, float(state["scale"]), state["lost"], rank or max(V.shape[-2], 1))


def has_begun(state: dict[str, Any]) -> bool:
    """Whether P_0 has been taken from the data; 0 stands where room is kept for it."""
    return float(state.get("first", 0.0)) > 0


def resized(P: Inverse, size: int, scale: float) -> Inverse:
    """P at the size that it has to have."""
    if P.size > size:
        return P.without_last()
    return P.with_last(scale) if P.size < size else P


def store(P: Inverse, state: dict[str, Any]) -> None:
    """Put P into the state of its weight."""
    tensors = P.state()
    for key in KEYS:
        if key in tensors:
            state[key] = tensors[key]
        else:
            state.pop(key, None)
