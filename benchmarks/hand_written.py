"""The least that a step of RLS with momentum can cost: 784-512-10, written out by hand.

Nothing is here that the algorithm does not need for this one network: no hooks but one, no
checks of values, no groups. What torchrls takes beyond it is the price of being general.

    python benchmarks/hand_written.py
"""

from __future__ import annotations

import resource
import time

import torch
from torch import nn

from torchrls.bench.contenders import FIRST_ORDER, OURS
from torchrls.bench.networks import NETWORKS
from torchrls.bench.step_time import measure

NETWORK = NETWORKS["FNN 784-512-10, batch 128"]


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, box):
        ctx.box = box
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx, grad):
        ctx.box["E"] = grad
        return grad, None


class HandWritten(torch.optim.Optimizer):
    """The first layer factored, the second one dense."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.first, self.second, self.box = model.hidden[0], model.head, {}
        self.first.register_forward_hook(self._observe_first)
        self.second.register_forward_hook(self._observe_second)
        self.P, self.Q = torch.eye(785), torch.eye(513)
        self.omegas = [torch.zeros(512, 784), torch.zeros(512), torch.zeros(10, 512)]
        self.r = torch.rand(512)

    def _observe_first(self, module, args, output):
        self.box["X"] = args[0]
        return _Keep.apply(output, self.box)

    def _observe_second(self, module, args, output):
        self.box["x"] = args[0].detach().mean(0)

    @torch.no_grad()
    def step(self):
        X, E, x = (self.box.pop(key) for key in ("X", "E", "x"))
        G, P = self.first.weight.grad, self.P
        found, expected = self.r @ G, (E @ self.r) @ X
        rows = P[:, :784] @ X.T
        rows += P[:, 784:]
        u = rows.mean(1)
        energy = X.mean(0) @ u[:784] + u[784]
        numbers = torch.stack([found @ expected, expected @ expected, energy]).tolist()
        h = 1 + 0.1 * numbers[2]
        self.omegas[0].addmm_(E.T, rows[:784].T, beta=0.5, alpha=-1 / h)
        self.omegas[1].addmv_(E.T, rows[784], beta=0.5, alpha=-1 / h)
        v = u * (0.1 / h) ** 0.5
        P.addcmul_(v[:, None], v, value=-1)
        self.first.weight.add_(self.omegas[0])
        self.first.bias.add_(self.omegas[1])
        Q = self.Q[:512, :512]
        u = Q @ x
        h = 1 + 0.1 * (x @ u).item()
        self.omegas[2].addmm_(self.second.weight.grad, Q, beta=0.5, alpha=-1 / h)
        v = u * (0.1 / h) ** 0.5
        Q.addcmul_(v[:, None], v, value=-1)
        self.second.weight.add_(self.omegas[2])


def adam_alone(steps: int = 50) -> tuple[float, float]:
    """Page faults and seconds of an update of Adam."""
    model = NETWORK.make()
    optimizer = FIRST_ORDER["Adam"](model)
    faults, seconds = 0, 0.0
    for x, y in NETWORK.batches(10) * (steps // 10):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        optimizer.step()
        seconds += time.perf_counter() - start
        faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults / steps, seconds / steps


if __name__ == "__main__":
    before = adam_alone()
    ours = {name: OURS[name] for name in ("RLS+M", "RLS+M, rank 64", "RLS+M+R")}
    contenders = {**FIRST_ORDER, "by hand": HandWritten, **ours}
    for name, found in measure(NETWORK, contenders).items():
        ratios = f"{found['to Adam']:.2f} x Adam, {found['to Adam, fused']:.2f} x fused"
        print(f"{name:<16} {1e3 * found['seconds']:6.2f} ms   {ratios}")
    for when, (faults, seconds) in (("before", before), ("after", adam_alone())):
        print(f"update of Adam {when} that: {1e3 * seconds:.2f} ms, {faults:.0f} page faults")
