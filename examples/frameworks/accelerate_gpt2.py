"""Train with Accelerate: make ``RLS(model)`` before ``accelerator.prepare``; the loop is as usual.

With ``accelerator.accumulate``, two minibatches make one step. The state is saved half-way, and
loaded again at the end.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pydoc_data.topics import topics

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from torchrls import RLS

TEXT = "".join(topics[name] for name in sorted(topics))[:100_000]
CHARACTERS = sorted(set(TEXT))


def small_gpt2() -> GPT2LMHeadModel:
    """Return a GPT-2 of two layers of 32 units, for windows of 32 characters."""
    config = GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        n_positions=32,
        vocab_size=len(CHARACTERS),
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def bits(model: torch.nn.Module, rows: Tensor) -> float:
    """Return the mean bits per character of rows (count, length)."""
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=rows, labels=rows).loss.item()
    model.train()
    return loss / math.log(2)


def main(steps: int) -> None:
    """Train, and print test results half-way, at the end, and with the state from half-way."""
    torch.manual_seed(0)
    rows = torch.tensor([CHARACTERS.index(c) for c in TEXT]).unfold(0, 32, 16)
    train, test = rows[:-600], rows[-598:]

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = small_gpt2()
    loader = DataLoader(train, batch_size=16, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, RLS(model), loader)

    def fit(steps: int) -> None:
        """Train for so many steps of the optimizer."""
        done = 0
        while True:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                done += accelerator.sync_gradients
                if done == steps:
                    return

    optimizer.optimizer.summary()  # prepare returns a wrapper of RLS
    with tempfile.TemporaryDirectory() as folder:
        fit(steps // 2)
        accelerator.save_state(folder)
        print(f"half-way: {bits(model, test):.2f} bits per character")
        fit(steps - steps // 2)
        print(f"after {steps} steps: {bits(model, test):.2f} bits per character")
        accelerator.load_state(folder)
        print(f"half-way again: {bits(model, test):.2f} bits per character")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
