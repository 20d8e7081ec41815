"""Train a character-level language model in the hybrid mode (HRLS), on Python's documentation.

The LSTM is trained by RLS, the embedding and the head by Adam, in one optimizer. The cross-entropy
averages over time, so ``time_scaling=False``: c = k instead of k T. In the mode "RLS", the head is
trained by RLS, too.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from torchrls import RLS
from torchrls.lab.experiments.plot import curves

TEXT = "".join(topics[name] for name in sorted(topics))[:200_000]
CHARACTERS = sorted(set(TEXT))
#: The number of steps between tests.
EVERY = 20


class CharacterModel(nn.Module):
    """An embedding, an LSTM and a head that predicts the next character at every time step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), 32)
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.head = nn.Linear(128, len(CHARACTERS))

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        return self.head(states)


def optimizer_of(name: str, model: nn.Module, momentum: float) -> torch.optim.Optimizer:
    """Make the optimizer: "Adam", "HRLS" or "RLS"."""
    if name == "Adam":
        return torch.optim.Adam(model.parameters())
    exclude = ["head"] if name == "HRLS" else []
    return RLS.paper(
        model, exclude=exclude, momentum=momentum, time_scaling=False, max_grad_norm=1.0
    )


def bits(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean bits per character of windows (count, length)."""
    logits = model(windows[:, :-1])
    nats = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    return nats / math.log(2)


def train(name: str, steps: int, momentum: float) -> list[float]:
    """Train with an optimizer; return the test bits per character at every test."""
    torch.manual_seed(0)
    data = torch.tensor([CHARACTERS.index(character) for character in TEXT])
    windows = data.unfold(0, 65, 1)
    past, future = windows[:180_000], windows[180_100::100]
    model = CharacterModel()
    optimizer = optimizer_of(name, model, momentum)
    test_bits = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        bits(model, past[torch.randint(len(past), (32,))]).backward()
        optimizer.step()
        if step % EVERY == 0:
            with torch.no_grad():
                test_bits.append(bits(model, future).item())
    return test_bits


def main(steps: int, momentum: float, out: Path) -> None:
    """Train with all optimizers, print the last bits per character and plot all."""
    results = {name: train(name, steps, momentum) for name in ("Adam", "HRLS", "RLS")}
    for name, test_bits in results.items():
        print(f"{name:<5} {test_bits[-1]:.3f} bits per character after {steps} steps")
    title = "Python's documentation, character by character: LSTM"
    labels = {"ylabel": "test bits per character", "xlabel": "step", "every": EVERY}
    path = curves({title: results}, out, **labels)
    print(f"plot saved to {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--momentum", type=float, default=0.9, help="of RLS")
    parser.add_argument("--out", type=Path, default=Path("runs/character_model.png"))
    arguments = parser.parse_args()
    main(arguments.steps, arguments.momentum, arguments.out)
