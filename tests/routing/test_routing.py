"""Every trainable parameter is trained by exactly one rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from models import HYPER, mixed, mlp, plain_step
from torchrls import RLS, Adapter, Block, RLSWarning, Rows, register
from torchrls.layers.adapter import unregister
from torchrls.reporting.summary import summary


def methods(optimizer: RLS) -> dict[str, str]:
    return {n: g["method"] for g in optimizer.param_groups for n in g["param_names"]}


class Zoo(nn.Module):
    """A little of everything."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(7, 4)
        self.free = nn.Parameter(torch.zeros(4))
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.up = nn.ConvTranspose1d(4, 4, 1)
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, tokens):
        x = self.norm(self.token(tokens) + self.free)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.up(x.mT).mT
        return self.head(self.normed(x + self.mlp(x)).mean(1))


def test_every_parameter_has_one_rule():
    model = Zoo()
    optimizer = RLS.paper(model)
    results = methods(optimizer)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(results) == sorted(names)
    assert {name for name, method in results.items() if method == "rls"} == {
        "attention.in_proj_weight",
        "attention.in_proj_bias",
        "up.weight",
        "mlp.0.weight",
        "mlp.0.bias",
        "mlp.2.weight",
        "mlp.2.bias",
        "head.weight",
        "head.bias",
    }


def test_every_parameter_is_trained():
    torch.manual_seed(0)
    model = Zoo()
    optimizer = RLS.paper(model, momentum=0.5, lr=0.1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    first = None
    for _ in range(30):
        optimizer.zero_grad()
        tokens = torch.randint(7, (16, 5))
        loss = nn.functional.cross_entropy(model(tokens), (tokens[:, 0] > 3).long())
        first = first or loss.item()
        loss.backward()
        optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("exclude", "excluded"),
    [
        (lambda m: [m.head], {"head"}),
        (lambda m: m.head, {"head"}),
        (lambda m: "head", {"head"}),
        (lambda m: ["mlp.*"], {"mlp.0", "mlp.2"}),
        (lambda m: ["mlp"], {"mlp.0", "mlp.2"}),
        (lambda m: ["*"], {"attention", "up", "mlp.0", "mlp.2", "head"}),
        (lambda m: nn.Linear, {"mlp.0", "mlp.2", "head"}),
        (lambda m: (nn.MultiheadAttention, "h?ad"), {"attention", "head"}),
        (lambda m: [nn.Conv2d], set()),
        (lambda m: [m], {"attention", "up", "mlp.0", "mlp.2", "head"}),
    ],
)
@pytest.mark.filterwarnings("ignore:no layer")
def test_exclude(exclude, excluded):
    model = Zoo()
    optimizer = RLS.paper(model, exclude=exclude(model))
    everything = {"attention", "up", "mlp.0", "mlp.2", "head"}
    assert {layer.name for layer in optimizer.layers} == everything - excluded


def test_model_without_a_layer_for_rls_warns():
    with pytest.warns(RLSWarning, match="no layer of the model is trained by RLS"):
        RLS.paper(nn.LayerNorm(4))


def test_fallback_is_adam_at_its_defaults_and_shares_groups_and_state():
    optimizer = RLS.paper(mixed())
    assert type(optimizer.fallback) is torch.optim.Adam
    assert optimizer.param_groups[1]["lr"] == 1e-3
    assert optimizer.fallback.param_groups[0] is optimizer.param_groups[1]
    assert optimizer.fallback.state is optimizer.state


def test_mixed_group_gives_each_its_own_options():
    model = mixed()
    groups = [{"params": model.parameters(), "lr": 0.5, "weight_decay": 0.1, "max_grad_norm": 2.0}]
    optimizer = RLS.paper(model, params=groups, fallback=lambda p: torch.optim.AdamW(p, lr=0.01))
    rls, fallback = optimizer.param_groups
    assert (rls["lr"], rls["max_grad_norm"], rls["weight_decay"]) == (0.5, 2.0, 0.1)
    assert (fallback["lr"], fallback["weight_decay"], fallback["max_grad_norm"]) == (0.01, 0.1, 2.0)


def test_separate_attention_has_three_layers():
    attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5)
    optimizer = RLS.paper(attention)
    assert [layer.name for layer in optimizer.layers] == ["q_proj", "k_proj", "v_proj"]
    attention.k_proj_weight.requires_grad_(False)
    assert methods(RLS.paper(attention))["in_proj_bias"] == "fallback"  # it cannot be split


def test_paper_values():
    model = mlp()
    group = RLS.paper(model).param_groups[0]
    expected = {
        "lr": 1.0,
        "forgetting": 1.0,
        "ratio": 0.1,
        "momentum": 0.0,
        "l1": 0.0,
        "initial_inverse": 1.0,
        "time_scaling": True,
        "max_grad_norm": None,
    }
    assert {key: group[key] for key in expected} == expected
    assert RLS.paper(model, l1=1e-5, exclude=["2"]).param_groups[0]["l1"] == 1e-5


# -- the registry ------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return (x / 2) @ self.w


def test_a_layer_of_the_users_own():
    @register(Scaled)
    class ScaledAdapter(Adapter):
        block = Block("w", bias=None, inputs_first=True)

        def rows(self, module, x):
            return x / 2

    try:
        torch.manual_seed(0)
        model = Scaled()
        linear = nn.Linear(4, 3, bias=False)
        linear.weight.data = model.w.data.T.clone()
        optimizer, plain = RLS.paper(model, **HYPER), RLS.paper(linear, **HYPER)
        for seed in range(5):
            plain_step(model, optimizer, seed)
            x = torch.randn(6, 4, generator=(g := torch.Generator().manual_seed(seed)))
            y = torch.randn(6, 3, generator=g)
            plain.zero_grad()
            ((linear(x / 2) - y).square().sum() / 12).backward()
            plain.step()
        assert torch.allclose(model.w.T, linear.weight, rtol=1e-4, atol=1e-5)
    finally:
        unregister(Scaled)
    with pytest.warns(RLSWarning, match="no layer"):
        RLS.paper(Scaled())


def test_most_specific_adapter_wins():
    class Quiet(nn.Linear):
        pass

    @register(Quiet)
    class NoRule(Adapter):
        def blocks(self, module):
            return []

    try:
        optimizer = RLS.paper(nn.Sequential(Quiet(2, 2), nn.Linear(2, 2)))
        assert [layer.name for layer in optimizer.layers] == ["1"]
    finally:
        unregister(Quiet)


# -- reports -----------------------------------------------------------------------------------


def test_summary(capsys):
    model = Zoo()
    model.mlp[0].requires_grad_(False)
    optimizer = RLS.paper(model, exclude=["head"], momentum=0.5)
    optimizer.summary()
    text = capsys.readouterr().out
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert "Adam (no rule for Embedding)" in lines["token.weight"]
    assert "Adam (excluded)" in lines["head.bias"]
    assert "Adam (its rows cannot be observed)" in lines["attention.out_proj.weight"]
    assert "Adam (no row of ConvTranspose1d)" in lines["up.bias"]
    assert (
        "Adam (no rule for ParametrizationList)"
        in lines["normed.parametrizations.weight.original1"]
    )
    assert "3 x 5 x 5" in lines["attention.in_proj_weight"]
    assert "9 x 9" in lines["mlp.2.weight"]
    assert "RLS with mlp.2" in lines["mlp.2.bias"]
    assert "nothing (frozen)" in lines["mlp.0.weight"]
    assert "of state in total" in text
    model.mlp[2].weight.requires_grad_(False)
    assert "Adam (its weight is not trained)" in summary(RLS.paper(model))
    assert "nothing (not in params)" in summary(RLS.paper(model, params=model.head.parameters()))
    assert "1 x 1  " in summary(RLS.paper(nn.Linear(1, 1, bias=False))).splitlines()[2]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(
    "fallback", [torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)]
)
def test_memory_estimate_is_what_is_allocated(momentum, fallback):
    model = mixed()
    optimizer = RLS.paper(model, momentum=momentum, fallback=fallback)
    estimate = optimizer.memory_estimate()
    assert not optimizer.state
    plain_step(model, optimizer, 0, 4, 2, 3, 3)
    tensors = [v for s in optimizer.state.values() for v in s.values() if v is not None]
    assert estimate == sum(v.numel() * v.element_size() for v in tensors)


def test_memory_estimate_with_a_fallback_that_needs_real_tensors():
    class Picky(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sum().item()

    model = nn.LayerNorm(4)
    with pytest.warns(RLSWarning):
        optimizer = RLS.paper(model, fallback=Picky)
    assert optimizer.memory_estimate() == 2 * 8 * 4


# -- adapters that are wrong -------------------------------------------------------------------


def observed_call(model: nn.Module) -> None:
    with RLS.paper(model):
        model(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("blocks", "rows", "message"),
    [
        (
            [Block("w", "bais")],
            None,
            "names the bias 'bais', which Scaled .* does not have; say bias",
        ),
        (Block("w", None), None, "blocks must return a list of Block, got Block"),
        (
            [Block("w", None, inputs=4, inputs_first=True)],
            "w",
            r"must return a tensor or Rows, or a list with one of these \(or None\) per block of "
            "Scaled, got str",
        ),
        ([Block("weigth", None)], None, "names the weight 'weigth', which Scaled .* does not have"),
        (
            [Block("w", None, inputs=4, inputs_first=True)],
            [],
            "rows must return one entry per block of Scaled, got 0",
        ),
        (
            [Block("w", None, inputs=4, inputs_first=True)],
            [Rows(torch.zeros(2, 3))],
            r"total of shape \(1, 1, 4\) \(groups, sets, inputs\), got \(1, 1, 3\)",
        ),
    ],
)
def test_wrong_adapter(blocks, rows, message):
    @register(Scaled)
    class Wrong(Adapter):
        def blocks(self, module):
            return blocks

        def rows(self, module, x):
            return rows

    try:
        with pytest.raises((TypeError, ValueError), match=message):
            observed_call(Scaled())
    finally:
        unregister(Scaled)


def test_fused_fallback_heeds_strides():
    """Fused kernels take it for granted that parameter and gradient have the same layout."""

    class Free(nn.Module):
        def __init__(self, parameter):
            super().__init__()
            self.free, self.layer = parameter, nn.Linear(6, 2)

    for parameter in (
        nn.Parameter(torch.randn(4, 6)),
        nn.Parameter(torch.randn(4, 12)[:, ::2]),
    ):
        model = Free(parameter)
        expected = nn.Parameter(parameter.detach().clone())
        optimizer, plain = RLS.paper(model), torch.optim.Adam([expected])
        gradient = torch.arange(-12.0, 12.0).view(6, 4).t()
        for _ in range(2):
            parameter.grad, expected.grad = gradient, gradient.contiguous()
            optimizer.step()
            plain.step()
        assert parameter.grad is gradient
        assert torch.allclose(parameter, expected)
