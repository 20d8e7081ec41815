"""Training that can be stopped after any batch and goes on from there."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchrls.lab.experiments.data import Split
from torchrls.lab.experiments.objective import Objective
from torchrls.optimizer import RLS


@dataclass(frozen=True)
class Epoch:
    """What there is to say after an epoch.

    Losses and accuracies (in per cent) of the training set are means over the epoch, those of the
    test set are taken at its end. A loss that is not finite is None. ``seconds`` are those of the
    training steps alone, ``cpu_seconds`` what of them the processor has spent on this process
    (None on other devices): other work on the machine does not count there. ``state`` describes how
    the optimizer does.
    """

    number: int
    train_loss: float | None
    train_accuracy: float
    test_loss: float | None
    test_accuracy: float
    seconds: float
    state: dict[str, Any]
    cpu_seconds: float | None = None


class Trainer(Protocol):
    """What makes the optimizer of a training run."""

    @property
    def objective(self) -> Objective:
        """What the network is trained for."""

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        """Made for a model."""


class Training:
    """A model, its optimizer and how far they have come.

    Equal seeds see equal weights and batches, whatever the contender.

    Args:
        contender: makes the optimizer, and has the objective.
        make_model: makes the model, after torch has been seeded.
        split: the data, on the device where the model shall be.
    """

    def __init__(
        self, contender: Trainer, make_model: Any, split: Split, *, seed: int, batch_size: int
    ) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = make_model().to(split.train_x.device)
        self.optimizer, self.objective = contender.optimizer(self.model), contender.objective
        self.split, self.batch_size = split, batch_size
        self.epochs: list[Epoch] = []
        self._generator = torch.Generator().manual_seed(seed)
        self._begin()

    def _begin(self) -> None:
        """The beginning of an epoch."""
        self._order, self._batch = self._generator.get_state(), 0
        self._seconds = self._cpu_seconds = 0.0
        self._sums = torch.zeros(2, dtype=_sum_dtype(self.device), device=self.device)

    @property
    def device(self) -> torch.device:
        return self.split.train_x.device

    @property
    def batches(self) -> int:
        """How many of them an epoch has."""
        return -(-self.split.samples // self.batch_size)

    def run(self, epochs: int) -> Iterator[Epoch]:
        """Train until there are so many epochs."""
        while len(self.epochs) < epochs:
            for _ in self.advance():
                pass
            yield self.epochs[-1]

    def advance(self) -> Iterator[float]:
        """Finish the epoch, batch by batch; yields how much of it is done."""
        self._generator.set_state(self._order)
        epoch = len(self.epochs)
        batches = self.split.batches(self.batch_size, self._generator, self._batch, epoch)
        start = _clocks()
        for x, y in batches:
            self._sums += self._step(x, y)
            self._batch += 1
            self._take_time(start)
            if self._batch < self.batches:
                yield self._batch / self.batches
            start = _clocks()
        self._end()
        yield 1.0

    def _take_time(self, start: tuple[float, float]) -> None:
        seconds, cpu_seconds = _clocks()
        self._seconds += seconds - start[0]
        self._cpu_seconds += cpu_seconds - start[1]

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with self._valid_rows(x):
            output = self.model(x)
        loss: Any = self.objective.loss(output, y)
        loss.backward()
        self.optimizer.step()
        return self._sums_of(loss, output, y)

    @torch.no_grad()
    def _sums_of(self, loss: Tensor, output: Tensor, y: Tensor) -> Tensor:
        """The sum of the losses of a batch, and what the score is made of."""
        dtype, tally = _sum_dtype(output.device), self.objective.tally(output, y)
        return torch.stack((loss.to(dtype) * len(y), tally.to(dtype)))

    def _valid_rows(self, x: Tensor) -> AbstractContextManager[Any]:
        """Padding, if the model knows of any, does not enter the mean input of RLS."""
        mask = getattr(self.model, "mask", None)
        if mask is None or not isinstance(self.optimizer, RLS):
            return nullcontext()
        return self.optimizer.rows(mask(x))

    def _end(self) -> None:
        start = _clocks()
        loss, tally = (self._sums / self.split.samples).tolist()  # waits for the device
        self._take_time(start)
        score = self.objective.score(tally)
        epoch = Epoch(
            number=len(self.epochs) + 1,
            train_loss=_finite(loss),
            train_accuracy=score,
            **(self._test() if len(self.split.test_x) else _online(loss, score)),
            seconds=self._seconds,
            state=learning_state(self.model, self.optimizer),
            cpu_seconds=self._cpu_seconds if self.device.type == "cpu" else None,
        )
        self.epochs.append(epoch)
        self._begin()

    @torch.no_grad()
    def _test(self) -> dict[str, Any]:
        self.model.eval()
        sums = torch.zeros_like(self._sums)
        for x, y in self.split.test_batches(max(self.batch_size, 500)):
            output = self.model(x)
            sums += self._sums_of(self.objective.loss(output, y), output, y)
        self.model.train()
        loss, tally = (sums / len(self.split.test_x)).tolist()
        return {"test_loss": _finite(loss), "test_accuracy": self.objective.score(tally)}

    def state_dict(self) -> dict[str, Any]:
        """Everything that it takes to go on as if nothing had happened."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "order": self._order,
            "batch": self._batch,
            "seconds": (self._seconds, self._cpu_seconds),
            "sums": self._sums,
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "skipped": getattr(self.optimizer, "skipped_steps", 0),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go back to a saved state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if isinstance(self.optimizer, RLS):
            self.optimizer.skipped_steps = state["skipped"]
        torch.set_rng_state(state["random"])
        self._order, self._batch = state["order"], state["batch"]
        self._seconds, self._cpu_seconds = state["seconds"]
        self._sums = state["sums"].to(self._sums)
        self.epochs = [Epoch(**epoch) for epoch in state["epochs"]]


def _online(loss: float, score: float) -> dict[str, Any]:
    """Of a stream, every sample is a test before it is learnt from."""
    return {"test_loss": _finite(loss), "test_accuracy": score}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _sum_dtype(device: torch.device) -> torch.dtype:
    """Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@torch.no_grad()
def learning_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The norm of the parameters; of RLS also steps that were skipped and the mean of P's diagonal.

    P begins at the identity: what is left of its diagonal is what a layer can still learn.
    """
    norms = torch._foreach_norm(list(model.parameters()))
    found: dict[str, Any] = {"parameter_norm": _finite(torch.stack(norms).norm().item())}
    if isinstance(optimizer, RLS):
        found["skipped_steps"] = optimizer.skipped_steps
        found["mean_of_p"] = {
            layer.name: P.diagonal(dim1=-2, dim2=-1).mean().item()
            for layer in optimizer.layers
            if (P := optimizer.state[layer.weight].get("inverse")) is not None
        }
    return found
