"""See what a practitioner sees who swaps one line: AdamW for RLS, which is not tuned.

    python benchmarks/swaps.py --data DATA --problem bert --seeds 3
    python benchmarks/swaps.py --table

``RLS(model)`` and ``RLS(model, total_steps=n)`` are at their defaults. AdamW has warm-up in the
first tenth and linear decay to zero, and is shown at the best of four learning rates. The best is
chosen by the mean test score over the very seeds that are shown, which favours AdamW. Where it is
the least or the largest of the four, "edge" in the table says that another rate may be better: then
a lead of RLS is no lead over a tuned AdamW.
Runs are appended to benchmarks/results/swaps.jsonl, and are not made twice. DATA has aclImdb.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchrls import RLS
from torchrls.lab.convergence import data as texts
from torchrls.lab.experiments.data import Split, Store, imdb

RESULTS = Path(__file__).parent / "results" / "swaps.jsonl"
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
BATCH = 32
#: The words of a review, and the number of the token that BERT puts before them.
WORDS, CLS = 2_000, 2_000
#: The steps and the learning rate of AdamW that pretrain BERT.
PRETRAINING, PRETRAINING_RATE = 300, 1e-3
#: Fine-tuning must not lose more than this share of the training loss for more than 10 steps.
HARM = 1.2

#: An optimizer of the model for so many steps, and its scheduler, if it has one.
Maker = Callable[[nn.Module, int], tuple[Optimizer, LambdaLR | None]]


@dataclass
class Setting:
    """A model at its beginning, and its data.

    Args:
        loss: calculates the loss of a minibatch, given by the numbers of its samples.
        score: evaluates the model on the test set.
        samples: the number of training samples; a minibatch has all of them if ``batch`` is None.
    """

    model: nn.Module
    loss: Callable[[Tensor], Tensor]
    score: Callable[[], float]
    samples: int
    batch: int | None = BATCH


@dataclass(frozen=True)
class Problem:
    """A setting, by seed and folder of data, and the number of steps.

    Args:
        is_loss: the score is a loss, so that less is better; else it is an accuracy in percent.
        is_begun: the model has been trained: its score before, and the harm done, are recorded.
    """

    title: str
    steps: int
    setting: Callable[[int, Path | None], Setting]
    is_loss: bool = False
    is_begun: bool = False


def minibatches(setting: Setting, seed: int) -> Iterator[Tensor]:
    """Yield the numbers of samples for ever, in a new order in every epoch."""
    source = torch.Generator().manual_seed(seed)
    size = setting.batch or setting.samples
    while True:
        order = torch.randperm(setting.samples, generator=source)
        yield from order[: len(order) // size * size].split(size)


def train(setting: Setting, make: Maker, steps: int, seed: int) -> list[float]:
    """Train the model; return the loss of every step."""
    optimizer, scheduler = make(setting.model, steps)
    losses = []
    setting.model.train()
    for _, batch in zip(range(steps), minibatches(setting, seed), strict=False):
        optimizer.zero_grad()
        loss = setting.loss(batch)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def adamw(rate: float) -> Maker:
    """Return AdamW with warm-up in the first tenth of the steps, and linear decay to zero."""

    def make(model: nn.Module, steps: int) -> tuple[Optimizer, LambdaLR]:
        optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
        warm = max(1, steps // 10)
        return optimizer, LambdaLR(
            optimizer, lambda i: min((i + 1) / warm, (steps - i) / (steps - warm))
        )

    return make


#: The entrants by their names and learning rates; None for the default.
ENTRANTS: dict[tuple[str, float | None], Maker] = {
    ("RLS(model)", None): lambda model, steps: (RLS(model), None),
    ("RLS(model, total_steps=n)", None): lambda model, steps: (
        RLS(model, total_steps=steps),
        None,
    ),
    **{("AdamW", rate): adamw(rate) for rate in RATES},
}


def setting_of(model: nn.Module, split: Split) -> Setting:
    """Return the setting of a classifier; of targets with time, the score is the loss."""

    def loss(batch: Tensor) -> Tensor:
        return F.cross_entropy(model(split.train_x[batch]).movedim(-1, 1), split.train_y[batch])

    @torch.no_grad()
    def score() -> float:
        model.eval()
        parts = zip(split.test_x.split(500), split.test_y.split(500), strict=True)
        scored = 0.0
        for x, y in parts:
            outputs = model(x)
            if y.dim() > 1:
                scored += F.cross_entropy(outputs.movedim(-1, 1), y).item() * len(y)
            else:
                scored += 100 * int((outputs.argmax(1) == y).sum())
        return scored / len(split.test_y)

    return Setting(model, loss, score, len(split.train_x))


class Bert(nn.Module):
    """Hugging Face's BERT, small, with its own initial weights."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        super().__init__()
        config = BertConfig(
            vocab_size=WORDS + 1,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=80,
            num_labels=2,
        )
        self.bert = BertForSequenceClassification(config)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of rows of word numbers."""
        rows = torch.cat([torch.full_like(words[:, :1], CLS), words], 1)
        return self.bert(input_ids=rows, attention_mask=(rows != imdb.PADDING).long()).logits


class LoRA(nn.Module):
    """Add a trainable product of two thin matrices to a frozen linear layer."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.A = nn.Linear(frozen.in_features, rank, bias=False)
        self.B = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the frozen outputs and what the adapter adds."""
        return self.frozen(x) + self.B(self.A(x))


@lru_cache(maxsize=1)
def reviews(folder: Path | None) -> Split:
    """Read 3,000 reviews, and 2,000 to test."""
    if folder is None:
        raise SystemExit("the problems with BERT need --data FOLDER, which has aclImdb")
    return imdb.load(Store(folder), limit=3_000, test_limit=2_000, vocabulary=WORDS, length=64)


def bert(seed: int, folder: Path | None) -> Setting:
    """Return BERT from scratch."""
    return setting_of(Bert(), reviews(folder))


@lru_cache(maxsize=8)
def pretrained(seed: int, folder: Path | None) -> dict[str, Tensor]:
    """Return the weights of BERT after its training with AdamW."""
    torch.manual_seed(seed)
    setting = bert(seed, folder)
    train(setting, adamw(PRETRAINING_RATE), PRETRAINING, seed + 1_000)
    return setting.model.state_dict()


def tuning(seed: int, folder: Path | None) -> Setting:
    """Return BERT as AdamW has trained it."""
    setting = bert(seed, folder)
    setting.model.load_state_dict(pretrained(seed, folder))
    torch.manual_seed(seed)  # whether it has been trained now or before
    return setting


def lora(seed: int, folder: Path | None) -> Setting:
    """Return the trained BERT, frozen, with adapters at queries and values and with a new head."""
    setting = tuning(seed, folder)
    setting.model.requires_grad_(False)
    model = setting.model.bert
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        attention.query, attention.value = LoRA(attention.query), LoRA(attention.value)
    nn.init.normal_(model.classifier.weight, std=0.02)
    nn.init.zeros_(model.classifier.bias)
    model.classifier.requires_grad_(True)
    return setting


class Block(nn.Module):
    """A layer of GPT: causal attention and a feedforward part, both after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the layer."""
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0)
        q, k, v = parts.transpose(2, 3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A small GPT with learned positions, initialised as GPT-2 is."""

    def __init__(self, vocabulary: int, *, tied: bool, width: int = 64, context: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads=2) for _ in range(2)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if tied:
            self.head.weight = self.characters.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next characters."""
        stream = self.characters(x) + self.positions.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(stream)))


def gpt(tied: bool) -> Callable[[int, Path | None], Setting]:
    """Return what makes GPT, with a head of its own or with the embedding's weight."""
    return lambda seed, folder: setting_of(GPT(texts.text()[1], tied=tied), texts.characters())


class Convolution(nn.Module):
    """A graph convolution that keeps its weight as a parameter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(nn.init.xavier_uniform_(torch.empty(inputs, outputs)))
        self.b = nn.Parameter(torch.zeros(outputs))

    def forward(self, A: Tensor, x: Tensor) -> Tensor:
        """Return the outputs of all nodes."""
        return A @ x @ self.W + self.b


class GCN(nn.Module):
    """Two graph convolutions."""

    def __init__(self, A: Tensor, inputs: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.register_buffer("A", A)
        self.first, self.second = Convolution(inputs, width), Convolution(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of all nodes."""
        hidden = F.dropout(F.relu(self.first(self.A, x)), 0.5, self.training)
        return self.second(self.A, hidden)


def graph(seed: int, folder: Path | None) -> Setting:
    """Return a graph network on a stochastic block model; 120 of 600 nodes have known classes."""
    nodes, classes, inputs, known = 600, 6, 32, 120
    labels = torch.arange(nodes) % classes
    chance = torch.where(labels[:, None] == labels, 0.05, 0.012)
    A = torch.bernoulli(chance).triu(1)
    A = A + A.T + torch.eye(nodes)
    scale = A.sum(1).rsqrt()
    x = 0.4 * torch.randn(classes, inputs)[labels] + torch.randn(nodes, inputs)
    order = torch.randperm(nodes)
    model = GCN(scale[:, None] * A * scale, inputs, classes)

    def loss(batch: Tensor) -> Tensor:
        return F.cross_entropy(model(x)[order[batch]], labels[order[batch]])

    @torch.no_grad()
    def score() -> float:
        model.eval()
        rest = order[known:]
        return 100 * (model(x)[rest].argmax(1) == labels[rest]).float().mean().item()

    return Setting(model, loss, score, known, batch=None)


class Mixture(nn.Module):
    """A mixture of experts, kept as one parameter, with softmax gating."""

    def __init__(self, inputs: int, classes: int, width: int = 32, experts: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, experts)
        weight = torch.empty(experts, inputs, width)
        self.experts = nn.Parameter(nn.init.normal_(weight, std=inputs**-0.5))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        hidden = F.relu(torch.einsum("ni,eio->neo", x, self.experts))
        return self.head(torch.einsum("ne,neo->no", self.gate(x).softmax(1), hidden))


def mixture(seed: int, folder: Path | None) -> Setting:
    """Return a mixture of experts; the classes of 6,000 samples are linear in each of 4 regions."""
    regions, inputs, classes = 4, 16, 5
    x = torch.randn(10_000, inputs)
    region = (x @ torch.randn(inputs, regions)).argmax(1)
    y = torch.einsum("ni,nio->no", x, torch.randn(regions, inputs, classes)[region]).argmax(1)
    return setting_of(Mixture(inputs, classes), Split(x[:6_000], y[:6_000], x[6_000:], y[6_000:]))


PROBLEMS = {
    "bert": Problem("BERT, from scratch", PRETRAINING, bert),
    "fine-tuning": Problem("BERT, trained by AdamW, goes on", 150, tuning, is_begun=True),
    "gpt": Problem("GPT, loss", 200, gpt(tied=False), is_loss=True),
    "gpt-tied": Problem("GPT with a tied head, loss", 200, gpt(tied=True), is_loss=True),
    "lora": Problem("LoRA on the trained BERT", 150, lora),
    "graph": Problem("graph network without nn.Linear", 200, graph),
    "mixture": Problem("mixture of experts", 400, mixture),
}


def harm(before: float, losses: list[float]) -> dict[str, Any]:
    """Return the worst mean loss of 10 steps relative to the loss before, and how long it was bad.

    Example:
        >>> harm(1.0, [1.0] * 20)
        {'loss_before': 1.0, 'worst': 1.0, 'steps_of_harm': 0}
    """
    means = torch.tensor(losses).unfold(0, 10, 1).mean(1) / before
    longest = now = 0
    for ratio in means.tolist():
        now = now + 1 if not ratio <= HARM else 0
        longest = max(longest, now)
    return {"loss_before": before, "worst": means.max().item(), "steps_of_harm": longest}


def run(name: str, make: Maker, seed: int, data: Path | None) -> dict[str, Any]:
    """Train once; return the score at the end and the processor seconds of training."""
    problem = PROBLEMS[name]
    torch.manual_seed(seed)
    setting = problem.setting(seed, data)
    before: dict[str, float] = {}
    if problem.is_begun:
        before["score_before"] = setting.score()
        setting.model.train()  # the loss before has dropout, too
        with torch.no_grad():
            batches = zip(range(90), minibatches(setting, seed), strict=False)
            loss_before = statistics.mean(setting.loss(batch).item() for _, batch in batches)
    torch.manual_seed(seed)  # of dropout
    start = time.process_time()
    losses = train(setting, make, problem.steps, seed)
    seconds = time.process_time() - start
    result = {"score": setting.score(), "seconds": round(seconds, 2), **before}
    return result | (harm(loss_before, losses) if problem.is_begun else {})


def recorded(path: Path) -> list[dict[str, Any]]:
    """Return the runs that have been made."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cell(records: list[dict[str, Any]], problem: Problem) -> str:
    """Return the mean and deviation of scores, and what a trained model suffered."""
    scores = [record["score"] for record in records]
    digits = 3 if problem.is_loss else 1
    text = f"{statistics.mean(scores):.{digits}f}"
    if len(scores) > 1:
        text += f" ± {statistics.stdev(scores):.{digits}f}"
    if problem.is_begun:
        before = statistics.mean(record["score_before"] for record in records)
        worst = max(record["worst"] for record in records)
        steps = max(record["steps_of_harm"] for record in records)
        text += f" (before {before:.1f}; loss at worst × {worst:.2f}, {steps} steps > {HARM})"
    return text


def table(path: Path) -> str:
    """Return the scores as a Markdown table: a row for a problem, AdamW at its best rate."""
    runs: dict[tuple[str, str, float | None], list[dict[str, Any]]] = {}
    for record in recorded(path):
        key = (record["problem"], record["optimizer"], record["lr"])
        runs.setdefault(key, []).append(record)
    ours = [name for name, rate in ENTRANTS if rate is None]
    lines = [
        "| | AdamW, best [rate] | " + " | ".join(ours) + " |",
        "| --- " * (len(ours) + 2) + "|",
    ]
    for name, problem in PROBLEMS.items():
        rivals = {
            rate: runs[name, "AdamW", rate] for rate in RATES if (name, "AdamW", rate) in runs
        }
        cells = [problem.title]
        if rivals:
            sign = -1 if problem.is_loss else 1
            best = max(
                rivals, key=lambda r: sign * statistics.mean(one["score"] for one in rivals[r])
            )
            edge = ", edge" if best in (RATES[0], RATES[-1]) else ""
            cells.append(f"{cell(rivals[best], problem)} [{best:g}{edge}]")
        else:
            cells.append("")
        cells += [
            cell(runs[key], problem) if (key := (name, o, None)) in runs else "" for o in ours
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Make the runs that are missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="the folder that has aclImdb")
    parser.add_argument("--problem", action="append", choices=PROBLEMS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the table, and make no run")
    asked = parser.parse_args()
    if asked.table:
        print(table(asked.out))
        return
    torch.set_num_threads(1)
    head = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    known = {(r["problem"], r["optimizer"], r["lr"], r["seed"]) for r in recorded(asked.out)}
    for seed in range(asked.seeds):
        for problem in asked.problem or PROBLEMS:
            for (optimizer, rate), make in ENTRANTS.items():
                key = (problem, optimizer, rate, seed)
                if key in known:
                    continue
                record = dict(zip(("problem", "optimizer", "lr", "seed"), key, strict=True))
                record |= run(problem, make, seed, asked.data)
                record["commit"] = commit
                with asked.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(*key, f"{record['score']:.3f}", f"{record['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
