"""Peak memory of a training step, each contender in a process of its own.

The peak is the resident set of the process after three steps, less that before the model was
made. What RLS must keep is P; the rest should be what Adam needs.

    python benchmarks/memory.py
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch
from step_time import CONTENDERS, NETWORKS, machine
from torch import nn

from torchrls import RLS


def peak() -> int:
    """Bytes of the largest resident set so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(network: str, contender: str) -> dict[str, int]:
    """To be called in a fresh process."""
    make, shape, classes, _ = NETWORKS[network]
    x, y = torch.rand(shape), torch.randint(classes, shape[:1])
    torch.ones(8, 8) @ torch.ones(8, 8)
    before = peak()
    model = make()
    optimizer = CONTENDERS[contender](model)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    inverses = 0
    if isinstance(optimizer, RLS):
        found = [optimizer.state[layer.weight]["inverse"] for layer in optimizer.layers]
        inverses = sum(P.numel() * P.element_size() for P in found)
    return {"peak": peak() - before, "inverses": inverses}


def main(out: Path, only: str) -> None:
    results: dict[str, dict[str, dict[str, int]]] = {}
    for network in (name for name in NETWORKS if only in name):
        print(network)
        results[network] = {}
        for contender in CONTENDERS:
            command = [sys.executable, __file__, "--one", network, contender]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = results[network][contender] = json.loads(done.stdout)
            beyond = found["peak"] - found["inverses"]
            ratio = beyond / results[network].get("Adam", found)["peak"]
            print(
                f"  {contender:<12} peak {found['peak'] / 1e6:8.1f} MB, of which P "
                f"{found['inverses'] / 1e6:6.1f} MB; without P {ratio:.2f} x Adam"
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=2, metavar=("NETWORK", "CONTENDER"))
    parser.add_argument("--only", default="", help="networks with this in their name")
    parser.add_argument("--out", type=Path, default=Path("runs/memory.json"))
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(*arguments.one)))
    else:
        main(arguments.out, arguments.only)
