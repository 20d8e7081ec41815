"""Time the steps of two commits against each other, turn by turn: python benchmarks/two_commits.py.

    git worktree add /tmp/before COMMIT
    python benchmarks/two_commits.py /tmp/before/src src --out benchmarks/results/two-commits.json

Each commit has a process of its own. The two take turns: one waits while the other trains, and who
begins changes from turn to turn. Printed is the median over the turns of the ratio of their times,
new to old, and the middle half of the ratios. Only public names of torchrls are used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path


def networks() -> dict:
    """Return the networks: a function that makes one, the shape of a batch, and steps of a turn."""
    import torch
    from torch import nn

    def mlp(*sizes):
        layers = []
        for n, m in itertools.pairwise(sizes):
            layers += [nn.Linear(n, m), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    class Block(nn.Module):
        def __init__(self, n, m, stride):
            super().__init__()
            self.one = nn.Conv2d(n, m, 3, stride, 1, bias=False)
            self.two = nn.Conv2d(m, m, 3, 1, 1, bias=False)
            self.norms = nn.ModuleList([nn.BatchNorm2d(m), nn.BatchNorm2d(m)])
            self.skip = nn.Conv2d(n, m, 1, stride, bias=False)

        def forward(self, x):
            y = self.norms[0](self.one(x)).relu()
            return (self.norms[1](self.two(y)) + self.skip(x)).relu()

    def resnet(width=32):
        blocks = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        n = width
        for stage in range(4):
            for stride in (1 + (stage > 0), 1):
                blocks.append(Block(n, width << stage, stride))
                n = width << stage
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 10))

    def vgg():
        sizes, layers = [3, 64, 64, "pool", 128, 128, "pool", 256, 256, "pool"], []
        n = sizes[0]
        for m in sizes[1:]:
            if m == "pool":
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(n, m, 3, padding=1), nn.ReLU()]
            n = m
        return nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    class LSTM(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.LSTM(100, 512, 2, batch_first=True), nn.Linear(512, 10)

        def forward(self, x):
            return self.head(self.body(x)[0][:, -1])

    class Transformer(nn.Module):
        def __init__(self, width=256):
            super().__init__()
            options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, **options)
            self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = nn.Linear(width, 10)

        def forward(self, x):
            return self.head(self.body(x).mean(1))

    torch.manual_seed(0)
    return {
        "64-64-10": (lambda: mlp(64, 64, 10), (32, 64), 100),
        "eight layers of 128": (lambda: mlp(*[128] * 8, 10), (64, 128), 40),
        "784-512-10": (lambda: mlp(784, 512, 10), (128, 784), 20),
        "mini VGG": (vgg, (128, 3, 32, 32), 1),
        "2 x LSTM 512": (LSTM, (64, 40, 100), 1),
        "half ResNet-18": (resnet, (32, 3, 32, 32), 2),
        "transformer 4 x 256": (Transformer, (16, 64, 256), 2),
    }


def optimizers() -> dict:
    """Return the optimizers that are compared."""
    from torchrls import RLS

    return {
        "default": RLS,
        "paper+M": lambda model: RLS.paper(model, momentum=0.5),
        "paper+M+R": lambda model: RLS.paper(model, momentum=0.5, l1=1e-5),
    }


def work() -> None:
    """Train a network for so many steps whenever a line comes in, and answer with the seconds."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    torch.set_flush_denormal(True)
    network = optimizer = None
    for line in sys.stdin:
        command = json.loads(line)
        if "network" in command:
            make, shape, steps = networks()[command["network"]]
            torch.manual_seed(0)
            network = make()
            optimizer = optimizers()[command["optimizer"]](network)
            batches = [(torch.rand(shape), torch.randint(10, shape[:1])) for _ in range(10)]
            endless = itertools.cycle(batches)
        else:
            start = time.perf_counter()
            for _ in range(command["steps"]):
                x, y = next(endless)
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(network(x), y).backward()
                optimizer.step()
            command["seconds"] = time.perf_counter() - start
        command["steps"] = command.get("steps", steps)
        print(json.dumps(command), flush=True)


class Worker:
    """A process that trains with the torchrls of one source folder."""

    def __init__(self, source: str) -> None:
        environment = {**os.environ, "PYTHONPATH": source}
        command = [sys.executable, __file__, "--work"]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **command):
        """Send a command, and return the answer."""
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def described(sources: list[str]) -> dict:
    """Return the machine, and the commits of the source folders."""
    import torch

    git = ["git", "describe", "--always", "--dirty"]
    commits = [
        subprocess.run(git, cwd=source, capture_output=True, text=True).stdout.strip()
        for source in sources
    ]
    with open("/proc/cpuinfo") as file:
        models = [line.partition(": ")[2].strip() for line in file if "model name" in line]
    threads = os.environ.get("OMP_NUM_THREADS", "2")
    machine = {"cpu": models[0], "threads": threads, "torch": torch.__version__}
    return {"machine": machine, "commits": commits}


def main() -> None:
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("sources", nargs="*", help="the src folders of the old and the new commit")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--only", default="", help="networks whose names contain this")
    parser.add_argument("--optimizer", default="", help="optimizers whose names contain this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work()
    workers = [Worker(str(Path(source).resolve())) for source in options.sources]
    rows = []
    for network in networks():
        for optimizer in ("default", "paper+M", "paper+M+R"):
            if options.only not in network or options.optimizer not in optimizer:
                continue
            for worker in workers:
                steps = worker.ask(network=network, optimizer=optimizer)["steps"]
                worker.ask(steps=max(3, steps // 2))  # warm up
            ratios, seconds = [], [[], []]
            for turn in range(options.turns):
                for i in (0, 1) if turn % 2 else (1, 0):
                    seconds[i].append(workers[i].ask(steps=steps)["seconds"] / steps)
                ratios.append(seconds[1][-1] / seconds[0][-1])
            low, middle, high = statistics.quantiles(ratios, n=4)
            old, new = (1e3 * statistics.median(s) for s in seconds)
            row = {"network": network, "optimizer": optimizer, "old ms": old, "new ms": new}
            rows.append({**row, "ratio": middle, "middle half": [low, high]})
            print(
                f"{network:22} {optimizer:10} {old:8.2f} ms {new:8.2f} ms   "
                f"x {middle:.3f}  ({low:.3f} to {high:.3f})",
                flush=True,
            )
            if options.out:
                content = {**described(options.sources), "turns": options.turns, "rows": rows}
                options.out.write_text(json.dumps(content, indent=1) + "\n")
    for worker in workers:
        worker.process.stdin.close()
    return None


if __name__ == "__main__":
    main()
