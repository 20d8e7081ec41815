"""Which group every parameter is in: found anew only when something about that has changed."""

from __future__ import annotations

from typing import Any

from torchrls.routing.groups import Group


class Membership:
    """The groups of all parameters.

    As long as the groups, their parameters, what is frozen, dtypes and devices are what they were,
    it is the same dict: who has worked out something from it needs not do so again.

    Example:
        >>> import torch
        >>> one = torch.nn.Parameter(torch.zeros(2))
        >>> known, groups = Membership(), [{"params": [one]}]
        >>> group_of = known.of(groups)
        >>> known.of(groups) is group_of
        True
        >>> _ = one.requires_grad_(False)
        >>> known.of(groups) is group_of
        False
    """

    def __init__(self) -> None:
        self._facts: list[Any] = []
        self._alive: list[Any] = []  # whose ids are in the facts, so that nobody else gets them
        self._found: dict[Any, Group] = {}

    def of(self, groups: list[Group]) -> dict[Any, Group]:
        """The group of every parameter."""
        facts: list[Any] = []
        for group in groups:
            facts.append(id(group))
            for p in group["params"]:
                facts += id(p), p.requires_grad, p.dtype, p.device
        if facts != self._facts:
            self._found = {p: group for group in groups for p in group["params"]}
            self._facts, self._alive = facts, [*groups, *self._found]
        return self._found
