"""Settings of glibc's allocator, and counts of page faults.

An allocator may return freed memory to the system, and the next step then gets it back page by
page. Whether glibc does so depends on where the blocks happen to lie. The page faults take a fifth
of a training step and more, with any optimizer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

#: The option numbers of glibc's ``mallopt``.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, MMAP_MAX = -1, -2, -3, -4
#: The values with which freed memory is never returned to the system.
KEEP = {TRIM_THRESHOLD: (1 << 31) - 1, TOP_PAD: 1 << 26, MMAP_MAX: 0}
#: The values that glibc reaches by itself in a long run.
USUAL = {TRIM_THRESHOLD: 1 << 26, TOP_PAD: 1 << 17, MMAP_THRESHOLD: 1 << 25, MMAP_MAX: 1 << 16}


@contextmanager
def kept(wanted: bool = True) -> Iterator[None]:
    """Keep freed memory in the process within the context. Does nothing without glibc."""
    if wanted:
        _set(KEEP)
    try:
        yield
    finally:
        if wanted:
            _set(USUAL)


def _set(options: dict[int, int]) -> None:
    """Call ``mallopt`` with each option and its value, if there is such a function."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return
    for option, value in options.items():
        mallopt(option, value)


def faults() -> int:
    """Return the number of minor page faults of this process so far; 0 if not counted."""
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt
