"""Train on two processes, each with half of every minibatch; the result equals one process's.

torchrun --nproc-per-node 2 examples/distributed/digits.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrls import RLS
from torchrls.lab.experiments.data import digits


def main(epochs: int = 5) -> float:
    """Train and test; return the accuracy in per cent, which is equal on all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    split, order = digits(0), torch.Generator().manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    )
    optimizer = RLS(model)
    for _ in range(epochs):
        for x, y in split.batches(64, order):
            x, y = (part.tensor_split(ranks)[rank] for part in (x, y))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        right = model(split.test_x).argmax(1) == split.test_y
    return 100 * right.double().mean().item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    line = f"rank {dist.get_rank()}: {main():.1f} % of the test digits\n"
    print(line, end="", flush=True)  # one write, so that the lines of the ranks do not mix
    dist.destroy_process_group()
