"""The jobs that the ranks of test_distributed.py carry out."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from torchrls import RLS

SAMPLES = 16


class Reader(nn.Module):
    """Attention, an LSTM and what is left to the fallback."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm, self.head = nn.LSTM(8, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.view(-1, 8, 8))
        x = x + self.attention(x, x, x)[0]
        out: torch.Tensor = self.head(self.lstm(x)[0][:, -1].clone())
        return out


NETS = {
    "convolutions": lambda: nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2), nn.ReLU()),
        *(nn.ConvTranspose2d(6, 2, 2), nn.Flatten(), nn.Linear(50, 1), nn.Linear(1, 3)),
    ),
    "sequences": Reader,
}


def wide(outputs: int) -> nn.Module:
    """Return a network with three weights of so many rows: of a convolution, and of layers."""
    return nn.Sequential(
        *(nn.Conv2d(1, outputs, 8), nn.Tanh(), nn.Flatten(), nn.Linear(outputs, 2)),
        *(nn.Linear(2, outputs), nn.Tanh(), nn.Linear(outputs, outputs), nn.Linear(outputs, 3)),
    )


OPTIMIZERS = {
    "default": RLS,
    "clipped": lambda model, **options: RLS(model, averages=3, max_grad_norm=0.3, **options),
    "paper": lambda model, **options: RLS.paper(
        model, momentum=0.5, l1=1e-4, max_grad_norm=0.5, forgetting=0.99, **options
    ),
}


def network(name: str | int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Make one of the networks above; a number stands for a wide one."""
    torch.manual_seed(0)
    model = wide(name) if isinstance(name, int) else NETS[name]()
    return model.to(dtype)


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 1, 8, 8, generator=generator, dtype=torch.float64)
    return 3 * x + 1, torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)


def share(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The half of a minibatch that a rank gets."""
    size = SAMPLES // dist.get_world_size()
    part = slice(rank * size, (rank + 1) * size)
    x, y = data(seed)
    return x[part], y[part]


def step(model: nn.Module, optimizer: RLS, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


def alone(net: str | int, kind: str, steps: int = 5) -> list[torch.Tensor]:
    """What one process has at the end, with whole minibatches."""
    model = network(net)
    optimizer = OPTIMIZERS[kind](model)
    for seed in range(steps):
        step(model, optimizer, *data(seed))
    return content(model, optimizer)


def content(model: nn.Module, optimizer: RLS) -> list[torch.Tensor]:
    """All parameters and every P that is here, whole."""
    tensors = [*model.parameters()]
    tensors += [optimizer.state[layer.weight].get("inverse") for layer in optimizer.layers]
    return [whole(tensor).detach().clone() for tensor in tensors if tensor is not None]


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def replicated(net: str, kind: str, first: str = "wrapper", **options: Any):
    model = network(net)
    if first == "wrapper":
        wrapped = DistributedDataParallel(model)
        return wrapped, OPTIMIZERS[kind](wrapped, **options)
    optimizer = OPTIMIZERS[kind](model, **options)
    return DistributedDataParallel(model), optimizer


def spread(net: str | int, kind: str):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network(net)
    for child in model.children():
        if list(child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, OPTIMIZERS[kind](model)


def train_replicated(rank, net, kind, first):
    model, optimizer = replicated(net, kind, first)
    for seed in range(5):
        step(model, optimizer, *share(rank, seed))
    return content(model, optimizer)


def train_spread(rank, net, kind):
    model, optimizer = spread(net, kind)
    for seed in range(5):
        step(model, optimizer, *share(rank, seed))
    return content(model, optimizer)


def count_collectives(rank, net):
    """The collectives of a step of RLS: their number and the floats that they carry."""
    model, optimizer = replicated(net, "default")
    sizes: list[int] = []
    reduce = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return reduce(tensor, *args, **kwargs)

    results = []
    for seed in range(3):
        optimizer.zero_grad()
        x, y = share(rank, seed)
        (model(x) - y).square().mean().backward()
        sizes.clear()
        dist.all_reduce = counted
        try:
            optimizer.step()
        finally:
            dist.all_reduce = reduce
        results.append(list(sizes))
    return results


def accumulate(rank, kind):
    """Two micro-batches a step, the first one without synchronisation of the gradients."""
    model, optimizer = replicated("convolutions", kind)
    for seed in range(4):
        x, y = share(rank, seed)
        optimizer.zero_grad()
        with model.no_sync():
            ((model(x[:4]) - y[:4]).square().mean() / 2).backward()
        ((model(x[4:]) - y[4:]).square().mean() / 2).backward()
        optimizer.step()
    return content(model, optimizer)


def uneven(rank):
    """Six samples here, ten there; what P has learnt, in the paper's mode."""
    model = network("convolutions")
    optimizer = RLS.paper(DistributedDataParallel(model))
    x, y = data(0)
    part = slice(0, 6) if rank == 0 else slice(6, None)
    (model(x[part]) - y[part]).square().mean().backward()
    optimizer.step()
    return [optimizer.state[layer.weight]["inverse"] for layer in optimizer.layers]


def not_finite(rank, where):
    """Rank 1 sees something bad in the third step; nothing may change anywhere."""
    model, optimizer = replicated("convolutions", "default", shard_inverse=where == "shared")
    before = None
    with contextlib.redirect_stderr(io.StringIO()):
        for seed in range(3):
            x, y = share(rank, seed)
            if seed == 2:
                before = content(model, optimizer)
                if rank == 1:
                    x[0, 0, 0, 0] = torch.nan
            step(model, optimizer, x, y)
    after = content(model, optimizer)
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return same, optimizer.skipped_steps


def bad_gradient(rank):
    """Only rank 1 has a bad gradient: without a wrapper, every rank has gradients of its own."""
    model = network("convolutions")
    optimizer = RLS(model)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = data(0)
    (model(x) - y).square().mean().backward()
    if rank == 1:
        model[-1].weight.grad[0, 0] = torch.inf
    optimizer.step()
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return same, optimizer.skipped_steps


def unused(rank):
    """Rank 1 does not use the middle layer; it learns from the rows of rank 0."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)]).double()

    class Maybe(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            x = torch.tanh(self.layers[0](x))
            return self.layers[2](torch.tanh(self.layers[1](x)) if rank == 0 else x)

    model = DistributedDataParallel(Maybe(), find_unused_parameters=True)
    optimizer = RLS(model)
    for seed in range(3):
        torch.manual_seed(seed)
        step(model, optimizer, torch.randn(8, 4).double(), torch.randn(8, 3).double())
    return content(model, optimizer)


def share_inverses(rank, net, kind):
    """Every P on one rank only; the state is brought together and loaded again on the way."""
    model, optimizer = replicated(net, kind, shard_inverse=True)
    for seed in range(5):
        if seed == 3:
            optimizer.consolidate_state_dict()
            states = [optimizer.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(states)
            optimizer.load_state_dict(states[0])
        step(model, optimizer, *share(rank, seed))
    own = [layer.name for layer in optimizer.layers if optimizer.state[layer.weight]]
    size = sum(
        value.numel() * value.element_size()
        for layer in optimizer.layers
        for value in optimizer.state[layer.weight].values()
        if isinstance(value, torch.Tensor)
    )
    return [p.detach().clone() for p in model.parameters()], own, size


def refuse_state(rank):
    model, optimizer = replicated("convolutions", "default", shard_inverse=True)
    step(model, optimizer, *share(rank, 0))
    try:
        optimizer.state_dict()
    except RuntimeError as error:
        return str(error)


def join(rank):
    """Rank 0 has two minibatches, rank 1 four."""
    model, optimizer = replicated("convolutions", "default")
    with Join([model, optimizer]):
        for seed in range(2 + 2 * rank):
            step(model, optimizer, *share(rank, seed))
    return content(model, optimizer)


def parallel(rank):
    """Tensor parallelism: Adam has it all, and says why."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = RLS(model)
    torch.manual_seed(1)
    for _ in range(3):
        step(model, optimizer, torch.randn(8, 4).double(), torch.randn(8, 3).double())
    reasons = [optimizer.reasons.get(layer.weight, "") for layer in (model[0], model[2])]
    return [whole(p).detach() for p in model.parameters()], reasons


def other_models(rank):
    """Every rank has a model of its own, and has not said so."""
    model = nn.Linear(4 + rank, 3).double()
    optimizer = RLS(model)
    try:
        step(model, optimizer, torch.randn(8, 4 + rank).double(), torch.randn(8, 3).double())
    except RuntimeError as error:
        return str(error)


def refusal(model, group):
    """Why RLS does not take a group."""
    try:
        RLS(model, process_group=group)
    except ValueError as error:
        return str(error)


def wrong_groups(rank):
    """Groups that are not those of the wrapper."""
    own = [dist.new_group([other]) for other in range(dist.get_world_size())]
    model = network("convolutions")
    wrapped = DistributedDataParallel(model)
    pairs = ((wrapped, False), (wrapped, own[rank]), (model, own[1 - rank]))
    results = [refusal(*pair) for pair in pairs]
    alone = DistributedDataParallel(network("convolutions"), process_group=own[rank])
    return results, RLS(alone)._ranks.count


def too_early(rank):
    """The optimizer was made before fully_shard."""
    model = network("convolutions")
    optimizer = RLS(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with warnings.catch_warnings(record=True) as results:
        warnings.simplefilter("always")
        step(model, optimizer, *share(rank, 0))
    return [str(warning.message) for warning in results]


def save_spread(rank, folder):
    """Train, save by torch.distributed.checkpoint, train on."""
    model, optimizer = spread("sequences", "default")
    for seed in range(3):
        step(model, optimizer, *share(rank, seed))
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    for seed in range(3, 5):
        step(model, optimizer, *share(rank, seed))
    return content(model, optimizer)


def load_spread(rank, folder):
    """What :func:`save_spread` has at the end, from what it has saved."""
    model, optimizer = spread("sequences", "default")
    return go_on(model, optimizer, folder, partial(share, rank))


def go_on(model, optimizer, folder, batches):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    results = states(model, optimizer)
    dcp.load(results, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=results["model"], optim_state_dict=results["optimizer"]
    )
    for seed in range(3, 5):
        step(model, optimizer, *batches(seed))
    return content(model, optimizer)


def train_until_killed(rank, file):
    """Rank 0 saves after every step, rank 1 is killed in the fourth."""
    model, optimizer = replicated("convolutions", "default")
    for seed in range(5):
        if seed == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer, *share(rank, seed))
        if rank == 0:
            states = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "steps": seed + 1}, file)


def states(model, optimizer):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}
