"""Time steps of RLS with momentum that are written by hand for the network 784-512-10.

They have the operations of a step of torchrls, without modes, groups and other kinds of layers: the
difference is the overhead of torchrls in Python. "Without care" means: without copies of rows and
output gradients, which user code may overwrite before the step, and without the check that all
numbers are finite.
``rank=64`` and L1 call the classes of torchrls for V and for Z = sgn(Theta) P directly.

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
from torchrls.matrix.signs import SignProduct, signs_of

NETWORK = NETWORKS["FNN 784-512-10, batch 128"]
#: The sizes of NETWORK, and the paper's k, alpha and gamma.
INPUTS, HIDDEN, OUTPUTS, BATCH = 784, 512, 10, 128
K, ALPHA, GAMMA, RANK = 0.1, 0.5, 1e-5, 64


class _Keep(torch.autograd.Function):
    """An identity on the output that keeps [X, 1] and E in its backward pass.

    The weight gets no gradient, the bias gets the sums of E.
    """

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
    """The paper's RLS with momentum: the first layer factored, the second one dense.

    Forward hooks on both layers put rows and output gradients into a box for the step.
    """

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
        """Attach :class:`_Keep` to the output of the first layer."""
        return _Keep.apply(output.detach(), args[0], module.weight, module.bias, self.box)

    def _observe_second(self, module, args, output):
        """Keep the mean row [x, 1] of the second layer."""
        self.box["x"] = torch.cat([args[0].detach().mean(0), self.one])

    def respond(self, rows):
        """Return P [X, 1]^T, of shape (inputs + 1, batch)."""
        return torch.mm(self.P, rows.T)

    def learn(self, u, gain):
        """Update P of the first layer: P -= gain u u^T."""
        v = u * gain**0.5
        self.P.addcmul_(v[:, None], v, value=-1)

    def penalize(self, rows, u, gain):
        """Apply the L1 term to the first layer; there is none here."""

    @torch.no_grad()
    def step(self):
        """Update P, momentum and parameters of both layers."""
        rows, E, x = (self.box.pop(key) for key in ("rows", "E", "x"))
        G = torch.cat([self.second.weight.grad, self.second.bias.grad[:, None]], 1)
        u2 = torch.mv(self.P2, x)
        h2 = 1 + K * torch.dot(x, u2).item()
        columns = self.respond(rows)
        u = torch.mm(columns, self.shares).view(-1)
        h = 1 + K * torch.dot(torch.mv(rows, u), self.shares.view(-1)).item()
        if self.careful:
            self.check(G)
        self._move_second(G, u2, h2)
        self.learn(u, K / h)
        last, columns = columns[INPUTS:], columns[:INPUTS]
        self.omega_b[None].addmm_(last, E, beta=ALPHA, alpha=-1 / h)
        self.omega.addmm_(E.T, columns.T, beta=ALPHA, alpha=-1 / h)
        self.penalize(rows, u, K / h)
        self.first.weight.add_(self.omega)
        self.first.bias.add_(self.omega_b)

    def check(self, G):
        """Assert that all numbers are finite and that the gradient of the bias is unchanged."""
        size, bound = torch.dot(G.view(-1), G.view(-1)).item(), self.box["bound"].item()
        assert max(size, bound) < 1e30
        assert torch.equal(self.first.bias.grad, self.box["sums"])

    def _move_second(self, G, u, h):
        """Update P, momentum and parameters of the second layer."""
        P = self.P2
        self.omega2.addmm_(G, P[:, :HIDDEN], beta=ALPHA, alpha=-1 / h)
        self.omega2_b.addmv_(G, P[HIDDEN], beta=ALPHA, alpha=-1 / h)
        v = u * (K / h) ** 0.5
        P.addcmul_(v[:, None], v, value=-1)
        self.second.weight.add_(self.omega2)
        self.second.bias.add_(self.omega2_b)


class Careless(HandWritten):
    """The step without copies and checks."""

    careful = False


class Penalized(HandWritten):
    """The step with L1 on the first layer only; the second one has just 5,000 weights."""

    product: SignProduct | None = None  # Z

    def penalize(self, rows, u, gain):
        weight, bias = self.first.weight, self.first.bias
        signs = signs_of(weight, bias)
        if self.product is None:
            self.product = SignProduct.first(self.P, signs)
        else:
            x = torch.mm(self.shares.T, rows)
            self.product.follow_(gain**0.5 * x, gain**0.5 * u[None], 1.0)
            self.product.flip_(self.P, signs)
        weight.sub_(self.product.Z[:, :INPUTS], alpha=GAMMA)
        bias.sub_(self.product.Z[:, INPUTS], alpha=GAMMA)


class OfLowRank(HandWritten):
    """The step with a P of rank 64 in the first layer; a dense P is as cheap in the second one."""

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
    """Time all contenders in turns, print a line for each, and write the results."""
    ours = {name: OURS[name] for name in ("RLS+M", "RLS+M, rank 64", "RLS+M+R")}
    measured = measure(NETWORK, {**FIRST_ORDER, **BY_HAND, **ours}, keep_memory=keep_memory)
    for name, one in measured.items():
        ratios = f"{one['to Adam']:.2f} x Adam, {one['to Adam, fused']:.2f} x fused"
        faults = f"{one['page faults']:,.0f} page faults"
        print(f"{name:<28} {1e3 * one['seconds']:6.2f} ms   {ratios}, {faults}")
    if out is not None:
        results.save("hand-written", measured, out, "python benchmarks/hand_written.py")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where to save the results")
    parser.add_argument("--keep-memory", action="store_true", help="without page faults")
    given = parser.parse_args()
    main(given.out, given.keep_memory)
