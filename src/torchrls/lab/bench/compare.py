"""The comparison of two files of results."""

from __future__ import annotations

from typing import NamedTuple

from torchrls.lab.bench.results import Results

#: The compared key of each kind of results. Times are relative to Adam, since machines differ.
QUANTITIES = {"step-time": "to Adam", "memory": "peak"}
UNITS = {"step-time": "time of a step, x Adam", "memory": "peak in bytes"}


class Change(NamedTuple):
    """The value of one network and contender in both files."""

    network: str
    contender: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """The new value relative to the old one."""
        return self.after / self.before if self.before else float("inf")


def compare(before: Results, after: Results) -> list[Change]:
    """Return the values that both files have, the largest increase first.

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
    quantity, changes = QUANTITIES[kind], []
    old, new = before["results"], after["results"]
    for network in old.keys() & new.keys():
        for contender in old[network].keys() & new[network].keys():
            pair = old[network][contender], new[network][contender]
            if all(quantity in values for values in pair):
                changes.append(Change(network, contender, *(values[quantity] for values in pair)))
    if not changes:
        raise ValueError("the files have no network and contender in common")
    return sorted(changes, key=lambda change: -change.ratio)
