"""Train a small GPT-2 with Hugging Face: ``Trainer(..., optimizers=(RLS(model), None))``.

The Trainer makes the schedule (None), clips, accumulates and saves. A second Trainer that resumes
from the checkpoint half-way ends with the same weights. The projections of GPT-2 are trained by
RLS, and the embedding, which is tied to the head, by Adam.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pydoc_data.topics import topics

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from torchrls import RLS

TEXT = "".join(topics[name] for name in sorted(topics))[:100_000]
CHARACTERS = sorted(set(TEXT))


class Windows(torch.utils.data.Dataset):
    """The data set of windows of Python's documentation, as character numbers."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


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


def trainer(folder: str, data: dict[str, Windows], steps: int) -> Trainer:
    """Return a Trainer with a new model and RLS, which saves a checkpoint half-way."""
    model = small_gpt2()
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=steps,
        save_steps=(steps + 1) // 2,
        use_cpu=True,
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
    )
    return Trainer(
        model,
        arguments,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        optimizers=(RLS(model), None),
    )


def bits(trainer: Trainer) -> float:
    """Return the mean bits per character on the test set."""
    return trainer.evaluate()["eval_loss"] / math.log(2)


def main(steps: int) -> None:
    """Train, resume a second training half-way, and print whether the weights are equal."""
    torch.manual_seed(0)
    rows = torch.tensor([CHARACTERS.index(c) for c in TEXT]).unfold(0, 32, 16)
    data = {"train": Windows(rows[:-600]), "test": Windows(rows[-598:])}
    with tempfile.TemporaryDirectory() as folder:
        whole = trainer(folder, data, steps)
        whole.train()
        print(f"after {steps} steps: {bits(whole):.2f} bits per character")
        resumed = trainer(folder, data, steps)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{(steps + 1) // 2}")
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    print(f"resumed half-way: same weights {all(torch.equal(a, b) for a, b in pairs)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    main(parser.parse_args().steps)
