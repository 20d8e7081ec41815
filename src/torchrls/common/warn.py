"""Warnings: each once per optimizer, pointing to the user's own line."""

from __future__ import annotations

import inspect
import os
import warnings

import torch


class RLSWarning(UserWarning):
    """A warning about something unintended, with which training can go on."""


class Notices:
    """The warnings that an optimizer has given already, by their keys."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def once(self, key: str, text: str) -> None:
        """Warn, unless the key is known; the warning names the first line outside of torchrls."""
        if key in self._given:
            return
        self._given.add(key)
        inside = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
        frame, level = inspect.currentframe(), 0
        while frame is not None and frame.f_code.co_filename.startswith(inside):
            frame, level = frame.f_back, level + 1
        warnings.warn(text, RLSWarning, stacklevel=level + 1)

    def has(self, key: str) -> bool:
        """Return whether a warning with this key has been given."""
        return key in self._given

    def add(self, *keys: str) -> None:
        """Mark warnings as given."""
        self._given.update(keys)
