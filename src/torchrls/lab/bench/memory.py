"""The memory of a training step, measured with each contender in a process of its own.

"peak" is the growth of the largest resident set from before the network is made to after three
steps, "state" the size of all tensors in the optimizer's state, "P" the part of the state that
holds inverses. All sizes are in bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchrls import RLS
from torchrls.lab.bench.contenders import FIRST_ORDER, OURS, PEERS, build
from torchrls.lab.bench.networks import NETWORKS, Network

#: The first fully connected layer of VGG-16, whose dense P would take 2.5 GB.
LARGE = {
    "Linear 25,088-4,096, batch 32": Network(
        lambda: nn.Linear(25088, 4096), (32, 25088), 4096, 1, 1
    )
}


def peak() -> int:
    """Return the size of the largest resident set of this process so far, in bytes."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(network: Network, contender: str) -> dict[str, int]:
    """Train for three steps and return peak, state and P in bytes. Needs a fresh process."""
    batches = network.batches(2)
    torch.ones(8, 8) @ torch.ones(8, 8)  # loads the linear algebra library
    before = peak()
    model = network.make()
    optimizer = build({**FIRST_ORDER, **OURS, **PEERS}[contender], model)
    for i in range(3):
        x, y = batches[i % 2]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    inverses = [
        state.get(key)
        for state in optimizer.state.values()
        for key in ("inverse", "directions")
        if isinstance(optimizer, RLS)
    ]
    return {"peak": peak() - before, "state": _bytes(optimizer.state), "P": _bytes(inverses)}


def _bytes(value: Any) -> int:
    """Return the size of all tensors in nested dicts, lists and tuples, in bytes."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_bytes(item) for item in value.values())
    return sum(_bytes(item) for item in value) if isinstance(value, (list, tuple)) else 0


def measure_all(
    networks: Iterable[str], contenders: Iterable[str]
) -> Iterable[tuple[str, str, Any]]:
    """Yield (network, contender, result of :func:`measure`), each from a new process.

    The result of a process that fails is ``{"failure": the last line of its error}``.
    """
    for network in networks:
        for contender in contenders:
            if network in LARGE and contender.startswith("HRLS"):  # a Linear has no ``head``
                continue
            command = [sys.executable, "-m", "torchrls.lab.bench.memory", network, contender]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                yield network, contender, {"failure": last[:160]}
            else:
                yield network, contender, json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(measure({**NETWORKS, **LARGE}[sys.argv[1]], sys.argv[2])))
