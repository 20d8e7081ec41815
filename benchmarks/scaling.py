"""What RLS would cost on a cluster: a calculation for transformers of Llama's shapes.

python benchmarks/scaling.py          # the tables of docs/scaling.md
python benchmarks/scaling.py --host   # measures the one number of them that is measured

Nothing here is a measurement of a cluster. Sizes and operations are the formulas of the
implementation, which tests/distributed/test_scaling.py compares with what a small model really
does; the machine is an assumption, in numbers below.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from torchrls import RLS
from torchrls.common.hyperparameters import DEFAULTS
from torchrls.common.shards import held_rows
from torchrls.distributed.owners import Owners
from torchrls.layers.extent import SUMS
from torchrls.step.block import PLACES
from torchrls.step.form import rank_for
from torchrls.step.outputs import BLOCK, COLUMNS
from torchrls.step.turns import EVERY

# Assumed: an A100 of 80 GB, at what is usually reached of its peaks.
CAPACITY = 80e9
#: Bytes that activations are left.
ACTIVATIONS = 20e9
#: Operations a second of the model: bfloat16, peak 312e12.
MODEL_RATE = 150e12
#: Of products with P: float32 as torch computes it by default, without TF32; peak 19.5e12.
FLOAT_RATE = 15e12
#: Bytes a second of its memory; peak 2.0e12.
MEMORY_RATE = 1.5e12
#: Bytes a second and GPU between those of a node (NVLink), and between nodes (200 Gb/s each).
NODE, NODE_RATE, NETWORK_RATE = 8, 200e9, 20e9
#: Seconds for the eigenvectors of an 80 x 80 matrix, which small ranks need every other step.
EIGEN_SECONDS = 1e-3

# Measured here, on one thread of a busy AMD EPYC: see :func:`measured_host_seconds`.
#: Seconds in which Python and torch start the operations of one layer.
HOST_SECONDS = 1.05e-3

# Counted: see tests/distributed/test_scaling.py.
#: Bytes that the operations for one bfloat16 weight read and write, with a dense P and with V.
TRAFFIC, LOW_RANK_TRAFFIC = 145, 155
#: Bytes of a bfloat16 weight, and of a float32 number.
HALF, FLOAT = 2, 4
#: Numbers of a statistic beside the sum of the rows, and of the flag.
TAIL, FLAG = 5, 2


class Layer(NamedTuple):
    """A linear layer without a bias; what it has beside its sizes is for ``Owners``."""

    name: str
    inputs: int
    outputs: int
    groups: int = 1
    weight: Any = None

    @property
    def size(self) -> int:
        return self.inputs * self.outputs


class Llama(NamedTuple):
    """A transformer."""

    label: str
    depth: int
    width: int
    hidden: int
    vocabulary: int = 32000

    def layers(self) -> list[Layer]:
        """What RLS trains."""
        w, h = self.width, self.hidden
        shapes = {**dict.fromkeys("qkvo", (w, w)), "gate": (w, h), "up": (w, h), "down": (h, w)}
        found = [
            Layer(f"{block}.{name}", *shape)
            for block in range(self.depth)
            for name, shape in shapes.items()
        ]
        return [*found, Layer("head", w, self.vocabulary)]

    @property
    def others(self) -> int:
        """Parameters of the embedding and of the norms: Adam trains them."""
        return self.vocabulary * self.width + (2 * self.depth + 1) * self.width


MODELS = (
    Llama("7B", 32, 4096, 11008),
    Llama("13B", 40, 5120, 13824),
    Llama("33B", 60, 6656, 17920),
    Llama("65B", 80, 8192, 22016),
)
RANKS = (8, 64, 256, 1024)
#: Tokens of a step.
TOKENS = 4_000_000


class Mode(NamedTuple):
    """How RLS is used.

    Attributes:
        cut: who moves a weight: "all" ranks the whole of it, each its "rows", or its "owner".
    """

    label: str
    cut: str
    rank: Any = DEFAULTS["rank"]


MODES = (
    Mode("DDP, `rank=None`", "all", None),
    Mode("DDP, `shard_inverse=True, rank=None`", "owner", None),
    Mode("`fully_shard`, `rank=None`", "rows", None),
    Mode("`fully_shard`, as it comes", "rows"),
    Mode("`fully_shard`, `rank=64`", "rows", 64),
)


# -- one layer -----------------------------------------------------------------------------------


def rank_of(layer: Layer, asked: Any) -> int | None:
    """None if P is dense."""
    return rank_for(asked, layer.groups, layer.inputs, FLOAT)


def inverse_bytes(layer: Layer, asked: Any) -> int:
    """Of P, or of V."""
    return FLOAT * layer.inputs * (rank_of(layer, asked) or layer.inputs)


def block_size(layer: Layer) -> int:
    """Outputs that have a Q together."""
    count = -(-layer.outputs // BLOCK)
    return -(-layer.outputs // count)


def outputs_bytes(layer: Layer) -> int:
    """Of Q."""
    return FLOAT * -(-layer.outputs // BLOCK) * block_size(layer) ** 2


def memory_bytes(layer: Layer) -> int:
    """Of momentum and squares."""
    return 2 * FLOAT * layer.size


def exchanged_floats(layers: Iterable[Layer], averages: int = DEFAULTS["averages"]) -> int:
    """Of the one all-reduce of a step."""
    return sum(layer.groups * averages * (layer.inputs + TAIL) for layer in layers) + FLAG


def extent_floats(layers: Iterable[Layer]) -> int:
    """Of the two all-reduces before the first step."""
    return sum(2 * SUMS * layer.groups * layer.inputs for layer in layers)


def gathered_floats(layers: Iterable[Layer], ranks: int) -> float:
    """What a rank with rows of the weights is told: D S, and rows of D where blocks are cut."""
    return sum(COLUMNS * layer.outputs / EVERY + missing_rows(layer, ranks) for layer in layers)


def missing_rows(layer: Layer, ranks: int) -> int:
    """Numbers in the rows that complete the blocks of a rank, at most."""
    size, each = block_size(layer), -(-layer.outputs // ranks)
    held = held_rows(layer.outputs, ranks)
    missing = [-(-b // size) * size - a // size * size - (b - a) for a, b in held if a < b]
    return 0 if each % size == 0 else layer.inputs * max(missing)


def product_operations(layer: Layer, asked: Any) -> int:
    """Of Q P G."""
    rank = rank_of(layer, asked)
    inner = 2 * layer.inputs if rank is None else 4 * rank
    return (inner + 2 * block_size(layer)) * layer.size


def rows_of(layer: Layer, asked: Any) -> int:
    """What P learns in a step: the sets, and with a dense P the rows that damp it."""
    return int(DEFAULTS["averages"]) + (PLACES if rank_of(layer, asked) is None else 0)


def update_operations(layer: Layer, asked: Any) -> int:
    """Of the new P: B P, the matrix S of Woodbury's identity and W^T W; of low rank, B P and S.

    And of the new Q, in the same way, with the columns that it learns from. Solutions with the
    roots of S, of ``rows**2 * inputs`` operations each, are left out.
    """
    n, rows, rank = layer.inputs, rows_of(layer, asked), rank_of(layer, asked)
    inputs = 4 * rows * n * (n if rank is None else rank) + 2 * rows**2 * n
    rows = COLUMNS + PLACES
    outputs = 4 * rows * layer.outputs * block_size(layer) + 2 * rows**2 * layer.outputs
    return inputs + outputs + 2 * COLUMNS * layer.size


def update_seconds(layer: Layer, asked: Any) -> float:
    """P is read for B P and read and written for its change: its traffic is what that takes.

    P and Q learn in every second step.
    """
    traffic = 3 * inverse_bytes(layer, asked) / MEMORY_RATE
    return max(update_operations(layer, asked) / FLOAT_RATE, traffic) / EVERY


def device_seconds(layer: Layer, asked: Any, share: int = 1) -> float:
    """Of the GPU, if it has one of ``share`` parts of the rows of the weight."""
    product = product_operations(layer, asked) / share / FLOAT_RATE
    traffic = TRAFFIC if rank_of(layer, asked) is None else LOW_RANK_TRAFFIC
    entries = traffic * layer.size / share / MEMORY_RATE
    return product + entries + update_seconds(layer, asked)


def host_seconds(layer: Layer, asked: Any) -> float:
    """Of Python, and of what it has to wait for."""
    return HOST_SECONDS + (0 if rank_of(layer, asked) is None else EIGEN_SECONDS / 2)


# -- one rank ------------------------------------------------------------------------------------


class Use(NamedTuple):
    """Of the rank that has most.

    Attributes:
        memory: bytes of weights, gradients, momentum and squares, which Adam has too.
        inverse: bytes of P and Q.
        transient: bytes that a step needs beside.
        device: seconds of the GPU.
        host: seconds of Python.
        network: seconds of what is exchanged.
    """

    memory: float
    inverse: float
    transient: float
    device: float
    host: float
    network: float

    @property
    def total(self) -> float:
        """Bytes."""
        return self.memory + self.inverse + self.transient

    @property
    def seconds(self) -> float:
        """Of the step."""
        return max(self.device, self.host) + self.network


def used(model: Llama, mode: Mode, ranks: int) -> Use:
    """By one of so many ranks."""
    layers = model.layers()
    share = ranks if mode.cut == "rows" else 1
    trained = sum(layer.size for layer in layers)
    held = 2 * HALF * (trained + model.others) / share  # weights and gradients
    held += 2 * HALF * model.others / share  # the state of the fallback is as its parameters are
    own, flat = [layers], 0.0
    network = reduce_seconds(FLOAT * exchanged_floats(layers), ranks)
    if mode.cut == "owner":
        own = dealt(layers, ranks)
        flat = max(HALF * sum(layer.size for layer in some) for some in own)
        network += HALF * trained / rate(ranks)
    elif mode.cut == "rows" and ranks > 1:
        network += FLOAT * gathered_floats(layers, ranks) / rate(ranks)
    largest = max(layer.size for layer in layers) / share
    copies = max(FLOAT * sum(layer.size for layer in some) / share for some in own)
    return Use(
        memory=held + max(sum(map(memory_bytes, some)) / share for some in own),
        inverse=max(
            sum(inverse_bytes(layer, mode.rank) + outputs_bytes(layer) for layer in some)
            for some in own
        ),
        transient=copies + flat + 3 * FLOAT * largest,
        device=max(sum(device_seconds(layer, mode.rank, share) for layer in some) for some in own),
        host=max(sum(host_seconds(layer, mode.rank) for layer in some) for some in own),
        network=network,
    )


def dealt(layers: list[Layer], ranks: int) -> list[list[Layer]]:
    """As ``shard_inverse=True`` deals them out."""
    here: Any = SimpleNamespace(count=ranks, rank=0)
    owners, found = Owners(here), []
    owners.assign(layers)  # type: ignore[arg-type]
    for here.rank in range(ranks):
        found.append([layer for layer in layers if owners.is_mine(layer)])  # type: ignore[arg-type]
    return [some for some in found if some]


def rate(ranks: int) -> float:
    """Bytes a second between ranks."""
    return NODE_RATE if ranks <= NODE else NETWORK_RATE


def reduce_seconds(size: float, ranks: int) -> float:
    """Of an all-reduce around a ring."""
    return 2 * size * (ranks - 1) / ranks / rate(ranks)


def training_operations(model: Llama, tokens: float) -> float:
    """Of forward and backward, without attention itself."""
    return 6 * sum(layer.size for layer in model.layers()) * tokens


def training_seconds(model: Llama, tokens: float, ranks: int) -> float:
    return training_operations(model, tokens) / ranks / MODEL_RATE


def observing_seconds(model: Llama, tokens: float, ranks: int) -> float:
    """The inputs of every layer are read once more, to be summed up."""
    entries = tokens / ranks * sum(layer.inputs for layer in model.layers())
    return HALF * entries / MEMORY_RATE


def overhead(model: Llama, mode: Mode, tokens: float, ranks: int) -> float:
    """What RLS adds, as a share of forward and backward."""
    added = used(model, mode, ranks).seconds + observing_seconds(model, tokens, ranks)
    return added / training_seconds(model, tokens, ranks)


def tokens_for(model: Llama, mode: Mode, ranks: int, share: float) -> float:
    """Tokens of a step from which on the overhead is less than this."""
    each = share * training_seconds(model, 1, ranks) - observing_seconds(model, 1, ranks)
    return used(model, mode, ranks).seconds / each


# -- tables --------------------------------------------------------------------------------------


def table(headings: list[str], rows: Iterable[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def giga(size: float) -> str:
    return f"{size / 1e9:,.1f}" if size >= 1e8 else f"{size / 1e9:.2f}"


def volumes() -> str:
    """What is exchanged."""
    layers, model = MODELS[0].layers(), MODELS[0]
    trained = sum(layer.size for layer in layers)
    rows = [
        ["the rows, `RLS(model)`, 16 sets", FLOAT * exchanged_floats(layers)],
        ["the rows, `RLS.paper`, one set", FLOAT * exchanged_floats(layers, 1)],
        ["extents of the inputs, once", FLOAT * extent_floats(layers)],
        *(
            [f"`fully_shard` on {ranks}: what blocks of outputs need", FLOAT * gathered]
            for ranks in (8, 64)
            for gathered in [gathered_floats(layers, ranks)]
        ),
        ["`shard_inverse=True`: new weights, beside the rows", HALF * trained],
        ["for comparison: the gradients, with or without RLS", HALF * (trained + model.others)],
    ]
    return table(["message", "MB"], ([str(name), f"{size / 1e6:,.1f}"] for name, size in rows))


def memories() -> str:
    """Of each mode on 8 and more ranks."""

    def row(mode: Mode) -> list[str]:
        uses = [used(MODELS[0], mode, ranks) for ranks in (8, 64, 1024)]
        first = [giga(size) for size in (uses[0].memory, uses[0].inverse, uses[0].transient)]
        sums = [giga(use.total) if fits(use) else f"**{giga(use.total)}**" for use in uses]
        return [mode.label, *first, *sums]

    headings = ["", "as Adam, 8 GPUs", "P and Q", "within the step", "sum, 8 GPUs", "64", "1024"]
    return table(headings, map(row, MODES))


def fits(use: Use) -> bool:
    """Beside activations."""
    return use.total <= CAPACITY - ACTIVATIONS


def fewest(model: Llama, mode: Mode) -> str:
    """GPUs on which it fits, of powers of two."""
    counts = (1 << power for power in range(11))
    return next((str(count) for count in counts if fits(used(model, mode, count))), "never")


def operations() -> str:
    """Of the three parts of a step."""

    def row(label: str, rank: Any) -> list[str]:
        layers = MODELS[0].layers()
        product = sum(product_operations(layer, rank) for layer in layers)
        update = sum(update_operations(layer, rank) for layer in layers) / EVERY
        share = (product + update) / training_operations(MODELS[0], TOKENS)
        return [label, f"{product / 1e12:.2f}", f"{update / 1e12:.3f}", f"{100 * share:.3f} %"]

    headings = ["P", "Q P G, 10¹²", "new P and Q, 10¹²", "both, of forward and backward"]
    choices = {"dense": None, "as it comes": "auto", "`rank=64`": 64}
    return table(headings, (row(*choice) for choice in choices.items()))


def overheads() -> str:
    """Seconds that RLS adds, as a share of forward and backward."""

    def cell(mode: Mode, ranks: int) -> str:
        use = used(MODELS[0], mode, ranks)
        parts = f"{use.device:.2f} / {use.host:.2f} / {use.network:.2f}"
        return f"{parts}: {100 * overhead(MODELS[0], mode, TOKENS, ranks):.1f} %"

    base = [f"{training_seconds(MODELS[0], TOKENS, ranks):.1f} s" for ranks in RANKS]
    rows = [["forward and backward", *base]]
    rows += [[mode.label, *(cell(mode, ranks) for ranks in RANKS)] for mode in MODES]
    return table(["", *(f"{ranks} GPUs" for ranks in RANKS)], rows)


def crossovers() -> str:
    """Millions of tokens a step from which on the overhead is below 10 %."""

    def row(mode: Mode) -> list[str]:
        return [mode.label, *(f"{tokens_for(MODELS[0], mode, n, 0.1) / 1e6:.2f}" for n in RANKS)]

    return table(["", *(f"{ranks} GPUs" for ranks in RANKS)], map(row, MODES))


def widths() -> str:
    """P of larger models, on every rank."""

    def row(model: Llama) -> list[str]:
        cells = [model.label, f"{model.depth} x {model.width}, {model.hidden}"]
        for mode in MODES[2:]:
            size = sum(inverse_bytes(layer, mode.rank) for layer in model.layers())
            cells += [giga(size), fewest(model, mode)]
        return [*cells, fewest(model, MODES[1])]

    names = ("dense P", "as it comes", "`rank=64`")
    pairs = [cell for name in names for cell in (f"{name}, GB", "GPUs")]
    headings = ["model", "layers", *pairs, "`shard_inverse`, GPUs"]
    return table(headings, map(row, MODELS))


TABLES = {
    "Messages of a step (7B)": volumes,
    "Memory of a rank, GB (7B)": memories,
    "Operations of a step (7B; 4 million tokens)": operations,
    "Seconds of the GPU / of Python / of the network, and the overhead (7B)": overheads,
    "Millions of tokens a step for an overhead of 10 % (7B)": crossovers,
    "P on every rank with `fully_shard`, and the fewest GPUs on which all fits": widths,
}


def measured_host_seconds(steps: int = 40) -> float:
    """CPU seconds of a step for each of 40 layers that are so small that nothing else counts.

    No two have the same shape: those would be updated together.
    """
    torch.set_num_threads(1)
    sizes, times = range(20, 61), []
    model = nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in pairwise(sizes)))
    optimizer = RLS(model, factored=False)  # as on several ranks
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(64, sizes[0])).square().mean().backward()
        start = time.process_time()
        optimizer.step()
        times.append(time.process_time() - start)
    return median(times) / len(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", action="store_true")
    if parser.parse_args().host:
        print(f"{1e3 * measured_host_seconds():.2f} ms of the host for each layer")
    else:
        for title, make in TABLES.items():
            print(f"{title}\n\n{make()}\n")
