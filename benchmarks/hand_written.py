"""The least that a step of RLS with momentum can cost: 784-512-10, written out by hand.

The same operations of torch as in a step of torchrls, and nothing else: no modes, no groups, no
layers of other kinds. What torchrls takes beyond it is the price of being general: Python. "Without
care", there are neither copies of the rows and output gradients, which somebody may write to
before the step, nor a look at whether all is finite. With ``rank=64`` and with L1 it has the
classes of torchrls that keep V and Q, called directly.

    python benchmarks/hand_written.py --out benchmarks/results/hand-written.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from torchrls.lab.bench import results
from torchrls.lab.bench.contenders import FIRST_ORDER, OURS
from torchrls.lab.bench.networks import NETWORKS
from torchrls.lab.bench.step_time import measure
from torchrls.matrix.lowrank import LowRank
from torchrls.matrix.signs import Penalty, signs_of

NETWORK = NETWORKS["FNN 784-512-10, batch 128"]
INPUTS, HIDDEN, OUTPUTS, BATCH = 784, 512, 10, 128
K, ALPHA, GAMMA, RANK = 0.1, 0.5, 1e-5, 64


class _Keep(torch.autograd.Function):
    """Keeps [X, 1] and E, and gives the weight no gradient."""

    @staticmethod
    def forward(ctx, output, X, weight, bias, box):
        ctx.box = box
        ctx.save_for_backward(X)
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx, E):
        box, sums = ctx.box, E.sum(0)
        box["rows"] = rows = torch.cat([*ctx.saved_tensors, box["ones"]], 1)
        box["E"] = E
        if box["careful"]:
            box["E"], box["sums"] = E.clone(), sums.clone()
            box["bound"] = torch.dot(rows.view(-1), rows.view(-1)) * E.view(-1).dot(E.view(-1))
        return None, None, None, sums, None


class HandWritten(torch.optim.Optimizer):
    """The first layer factored, the second one dense."""

    careful = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.first, self.second = model.hidden[0], model.head
        self.box = {"ones": torch.ones(BATCH, 1), "careful": self.careful}
        self.first.register_forward_hook(self._observe_first)
        self.second.register_forward_hook(self._observe_second)
        self.P, self.P2 = torch.eye(INPUTS + 1), torch.eye(HIDDEN + 1)
        self.omega, self.omega_b = torch.zeros(HIDDEN, INPUTS), torch.zeros(HIDDEN)
        self.omega2, self.omega2_b = torch.zeros(OUTPUTS, HIDDEN), torch.zeros(OUTPUTS)
        self.shares, self.one = torch.full((BATCH, 1), 1 / BATCH), torch.ones(1)

    def _observe_first(self, module, args, output):
        return _Keep.apply(output.detach(), args[0], module.weight, module.bias, self.box)

    def _observe_second(self, module, args, output):
        self.box["x"] = torch.cat([args[0].detach().mean(0), self.one])

    def respond(self, rows):
        """P [X, 1]^T."""
        return torch.mm(self.P, rows.T)

    def learn(self, u, gain):
        v = u * gain**0.5
        self.P.addcmul_(v[:, None], v, value=-1)

    def penalize(self, rows, u, gain):
        """Nothing, here."""

    @torch.no_grad()
    def step(self):
        rows, E, x = (self.box.pop(key) for key in ("rows", "E", "x"))
        G = torch.cat([self.second.weight.grad, self.second.bias.grad[:, None]], 1)
        u2 = torch.mv(self.P2, x)
        h2 = 1 + K * torch.dot(x, u2).item()
        columns = self.respond(rows)
        u = torch.mm(columns, self.shares).view(-1)
        h = 1 + K * torch.dot(torch.mv(rows, u), self.shares.view(-1)).item()
        if self.careful:
            self.look(G)
        self._move_second(G, u2, h2)
        self.learn(u, K / h)
        last, columns = columns[INPUTS:], columns[:INPUTS]
        self.omega_b[None].addmm_(last, E, beta=ALPHA, alpha=-1 / h)
        self.omega.addmm_(E.T, columns.T, beta=ALPHA, alpha=-1 / h)
        self.penalize(rows, u, K / h)
        self.first.weight.add_(self.omega)
        self.first.bias.add_(self.omega_b)

    def look(self, G):
        """Whether all is finite, and the gradient of the bias what it was."""
        size, bound = torch.dot(G.view(-1), G.view(-1)).item(), self.box["bound"].item()
        assert max(size, bound) < 1e30
        assert torch.equal(self.first.bias.grad, self.box["sums"])

    def _move_second(self, G, u, h):
        P = self.P2
        self.omega2.addmm_(G, P[:, :HIDDEN], beta=ALPHA, alpha=-1 / h)
        self.omega2_b.addmv_(G, P[HIDDEN], beta=ALPHA, alpha=-1 / h)
        v = u * (K / h) ** 0.5
        P.addcmul_(v[:, None], v, value=-1)
        self.second.weight.add_(self.omega2)
        self.second.bias.add_(self.omega2_b)


class Careless(HandWritten):
    """Without copies and checks."""

    careful = False


class Penalized(HandWritten):
    """With L1 on the first layer; the second one has 5,000 weights."""

    penalty = None

    def penalize(self, rows, u, gain):
        weight, bias = self.first.weight, self.first.bias
        signs = signs_of(weight, bias)
        if self.penalty is None:
            self.penalty = Penalty.first(self.P, signs)
        else:
            x = torch.mm(self.shares.T, rows).view(-1)
            self.penalty.update_(x, u, gain, 1.0)
            self.penalty.turn_(self.P, signs)
        weight.sub_(self.penalty.Q[:, :INPUTS], alpha=GAMMA)
        bias.sub_(self.penalty.Q[:, INPUTS], alpha=GAMMA)


class OfLowRank(HandWritten):
    """The first layer has 64 directions; the second one is as cheap without them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.low = LowRank.first(1, INPUTS + 1, 1.0, like=self.P, rank=RANK)

    def respond(self, rows):
        V = self.low.V
        return torch.addmm(rows, rows @ V.T, V, alpha=-1).T

    def learn(self, u, gain):
        self.low.update_(u, [gain], 1.0, 1.0)


BY_HAND = {
    "RLS+M by hand, without care": Careless,
    "RLS+M by hand": HandWritten,
    "RLS+M, rank 64 by hand": OfLowRank,
    "RLS+M+R by hand": Penalized,
}


def main(out: Path | None, keep_memory: bool) -> None:
    ours = {name: OURS[name] for name in ("RLS+M", "RLS+M, rank 64", "RLS+M+R")}
    found = measure(NETWORK, {**FIRST_ORDER, **BY_HAND, **ours}, keep_memory=keep_memory)
    for name, one in found.items():
        ratios = f"{one['to Adam']:.2f} x Adam, {one['to Adam, fused']:.2f} x fused"
        faults = f"{one['page faults']:,.0f} page faults"
        print(f"{name:<28} {1e3 * one['seconds']:6.2f} ms   {ratios}, {faults}")
    if out is not None:
        results.save("hand-written", found, out, "python benchmarks/hand_written.py")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to save the results")
    parser.add_argument("--keep-memory", action="store_true", help="without page faults")
    given = parser.parse_args()
    main(given.out, given.keep_memory)
