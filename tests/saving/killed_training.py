"""Training that is killed: goes on from its checkpoint, and tells its numbers at the end.

Every line of the standard input is a life, a process of its own: the file of the checkpoint, the
steps to make, and where it shall kill itself: "write:n", "rename:n" or "renamed:n", in the midst
of its n-th checkpoint, before it is renamed or right after; or "nowhere:0". What it prints:
"ready" with its number and the steps that have been made, "done" with a sum of all numbers, and
"gone" when it has ended.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from models import everything
from torchrls import RLS, load_checkpoint, save_checkpoint
from torchrls.saving import files as safe


class Model(nn.Module):
    """Every kind of state: sets, momentum, L1, the fallback, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.wide, self.dropout, self.head = nn.Linear(6, 120), nn.Dropout(0.2), nn.Linear(120, 3)

    def forward(self, x):
        states, _ = self.lstm(self.norm(self.convolution(x)).relu().mT)
        return self.head(self.dropout(self.wide(states[:, -1]).relu()))


def make() -> tuple[Model, RLS]:
    torch.manual_seed(0)
    model = Model()
    groups = [
        {"params": [*model.convolution.parameters(), *model.norm.parameters()]},
        {"params": model.lstm.parameters(), "forgetting": 0.99, "weight_decay": 1e-3},
        {"params": model.wide.parameters(), "step": "gain", "averages": 1, "l1": 1e-5},
        {"params": model.head.parameters(), "averages": 4},
    ]
    return model, RLS(model, params=groups)


def train(path: Path, steps: int) -> str:
    """A checkpoint after every step; returns a sum of all numbers at the end."""
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    done, losses = 0, []
    if path.exists():
        state = load_checkpoint(path)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        done, losses = state["done"], state["losses"]
    print("ready", os.getpid(), done, flush=True)
    for step in range(done, steps):
        x = torch.randn(8, 2, 5)
        loss = nn.functional.cross_entropy(model(x), x.sum((1, 2)).sign().long() + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        state = {name: part.state_dict() for name, part in parts.items()}
        more = {"random": torch.get_rng_state(), "done": step + 1, "losses": losses}
        save_checkpoint({**state, **more}, path)
    return digest(model, optimizer, losses)


def digest(model: Model, optimizer: RLS, losses: list[float]) -> str:
    results = hashlib.sha256(repr((losses, optimizer.skipped_steps)).encode())
    for value in [*everything(model, optimizer), *model.buffers()]:
        results.update(value.contiguous().numpy().tobytes())
    return results.hexdigest()


def set_trap(where: str, number: int) -> None:
    real_put, real_replace, calls = safe._put, os.replace, []

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def put(state, file):
        calls.append(1)
        if where == "write" and len(calls) == number:
            file.write(b"half of a checkpoint")
            file.flush()
            die()
        real_put(state, file)

    def replace(source, target):
        if where == "rename" and len(calls) == number:
            die()
        real_replace(source, target)
        if where == "renamed" and len(calls) == number:
            die()

    safe._put, os.replace = put, replace


def live(path: str, steps: str, trap: str) -> None:
    place, _, nth = trap.partition(":")
    set_trap(place, int(nth))
    print("done", train(Path(path), int(steps)), flush=True)


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    make()  # torch imports much when the first optimizer is made
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                live(*line.split())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        print("gone", flush=True)


if __name__ == "__main__":
    main()
