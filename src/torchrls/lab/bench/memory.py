"""Memory of a training step, each contender in a process of its own.

The peak is the resident set of the process after three steps, less that before the network was
made; the state is what the optimizer keeps between steps.
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

#: VGG-16's first fully connected layer: a dense P of it would be 2.5 GB.
LARGE = {
    "Linear 25,088-4,096, batch 32": Network(
        lambda: nn.Linear(25088, 4096), (32, 25088), 4096, 1, 1
    )
}


def peak() -> int:
    """Bytes of the largest resident set so far."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(network: Network, contender: str) -> dict[str, int]:
    """To be called in a fresh process."""
    batches = network.batches(2)
    torch.ones(8, 8) @ torch.ones(8, 8)
    before = peak()
    model = network.make()
    optimizer = build({**FIRST_ORDER, **OURS, **PEERS}[contender], model)
    for i in range(3):
        x, y = batches[i % 2]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {"peak": peak() - before, "state": _bytes(optimizer.state), "P": _inverses(optimizer)}


def _bytes(value: Any) -> int:
    """Of all tensors in some nest of containers."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_bytes(item) for item in value.values())
    return sum(_bytes(item) for item in value) if isinstance(value, (list, tuple)) else 0


def _inverses(optimizer: torch.optim.Optimizer) -> int:
    if not isinstance(optimizer, RLS):
        return 0
    keys = ("inverse", "directions")
    states = optimizer.state.values()
    return sum(_bytes(state.get(key)) for state in states for key in keys)


def measure_all(
    networks: Iterable[str], contenders: Iterable[str]
) -> Iterable[tuple[str, str, Any]]:
    """(network, contender, result), each from a new process."""
    for network in networks:
        for contender in contenders:
            if network in LARGE and contender.startswith("HRLS"):  # it is its own output layer
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
