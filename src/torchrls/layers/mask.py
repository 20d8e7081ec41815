"""The mask of valid rows in padded batches: ``optimizer.rows(mask)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Mask:
    """The valid rows of a batch, (batch, time), or (batch,) for inputs without time.

    Attributes:
        count: the number of valid rows.
        samples: the number of samples that have a valid row.
        seen, heeded: whether a layer was observed under the mask, and whether it fitted one.
    """

    def __init__(self, valid: Any, time_first: bool) -> None:
        if not isinstance(valid, Tensor) or valid.dtype != torch.bool or not 1 <= valid.dim() <= 2:
            given = type(valid).__name__
            if isinstance(valid, Tensor):
                given = f"{tuple(valid.shape)} of {valid.dtype}"
            raise TypeError(
                f"a mask of rows is a bool tensor (batch, time) or (batch,), got {given}"
            )
        self.valid = valid
        self.time_first = time_first
        self.count = int(valid.sum())
        self.samples = int(valid.any(-1).sum()) if valid.dim() == 2 else len(valid)
        self.seen = self.heeded = False
        if self.count == 0:
            raise ValueError(f"the mask of rows, {tuple(valid.shape)}, has no valid row")

    def oriented(self, time_first: bool | None) -> Tensor:
        """Return the mask in the layout of inputs: (time, batch) if ``time_first``.

        Args:
            time_first: None if only the user knows; then it is what the user said of the mask.
        """
        transposed = self.time_first if time_first is None else time_first
        return self.valid.mT if transposed and self.valid.dim() == 2 else self.valid

    def fits(self, shape: Sequence[int], time_first: bool | None) -> bool:
        """Return whether the mask has the leading dimensions of some inputs, and note it."""
        fits = self.oriented(time_first).shape == shape
        self.seen, self.heeded = True, self.heeded or fits
        return fits

    def check_heeded(self) -> None:
        """Raise if layers were observed under the mask, but it fitted none of them."""
        if self.seen and not self.heeded:
            raise ValueError(
                f"the mask of rows, {tuple(self.valid.shape)}, fits the input of no layer in this "
                f"pass: it must be (batch, time) where inputs are (batch, time, features); for "
                f"models with time first, pass time_first=True"
            )
