"""Golden numbers: parameters and state of 58 cases after 80 steps, to compare two commits.

    python tests/golden.py save FILE              # of the package that this Python imports
    PYTHONPATH=OTHER/src python tests/golden.py save OTHER_FILE
    python tests/golden.py compare OTHER_FILE FILE

``save`` prints a hash for every case. Hashes depend on the processor and on torch's kernels, so
both files have to come from one machine. ``compare`` prints "equal", or the largest difference
relative to the largest entry of its tensor; with ``save --double``, another order of operations
shows as rounding of float64. (The twelve cases of two processes take 20 steps.) Only public names
are used, so that the script runs on any commit.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from torchrls import RLS

STEPS = 80
#: Keys of the optimizer's state that have been renamed, new to old.
RENAMED: dict[str, str] = {}

Content = dict[str, Tensor]


# -- networks --------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer, two deep and in both directions, with a head on its last output."""

    def __init__(self, kind: type[nn.Module], packed: bool = False) -> None:
        super().__init__()
        self.body = kind(5, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head, self.packed = nn.Linear(12, 3), packed

    def forward(self, x: Tensor) -> Tensor:
        if not self.packed:
            return self.head(self.body(x)[0][:, -1])
        lengths = torch.tensor([7, 6, 6, 4, 3, 3, 2, 1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.head(self.body(packed)[1][-2:].transpose(0, 1).flatten(1))


class Attention(nn.Module):
    """Multi-head attention with a norm and a head."""

    def __init__(self, own: bool = False) -> None:
        super().__init__()
        sizes = {"kdim": 6, "vdim": 4} if own else {}
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **sizes)
        self.norm, self.head, self.own = nn.LayerNorm(8), nn.Linear(8, 3), own

    def forward(self, x: Tensor) -> Tensor:
        key, value = (x[..., :6], x[..., :4]) if self.own else (x, x)
        return self.head(self.norm(x + self.attention(x, key, value)[0]).mean(1))


class Transformer(nn.Module):
    """A language model of two blocks with embeddings and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(block, 2), nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(x))).mean(1)[:, :3]


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Conv2d(6, 6, 3, groups=3, dilation=2, padding="same", padding_mode="circular"),),
        *(nn.ReLU(), nn.ConvTranspose2d(6, 4, 2, groups=2), nn.Flatten(), nn.Linear(100, 3)),
    )


class Cells(nn.Module):
    """A cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for part in x.unbind(1):
            state = self.cell(part, state)
        return self.head(state)


# -- loops -----------------------------------------------------------------------------------------

Step = Callable[[nn.Module, RLS, Tensor, Tensor], None]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def plain(model: nn.Module, optimizer: RLS, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: RLS, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    for part in (slice(0, 3), slice(3, None)):
        loss_of(model, x[part], y[part]).backward()
    optimizer.step()


def clipped(model: nn.Module, optimizer: RLS, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def masked(model: nn.Module, optimizer: RLS, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    valid = torch.arange(x.shape[1]) < torch.arange(1, len(x) + 1).clamp(max=x.shape[1])[:, None]
    with optimizer.rows(valid):
        loss_of(model, x, y).backward()
    optimizer.step()


def resumed(model: nn.Module, optimizer: RLS, x: Tensor, y: Tensor) -> None:
    """A bias is frozen and comes back, a step is skipped, and the state is loaded again."""
    resumed.count += 1  # type: ignore[attr-defined]
    if resumed.count % 20 == 5:  # type: ignore[attr-defined]
        model[0].bias.requires_grad_(False)  # type: ignore[index,union-attr]
    if resumed.count % 20 == 10:  # type: ignore[attr-defined]
        model[0].bias.requires_grad_(True)  # type: ignore[index,union-attr]
    if resumed.count % 20 == 15:  # type: ignore[attr-defined]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain(model, optimizer, x * torch.nan, y)
    plain(model, optimizer, x, y)


def watched(model: nn.Module, optimizer: RLS, x: Tensor, y: Tensor) -> None:
    optimizer.watch()
    plain(model, optimizer, x, y)


# -- cases -----------------------------------------------------------------------------------------

PAPER = {"lr": 0.3, "forgetting": 0.99, "ratio": 0.2, "momentum": 0.5, "l1": 1e-4}
DEFAULT = {"lr": 0.8, "forgetting": 0.999, "l1": 1e-3, "weight_decay": 1e-2}


def paper(model: nn.Module, **options: Any) -> RLS:
    return RLS.paper(model, **{**PAPER, **options})


def default(model: nn.Module, **options: Any) -> RLS:
    return RLS(model, **{**DEFAULT, **options})


def plain_paper(model: nn.Module) -> RLS:
    return RLS.paper(model)


def plain_default(model: nn.Module) -> RLS:
    return RLS(model)


def low_rank_paper(model: nn.Module) -> RLS:
    return paper(model, rank=5, l1=1e-4)


def averages_paper(model: nn.Module) -> RLS:
    return paper(model, lr=0.003, averages=4, initial_inverse="auto")


def averages_default(model: nn.Module) -> RLS:
    return default(model, averages=3, momentum=0.0, max_grad_norm=0.2)


def clipping_paper(model: nn.Module) -> RLS:
    return paper(model, max_grad_norm=0.2, forgetting=1.0, momentum=0.0, l1=0.0)


def decay_paper(model: nn.Module) -> RLS:
    return paper(model, lr=0.003, weight_decay=0.01, time_scaling=False, factored=False)


def slow_paper(model: nn.Module) -> RLS:
    return paper(model, lr=0.003)


def grouped_paper(model: nn.Module) -> RLS:
    named = list(model.named_parameters())
    weights = [p for name, p in named if name.endswith("weight")]
    biases = [p for name, p in named if not name.endswith("weight")]
    return paper(model, params=[{"params": weights}, {"params": biases, "lr": 0.1, "l1": 0.0}])


def frozen(model: nn.Module) -> RLS:
    model[0].bias.requires_grad_(False)  # type: ignore[index,union-attr]
    model[2].weight.requires_grad_(False)  # type: ignore[index,union-attr]
    return default(model)


IMAGE, SERIES, ROWS = (8, 2, 8, 8), (8, 7, 5), (12, 7)
#: name: network, optimizer, shape of the inputs, loop, dtype.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], RLS], Any, Step, Any]] = {}


def add(
    name: str,
    make: Callable[[], nn.Module],
    optimizer: Callable[[nn.Module], RLS],
    shape: tuple[int, ...] = ROWS,
    step: Step = plain,
    dtype: torch.dtype = torch.float32,
) -> None:
    CASES[name] = (make, optimizer, shape, step, dtype)


for which, ours, simple in (("paper", paper, plain_paper), ("default", default, plain_default)):
    add(f"{which}: FNN, bare", lambda: mlp(7, 9, 3), simple)
    add(f"{which}: FNN", lambda: mlp(7, 9, 3), ours)
    add(f"{which}: FNN, float64", lambda: mlp(7, 9, 3), ours, dtype=torch.float64)
    add(f"{which}: FNN, bfloat16", lambda: mlp(7, 9, 3), ours, dtype=torch.bfloat16)
    slow = slow_paper if which == "paper" else ours
    add(f"{which}: wide FNN (factors, kept signs)", lambda: mlp(300, 400, 3), slow, (12, 300))
    add(f"{which}: wide FNN, clipped", lambda: mlp(300, 400, 3), slow, (12, 300), clipped)
    add(f"{which}: seven equal layers", lambda: mlp(*[7] * 8, 3), ours)
    add(f"{which}: CNN", cnn, ours, IMAGE)
    add(f"{which}: LSTM", lambda: Recurrent(nn.LSTM), ours, SERIES)
    add(f"{which}: GRU, packed", lambda: Recurrent(nn.GRU, True), ours, SERIES)
    add(f"{which}: cells in a loop", Cells, ours, SERIES)
    add(f"{which}: attention", Attention, ours, (8, 7, 8))
    add(f"{which}: attention, own sizes", lambda: Attention(True), ours, (8, 7, 8))
    add(f"{which}: transformer, tied", Transformer, ours, (8, 7))
    add(f"{which}: LSTM, masked", lambda: Recurrent(nn.LSTM), ours, SERIES, masked)
    add(
        f"{which}: 3-D FNN, masked",
        lambda: nn.Sequential(mlp(5, 6, 6, 6, 3), Mean()),
        ours,
        SERIES,
        masked,
    )
    add(f"{which}: FNN, accumulated", lambda: mlp(7, 9, 3), ours, ROWS, accumulated)
    add(
        f"{which}: FNN, bias frozen and back, skipped, loaded",
        lambda: mlp(7, 9, 3),
        ours,
        ROWS,
        resumed,
    )
    add(f"{which}: CNN, watched", cnn, ours, IMAGE, watched)
add("paper: low rank", lambda: mlp(20, 30, 3), low_rank_paper, (12, 20))
add("default: low rank", lambda: mlp(20, 30, 3), default, (12, 20))  # before format 3
add("paper: averages, auto", lambda: mlp(300, 400, 3), averages_paper, (12, 300))
add("default: averages 3, clipping, no momentum", cnn, averages_default, IMAGE)
add("paper: clipping", cnn, clipping_paper, IMAGE)
add("paper: decay, no factors", lambda: mlp(300, 400, 3), decay_paper, (12, 300))
add("paper: groups", lambda: mlp(7, 9, 9, 9, 9, 3), grouped_paper)
add("default: frozen parts", lambda: mlp(7, 9, 9, 3), frozen)


class Mean(nn.Module):
    """The mean over time."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def batch(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randn(shape[0], 3, generator=generator).to(dtype)
    if len(shape) == 2 and shape == (8, 7):
        return torch.randint(0, 11, shape, generator=generator), y
    return (2 * torch.randn(shape, generator=generator) + 0.5).to(dtype), y


def content(model: nn.Module, optimizer: RLS) -> Content:
    """Parameters and state by name; state keys by their old names."""
    obtained = {}
    for name, parameter in model.named_parameters():
        obtained[name] = _plain(parameter)
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                obtained[f"{name}/{RENAMED.get(key, key)}"] = _plain(value)
    return obtained


def _plain(tensor: Any) -> Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def run(name: str, double: bool = False) -> Content:
    """What a case has at the end."""
    make, optimizer_of, shape, step, dtype = CASES[name]
    dtype = torch.float64 if double else dtype
    torch.manual_seed(0)
    resumed.count = 0  # type: ignore[attr-defined]
    model = make().to(dtype)
    optimizer = optimizer_of(model)
    for seed in range(STEPS):
        step(model, optimizer, *batch(seed % 10, shape, dtype))
    return content(model, optimizer)


# -- two processes ---------------------------------------------------------------------------------


def two_processes(kind: str) -> dict[str, Content]:
    """The same with DistributedDataParallel or fully_shard on two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank, (port, kind, results), nprocs=2, join=False)
    names = results.get()
    return {
        name: {k: torch.tensor(v, dtype=torch.float64) for k, v in results.get().items()}
        for name in names
    }


def _rank(rank: int, port: int, kind: str, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    cases = [f"{which}: {net}" for which in ("paper", "default") for net in ("CNN", "LSTM", "FNN")]
    if rank == 0:
        results.put([f"{kind}, {case}" for case in cases])
    for case in cases:
        make, optimizer_of, shape, _, _ = CASES[case]
        torch.manual_seed(0)
        model = make().double()
        if kind == "DDP":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = optimizer_of(model)
        for seed in range(20):
            x, y = batch(seed, shape, torch.float64)
            half = slice(rank * len(x) // 2, (rank + 1) * len(x) // 2)
            plain(model, optimizer, x[half], y[half])
        obtained = content(model, optimizer)
        if rank == 0:
            results.put({key: value.tolist() for key, value in obtained.items()})
    dist.destroy_process_group()


# -- files -----------------------------------------------------------------------------------------


def digest(obtained: Content) -> str:
    total = hashlib.sha256()
    for name in sorted(obtained):
        total.update(name.encode())
        value = obtained[name].contiguous()
        total.update(value.view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"")
    return total.hexdigest()[:16]


def save(path: str, only: str, double: bool) -> None:
    obtained = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (name for name in CASES if only in name):
            obtained[name] = run(name, double)
            print(digest(obtained[name]), name, flush=True)
        for kind in ("DDP", "FSDP2") if only in ("", "DDP", "FSDP2") else ():
            for name, some in two_processes(kind).items():
                obtained[name] = some
                print(digest(some), name, flush=True)
    torch.save(obtained, path)


def difference(one: Content, other: Content) -> str:
    worst = (0.0, "")
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            return f"{name} is missing in one of them"
        a, b = one[name].double(), other[name].double()
        if a.shape != b.shape:
            return f"{name} has shapes {tuple(a.shape)} and {tuple(b.shape)}"
        if not torch.equal(a, b):
            size = max(float(a.abs().max()), 1e-30)
            worst = max(worst, (float((a - b).abs().max()) / size, name))
    return "equal" if not worst[1] else f"{worst[0]:.1e} in {worst[1]}"


def compare(one: str, other: str) -> int:
    first, second = torch.load(one, weights_only=True), torch.load(other, weights_only=True)
    unequal = 0
    for name in second:
        text = difference(first[name], second[name]) if name in first else "new"
        unequal += text != "equal"
        print(f"{name:60} {text}")
    print(f"{len(second) - unequal} of {len(second)} equal")
    return int(unequal > 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=["save", "compare"])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--double", action="store_true", help="all cases in float64")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "compare":
        return compare(*options.files)
    save(options.files[0], options.only, options.double)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
