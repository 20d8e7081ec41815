"""The least that a step of RLS with momentum can cost: 784-512-10, written out by hand.

Nothing is here that the algorithm does not need for this one network: no gradient of the first
layer, no copies of its rows, no bias of the second, no checks of values, no groups. What torchrls
takes beyond it is the price of being general. With ``rank=64`` and with L1 it has the classes of
torchrls that keep V and Q, called directly.

    python benchmarks/hand_written.py --out benchmarks/results/hand-written.json
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import torch
from torch import nn

from torchrls.bench import results
from torchrls.bench.contenders import FIRST_ORDER, OURS
from torchrls.bench.networks import NETWORKS
from torchrls.bench.step_time import measure
from torchrls.lowrank import LowRank
from torchrls.penalty import Penalty, signs_of

NETWORK = NETWORKS["FNN 784-512-10, batch 128"]


class _Keep(torch.autograd.Function):
    """Keeps X and E, and gives the weight no gradient."""

    @staticmethod
    def forward(ctx, output, X, weight, box):
        ctx.box = box
        ctx.save_for_backward(X)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx, grad):
        ctx.box["X"], ctx.box["E"] = *ctx.saved_tensors, grad
        return None, None, None, None


class HandWritten(torch.optim.Optimizer):
    """The first layer factored, the second one dense."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.first, self.second, self.box = model.hidden[0], model.head, {}
        self.first.register_forward_hook(self._observe_first)
        self.second.register_forward_hook(self._observe_second)
        self.P, self.Q = torch.eye(785), torch.eye(513)
        self.omegas = [torch.zeros(512, 784), torch.zeros(512), torch.zeros(10, 512)]

    def _observe_first(self, module, args, output):
        return _Keep.apply(output.detach(), args[0], module.weight, self.box)

    def _observe_second(self, module, args, output):
        self.box["x"] = args[0].detach().mean(0)

    def penalize(self, u, gain, x):
        """Nothing, here."""

    @torch.no_grad()
    def step(self):
        X, E, x = (self.box.pop(key) for key in ("X", "E", "x"))
        P, mean = self.P, X.mean(0)
        u = torch.addmv(P[784], P[:, :784], mean)
        h = 1 + 0.1 * (mean @ u[:784] + u[784]).item()
        rows = torch.addmm(P[:, 784:], P[:, :784], X.T)
        self.omegas[0].addmm_(E.T, rows[:784].T, beta=0.5, alpha=-1 / h)
        self.omegas[1].addmv_(E.T, rows[784], beta=0.5, alpha=-1 / h)
        v = u * (0.1 / h) ** 0.5
        P.addcmul_(v[:, None], v, value=-1)
        self.penalize(u, 0.1 / h, mean)
        self.first.weight.add_(self.omegas[0])
        self.first.bias.add_(self.omegas[1])
        Q = self.Q[:512, :512]
        u = Q @ x
        h = 1 + 0.1 * (x @ u).item()
        self.omegas[2].addmm_(self.second.weight.grad, Q, beta=0.5, alpha=-1 / h)
        v = u * (0.1 / h) ** 0.5
        Q.addcmul_(v[:, None], v, value=-1)
        self.second.weight.add_(self.omegas[2])


class Penalized(HandWritten):
    """With L1 on the first layer; the second one has 5,000 weights."""

    penalty = None

    def penalize(self, u, gain, x):
        weight, bias = self.first.weight, self.first.bias
        signs = signs_of(weight, bias)
        if self.penalty is None:
            self.penalty = Penalty.first(self.P, signs)
        else:
            self.penalty.update_(torch.cat([x, x.new_ones(1)]), u, gain, 1.0)
            self.penalty.turn_(self.P, signs)
        weight.sub_(self.penalty.Q[:, :784], alpha=1e-5)
        bias.sub_(self.penalty.Q[:, 784], alpha=1e-5)


class OfLowRank(HandWritten):
    """The first layer has 64 directions, factored; the second one is as cheap without them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.low = LowRank.first(1, 785, 1.0, like=self.P, rank=64)

    @torch.no_grad()
    def step(self):
        X, E, x = (self.box.pop(key) for key in ("X", "E", "x"))
        low = self.low
        mean = torch.cat([X.mean(0), X.new_ones(1)])
        u = low.times(mean)
        h = 1 + 0.1 * (mean @ u).item()
        product = low.factored(X, E, has_bias=True, scale=1.0)
        product.add_(self.omegas[0], beta=0.5, alpha=[-1 / h])
        product.add_(self.omegas[1], beta=0.5, alpha=[-1 / h])
        low.update_(u, [0.1 / h], 1.0, 1.0)
        self.first.weight.add_(self.omegas[0])
        self.first.bias.add_(self.omegas[1])
        u = self.Q[:512, :512] @ x
        h = 1 + 0.1 * (x @ u).item()
        self.omegas[2].addmm_(self.second.weight.grad, self.Q[:512, :512], beta=0.5, alpha=-1 / h)
        v = u * (0.1 / h) ** 0.5
        self.Q[:512, :512].addcmul_(v[:, None], v, value=-1)
        self.second.weight.add_(self.omegas[2])


BY_HAND = {
    "RLS+M by hand": HandWritten,
    "RLS+M, rank 64 by hand": OfLowRank,
    "RLS+M+R by hand": Penalized,
}


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


def main(out: Path | None) -> None:
    before = adam_alone()
    ours = {name: OURS[name] for name in ("RLS+M", "RLS+M, rank 64", "RLS+M+R")}
    contenders = {**FIRST_ORDER, **BY_HAND, **ours}
    table = measure(NETWORK, contenders)
    for name, found in table.items():
        ratios = f"{found['to Adam']:.2f} x Adam, {found['to Adam, fused']:.2f} x fused"
        print(f"{name:<22} {1e3 * found['seconds']:6.2f} ms   {ratios}")
    updates = {"before": before, "after": adam_alone()}
    for when, (faults, seconds) in updates.items():
        print(f"update of Adam {when} that: {1e3 * seconds:.2f} ms, {faults:.0f} page faults")
    if out is not None:
        alone = {when: {"page faults": u[0], "seconds": u[1]} for when, u in updates.items()}
        results.save("hand-written", {"steps": table, "updates of Adam": alone}, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to save the results")
    main(parser.parse_args().out)
