"""The training of a model, which can be stopped and resumed after any batch."""

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
    """The results of an epoch.

    Losses and accuracies (in per cent) of the training set are means over the epoch, those of the
    test set are taken after the epoch. A loss that is not finite is None.

    Args:
        number: the number of the epoch, from 1.
        seconds: the time of the training steps, without tests.
        state: the result of :func:`learning_state` after the epoch.
        cpu_seconds: the CPU time of the training steps, which does not depend on other work of the
            machine; None on other devices.
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
    """An objective, and the optimizer that is made for it."""

    @property
    def objective(self) -> Objective:
        """The loss and the score."""

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        """Make the optimizer of a model."""


class Training:
    """A model, its optimizer, the data and the epochs so far.

    With equal seeds, all contenders get equal initial weights and equal batches.

    Args:
        contender: makes the optimizer, and has the objective.
        make_model: makes the model; is called after torch has been seeded.
        split: the data. The model is moved to the device of the data.
        seed: the seed of torch and of the order of the samples.
        batch_size: the number of samples in a minibatch.
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
        """Reset the order of the samples, the times and the sums for a new epoch."""
        self._order, self._batch = self._generator.get_state(), 0
        self._seconds = self._cpu_seconds = 0.0
        dtype = _sum_dtype(self.device)
        self._sums = torch.zeros(2, dtype=dtype, device=self.device)  # of losses and tallies

    @property
    def device(self) -> torch.device:
        """The device of the data and the model."""
        return self.split.train_x.device

    @property
    def batches(self) -> int:
        """The number of batches in an epoch."""
        return -(-self.split.samples // self.batch_size)

    def run(self, epochs: int) -> Iterator[Epoch]:
        """Train until there are so many epochs, and yield each."""
        while len(self.epochs) < epochs:
            for _ in self.advance():
                pass
            yield self.epochs[-1]

    def advance(self) -> Iterator[float]:
        """Train to the end of the epoch, and yield the finished fraction after each batch.

        The times of the epoch do not include what the caller does between batches.
        """
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
        """Add the time since the start to the times of the epoch."""
        seconds, cpu_seconds = _clocks()
        self._seconds += seconds - start[0]
        self._cpu_seconds += cpu_seconds - start[1]

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        """Take one training step; return the sums of :meth:`_sums_of`.

        If the model has a method ``mask``, padded rows do not enter the mean input of RLS.
        """
        self.optimizer.zero_grad()
        rows: AbstractContextManager[Any] = nullcontext()
        mask = getattr(self.model, "mask", None)
        if mask is not None and isinstance(self.optimizer, RLS):
            rows = self.optimizer.rows(mask(x))
        with rows:
            output = self.model(x)
        loss: Any = self.objective.loss(output, y)
        loss.backward()
        self.optimizer.step()
        return self._sums_of(loss, output, y)

    @torch.no_grad()
    def _sums_of(self, loss: Tensor, output: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the losses of a batch and its tally, of shape (2,)."""
        dtype, tally = _sum_dtype(output.device), self.objective.tally(output, y)
        return torch.stack((loss.to(dtype) * len(y), tally.to(dtype)))

    def _end(self) -> None:
        """Test the model, append the epoch and begin a new one.

        A stream has no test set: every sample is a test before the model learns from it.
        """
        start = _clocks()
        loss, tally = (self._sums / self.split.samples).tolist()  # waits for the device
        self._take_time(start)
        score = self.objective.score(tally)
        is_stream = not len(self.split.test_x)
        test_loss, test_score = (loss, score) if is_stream else self._test()
        epoch = Epoch(
            number=len(self.epochs) + 1,
            train_loss=_finite(loss),
            train_accuracy=score,
            test_loss=_finite(test_loss),
            test_accuracy=test_score,
            seconds=self._seconds,
            state=learning_state(self.model, self.optimizer),
            cpu_seconds=self._cpu_seconds if self.device.type == "cpu" else None,
        )
        self.epochs.append(epoch)
        self._begin()

    @torch.no_grad()
    def _test(self) -> tuple[float, float]:
        """Return loss and score of the test set."""
        self.model.eval()
        sums = torch.zeros_like(self._sums)
        for x, y in self.split.test_batches(max(self.batch_size, 500)):
            output = self.model(x)
            sums += self._sums_of(self.objective.loss(output, y), output, y)
        self.model.train()
        loss, tally = (sums / len(self.split.test_x)).tolist()
        return loss, self.objective.score(tally)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that is needed to resume with equal numbers."""
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
        """Restore a state that :meth:`state_dict` has returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if isinstance(self.optimizer, RLS):
            self.optimizer.skipped_steps = state["skipped"]
        torch.set_rng_state(state["random"])
        self._order, self._batch = state["order"], state["batch"]
        self._seconds, self._cpu_seconds = state["seconds"]
        self._sums = state["sums"].to(self._sums)
        self.epochs = [Epoch(**epoch) for epoch in state["epochs"]]


def _clocks() -> tuple[float, float]:
    """Return wall-clock and CPU time, in seconds."""
    return time.perf_counter(), time.process_time()


def _sum_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _finite(value: float) -> float | None:
    """Return the value, or None if it is not finite."""
    return value if math.isfinite(value) else None


@torch.no_grad()
def learning_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the norm of the parameters; for RLS also skipped steps and means of P's diagonals.

    P begins with the identity and shrinks in directions that inputs have had: the mean of its
    diagonal tells how far a layer can still move.
    """
    norms = torch._foreach_norm(list(model.parameters()))
    state: dict[str, Any] = {"parameter_norm": _finite(torch.stack(norms).norm().item())}
    if isinstance(optimizer, RLS):
        state["skipped_steps"] = optimizer.skipped_steps
        state["mean_of_p"] = {
            layer.name: P.diagonal(dim1=-2, dim2=-1).mean().item()
            for layer in optimizer.layers
            if (P := optimizer.state[layer.weight].get("inverse")) is not None
        }
    return state
