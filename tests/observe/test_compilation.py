"""Compiled models are trained as others are: same numbers, no graph break, no recompilation."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.utils.rnn import pack_padded_sequence

from models import mlp
from torchrls import RLS, LeastSquaresLoss, RLSWarning

pytestmark = [
    pytest.mark.usefixtures("double", "uncompiled"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]
WHOLE = {"backend": "aot_eager", "fullgraph": True}
KINDS = {"default": RLS, "paper": RLS.paper}


@pytest.fixture
def uncompiled():
    """As at the start of a process, whatever other tests have done."""
    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        yield
    torch.compiler.reset()


class Everything(nn.Module):
    """Convolution, norm, attention, cells and linear layers with and without time."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)
        self.project = nn.Linear(3, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm, self.gru = nn.LSTMCell(4, 4), nn.GRUCell(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.project(torch.relu_(self.norm(self.conv(x))).flatten(2).mT)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        states = state = None
        for t in range(2):
            states = self.lstm(x[:, t], states)
            state = self.gru(states[0], state)
        return self.head(state)


class Sequences(nn.Module):
    """Recurrent layers, which torch.compile leaves out of its graphs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.lstm = nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(6, 3)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        x = self.lstm(torch.tanh(self.first(x)))[0]
        lengths = torch.arange(len(x)) % x.shape[1] + 1
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.gru(packed)[1][0])


class OverTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).mean(1))


def trained(network, optimizer, shapes, masked=False):
    """Train it; returns how many graphs there were after each step."""
    graphs = []
    for seed, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(*shape, generator=generator)
        y = torch.randn(len(x), 3, generator=generator)
        mask = torch.rand(shape[:2], generator=generator) < 0.7
        optimizer.zero_grad()
        with optimizer.rows(mask) if masked else contextlib.nullcontext():
            output = network(x)
        LeastSquaresLoss()(output, y).backward()
        optimizer.step()
        graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def compiled(model, **options):
    """By a backend that makes graphs of the forward pass only: quick."""
    return torch.compile(model, **{"backend": "eager", **options})


def close(model, other):
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-8) for a, b in pairs)


def compare(make, kind, shapes, **options):
    """Train a compiled network and the same in eager mode; returns the numbers of graphs."""
    masked = options.pop("masked", False)
    model = make()
    other = copy.deepcopy(model)
    optimizer, plain = KINDS[kind](model), KINDS[kind](other)
    graphs = trained(compiled(model, **options), optimizer, shapes, masked)
    trained(other, plain, shapes, masked)
    assert close(model, other)
    names = [layer.name for layer in optimizer.layers if layer.weight not in optimizer.state]
    assert names == []
    return graphs


@pytest.mark.parametrize(("kind", "graphs"), [("default", [1, 2, 2, 2]), ("paper", [1, 1, 1, 1])])
def test_one_graph_and_the_same_numbers(kind, graphs):
    """The default step asks for more in the first pass than later: that is its second graph."""
    assert compare(Everything, kind, [(6, 2, 3, 3)] * 4, **WHOLE) == graphs


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_are_observed_outside_of_the_graphs(kind):
    graphs = compare(Sequences, kind, [(6, 4, 4)] * 4, backend="aot_eager")
    assert graphs[2] == graphs[3]


@torch._dynamo.config.patch(allow_rnn=True)
def test_recurrent_layers_where_torch_would_take_them_into_the_graph():
    compare(Sequences, "default", [(6, 4, 4)] * 3)
    network = nn.LSTM(4, 3)
    optimizer = RLS(network)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_outside_of_the_graph"):
        trained(compiled(network, fullgraph=True), optimizer, [(6, 4, 4)])


def test_recurrent_layer_that_is_the_model():
    model = nn.LSTM(4, 3, batch_first=True)
    other = copy.deepcopy(model)
    optimizer, plain = RLS(model), RLS(other)
    network = compiled(model)
    for seed in range(3):
        x = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(seed))
        for net, opt in ((network, optimizer), (other, plain)):
            opt.zero_grad()
            net(x)[0].square().sum().backward()
            opt.step()
    assert close(model, other)


def test_batches_of_many_sizes_are_no_reason_to_compile_again():
    sizes = [32, 32, 7, 20, 32, 33, 21]
    graphs = compare(OverTime, "default", [(size, 5, 4) for size in sizes], fullgraph=True)
    assert graphs == [1, 2, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_heeded(kind):
    graphs = compare(OverTime, kind, [(6, 5, 4)] * 5, masked=True)
    assert graphs[1] == graphs[-1]


def test_mask_in_one_graph_says_why_it_cannot_be():
    network = OverTime()
    optimizer = RLS(network)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_outside_of_the_graph"):
        trained(compiled(network, fullgraph=True), optimizer, [(6, 5, 4)], masked=True)


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_optimizer_that_is_made_after_the_first_compiled_call(how):
    model = mlp()
    other = copy.deepcopy(model)
    network = model
    if how == "wrapped":
        network = compiled(model)
    else:
        model.compile(backend="eager")
    network(torch.randn(6, 4)).sum().backward()
    model.zero_grad()
    trained(network, RLS(network), [(6, 4)] * 2)
    trained(other, RLS(other), [(6, 4)] * 2)
    assert close(model, other)


def test_optimizer_that_cannot_know_of_an_earlier_compiled_call_says_what_to_do():
    model = mlp()
    network = compiled(model)
    network(torch.randn(6, 4)).sum().backward()
    optimizer = RLS(model)
    with pytest.warns(RLSWarning, match=r"torch.compiler.reset\(\) once"):
        trained(network, optimizer, [(6, 4)])
    torch.compiler.reset()
    trained(network, optimizer, [(6, 4)])
    assert all(layer.weight in optimizer.state for layer in optimizer.layers)


def test_twin_without_an_optimizer_has_compiled_code_of_its_own():
    model, twin = mlp(), mlp()
    optimizer = RLS(model)
    network, other = compiled(model), compiled(twin)
    for _ in range(3):
        other(torch.randn(6, 4)).sum().backward()
        trained(network, optimizer, [(6, 4)])
    assert int(optimizer.state[model[0].weight]["step"]) == 3


def test_closed_optimizer_leaves_a_compiled_model_alone():
    model = mlp()
    optimizer = RLS(model)
    network = compiled(model, fullgraph=True)
    trained(network, optimizer, [(6, 4)])
    records = list(optimizer._capture.records.values())
    optimizer.close()
    network(torch.randn(6, 4)).sum().backward()
    assert all(record.statistic() is None for record in records)


def test_model_that_was_moved_since_the_optimizer_was_made():
    model = mlp().float()
    optimizer = RLS(model)
    model.double()
    trained(compiled(model, fullgraph=True), optimizer, [(6, 4)])
    assert all(layer.weight in optimizer.state for layer in optimizer.layers)


def test_compiled_training_step():
    model = mlp()
    other = copy.deepcopy(model)
    optimizer, plain = RLS(model), RLS(other)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.graph)
        return graph

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()

    step_compiled = torch.compile(step, backend=backend)
    for seed in range(3):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        step_compiled(x)
        plain.zero_grad()
        other(x).square().mean().backward()
        plain.step()
    assert close(model, other)
    assert sum(is_of(graph, __file__) for graph in graphs) == 2


def is_of(graph, file):
    """torch 2.6 makes graphs of what its backward pass calls as well: those are of other files."""
    return any(file in (node.stack_trace or "") for node in graph.nodes)
