"""Does it keep working? 100,000 steps of float32 and bfloat16 networks beside a twin in float64.

python benchmarks/soak.py [--steps 100000] [--out benchmarks/results/soak.json] [--only "..."]

Each case takes some ten minutes of one core; with the same --out, cases add up. --table prints
what is in it.
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
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))


class Stream:
    """Noisy outputs of a fixed network; the inputs are correlated."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.mixing = torch.randn(INPUTS, INPUTS, generator=self.generator)
        self.teacher, self.dtype = network(), dtype

    @torch.no_grad()
    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(BATCH, INPUTS, generator=self.generator) @ self.mixing / INPUTS**0.5
        noise = torch.randn(BATCH, OUTPUTS, generator=self.generator)
        x = x.to(self.dtype).float()
        return x, self.teacher(x) + 0.1 * noise


def learner(kind: str, dtype: torch.dtype, forgetting: float) -> tuple[nn.Module, RLS]:
    model = copy.deepcopy(network()).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model, KINDS[kind](model, forgetting=forgetting)


def step(model: nn.Module, optimizer: RLS, x: torch.Tensor, y: torch.Tensor) -> float:
    dtype = next(model.parameters()).dtype
    optimizer.zero_grad()
    loss = (model(x.to(dtype)).to(y.dtype) - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def inverses(model: nn.Module, optimizer: RLS) -> list[torch.Tensor]:
    return [optimizer.state[layer.weight]["inverse"].double() for layer in optimizer.layers]


def resident() -> float:
    """MB of memory that the process has now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def look(kind: str, own: tuple[nn.Module, RLS], twin: tuple[nn.Module, RLS]) -> dict[str, float]:
    """How far P is from that of the twin, and if it is sound."""
    (P, second), (exact, _) = inverses(*own), inverses(*twin)
    return {
        "difference of P": ((P - exact).norm() / exact.norm()).item(),
        "asymmetry": max(((M - M.T).norm() / M.norm()).item() for M in (P, second)),
        "least eigenvalue / largest": min(
            (v[0] / v[-1]).item() for v in map(torch.linalg.eigvalsh, (P, second))
        ),
        "skipped steps": own[1].skipped_steps,
        "repaired P": own[1].repaired_inverses,
        "tensors": sum(type(found) is torch.Tensor for found in gc.get_objects()),
        "objects": len(gc.get_objects()),
        "MB now": resident(),
        "MB at most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def soak(kind: str, dtype: torch.dtype, forgetting: float, steps: int) -> list[dict[str, float]]:
    own, twin = learner(kind, dtype, forgetting), learner(kind, torch.float64, forgetting)
    stream, found, losses, spent = Stream(dtype), [], [0.0, 0.0], 0.0
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
            found.append(row | look(kind, own, twin))
            losses, spent = [0.0, 0.0], 0.0
    return found


def table(cases: dict[str, list[dict[str, float]]]) -> str:
    """For docs/reliability.md: time, tensors and memory at the first mark and at the last."""
    lines = [
        "| | difference of P | loss | of the twin | least eigenvalue | ms a step | tensors | MB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in cases.items():
        first, last = found[0], found[-1]
        row = [f"{last['difference of P']:.1e}"]
        row += [f"{last['loss']:.4f}", f"{last['loss of the twin']:.4f}"]
        row.append(f"{last['least eigenvalue / largest']:.1e}")
        row.append(f"{first['ms per step']:.2f}, {last['ms per step']:.2f}")
        row += [f"{first[key]:.0f}, {last[key]:.0f}" for key in ("tensors", "MB at most")]
        lines.append(f"| {name} | {' | '.join(row)} |")
    return "\n".join(lines)


def main(steps: int, out: Path, only: str) -> None:
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
