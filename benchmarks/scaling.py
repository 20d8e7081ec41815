"""Calculate what RLS would cost on a cluster, for transformers of Llama's shapes.

python benchmarks/scaling.py          # the tables of docs/scaling.md
python benchmarks/scaling.py --host   # measures HOST_SECONDS

Nothing here is a measurement of a cluster. Sizes and operations come from formulas, which
tests/distributed/test_scaling.py compares with a small model; the machine is assumed, by the
constants below.
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
from torchrls.layers.rows import SUMS
from torchrls.matrix.whitening import COLUMNS, PLACES, tile_shape
from torchrls.step.default import EVERY

# Assumed: A100 GPUs at rates that are usually reached. Sizes in bytes, rates per second.
#: The memory of a GPU.
CAPACITY = 80e9
#: The memory that is reserved for activations.
ACTIVATIONS = 20e9
#: The operations of the model: bfloat16, peak 312e12.
MODEL_RATE = 150e12
#: The operations of products with P: float32 without TF32, the default of torch; peak 19.5e12.
FLOAT_RATE = 15e12
#: The bytes that the GPU reads or writes; peak 2.0e12.
MEMORY_RATE = 1.5e12
#: The GPUs of a node; the bytes of a GPU within a node (NVLink) and between nodes (200 Gb/s).
NODE, NODE_RATE, NETWORK_RATE = 8, 200e9, 20e9

# Measured here, on one thread of a busy AMD EPYC: see :func:`measured_host_seconds`.
#: The seconds in which Python and torch start the operations of one layer.
HOST_SECONDS = 1.05e-3

# Counted: see tests/distributed/test_scaling.py.
#: The bytes read and written for each bfloat16 weight.
TRAFFIC = 68
#: The bytes of a bfloat16 and of a float32 number.
HALF, FLOAT = 2, 4
#: The exchanged numbers of a set beside the sum of its rows, and those of the flag of a step.
TAIL, FLAG = 5, 2


class Layer(NamedTuple):
    """A linear layer without a bias. ``Owners`` needs its name, groups and weight."""

    name: str
    inputs: int
    outputs: int
    groups: int = 1
    weight: Any = None

    @property
    def size(self) -> int:
        """The number of weights."""
        return self.inputs * self.outputs


class Llama(NamedTuple):
    """A transformer with the layers of Llama."""

    label: str
    depth: int
    width: int
    hidden: int
    vocabulary: int = 32000

    def layers(self) -> list[Layer]:
        """Return the layers that RLS trains."""
        w, h = self.width, self.hidden
        shapes = {**dict.fromkeys("qkvo", (w, w)), "gate": (w, h), "up": (w, h), "down": (h, w)}
        blocks = [
            Layer(f"{block}.{name}", *shape)
            for block in range(self.depth)
            for name, shape in shapes.items()
        ]
        return [*blocks, Layer("head", w, self.vocabulary)]

    @property
    def others(self) -> int:
        """The number of parameters that Adam trains: those of the embedding and of the norms."""
        return self.vocabulary * self.width + (2 * self.depth + 1) * self.width


MODELS = (
    Llama("7B", 32, 4096, 11008),
    Llama("13B", 40, 5120, 13824),
    Llama("33B", 60, 6656, 17920),
    Llama("65B", 80, 8192, 22016),
)
RANKS = (8, 64, 256, 1024)
#: The number of tokens in a step.
TOKENS = 4_000_000


class Mode(NamedTuple):
    """A way of using RLS.

    Attributes:
        label: the name in the tables.
        cut: how weights are updated: "all" ranks update whole weights, each rank updates its "rows"
            of every weight, or the "owner" of a weight updates the whole of it.
    """

    label: str
    cut: str


MODES = (
    Mode("DDP", "all"),
    Mode("DDP, `shard_inverse=True`", "owner"),
    Mode("`fully_shard`", "rows"),
)


# -- one layer -----------------------------------------------------------------------------------


def tile_bytes(size: int) -> int:
    """Return the bytes of the tiles of P for so many inputs, or of Q for so many outputs."""
    tiles, each, _ = tile_shape(size)
    return FLOAT * tiles * each**2


def inverse_bytes(layer: Layer) -> int:
    """Return the bytes of P."""
    return tile_bytes(layer.inputs)


def outputs_bytes(layer: Layer) -> int:
    """Return the bytes of Q."""
    return tile_bytes(layer.outputs)


def memory_bytes(layer: Layer) -> int:
    """Return the bytes of momentum and squares."""
    return 2 * FLOAT * layer.size


def exchanged_floats(layers: Iterable[Layer], averages: int = DEFAULTS["averages"]) -> int:
    """Return the numbers in the one all-reduce of a step."""
    return sum(layer.groups * averages * (layer.inputs + TAIL) for layer in layers) + FLAG


def extent_floats(layers: Iterable[Layer]) -> int:
    """Return the numbers in the two all-reduces before the first step."""
    return sum(2 * SUMS * layer.groups * layer.inputs for layer in layers)


def gathered_floats(layers: Iterable[Layer], ranks: int) -> float:
    """Return the numbers that a rank with rows of the weights receives in a step.

    They are D S for Q, and rows of D where tiles are cut between ranks.
    """
    return sum(COLUMNS * layer.outputs / EVERY + missing_rows(layer, ranks) for layer in layers)


def missing_rows(layer: Layer, ranks: int) -> int:
    """Return the most numbers in the rows of D that a rank lacks to complete its tiles."""
    size, each = tile_shape(layer.outputs)[-1], -(-layer.outputs // ranks)
    held = held_rows(layer.outputs, ranks)
    missing = [-(-b // size) * size - a // size * size - (b - a) for a, b in held if a < b]
    return 0 if each % size == 0 else layer.inputs * max(missing)


def product_operations(layer: Layer) -> int:
    """Return the operations of Q G P."""
    return 2 * (tile_shape(layer.inputs)[-1] + tile_shape(layer.outputs)[-1]) * layer.size


def update_operations(layer: Layer) -> int:
    """Return the operations of an update of P and Q.

    These are B P, the matrix S of Woodbury's identity and W^T W, and D S for Q. Solutions with the
    roots of S, of ``rows**2 * inputs`` operations each, are left out.
    """

    def update(size: int, rows: int) -> int:
        tiles, each, _ = tile_shape(size)
        return tiles * (4 * rows * each**2 + 2 * rows**2 * each)

    inputs = update(layer.inputs, int(DEFAULTS["averages"]) + PLACES)
    return inputs + update(layer.outputs, COLUMNS + PLACES) + 2 * COLUMNS * layer.size


def update_seconds(layer: Layer) -> float:
    """Return the seconds of the update of P and Q per step; there is one in EVERY steps.

    They are the maximum of computation and memory traffic: P is read for B P, and read and written
    for its change.
    """
    traffic = 3 * (inverse_bytes(layer) + outputs_bytes(layer)) / MEMORY_RATE
    return max(update_operations(layer) / FLOAT_RATE, traffic) / EVERY


def device_seconds(layer: Layer, share: int = 1) -> float:
    """Return the seconds of a GPU that has one of ``share`` parts of the rows of the weight."""
    product = product_operations(layer) / share / FLOAT_RATE
    return product + TRAFFIC * layer.size / share / MEMORY_RATE + update_seconds(layer)


# -- one rank ------------------------------------------------------------------------------------


class Use(NamedTuple):
    """The memory and the time of a step, each on the rank that needs most.

    Attributes:
        memory: bytes of weights, gradients, momentum and squares, which Adam has too.
        inverse: bytes of P and Q.
        transient: bytes of temporary tensors in a step.
        device: seconds of the GPU.
        host: seconds of Python.
        network: seconds of communication.
    """

    memory: float
    inverse: float
    transient: float
    device: float
    host: float
    network: float

    @property
    def total(self) -> float:
        """The bytes of everything but activations."""
        return self.memory + self.inverse + self.transient

    @property
    def seconds(self) -> float:
        """The seconds of the step: GPU and Python overlap, communication does not."""
        return max(self.device, self.host) + self.network


def used(model: Llama, mode: Mode, ranks: int) -> Use:
    """Return memory and time of a step on so many ranks."""
    layers = model.layers()
    share = ranks if mode.cut == "rows" else 1
    trained = sum(layer.size for layer in layers)
    held = 2 * HALF * (trained + model.others) / share  # weights and gradients
    held += 2 * HALF * model.others / share  # the fallback's state has the dtype of its parameters
    per_rank, flat = [layers], 0.0
    network = reduce_seconds(FLOAT * exchanged_floats(layers), ranks)
    if mode.cut == "owner":
        per_rank = dealt(layers, ranks)
        flat = max(HALF * sum(layer.size for layer in part) for part in per_rank)
        network += HALF * trained / rate(ranks)
    elif mode.cut == "rows" and ranks > 1:
        network += FLOAT * gathered_floats(layers, ranks) / rate(ranks)
    largest = max(layer.size for layer in layers) / share
    copies = max(FLOAT * sum(layer.size for layer in part) / share for part in per_rank)
    return Use(
        memory=held + max(sum(map(memory_bytes, part)) / share for part in per_rank),
        inverse=max(
            sum(inverse_bytes(layer) + outputs_bytes(layer) for layer in part) for part in per_rank
        ),
        transient=copies + flat + 3 * FLOAT * largest,
        device=max(sum(device_seconds(layer, share) for layer in part) for part in per_rank),
        host=max(HOST_SECONDS * len(part) for part in per_rank),
        network=network,
    )


def dealt(layers: list[Layer], ranks: int) -> list[list[Layer]]:
    """Return the layers of each rank that owns some, as ``shard_inverse=True`` assigns them."""
    here: Any = SimpleNamespace(count=ranks, rank=0)
    owners, shares = Owners(here), []
    owners.assign(layers)  # type: ignore[arg-type]
    for here.rank in range(ranks):
        shares.append([layer for layer in layers if owners.is_mine(layer)])  # type: ignore[arg-type]
    return [own for own in shares if own]


def rate(ranks: int) -> float:
    """Return the bytes per second between so many ranks."""
    return NODE_RATE if ranks <= NODE else NETWORK_RATE


def reduce_seconds(size: float, ranks: int) -> float:
    """Return the seconds of an all-reduce of so many bytes around a ring."""
    return 2 * size * (ranks - 1) / ranks / rate(ranks)


def training_operations(model: Llama, tokens: float) -> float:
    """Return the operations of forward and backward pass, without attention scores."""
    return 6 * sum(layer.size for layer in model.layers()) * tokens


def training_seconds(model: Llama, tokens: float, ranks: int) -> float:
    """Return the seconds of forward and backward pass."""
    return training_operations(model, tokens) / ranks / MODEL_RATE


def observing_seconds(model: Llama, tokens: float, ranks: int) -> float:
    """Return the seconds for reading the inputs of every layer once more, to sum them up."""
    entries = tokens / ranks * sum(layer.inputs for layer in model.layers())
    return HALF * entries / MEMORY_RATE


def overhead(model: Llama, mode: Mode, tokens: float, ranks: int) -> float:
    """Return the time that RLS adds, relative to forward and backward pass."""
    added = used(model, mode, ranks).seconds + observing_seconds(model, tokens, ranks)
    return added / training_seconds(model, tokens, ranks)


def tokens_for(model: Llama, mode: Mode, ranks: int, share: float) -> float:
    """Return the number of tokens in a step at which the overhead is ``share``."""
    each = share * training_seconds(model, 1, ranks) - observing_seconds(model, 1, ranks)
    return used(model, mode, ranks).seconds / each


# -- tables --------------------------------------------------------------------------------------


def table(headings: list[str], rows: Iterable[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def giga(size: float) -> str:
    """Format bytes as GB."""
    return f"{size / 1e9:,.1f}" if size >= 1e8 else f"{size / 1e9:.2f}"


def volumes() -> str:
    """Return the table of the messages of a step, in MB."""
    layers, model = MODELS[0].layers(), MODELS[0]
    trained = sum(layer.size for layer in layers)
    rows = [
        ["the rows, `RLS(model)`, 16 sets", FLOAT * exchanged_floats(layers)],
        ["the rows, `RLS.paper`, one set", FLOAT * exchanged_floats(layers, 1)],
        ["extents of the inputs, once", FLOAT * extent_floats(layers)],
        *(
            [f"`fully_shard` on {ranks}: what tiles of outputs need", FLOAT * gathered]
            for ranks in (8, 64)
            for gathered in [gathered_floats(layers, ranks)]
        ),
        ["`shard_inverse=True`: new weights, beside the rows", HALF * trained],
        ["for comparison: the gradients, with or without RLS", HALF * (trained + model.others)],
    ]
    return table(["message", "MB"], ([str(name), f"{size / 1e6:,.1f}"] for name, size in rows))


def memories() -> str:
    """Return the table of the memory of each mode on 8 and more ranks; bold if it does not fit."""

    def row(mode: Mode) -> list[str]:
        uses = [used(MODELS[0], mode, ranks) for ranks in (8, 64, 1024)]
        first = [giga(size) for size in (uses[0].memory, uses[0].inverse, uses[0].transient)]
        sums = [giga(use.total) if fits(use) else f"**{giga(use.total)}**" for use in uses]
        return [mode.label, *first, *sums]

    headings = ["", "as Adam, 8 GPUs", "P and Q", "within the step", "sum, 8 GPUs", "64", "1024"]
    return table(headings, map(row, MODES))


def fits(use: Use) -> bool:
    """Return whether the memory suffices, with activations."""
    return use.total <= CAPACITY - ACTIVATIONS


def fewest(model: Llama, mode: Mode) -> str:
    """Return the least power of two of GPUs on which a mode fits, up to 1,024."""
    counts = (1 << power for power in range(11))
    return next((str(count) for count in counts if fits(used(model, mode, count))), "never")


def operations() -> str:
    """Return the table of the operations of a step."""
    layers = MODELS[0].layers()
    product = sum(map(product_operations, layers))
    update = sum(map(update_operations, layers)) / EVERY
    share = (product + update) / training_operations(MODELS[0], TOKENS)
    headings = ["Q G P, 10¹²", "new P and Q, 10¹²", "both, of forward and backward"]
    cells = [f"{product / 1e12:.2f}", f"{update / 1e12:.3f}", f"{100 * share:.3f} %"]
    return table(headings, [cells])


def overheads() -> str:
    """Return the table of the seconds that RLS adds, and of the overhead."""

    def cell(mode: Mode, ranks: int) -> str:
        use = used(MODELS[0], mode, ranks)
        parts = f"{use.device:.2f} / {use.host:.2f} / {use.network:.2f}"
        return f"{parts}: {100 * overhead(MODELS[0], mode, TOKENS, ranks):.1f} %"

    base = [f"{training_seconds(MODELS[0], TOKENS, ranks):.1f} s" for ranks in RANKS]
    rows = [["forward and backward", *base]]
    rows += [[mode.label, *(cell(mode, ranks) for ranks in RANKS)] for mode in MODES]
    return table(["", *(f"{ranks} GPUs" for ranks in RANKS)], rows)


def crossovers() -> str:
    """Return the table of the millions of tokens in a step at which the overhead is 10 %."""

    def row(mode: Mode) -> list[str]:
        return [mode.label, *(f"{tokens_for(MODELS[0], mode, n, 0.1) / 1e6:.2f}" for n in RANKS)]

    return table(["", *(f"{ranks} GPUs" for ranks in RANKS)], map(row, MODES))


def widths() -> str:
    """Return the table of the size of P and Q and the fewest GPUs, for each model."""

    def row(model: Llama) -> list[str]:
        shape = f"{model.depth} x {model.width}, {model.hidden}"
        size = sum(inverse_bytes(layer) + outputs_bytes(layer) for layer in model.layers())
        return [model.label, shape, giga(size), *(fewest(model, mode) for mode in MODES)]

    headings = ["model", "layers", "P and Q, GB", *(f"{mode.label}, GPUs" for mode in MODES)]
    return table(headings, map(row, MODELS))


TABLES = {
    "Messages of a step (7B)": volumes,
    "Memory of a rank, GB (7B)": memories,
    "Operations of a step (7B; 4 million tokens)": operations,
    "Seconds of the GPU / of Python / of the network, and the overhead (7B)": overheads,
    "Millions of tokens a step for an overhead of 10 % (7B)": crossovers,
    "P and Q, and the fewest GPUs on which all fits": widths,
}


def measured_host_seconds(steps: int = 40) -> float:
    """Return the CPU seconds of a step per layer, measured with 40 very small layers.

    No two layers have the same shape, because layers of one shape are updated together.
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
