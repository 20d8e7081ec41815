"""Which group every parameter is in: found anew only when something about that has changed."""

from __future__ import annotations

import operator
from typing import Any

from torchrls.groups import Group


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
        self._groups: list[Group] = []
        self._parameters: list[Any] = []
        self._facts: list[Any] = []
        self._found: dict[Any, Group] = {}

    def of(self, groups: list[Group]) -> dict[Any, Group]:
        """The group of every parameter."""
        parameters = [parameter for group in groups for parameter in group["params"]]
        facts: list[Any] = [(p.requires_grad, p.dtype, p.device) for p in parameters]
        facts += [len(group["params"]) for group in groups]
        same = facts == self._facts and len(groups) == len(self._groups)
        same = same and all(map(operator.is_, groups, self._groups))
        if not (same and all(map(operator.is_, parameters, self._parameters))):
            self._groups, self._parameters, self._facts = list(groups), parameters, facts
            self._found = {p: group for group in groups for p in group["params"]}
        return self._found
