"""What got slower, or larger, from one file of results to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torchrls.lab.bench.results import Results

#: What is compared in each kind of results; times by their ratio to Adam, since machines differ.
QUANTITIES = {"step-time": "to Adam", "memory": "peak"}
UNITS = {"step-time": "time of a step, x Adam", "memory": "peak in bytes"}


class Change(NamedTuple):
    """One figure, before and after."""

    network: str
    contender: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before if self.before else float("inf")


def compare(before: Results, after: Results) -> list[Change]:
    """The figures that both have, the largest increase first.

    Raises:
        ValueError: if the files are of different kinds, or of one that has no figures to compare.
    """
    kinds = {before["kind"], after["kind"]}
    if len(kinds) > 1:
        raise ValueError(f"the files are of different kinds: {' and '.join(sorted(kinds))}")
    (kind,) = kinds
    if kind not in QUANTITIES:
        raise ValueError(
            f"results of {kind} cannot be compared, those of {' and '.join(QUANTITIES)} can"
        )
    found = list(_changes(before["results"], after["results"], QUANTITIES[kind]))
    if not found:
        raise ValueError("the files have no network and contender in common")
    return sorted(found, key=lambda change: -change.ratio)


def _changes(before: Any, after: Any, quantity: str) -> Iterator[Change]:
    for network in before.keys() & after.keys():
        for contender in before[network].keys() & after[network].keys():
            old, new = before[network][contender], after[network][contender]
            if quantity in old and quantity in new:
                yield Change(network, contender, old[quantity], new[quantity])
