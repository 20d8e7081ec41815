"""Parts of the default step, each taken out alone, on the ten tasks of ``torchrls converge``.

    python benchmarks/ablations.py --data DATA --task deep --variant "without P" --seeds 3
    python benchmarks/ablations.py --data DATA --numbers --task deep --seeds 2
    python benchmarks/ablations.py --table

``--numbers`` varies each number of the default step instead: once half, once twice as large. Every
run is trained with ``total_steps``, unless its variant says otherwise. Runs are appended to
benchmarks/results/ablations.jsonl with their scores at the end, and are not made twice.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from torchrls import RLS
from torchrls.lab.convergence.tasks import TASKS
from torchrls.lab.experiments.data import Store
from torchrls.lab.experiments.training import Training
from torchrls.matrix import whitening

RESULTS = Path(__file__).parent / "results" / "ablations.jsonl"
STEP = "torchrls.step.default"

#: What a variant replaces, by the names of module and attribute; and its arguments of RLS.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "total_steps": ({}, {}),
    "no end": ({}, {"total_steps": None}),
    "no end, averaged": ({}, {"total_steps": None, "average": True}),
    "no end, no decay": ({"torchrls.step.decay.STEADY": math.inf}, {"total_steps": None}),
    "without P": ({}, {"ratio": 0.0}),
    "without Q": ({"torchrls.step.slots.output_tiles": lambda layer: None}, {}),
    "without P and Q": ({"torchrls.step.slots.output_tiles": lambda layer: None}, {"ratio": 0.0}),
    "inputs as they are": (
        {"torchrls.observe.record.Record.join_extent": lambda *_: None},
        {},
    ),
    "learning always": ({f"{STEP}.EARLY": 10**9}, {}),
    "whitening ten times as strong": ({}, {"ratio": 1.0}),
}

#: The numbers of the default step, by module. Of a decay, such as 0.99, its memory is varied.
NUMBERS = {
    STEP: (
        *("RATE", "OFFSET", "USUAL", "POWER", "LEAST", "MEMORY", "EARLY", "EVERY", "SHARE"),
        *("LEARNING", "CALLS", "Q_RATIO"),
    ),
    "torchrls.matrix.whitening": ("TILE", "PLACES", "COLUMNS"),
    "torchrls.step.inputs": ("FARTHER", "MEMORY"),
    "torchrls.step.decay": ("STEADY", "WARM", "STEADY_TO_THE_END", "RISE", "FALL"),
    "torchrls.routing.relative": ("SHARE", "LEAST", "LEAST_OF_VECTORS"),
}
#: Those that only runs without ``total_steps`` have.
OPEN = ("STEADY", "WARM")
OPTIONS = {"ratio": 0.1, "momentum": 0.9, "averages": 16}


def half_and_double(value: float) -> list[tuple[str, Any]]:
    """Return half and twice a number; of a decay, one with half and with twice the memory."""
    if 0.85 < value < 1:
        return [("half", 1 - 2 * (1 - value)), ("double", 1 - (1 - value) / 2)]
    if isinstance(value, int):
        return [("half", value // 2), ("double", value * 2)]
    return [("half", value / 2), ("double", value * 2)]


def numbers() -> Iterator[str]:
    """Add a variant for half and twice each number of the default step; yield their names."""
    varied = [
        (f"{module.rpartition('.')[2]}.{name}", {f"{module}.{name}": value}, {}, which, name)
        for module, names in NUMBERS.items()
        for name in names
        for which, value in half_and_double(getattr(importlib.import_module(module), name))
    ]
    varied += [
        (name, {}, {name: value}, which, name)
        for name, old in OPTIONS.items()
        for which, value in half_and_double(old)
    ]
    for title, replaced, options, which, name in varied:
        is_open = {"total_steps": None} if name in OPEN else {}
        VARIANTS[f"{title}, {which}"] = replaced, {**options, **is_open}
        yield f"{title}, {which}"


@dataclass
class Entrant:
    """RLS in one of its variants, for :class:`torchrls.lab.experiments.training.Training`."""

    objective: Any
    options: dict[str, Any]

    def optimizer(self, model: torch.nn.Module) -> RLS:
        """Make the optimizer of the model."""
        return RLS(model, **self.options)


def run(task_name: str, variant: str, seed: int, data: Path) -> dict[str, Any]:
    """Train once; return the score at the end and the processor seconds of training steps."""
    task, (replaced, options) = TASKS[task_name], VARIANTS[variant]
    split = task.split(Store(data), seed, search=False)
    steps = task.epochs * -(-split.samples // task.batch_size)
    options = {"total_steps": steps, **options}
    for cached in (whitening.random_signs, whitening.damping_rows):
        cached.cache_clear()
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(patch(name, value))
        entrant = Entrant(task.objective, options)
        training = Training(entrant, task.network, split, seed=seed, batch_size=task.batch_size)
        epochs = list(training.run(task.epochs))
        score = epochs[-1].test_accuracy
        if options.get("average"):  # the curve is that of the weights themselves
            with training.optimizer.averaged():
                score = training._test()[1]
    return {
        "score": score,
        "scores": [round(epoch.test_accuracy, 3) for epoch in epochs],
        "seconds": sum(epoch.cpu_seconds or epoch.seconds for epoch in epochs),
    }


def recorded(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs that have been made."""
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def table(path: Path) -> str:
    """Return the scores as a Markdown table: mean and deviation over seeds, a row for a variant."""
    scores: dict[tuple[str, str], list[float]] = {}
    for record in recorded(path):
        scores.setdefault((record["variant"], record["task"]), []).append(record["score"])
    tasks = [task for task in TASKS if any(task == known for _, known in scores)]
    variants = list(dict.fromkeys(variant for variant, _ in scores))
    lines = ["| | " + " | ".join(tasks) + " |", "| --- " * (len(tasks) + 1) + "|"]
    for variant in variants:
        cells = []
        for task in tasks:
            values = scores.get((variant, task), [])
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.2f}{spread}" if values else "")
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table_of_numbers(path: Path) -> str:
    """Return what half and twice each number change in the score, as a Markdown table."""
    scores: dict[tuple[str, str], dict[int, float]] = {}
    for record in recorded(path):
        scores.setdefault((record["variant"], record["task"]), {})[record["seed"]] = record["score"]
    tasks = [task for task in TASKS if any("half" in v and task == t for v, t in scores)]
    lines = ["| | " + " | ".join(tasks) + " |", "| --- " * (len(tasks) + 1) + "|"]
    for variant in numbers():
        title, which = variant.split(", ")
        if which == "double":
            continue
        base = "no end" if title.rpartition(".")[2] in OPEN else "total_steps"
        cells = []
        for task in tasks:
            known = scores.get((base, task), {})
            changes = []
            for end in ("half", "double"):
                varied = scores.get((f"{title}, {end}", task), {})
                both = [varied[seed] - known[seed] for seed in varied.keys() & known.keys()]
                changes.append(f"{statistics.mean(both):+.1f}" if both else "")
            cells.append(", ".join(changes))
        lines.append(f"| `{title}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(made: Callable[..., dict[str, Any]] = run) -> None:
    """Make the runs that are missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--task", action="append", choices=TASKS)
    parser.add_argument("--variant", action="append", choices=VARIANTS)
    parser.add_argument("--numbers", action="store_true", help="half and twice each number")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--label", help="the name of the variant in the records")
    parser.add_argument("--table", action="store_true", help="print the table, and make no run")
    asked = parser.parse_args()
    if asked.table:
        print(table_of_numbers(asked.out) if asked.numbers else table(asked.out))
        return
    torch.set_num_threads(1)
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    variants = list(numbers()) if asked.numbers else asked.variant or list(VARIANTS)
    known = {(r["task"], r["variant"], r["seed"]) for r in recorded(asked.out)}
    for seed in range(asked.seeds):
        for variant in variants:
            for task in asked.task or TASKS:
                key = (task, asked.label or variant, seed)
                if key in known:
                    continue
                record = dict(zip(("task", "variant", "seed"), key, strict=True))
                record |= made(task, variant, seed, asked.data)
                record["commit"] = commit
                with asked.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(*key, f"{record['score']:.2f}", f"{record['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
