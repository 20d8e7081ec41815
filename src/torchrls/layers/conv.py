"""Convolutions: rows are the receptive fields, equations (3), (4) and (72)."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from torchrls.common.numerics import statistics_dtype
from torchrls.layers.adapter import Adapter, argument, register
from torchrls.layers.layer import Block
from torchrls.layers.rows import Counts, Mask, Rows, extent_of, sizes_of_sets, sums_of_sets


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvAdapter(Adapter):
    """The adapter of convolutions."""

    in_place = True

    def blocks(self, module: Any) -> list[Block]:
        return [Block(inputs=prod(module.weight.shape[1:]), groups=module.groups)]

    def rows(self, module: Any, *args: Any, **kwargs: Any) -> Rows:
        return Patches(module, argument(args, kwargs, 0, "input"))


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeAdapter(Adapter):
    """The adapter of transposed convolutions. Their bias is no row of Theta: fallback."""

    in_place = True

    def blocks(self, module: Any) -> list[Block]:
        inputs = module.in_channels // module.groups
        return [Block(bias=None, inputs=inputs, groups=module.groups, inputs_first=True)]

    def rows(self, module: Any, *args: Any, **kwargs: Any) -> Rows:
        return Channels(module, argument(args, kwargs, 0, "input"))


class Channels(Rows):
    """The channel vectors of images, (samples, channels, ...) or (channels, ...) for one sample."""

    def __init__(self, module: Any, x: Tensor) -> None:
        x = x if x.dim() == len(module.kernel_size) + 2 else x.unsqueeze(0)
        super().__init__(x)
        self.module = module

    def heed(self, mask: Mask) -> None:
        """Do nothing: masks are for sequences."""

    def sums(self, sets: int) -> tuple[Tensor, Counts]:
        total = sums_of_sets(self.x, sets, 0, tuple(range(2, self.x.dim())))
        return self._in_groups(total, sets, prod(self.x.shape[2:]))

    def _in_groups(self, total: Tensor, sets: int, positions: int) -> tuple[Tensor, Counts]:
        """Return sums (sets, channels, ...) as (groups, sets, inputs), and the counts."""
        groups = self.module.groups
        counts = [size * positions for size in sizes_of_sets(self.x.shape[0], sets)]
        return total.reshape(sets, groups, -1).movedim(0, 1), [counts] * groups

    def squares(self) -> Tensor:
        x = self.x.detach().to(statistics_dtype(self.x.dtype))
        fields = self.fields(x.square().sum(0, keepdim=True))
        return fields.reshape(self.module.groups, -1).sum(1)

    def fields(self, images: Tensor) -> Tensor:
        """Return the entries of the rows of images, (images, channels, *positions, ...)."""
        return images

    def extent(self) -> Tensor | None:
        extent = extent_of(self.x, 1)
        return None if extent is None else extent.reshape(len(extent), self.module.groups, -1)


class Patches(Channels):
    """The receptive fields of images.

    Their sum needs no im2col: padding (in all modes) and patches are linear in the image, so the
    images are added up first, and the patches are those of the sum.
    """

    def sums(self, sets: int) -> tuple[Tensor, Counts]:
        patches = self.fields(sums_of_sets(self.x, sets, 0))
        spatial = tuple(range(2, patches.dim() // 2 + 1))
        positions = prod([patches.shape[dim] for dim in spatial])
        return self._in_groups(patches.sum(spatial), sets, positions)

    def extent(self) -> Tensor | None:
        extent = super().extent()
        places = prod(self.module.kernel_size)
        return None if extent is None else extent.repeat_interleave(places, -1)

    def fields(self, images: Tensor) -> Tensor:
        """Return a view of the patches, (images, channels, *positions, *kernel); equation (3)."""
        module = self.module
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        patches = pad(images, module._reversed_padding_repeated_twice, mode=mode)
        sizes = zip(module.kernel_size, module.dilation, module.stride, strict=True)
        for axis, (kernel, dilation, stride) in enumerate(sizes, start=2):
            patches = patches.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        return patches
