"""The memory that a process keeps, and the page faults of one that does not.

Memory that is freed may be handed back to the system, which then hands it out again page by page,
at the next step. With glibc that is a matter of luck, of where the blocks happen to be, and takes
a fifth of a training step and more, whatever the optimizer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

#: Options of glibc's ``mallopt``: to keep all, and what it comes to by itself in a long run.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, MMAP_MAX = -1, -2, -3, -4
KEEP = {TRIM_THRESHOLD: (1 << 31) - 1, TOP_PAD: 1 << 26, MMAP_MAX: 0}
USUAL = {TRIM_THRESHOLD: 1 << 26, TOP_PAD: 1 << 17, MMAP_THRESHOLD: 1 << 25, MMAP_MAX: 1 << 16}


@contextmanager
def kept(wanted: bool = True) -> Iterator[None]:
    """Within the context, memory is not handed back, where the allocator is that of glibc."""
    if wanted:
        _set(KEEP)
    try:
        yield
    finally:
        if wanted:
            _set(USUAL)


def _set(options: dict[int, int]) -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another system, another allocator
        return
    for option, value in options.items():
        mallopt(option, value)


def faults() -> int:
    """Page faults of this process until now that needed no disk; 0 where nobody counts them."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt
