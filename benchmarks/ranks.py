"""Time a training step on two gloo processes and on one, with equal batches and one thread each.

python benchmarks/ranks.py [--runs 2] [--turns 15] [--out benchmarks/results/ranks.json]

All contenders take turns in the same two processes. In the turns of one process, the other waits.
On a machine with other work, the CPU seconds of the first rank say more than the seconds.
"""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from torchrls import RLS
from torchrls.lab.bench.networks import Network, Transformer
from torchrls.lab.experiments.machine import describe
from torchrls.lab.experiments.models import Feedforward

NETWORKS = {
    "784-512-512-10, batch 256": Network(
        partial(Feedforward, 784, 512, 512, 10), (256, 784), 10, steps=5, turns=1
    ),
    "transformer 4 x 256, batch 16, 64 steps": Network(
        Transformer, (16, 64, 256), 10, steps=1, turns=1
    ),
}


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Make Adam; the options of RLS are ignored."""
    return torch.optim.Adam(model.parameters())


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": adam,
    "RLS": RLS,
    "RLS.paper, momentum 0.5": partial(RLS.paper, momentum=0.5),
    "RLS, shard_inverse": partial(RLS, shard_inverse=True),
}
SETTINGS = ("one process", "two processes")
#: The optimizers that are timed on one process, where sharding does nothing.
ALONE = ("Adam", "RLS", "RLS.paper, momentum 0.5")


@dataclass
class Contender:
    """A network, its optimizer and this rank's part of each batch.

    Args:
        times: the mean seconds of a step, for each turn.
        works: the mean CPU seconds of a step, for each turn.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Tensor, Tensor]]
    times: list[float] = field(default_factory=list)
    works: list[float] = field(default_factory=list)

    def step(self, number: int) -> None:
        """Take one training step on a batch."""
        x, y = self.batches[number % len(self.batches)]
        self.optimizer.zero_grad()
        cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def turn(self, steps: int) -> None:
        """Take some steps, and append the means of their seconds and CPU seconds."""
        start, work = time.perf_counter(), time.process_time()
        for number in range(steps):
            self.step(number)
        self.times.append((time.perf_counter() - start) / steps)
        self.works.append((time.process_time() - work) / steps)

    def forget(self) -> None:
        """Drop the times of the first turn, in which caches and allocators were cold."""
        self.times.clear()
        self.works.clear()


def alone(network: Network, make: Callable[..., torch.optim.Optimizer]) -> Contender:
    """Make a contender for one process."""
    torch.manual_seed(0)
    model = network.make()
    return Contender(model, make(model, process_group=False), network.batches(5))


def together(network: Network, make: Callable[..., torch.optim.Optimizer]) -> Contender:
    """Make a contender for all processes, with DistributedDataParallel."""
    torch.manual_seed(0)
    model = DistributedDataParallel(network.make())
    rank, count = dist.get_rank(), dist.get_world_size()
    batches = [(x.chunk(count)[rank], y.chunk(count)[rank]) for x, y in network.batches(5)]
    return Contender(model, make(model), batches)


@contextmanager
def exchanged() -> Iterator[dict[str, int]]:
    """Count calls and bytes of all_reduce and broadcast within the context.

    Replaces these functions of torch.distributed, which the optimizer calls; the exchange of
    gradients by DistributedDataParallel is not counted.
    """
    volume = {"calls": 0, "bytes": 0}
    originals = {name: getattr(dist, name) for name in ("all_reduce", "broadcast")}

    def counted(function: Callable[..., Any], tensor: Tensor, *args: Any, **options: Any) -> Any:
        volume["calls"] += 1
        volume["bytes"] += tensor.numel() * tensor.element_size()
        return function(tensor, *args, **options)

    for name, function in originals.items():
        setattr(dist, name, partial(counted, function))
    try:
        yield volume
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def serve(rank: int, count: int, port: int, turns: int, results: Any) -> None:
    """Run one rank: measure all networks; the first rank puts the results into a queue."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=count)
    for name, network in NETWORKS.items():
        measured = measure(network, turns)
        if rank == 0:
            results.put((name, measured))
    if rank == 0:
        results.put((None, describe()))
    dist.barrier()
    dist.destroy_process_group()


def measure(network: Network, turns: int) -> dict[str, Any]:
    """Time all contenders of a network in turns; return the results on the first rank."""
    ones = {name: alone(network, OPTIMIZERS[name]) for name in ALONE}
    twos = {name: together(network, make) for name, make in OPTIMIZERS.items()}
    volumes = {name: warm_up(contender) for name, contender in twos.items()}
    for turn in range(turns + 1):
        for name, contender in twos.items():
            dist.barrier()
            if name in ones and dist.get_rank() == 0:
                ones[name].turn(network.steps)
            dist.barrier()
            contender.turn(network.steps)
        if turn == 0:
            for contender in (*ones.values(), *twos.values()):
                contender.forget()
    if dist.get_rank() > 0:
        return {}
    parameters = sum(p.numel() for p in twos["Adam"].model.parameters())
    return {
        "gradient bytes": 4 * parameters,
        SETTINGS[0]: summary(ones, {}),
        SETTINGS[1]: summary(twos, volumes),
    }


def warm_up(contender: Contender) -> dict[str, int]:
    """Take two steps; return calls and bytes that the second one has exchanged."""
    contender.step(0)
    with exchanged() as volume:
        contender.step(1)
    return volume


def summary(
    contenders: dict[str, Contender], volumes: dict[str, dict[str, int]]
) -> dict[str, dict[str, Any]]:
    """Return medians and ratios to Adam of each contender, with the exchanged volumes."""
    base = contenders["Adam"]
    return {
        name: {
            "seconds": median(contender.times),
            "to Adam": ratio(contender.times, base.times),
            "CPU seconds": median(contender.works),
            "CPU to Adam": ratio(contender.works, base.works),
            **volumes.get(name, {}),
        }
        for name, contender in contenders.items()
    }


def ratio(times: list[float], others: list[float]) -> float:
    """Return the median over the turns of the ratio of two times in the same round."""
    return median(time / other for time, other in zip(times, others, strict=True))


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(turns: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Start both ranks, print results as they come; return them by network, and the machine."""
    context = mp.get_context("spawn")
    results, port = context.Queue(), free_port()
    arguments = (2, port, turns, results)
    ranks = mp.spawn(serve, arguments, nprocs=2, join=False)
    measured: dict[str, Any] = {}
    for name, values in iter(results.get, None):
        if name is None:
            ranks.join()
            return measured, values
        measured[name] = values
        show(name, values)
    raise RuntimeError("the ranks have ended without a result")


def show(name: str, values: dict[str, Any]) -> None:
    """Print the results of a network."""
    print(f"\n{name}; gradients: {values['gradient bytes']:,} bytes")
    for setting in SETTINGS:
        for label, one in values[setting].items():
            line = f"{label:<24} {setting:<14}"
            line += f"{1e3 * one['seconds']:8.1f} ms {one['to Adam']:5.2f} x"
            line += f"{1e3 * one['CPU seconds']:8.1f} ms of CPU {one['CPU to Adam']:5.2f} x"
            print(line + f" {one.get('bytes', 0):>11,} bytes", flush=True)


def table(runs: list[dict[str, Any]]) -> str:
    """Return the table of docs/scaling.md: the numbers of all runs side by side."""
    parts = ("ms of CPU", "x Adam", "x Adam by the clock")
    headings = [f"{setting}: {part}" for setting in SETTINGS for part in parts]
    lines = [["", *headings, "kB exchanged"], ["---"] * (len(headings) + 2)]
    for network in runs[0]:
        lines.append([f"**{network}**", *[""] * (len(headings) + 1)])
        for label, last in runs[-1][network][SETTINGS[1]].items():
            cells = [
                cell for setting in SETTINGS for cell in cells_of(runs, network, setting, label)
            ]
            lines.append([label, *cells, f"{last['bytes'] / 1e3:,.0f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells_of(runs: list[dict[str, Any]], network: str, setting: str, label: str) -> list[str]:
    """Return the three cells of a contender in a setting; empty ones if it was not timed there."""
    values = [run[network][setting].get(label) for run in runs]
    if None in values:
        return [""] * 3
    times = ", ".join(f"{1e3 * numbers['CPU seconds']:.0f}" for numbers in values)
    ratios = [
        ", ".join(f"{numbers[key]:.2f}" for numbers in values) for key in ("CPU to Adam", "to Adam")
    ]
    return [times, *ratios]


def main(runs: int, turns: int, out: Path) -> None:
    """Repeat the measurement, write all results and print the table."""
    done = [run(turns) for _ in range(runs)]
    results, machines = [measured for measured, _ in done], [machine for _, machine in done]
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {"turns": turns, "processes": 2, "runs": results, "machine": machines[-1]}
    out.write_text(json.dumps(content, indent=2) + "\n")
    print(f"\n{table(results)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/ranks.json"))
    main(**vars(parser.parse_args()))
