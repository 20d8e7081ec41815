"""The self-test ``torchrls doctor``: prints what is installed, and compares with the specification.

It needs torch alone, so that it runs where optional packages are missing.
"""

from __future__ import annotations

import importlib.metadata
import io
import math
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrls.common.version import __version__
from torchrls.common.warn import RLSWarning
from torchrls.optimizer import RLS
from torchrls.selftest import naive

#: The packages that the extras need.
OPTIONAL = (
    *("filelock", "matplotlib", "numpy", "pooch", "requests", "rich", "scikit-learn", "typer"),
    *("tensorboard", "transformers", "opt-einsum", "pytorch-optimizer", "singd"),
)
#: A test on a device: it returns the largest difference found, and the largest allowed.
Test = Callable[[torch.device], tuple[float, float]]
#: Hyperparameters other than the defaults, so that every term has an effect.
HYPER: dict[str, Any] = {"lr": 0.7, "forgetting": 0.99, "ratio": 0.3, "momentum": 0.5, "l1": 1e-4}
STEPS = 10
#: The largest relative difference that counts as rounding.
LIMITS = {torch.float64: 1e-8, torch.float32: 1e-2}


class Check(NamedTuple):
    """The result of a check."""

    name: str
    difference: float  # the largest difference from the expected numbers
    limit: float
    error: str = ""  # the exception that ended the check

    @property
    def passed(self) -> bool:
        """Whether there was no error and the difference is within the limit."""
        return not self.error and self.difference <= self.limit

    def __str__(self) -> str:
        verdict = "PASS" if self.passed else "FAIL"
        reason = self.error or f"difference {self.difference:.1e}, allowed {self.limit:.0e}"
        return f"{verdict}  {self.name}: {reason}"


def run() -> int:
    """Print all facts and checks; return the exit code, 1 if a check has failed and else 0."""
    for name, value in facts():
        print(f"{name:<11} {value}")
    print()
    failed = 0
    for check in checks():
        print(check, flush=True)
        failed += not check.passed
    print()
    if not failed:
        print("All is well.")
        return 0
    print(
        f"{failed} checks failed: the numbers of this machine are wrong: try again with "
        f"OMP_NUM_THREADS=1 and in a new environment with another build of torch (python -m venv); "
        f"if it stays so, open an issue with all of this output."
    )
    return 1


# -- facts -----------------------------------------------------------------------------------------


def facts() -> Iterator[tuple[str, str]]:
    """Yield versions and properties of the machine, each as (name, text)."""
    yield "torchrls", f"{__version__}, {Path(__file__).parent.parent}"
    yield "torch", torch.__version__
    yield "python", f"{platform.python_version()}, {sys.executable}"
    yield "system", platform.platform()
    versions = {name: _version(name) for name in OPTIONAL}
    installed = [f"{name} {version}" for name, version in versions.items() if version]
    yield "packages", ", ".join(installed) or "none"
    missing = [name for name, version in versions.items() if not version]
    yield "missing (all optional)", ", ".join(missing) or "none"
    yield "devices", ", ".join(_describe(device) for device in devices())
    yield "threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors"
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    yield "BLAS", blas.group(1) if blas else "unknown"
    try:
        names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES", "SC_AVPHYS_PAGES")
        page, total, free = (os.sysconf(name) for name in names)
    except (AttributeError, ValueError, OSError):
        yield "memory", "unknown"
    else:
        yield "memory", f"{page * total / 1e9:.1f} GB, {page * free / 1e9:.1f} GB of them unused"


def _version(name: str) -> str:
    """Return the version of a package, or "" if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def devices() -> list[torch.device]:
    """Return the processor, and the accelerator if there is one."""
    if not torch.accelerator.is_available():
        return [torch.device("cpu")]
    return [torch.device("cpu"), torch.accelerator.current_accelerator()]  # type: ignore[list-item]


def _describe(device: torch.device) -> str:
    """Return a device as text; for CUDA, with the number and the name of the GPUs."""
    if device.type == "cuda":
        count = torch.cuda.device_count()
        return f"{count} x {torch.cuda.get_device_name()} (cuda {torch.version.cuda})"
    return str(device)


# -- checks ----------------------------------------------------------------------------------------


def checks() -> Iterator[Check]:
    """Carry out all checks on every device, and yield their results."""
    for device in devices():
        where = "" if device.type == "cpu" else f" on {device}"
        for name, function in CHECKS.items():
            yield _carried_out(f"{name}{where}", function, device)


def _carried_out(name: str, function: Test, device: torch.device) -> Check:
    """Run one check. An exception is a failure; torch's random state is restored afterwards."""
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RLSWarning)
            torch.manual_seed(0)
            difference, limit = function(device)
    except Exception as error:
        return Check(name, math.inf, 0.0, f"{type(error).__name__}: {error}")
    return Check(name, math.inf if math.isnan(difference) else difference, limit)


class Recurrent(nn.Module):
    """An LSTM layer with a linear layer on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.lstm(x)[0][:, -1])
        return output


#: Networks, their twins in the specification, and the shapes of their minibatches.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], tuple[int, ...]]] = {
    "linear layers": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)),
        *(naive.Perceptron, (20, 3)),
    ),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)),
        *(naive.Images, (6, 2, 3, 3)),
    ),
    "LSTM": (Recurrent, naive.Sequences, (5, 4, 3)),
}


def dtype_of(device: torch.device) -> torch.dtype:
    """Return the most precise floating-point type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def against_naive(kind: str, is_paper: bool, device: torch.device) -> tuple[float, float]:
    """Compare weights, biases and P with those of a naive twin after each step."""
    make, twin_of, shape = CASES[kind]
    dtype = dtype_of(device)
    model = make().to(device, dtype)
    twin = twin_of(model)
    optimizer = RLS.paper(model, **HYPER) if is_paper else RLS(model, **HYPER)
    step = naive.paper_step if is_paper else naive.default_step
    worst = 0.0
    for number in range(STEPS):
        x, y = batch(shape)
        if number == 0 and not is_paper:
            twin.note_ranges(x)
        optimizer.zero_grad()
        (model(x.to(device, dtype)) - y.to(device, dtype)).square().mean().backward()
        optimizer.step()
        step(twin.matrices, (twin(x) - y).square().mean(), **HYPER)
        for layer, matrix in zip(optimizer.layers, twin.matrices, strict=True):
            assert layer.bias is not None
            P = optimizer.state[layer.weight]["inverse"]
            actual = [layer.weight.flatten(1).T, layer.bias, P]
            expected: list[Any] = [matrix.weight, matrix.bias, matrix.P]
            for one, other in zip(actual, expected, strict=True):
                difference = (one.detach().cpu().double() - other).abs().max()
                relative = float(difference / other.abs().max())
                worst = math.inf if math.isnan(relative) else max(worst, relative)
    return worst, LIMITS[dtype]


def batch(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return random inputs, whose mean is not zero, and targets, in float64."""
    x = torch.randn(*shape, dtype=torch.float64) + 0.5
    return x, torch.randn(shape[0], 2, dtype=torch.float64)


def trained(device: torch.device, is_paper: bool = False, steps: int = 8) -> tuple[nn.Module, RLS]:
    """Train a small network in float32, with a norm that the fallback trains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)).to(device)
    optimizer = RLS.paper(model, momentum=0.5) if is_paper else RLS(model)
    for _ in range(steps):
        train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: RLS, factor: float = 1.0) -> None:
    """Take a step on new data; inputs are multiplied by the factor."""
    x, y = (part.to(next(model.parameters())) for part in batch((20, 3)))
    optimizer.zero_grad()
    (model(factor * x) - y).square().mean().backward()
    optimizer.step()


def everything(model: nn.Module, optimizer: RLS) -> list[Tensor]:
    """Return copies of the parameters and of all of the state, in float64."""
    parameters = list(model.parameters())
    state = [v for p in parameters for _, v in sorted(optimizer.state[p].items())]
    both = map(torch.as_tensor, [*parameters, *state])
    return [t.detach().cpu().double().clone() for t in both]


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest difference between two lists of tensors; infinity if shapes differ."""
    if [t.shape for t in one] != [t.shape for t in other]:
        return math.inf
    largest = [(a - b).abs().max() for a, b in zip(one, other, strict=True) if a.numel()]
    return float(torch.stack(largest).max())  # NaN if there is one


def round_trip(device: torch.device) -> tuple[float, float]:
    """Check that a saved and loaded optimizer continues with the same numbers."""
    ends = []
    model, optimizer = trained(device)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, resumed = trained(device, steps=0)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for pair in ((model, optimizer), (other, resumed)):
        torch.manual_seed(1)
        for _ in range(4):
            train(*pair)
        ends.append(everything(*pair))
    return distance(*ends), 0.0


def definite(device: torch.device) -> tuple[float, float]:
    """Check that every P is symmetric, to rounding, and that its eigenvalues are positive."""
    worst = 0.0
    for is_paper in (True, False):
        _, optimizer = trained(device, is_paper, steps=50)
        for layer in optimizer.layers:
            P = optimizer.state[layer.weight]["inverse"].cpu().double()
            if not float(torch.linalg.eigvalsh(P).min()) > 0:
                return math.inf, 1e-6
            worst = max(worst, float((P - P.mT).abs().max() / P.abs().max()))
    return worst, 1e-6


def skips(device: torch.device) -> tuple[float, float]:
    """Check that a step with a NaN changes nothing and is counted as skipped."""
    worst = 0.0
    for is_paper in (True, False):
        model, optimizer = trained(device, is_paper)
        before = everything(model, optimizer)
        train(model, optimizer, factor=math.nan)
        counted = optimizer.skipped_steps == 1
        change = distance(before, everything(model, optimizer)) if counted else math.inf
        worst = math.inf if math.isnan(change) else max(worst, change)
    return worst, 0.0


CHECKS: dict[str, Test] = {
    f"{kind}, {step} step": partial(against_naive, kind, step == "the paper's")
    for kind in CASES
    for step in ("the paper's", "the default")
}
CHECKS["saving and loading"] = round_trip
CHECKS["P symmetric and positive definite"] = definite
CHECKS["a step with a NaN changes nothing"] = skips
