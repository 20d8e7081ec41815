"""Convolutions: rows are the receptive fields, equations (3), (4) and (72)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import pad

from torchrls.layers.base import Adapter, Block, Rows, argument, register
from torchrls.layers.extent import extent_of
from torchrls.layers.sets import sizes_of_sets, sums_of_sets, wants_first
from torchrls.matrix.inverse import statistics_dtype


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvAdapter(Adapter):
    """The mean receptive field needs no im2col.

    The mean is linear, so the images are added up first, and the patches are those of one
    image. Padding is linear too, in all of its modes.
    """

    in_place = True

    def blocks(self, module: Any) -> list[Block]:
        return [Block(inputs=prod(module.weight.shape[1:]), groups=module.groups)]

    def rows(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Rows | None]:
        x = batched(module, argument(args, kwargs, 0, "input"))
        patches = receptive_fields(module, sums_of_sets(x, 0))
        spatial = tuple(range(2, patches.dim() // 2 + 1))
        positions = prod([patches.shape[dim] for dim in spatial])
        found = rows_of(module, patches.sum(spatial), x.shape[0], positions)
        if not wants_first():
            return [found]
        image = sum_of_squares(x).unsqueeze(0)
        squares = receptive_fields(module, image).reshape(module.groups, -1).sum(1)
        times = prod(module.kernel_size)
        return [found.with_first(squares, extent_in_groups(module, x, times))]


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeAdapter(Adapter):
    """Rows are the input's channel vectors; the bias is outside of Theta (fallback)."""

    in_place = True

    def blocks(self, module: Any) -> list[Block]:
        inputs = module.in_channels // module.groups
        return [Block(bias=None, inputs=inputs, groups=module.groups, inputs_first=True)]

    def rows(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Rows | None]:
        x = batched(module, argument(args, kwargs, 0, "input"))
        total = sums_of_sets(x, 0, tuple(range(2, x.dim())))
        found = rows_of(module, total, x.shape[0], prod(x.shape[2:]))
        if not wants_first():
            return [found]
        squares = sum_of_squares(x).reshape(module.groups, -1).sum(1)
        return [found.with_first(squares, extent_in_groups(module, x, 1))]


def extent_in_groups(module: Any, x: Tensor, times: int) -> Tensor | None:
    """That of the channels, each for so many places of the kernel."""
    found = extent_of(x, 1)
    if found is None:
        return None
    return found.repeat_interleave(times, -1).reshape(len(found), module.groups, -1)


def sum_of_squares(x: Tensor) -> Tensor:
    """Over the samples."""
    return x.detach().to(statistics_dtype(x.dtype)).square().sum(0)


def rows_of(module: Any, total: Tensor, samples: int, positions: int) -> Rows:
    """Rows from the totals (sets, channels, ...), the same number in every place."""
    if len(total) == 1:
        total = total.reshape(module.groups, -1)
        return Rows(total, samples * positions)
    sets = total.reshape(len(total), module.groups, -1).movedim(0, 1)
    counts = [size * positions for size in sizes_of_sets(samples)]
    return Rows(sets, counts)


def batched(module: Any, x: Tensor) -> Tensor:
    """Unbatched input becomes a batch of one."""
    return x if x.dim() == len(module.kernel_size) + 2 else x.unsqueeze(0)


def receptive_fields(module: Any, images: Tensor) -> Tensor:
    """The patches of images (images, channels, *positions, *kernel), as a view; equation (3)."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    patches = pad(images, module._reversed_padding_repeated_twice, mode=mode)
    sizes = zip(module.kernel_size, module.dilation, module.stride, strict=True)
    for axis, (kernel, dilation, stride) in enumerate(sizes, start=2):
        patches = patches.unfold(axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    return patches
