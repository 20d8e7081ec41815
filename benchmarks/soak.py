"""Train float32 and bfloat16 networks for 100,000 steps beside a twin in float64.

python benchmarks/soak.py [--steps 100000] [--out benchmarks/results/soak.json] [--only "..."]

Each case takes some ten minutes of one core. Cases are added to the file of --out; --table prints
the results in that file.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import resource
import time
from pathlib import Path

import torch
from torch import nn

from torchrls import RLS
from torchrls.lab.experiments.machine import describe

INPUTS, HIDDEN, OUTPUTS, BATCH = 12, 16, 4, 8
KINDS = {
    "RLS(model)": RLS,
    "RLS.paper": lambda model, **options: RLS.paper(model, momentum=0.5, lr=0.1, **options),
}
CASES = [
    (kind, dtype, forgetting)
    for kind in KINDS
    for dtype in (torch.float32, torch.bfloat16)
    for forgetting in (1.0, 0.99)
]


def network() -> nn.Sequential:
    """Return a network of tanh units, the same in every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))


class Stream:
    """A source of batches: correlated inputs, and noisy outputs of a fixed network.

    Inputs are rounded to the dtype, so that both twins see equal numbers.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.mixing = torch.randn(INPUTS, INPUTS, generator=self.generator)
        self.teacher, self.dtype = network(), dtype

    @torch.no_grad()
    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch (x, y), in float32."""
        x = torch.randn(BATCH, INPUTS, generator=self.generator) @ self.mixing / INPUTS**0.5
        noise = torch.randn(BATCH, OUTPUTS, generator=self.generator)
        x = x.to(self.dtype).float()
        return x, self.teacher(x) + 0.1 * noise


def learner(kind: str, dtype: torch.dtype, forgetting: float) -> tuple[nn.Module, RLS]:
    """Return a model, whose parameters are the teacher's times 0.5, and its optimizer."""
    model = copy.deepcopy(network()).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model, KINDS[kind](model, forgetting=forgetting)


def step(model: nn.Module, optimizer: RLS, x: torch.Tensor, y: torch.Tensor) -> float:
    """Take one training step in the dtype of the model; return the loss."""
    dtype = next(model.parameters()).dtype
    optimizer.zero_grad()
    loss = (model(x.to(dtype)).to(y.dtype) - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def inverses(optimizer: RLS) -> list[torch.Tensor]:
    """Return the matrices P of all layers, in float64."""
    return [optimizer.state[layer.weight]["inverse"].double() for layer in optimizer.layers]


def resident() -> float:
    """Return the resident memory of the process in MB (Linux only)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def diagnose(optimizer: RLS, twin: RLS) -> dict[str, float]:
    """Return the difference between P and the twin's P, the soundness of P, and the memory."""
    (P, second), (exact, _) = inverses(optimizer), inverses(twin)
    return {
        "difference of P": ((P - exact).norm() / exact.norm()).item(),
        "asymmetry": max(((M - M.T).norm() / M.norm()).item() for M in (P, second)),
        "least eigenvalue / largest": min(
            (v[0] / v[-1]).item() for v in map(torch.linalg.eigvalsh, (P, second))
        ),
        "skipped steps": optimizer.skipped_steps,
        "repaired P": optimizer.repaired_inverses,
        "tensors": sum(type(thing) is torch.Tensor for thing in gc.get_objects()),
        "objects": len(gc.get_objects()),
        "MB now": resident(),
        "MB at most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def soak(kind: str, dtype: torch.dtype, forgetting: float, steps: int) -> list[dict[str, float]]:
    """Train a case and its twin; return a row of results at 1, 10, 50 and 100 % of the steps."""
    own, twin = learner(kind, dtype, forgetting), learner(kind, torch.float64, forgetting)
    stream, rows, losses, spent = Stream(dtype), [], [0.0, 0.0], 0.0
    marks = {steps // 100, steps // 10, steps // 2, steps}
    last = 0
    for number in range(1, steps + 1):
        x, y = stream.batch()
        start = time.process_time()
        losses[0] += step(*own, x, y)
        spent += time.process_time() - start
        losses[1] += step(*twin, x.double(), y.double())
        if number in marks:
            gc.collect()
            count, last = number - last, number
            row = {"steps": number, "ms per step": 1000 * spent / count}
            row |= {"loss": losses[0] / count, "loss of the twin": losses[1] / count}
            rows.append(row | diagnose(own[1], twin[1]))
            losses, spent = [0.0, 0.0], 0.0
    return rows


def table(cases: dict[str, list[dict[str, float]]]) -> str:
    """Return the table of docs/reliability.md; pairs are values at the first and the last mark."""
    lines = [
        "| | difference of P | loss | of the twin | least eigenvalue | ms a step | tensors | MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, rows in cases.items():
        first, last = rows[0], rows[-1]
        row = [f"{last['difference of P']:.1e}"]
        row += [f"{last['loss']:.4f}", f"{last['loss of the twin']:.4f}"]
        row.append(f"{last['least eigenvalue / largest']:.1e}")
        row.append(f"{first['ms per step']:.2f}, {last['ms per step']:.2f}")
        row += [f"{first[key]:.0f}, {last[key]:.0f}" for key in ("tensors", "MB at most")]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def main(steps: int, out: Path, only: str) -> None:
    """Run the cases whose names contain ``only``; write and print each as it ends."""
    content = json.loads(out.read_text()) if out.exists() else {"cases": {}}
    for kind, dtype, forgetting in CASES:
        name = f"{kind}, {str(dtype)[6:]}, forgetting {forgetting:g}"
        if only in name:
            content["cases"][name] = soak(kind, dtype, forgetting, steps)
            content["machine"] = describe()
            out.write_text(json.dumps(content, indent=2) + "\n")
            print(name, json.dumps(content["cases"][name][-1]), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak.json"))
    parser.add_argument("--only", default="", help="a part of the name of the cases to run")
    parser.add_argument("--table", action="store_true", help="run nothing, print the results")
    given = vars(parser.parse_args())
    if given.pop("table"):
        print(table(json.loads(given["out"].read_text())["cases"]))
    else:
        main(**given)
