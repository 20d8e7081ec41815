"""A lock for what one thread alone may do at a time."""

from __future__ import annotations

import threading


class Turns:
    """A context that one thread can be in; it is an error, and no reason to wait, if one is.

    Example:
        >>> turns = Turns()
        >>> with turns:
        ...     pass
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "another thread is inside of step() or zero_grad() of this optimizer: threads that "
                "train one model have to take turns, with a threading.Lock around zero_grad(), "
                "forward, backward() and step()"
            )

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
