"""When P and Q of the default step learn: always at first, then every second time.

What they learn changes slowly. In the steps between, which cost less, they are used as they are; a
step in which they learn counts twice.
"""

from __future__ import annotations

from typing import NamedTuple

#: So many steps at first, and one in so many later.
EARLY, EVERY = 64, 2


class Turn(NamedTuple):
    """What there is to learn in a step.

    Attributes:
        number: how often has been learnt before.
        weight: how many steps this one counts for; 0 if nothing is learnt.
    """

    number: int
    weight: int


def turn_of(step: int) -> Turn:
    """That of a step; the first one is 1.

    Example:
        >>> turn_of(64), turn_of(65), turn_of(66)
        (Turn(number=63, weight=1), Turn(number=64, weight=0), Turn(number=64, weight=2))
    """
    if step <= EARLY:
        return Turn(step - 1, 1)
    late, rest = divmod(step - EARLY, EVERY)
    return Turn(EARLY + late - (rest == 0), 0 if rest else EVERY)
