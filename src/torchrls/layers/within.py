"""Contexts that compiled code can enter."""

from __future__ import annotations

from typing import Any


class Within:
    """Within the context, ``entries`` are the last ones of a list.

    A class: ``torch.compile`` takes generators as contexts into its graphs since torch 2.7 only.

    Example:
        >>> stack = ["outer"]
        >>> with Within(stack, ["inner"]):
        ...     stack
        ['outer', 'inner']
        >>> stack
        ['outer']
    """

    def __init__(self, stack: list[Any], entries: list[Any]) -> None:
        self.stack = stack
        self.entries = entries

    def __enter__(self) -> None:
        self.stack.extend(self.entries)

    def __exit__(self, *exception: object) -> None:
        for _ in self.entries:
            self.stack.pop()
