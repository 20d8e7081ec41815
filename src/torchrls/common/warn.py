"""Warnings: each once per optimizer, pointing to the user's own line."""

from __future__ import annotations

import inspect
import os
import warnings

import torch


class RLSWarning(UserWarning):
    """Training can go on, but something is not as it should be."""


class Notices:
    """What an optimizer has warned of already."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def once(self, key: str, text: str) -> None:
        """Warn, unless this optimizer has done so under this key."""
        if key not in self._given:
            self._given.add(key)
            warnings.warn(text, RLSWarning, stacklevel=_levels_to_the_user())

    def has(self, key: str) -> bool:
        return key in self._given

    def add(self, *keys: str) -> None:
        """Take these as warned of, too."""
        self._given.update(keys)


def _levels_to_the_user() -> int:
    """How far up the first caller outside of torch and torchrls is."""
    inside = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level
