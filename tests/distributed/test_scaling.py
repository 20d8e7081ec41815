"""The formulas of benchmarks/scaling.py against what the optimizer really does."""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from requirements import shards_on_cpus
from torchrls import RLS

ROOT = Path(__file__).parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scaling, ranks = load("scaling"), load("ranks")


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write; a view of something is none."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        if not operation.is_view and operation is not torch.ops.aten._unsafe_view.default:
            tensors = [
                t for t in tree_leaves((args, kwargs, results)) if isinstance(t, torch.Tensor)
            ]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return results


def added_product(target, one, other, *args, **kwargs):
    """Operations of ``addmm_``, which torch does not count."""
    return 2 * one[0] * one[1] * other[1]


def added_products(target, one, other, *args, **kwargs):
    """Those of ``baddbmm_``."""
    return one[0] * added_product(target, one[1:], other[1:])


def counter():
    aten = torch.ops.aten
    uncounted = {aten.addmm_: added_product, aten.baddbmm_: added_products}
    return FlopCounterMode(display=False, custom_mapping=uncounted)


def steps_of(model, optimizer, count, inputs, mode=None):
    """The last one within ``mode``."""
    dtype = next(model.parameters()).dtype
    for number in range(count):
        optimizer.zero_grad()
        model(torch.randn(32, inputs, dtype=dtype)).float().square().mean().backward()
        if mode is not None and number == count - 1:
            with mode:
                optimizer.step()
        else:
            optimizer.step()


def chain(*sizes, dtype=torch.float32):
    """Layers without a bias."""
    torch.manual_seed(0)
    layers = (nn.Linear(*pair, bias=False) for pair in pairwise(sizes))
    return nn.Sequential(*layers).to(dtype)


def layer_of(module):
    return scaling.Layer("", module.in_features, module.out_features)


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_bytes_of_state():
    model = chain(24, 300, 16, dtype=torch.bfloat16)
    optimizer = RLS(model, averages=8)
    steps_of(model, optimizer, 1, 24)
    for module in model:
        state, layer = optimizer.state[module.weight], layer_of(module)
        memories = [state["momentum"], state["square"]]
        assert bytes_of(memories) == scaling.memory_bytes(layer)
        assert bytes_of([state["inverse"]]) == scaling.inverse_bytes(layer)
        assert bytes_of([state["outputs"]]) == scaling.outputs_bytes(layer)


def test_operations_of_a_step():
    model = chain(24, 300, 16)
    optimizer, count = RLS(model, factored=False), counter()
    steps_of(model, optimizer, 2, 24, count)
    layers = [layer_of(module) for module in model]
    products = sum(map(scaling.product_operations, layers))
    assert count.get_total_flops() == products + sum(map(scaling.update_operations, layers))


def test_traffic_of_a_weight():
    """Of a layer whose P and Q are small."""
    model, traffic = chain(16, 1024, 8192, dtype=torch.bfloat16), Traffic()
    optimizer = RLS(model, averages=2, factored=False)
    steps_of(model, optimizer, 3, 16, traffic)
    weights = sum(p.numel() for p in model.parameters())
    assert traffic.bytes / weights == pytest.approx(scaling.TRAFFIC, rel=0.1)


def test_inputs_are_read_once_more():
    model = chain(64, 1, dtype=torch.bfloat16)
    x = torch.randn(1024, 64, dtype=torch.bfloat16)
    with Traffic() as before:
        model(x).float().square().mean().backward()
    optimizer = RLS(model, averages=2)
    steps_of(model, optimizer, 1, 64)
    optimizer.zero_grad()
    with Traffic() as after:
        model(x).float().square().mean().backward()
    added = (after.bytes - before.bytes) / x.numel()
    assert added == pytest.approx(scaling.HALF, rel=0.05)


@pytest.fixture
def first_of_four():
    """A rank; the other ones say nothing."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("averages", [1, 16])
def test_floats_exchanged(first_of_four, monkeypatch, averages):
    sizes = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *_, **__: sizes.append(tensor.numel()))
    model = chain(24, 40, 16)
    optimizer = RLS(model, averages=averages)
    steps_of(model, optimizer, 1, 24)
    rows = scaling.exchanged_floats(optimizer.layers, averages)
    extents = scaling.extent_floats(optimizer.layers)
    assert sizes == [rows, extents // 2, extents // 2]
    sizes.clear()
    steps_of(model, optimizer, 1, 24)
    assert sizes == [rows]


@shards_on_cpus
def test_bytes_of_a_rank_that_has_rows(first_of_four):
    model, mesh = chain(24, 40, 16), init_device_mesh("cpu", (4,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    optimizer = RLS(model)
    steps_of(model, optimizer, 1, 24)
    for module in model:
        state, layer = optimizer.state[module.weight], layer_of(module)
        memories = [state["momentum"].to_local(), state["square"].to_local()]
        assert bytes_of(memories) == scaling.memory_bytes(layer) / 4
        assert bytes_of([state["inverse"]]) == scaling.inverse_bytes(layer)


def test_bytes_of_owners(first_of_four, monkeypatch):
    sizes = []
    monkeypatch.setattr(dist, "broadcast", lambda tensor, **_: sizes.append(tensor.numel()))
    model = chain(24, 40, 16, 8, 32, 12)
    optimizer = RLS(model, shard_inverse=True)
    steps_of(model, optimizer, 1, 24)
    layers = [layer_of(module)._replace(name=name) for name, module in model.named_children()]
    expected = [sum(layer.size for layer in some) for some in scaling.dealt(layers, 4)]
    own = [name for name, module in model.named_children() if optimizer.state[module.weight]]
    assert sizes == expected
    assert own == [layer.name for layer in scaling.dealt(layers, 4)[0]]


def test_shapes_of_the_models():
    results = {
        model.label: sum(layer.size for layer in model.layers()) + model.others
        for model in scaling.MODELS
    }
    assert results["7B"] == 6_738_415_616
    assert results["13B"] == 13_015_864_320
    layers = scaling.MODELS[0].layers()
    inverses = 4 * 64 * (32 * (6 * 4096 + 11008) + 4096)
    assert sum(scaling.inverse_bytes(layer) for layer in layers) == inverses


@pytest.mark.parametrize("ranks", [3, 8, 1024])
def test_every_layer_has_one_owner(ranks):
    layers = scaling.MODELS[0].layers()
    dealt = scaling.dealt(layers, ranks)
    assert len(dealt) == min(ranks, len(layers))
    assert sorted(layer.name for some in dealt for layer in some) == sorted(
        layer.name for layer in layers
    )


def test_overhead_is_what_was_asked_for():
    model, mode = scaling.MODELS[0], scaling.MODES[2]
    tokens = scaling.tokens_for(model, mode, 64, 0.1)
    assert scaling.overhead(model, mode, tokens, 64) == pytest.approx(0.1)


@pytest.mark.parametrize("title", scaling.TABLES)
def test_document_has_what_the_script_prints(title):
    text = (ROOT / "docs" / "scaling.md").read_text()
    assert scaling.TABLES[title]() + "\n" in text


def test_document_has_what_was_measured():
    text = (ROOT / "docs" / "scaling.md").read_text()
    runs = json.loads((ROOT / "benchmarks" / "results" / "ranks.json").read_text())["runs"]
    assert ranks.table(runs) + "\n" in text
