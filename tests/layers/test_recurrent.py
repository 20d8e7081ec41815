"""Recurrent layers: against Algorithm 2, and the forward pass against the plain module."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

import explicit_layers as explicit
from comparison import STEPS, agree
from models import HYPER, inverses
from torchrls import RLS, LeastSquaresLoss
from torchrls.observe import identities
from torchrls.selftest import naive

KINDS = {
    "RNN": nn.RNN,
    "RNN, relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
}
LENGTHS = torch.tensor([4, 2, 3])
loss_fn = LeastSquaresLoss()


pytestmark = pytest.mark.usefixtures("double")


class Net(nn.Module):
    """A recurrent stack with a head on all steps (prediction) or on the last (classification)."""

    def __init__(self, kind: str = "LSTM", *, task: str = "prediction", **options) -> None:
        super().__init__()
        options = {"num_layers": 2, "batch_first": True, **options}
        self.rnn = KINDS[kind](3, 4, **options)
        width = (options.get("proj_size") or 4) * (2 if options.get("bidirectional") else 1)
        self.head, self.task = nn.Linear(width, 2), task

    def forward(self, x, hx=None):
        out, state = self.rnn(x, hx)
        if self.task == "prediction":
            if isinstance(out, PackedSequence):
                return self.head(out.data)
            return self.head(out)
        h = state[0] if isinstance(state, tuple) else state
        last = h[-2:].transpose(0, 1).flatten(1) if self.rnn.bidirectional else h[-1]
        return self.head(last)


def compare(net: Net, optimizer: RLS, twin: explicit.Recurrent, head: explicit.Linear) -> None:
    matrices = iter(twin.matrices)
    for layer in range(net.rnn.num_layers):
        for suffix in ("", "_reverse") if net.rnn.bidirectional else ("",):
            for part in ("ih", "hh"):
                matrix = next(matrices)
                weight = getattr(net.rnn, f"weight_{part}_l{layer}{suffix}")
                agree(weight.detach(), matrix.weight.T)
                agree(optimizer.state[weight]["inverse"], matrix.P)
                if net.rnn.bias:
                    bias = getattr(net.rnn, f"bias_{part}_l{layer}{suffix}")
                    agree(bias.detach(), matrix.bias)
    agree(net.head.weight.detach(), head.weight)
    agree(optimizer.state[net.head.weight]["inverse"], head.matrices[0].P)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("task", ["prediction", "classification"])
@pytest.mark.parametrize("kind", KINDS)
def test_algorithm_2(kind, task, packed, bidirectional):
    net = Net(kind, task=task, bidirectional=bidirectional)
    optimizer = RLS.paper(net, **HYPER, max_grad_norm=1.0)
    twin = explicit.Recurrent(net.rnn)
    head = explicit.Linear(net.head)
    for _ in range(STEPS):
        x = torch.randn(3, 4, 3)
        sequences = [s[:n] for s, n in zip(x, LENGTHS, strict=True)] if packed else list(x)
        given = pack_padded_sequence(x, LENGTHS, True, enforce_sorted=False) if packed else x
        optimizer.zero_grad()
        out = net(given)
        target = torch.randn_like(out)
        loss_fn(out, target).backward()
        optimizer.step()

        outputs, finals = twin(sequences)
        if task == "classification":
            z = head(finals)
        elif packed:  # the order of the packed rows
            order = pack_padded_sequence(
                nn.utils.rnn.pad_sequence(outputs, True), LENGTHS, True, enforce_sorted=False
            )
            z = head(order.data)
        else:
            z = head(torch.stack(outputs))
        loss = loss_fn(z, target)
        naive.paper_step([*twin.matrices, *head.matrices], loss, **HYPER, max_grad_norm=1.0)
    compare(net, optimizer, twin, head)


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_without_bias_and_with_initial_states(kind):
    net = Net(kind, bias=False)
    optimizer = RLS.paper(net, **HYPER, max_grad_norm=1.0)
    twin = explicit.Recurrent(net.rnn)
    head = explicit.Linear(net.head)
    for _ in range(STEPS):
        x, target = torch.randn(3, 4, 3), torch.randn(3, 4, 2)
        states = torch.randn(2, 2, 3, 4)
        optimizer.zero_grad()
        loss_fn(net(x, tuple(states) if kind == "LSTM" else states[0]), target).backward()
        optimizer.step()
        outputs, _ = twin(list(x), states)
        loss = loss_fn(head(torch.stack(outputs)), target)
        naive.paper_step([*twin.matrices, *head.matrices], loss, **HYPER, max_grad_norm=1.0)
    compare(net, optimizer, twin, head)


# -- the forward pass is the plain one ---------------------------------------------------------


def tensors(result) -> list[torch.Tensor]:
    if isinstance(result, PackedSequence):
        return [result.data]
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in tensors(part)]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("form", ["batched", "unbatched", "packed", "with states"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 3, "dropout": 0.4},
        {"num_layers": 2, "bidirectional": True, "dropout": 0.3},
        {"num_layers": 2, "batch_first": True},
        {"bias": False, "bidirectional": True, "batch_first": True},
        {"proj_size": 2, "num_layers": 2, "bidirectional": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_forward_is_the_plain_one_to_the_bit(kind, options, dtype, form, train):
    if "proj_size" in options and kind != "LSTM":
        return
    plain = KINDS[kind](3, 4, **options).to(dtype).train(train)
    module = copy.deepcopy(plain)
    optimizer = RLS.paper(module)
    x = torch.randn(5, 4, 3, dtype=dtype)
    args = [x]
    if form == "unbatched":
        args = [x[0]]
    elif form == "packed":
        first = options.get("batch_first", False)
        lengths = torch.tensor([2, 4, 1, 3, 4]) if first else torch.tensor([3, 5, 1, 5])
        args = [pack_padded_sequence(x, lengths, first, enforce_sorted=False)]
    elif form == "with states":
        directions = (2 if options.get("bidirectional") else 1) * options.get("num_layers", 1)
        batch = 5 if options.get("batch_first") else 4
        h = torch.randn(directions, batch, options.get("proj_size", 4), dtype=dtype)
        args.append((h, torch.randn(directions, batch, 4, dtype=dtype)) if kind == "LSTM" else h)
    results = []
    for net in (plain, module):
        torch.manual_seed(3)
        out = net(*args)
        gradients = torch.autograd.grad(sum(t.sum() for t in tensors(out)), [*net.parameters()])
        results.append([*tensors(out), *gradients])
        with torch.no_grad():
            torch.manual_seed(3)
            results[-1] += tensors(net(*args))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert [a.stride() for a in results[0]] == [a.stride() for a in results[1]]
    optimizer.close()


def test_module_stays_the_module_that_it_was():
    net = Net()
    before = {name: set(vars(module)) for name, module in net.named_modules()}
    keys, call = list(net.state_dict()), type(net.rnn).__call__
    optimizer = RLS.paper(net)
    net(torch.randn(2, 3, 3)).sum().backward()
    optimizer.step()
    assert type(net.rnn) is nn.LSTM
    assert type(net.rnn).__call__ is call
    assert list(net.state_dict()) == keys
    assert {name: set(vars(module)) for name, module in net.named_modules()} == before
    optimizer.close()
    assert not net.rnn._forward_hooks
    assert not net.rnn._forward_pre_hooks
    assert not net.rnn._forward_hooks_always_called
    assert not net.rnn._forward_hooks_with_kwargs


@pytest.mark.parametrize("part", ["output", "h_n", "c_n"])
def test_loss_on_any_output_alone(part):
    lstm = nn.LSTM(3, 4, 2)
    optimizer = RLS.paper(lstm, **HYPER)
    out, (h, c) = lstm(torch.randn(5, 2, 3))
    {"output": out, "h_n": h, "c_n": c}[part].square().sum().backward()
    before = [p.clone() for p in lstm.parameters()]
    optimizer.step()
    assert len(inverses(optimizer)) == 4
    assert all(not torch.equal(a, b) for a, b in zip(before, lstm.parameters(), strict=True))


def test_in_place_operation_behind_a_recurrent_layer():
    gru = nn.GRU(3, 4)
    optimizer = RLS.paper(gru)
    out, _ = gru(torch.randn(5, 2, 3))
    out.relu_()
    out.sum().backward()
    optimizer.step()
    assert len(inverses(optimizer)) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", ["output", "h_n"])
def test_who_writes_to_an_output_gets_what_torch_gives(kind, dtype, part):
    """The same gradients, or the same complaint that a kernel still needs what was there."""

    def outcome(optimized):
        torch.manual_seed(0)
        rnn = KINDS[kind](3, 4, 2).to(dtype)
        optimizer = RLS.paper(rnn) if optimized else None
        out, state = rnn(torch.randn(5, 2, 3, dtype=dtype))
        h = state[0] if isinstance(state, tuple) else state
        written = {"output": out, "h_n": h}[part]
        try:
            written.mul_(2)
            (out.square().sum() + h.exp().sum()).backward()
        except RuntimeError as error:
            return str(error).split(":")[0]
        del optimizer
        return [p.grad for p in rnn.parameters()]

    plain, ours = outcome(False), outcome(True)
    if isinstance(plain, str):
        assert ours == plain
    else:
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_outputs_are_not_copied():
    """What the kernel returns is what the user gets: of a long sequence, it is much."""
    lstm = nn.LSTM(3, 4)
    optimizer = RLS.paper(lstm)
    made = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            obtained = function(*args, **(kwargs or {}))
            made.extend(obtained if function is torch.lstm else [])
            return obtained

    with Watch():
        out, _ = lstm(torch.randn(5, 2, 3))
    assert out.data_ptr() in {tensor.data_ptr() for tensor in made}
    del optimizer


def test_an_output_that_is_there_twice_is_copied():
    """Else who writes to one of them would change the other's values, but not its gradient."""
    x = torch.ones(2)
    one, other, part = identities.aliases([x, x, torch.ones(4)[:2]])
    assert one.data_ptr() == x.data_ptr()
    one.mul_(2)
    assert torch.equal(other, torch.ones(2))
    assert not part._is_view()


def test_projections_are_trained_by_the_fallback():
    lstm = nn.LSTM(3, 4, 2, proj_size=2)
    optimizer = RLS.paper(lstm)
    names = {n: g["method"] for g in optimizer.param_groups for n in g["param_names"]}
    assert {name for name, method in names.items() if method == "fallback"} == {
        "weight_hr_l0",
        "weight_hr_l1",
    }
    assert optimizer.reasons[lstm.weight_hr_l0] == "no row of LSTM"


# -- cells -------------------------------------------------------------------------------------

CELLS = {"RNN": nn.RNNCell, "LSTM": nn.LSTMCell, "GRU": nn.GRUCell}


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("bias", [True, False])
def test_cell_in_a_loop_is_the_layer(kind, bias):
    layer, cell = KINDS[kind](3, 4, bias=bias), CELLS[kind](3, 4, bias=bias)
    with torch.no_grad():
        for name, parameter in cell.named_parameters():
            parameter.copy_(getattr(layer, f"{name}_l0"))
    optimizers = [RLS.paper(layer, **HYPER), RLS.paper(cell, **HYPER)]
    for _ in range(5):
        x = torch.randn(6, 3, 3)
        for optimizer in optimizers:
            optimizer.zero_grad()
        layer(x)[0].square().mean().backward()
        state, outputs = None, []
        for step in x:
            state = cell(step, state)
            outputs.append(state[0] if kind == "LSTM" else state)
        torch.stack(outputs).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in cell.named_parameters():
        agree(parameter.detach(), getattr(layer, f"{name}_l0").detach())
    for one, other in zip(*map(inverses, optimizers), strict=True):
        agree(one, other)


def test_unbatched_cell():
    cell = nn.GRUCell(3, 4)
    optimizer = RLS.paper(cell)
    cell(torch.randn(3)).sum().backward()
    optimizer.step()
    assert len(inverses(optimizer)) == 2


# -- loops -------------------------------------------------------------------------------------


def test_truncated_backpropagation_with_detached_state():
    net = nn.LSTM(3, 4)
    optimizer = RLS.paper(net, ratio=0.3)
    state, means = None, []
    for _ in range(3):
        x = torch.randn(5, 2, 3)
        optimizer.zero_grad()
        first = torch.zeros(2, 4) if state is None else state[0][0]
        out, state = net(x, state)
        means.append(torch.cat([first[None], out[:-1]]).detach().mean((0, 1)))
        out.square().mean().backward()
        optimizer.step()
        state = tuple(s.detach() for s in state)
    A = torch.eye(5)
    for mean in means:
        row = torch.cat([mean, torch.ones(1)])
        A = A + 0.3 * 5 * torch.outer(row, row)
    agree(optimizer.state[net.weight_hh_l0]["inverse"], A.inverse())


def test_evaluation_leaves_no_trace_and_exceptions_leave_no_mode():
    net = Net()
    optimizer = RLS.paper(net)
    net(torch.randn(2, 3, 3))
    with pytest.raises(RuntimeError, match=r"input.size\(-1\)"):
        net(torch.randn(2, 3, 7))
    assert torch.overrides._get_current_function_mode() is None
    net(torch.randn(2, 3, 3)).sum().backward()
    optimizer.step()
    assert len(inverses(optimizer)) == 5


def test_accumulation_is_the_large_batch():
    net = Net()
    other = copy.deepcopy(net)
    optimizers = [RLS.paper(net, **HYPER), RLS.paper(other, **HYPER)]
    for _ in range(3):
        x, y = torch.randn(6, 4, 3), torch.randn(6, 4, 2)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in (slice(0, 2), slice(2, 6)):
            (loss_fn(net(x[part]), y[part]) * len(x[part]) / 6).backward()
        loss_fn(other(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        agree(one.detach(), two.detach())


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    net = Net()
    other = copy.deepcopy(net)
    optimizers = [RLS.paper(net, **HYPER), RLS.paper(other, **HYPER)]
    for _ in range(3):
        x, y = torch.randn(6, 4, 3, requires_grad=True), torch.randn(6, 4, 2)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_fn(checkpoint(net, x, use_reentrant=reentrant), y).backward()
        loss_fn(other(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies(way):
    net = Net()
    optimizer = RLS.paper(net, **HYPER)
    pair = (net, optimizer)
    other, plain = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    alone = copy.deepcopy(net)
    x, y = torch.randn(6, 4, 3), torch.randn(6, 4, 2)
    for model, opt in ((net, optimizer), (other, plain)):
        loss_fn(model(x), y).backward()
        opt.step()
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    assert len(other.rnn._forward_hooks) == len(other.rnn._forward_pre_hooks) == 1
    alone(x)


# -- masks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_mask_of_valid_rows_equals_packing(kind, batch_first):
    net = Net(kind, batch_first=batch_first)
    other = copy.deepcopy(net)
    optimizers = [RLS.paper(net, **HYPER), RLS.paper(other, **HYPER)]
    mask = torch.arange(4) < LENGTHS[:, None]
    orient = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    for _ in range(5):
        x, y = torch.randn(3, 4, 3), torch.randn(3, 4, 2)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with optimizers[0].rows(mask):
            out, _ = net.rnn(orient(x))
            out = net.head(orient(out))
        (out - y)[mask].square().sum().backward()
        packed, _ = other.rnn(
            pack_padded_sequence(orient(x), LENGTHS, batch_first, enforce_sorted=False)
        )
        padded, _ = pad_packed_sequence(packed, batch_first=True)
        with optimizers[1].rows(mask):
            plain = other.head(padded)
        (plain - y)[mask].square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        agree(one.detach(), two.detach())
    for one, two in zip(*map(inverses, optimizers), strict=True):
        agree(one, two)


def test_mask_leaves_other_layers_alone_and_padding_out():
    layer, head = nn.Linear(3, 4), nn.Linear(4, 2)
    model = nn.ModuleList([layer, head])
    optimizer = RLS.paper(model, ratio=0.3)
    x = torch.randn(3, 4, 3)
    mask = torch.arange(4) < LENGTHS[:, None]
    with optimizer.rows(mask):
        head(layer(x)[:, 0]).sum().backward()
    optimizer.step()
    row = torch.cat([x[mask].mean(0), torch.ones(1)])
    expected = torch.eye(4) + 0.3 * 3 * torch.outer(row, row)  # T is the mean length
    agree(inverses(optimizer)[0][0], expected.inverse())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["Linear", "LSTM"])
def test_mask_with_activation_checkpointing(kind, reentrant):
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(3, 4) if kind == "Linear" else nn.LSTM(3, 4, batch_first=True)
    optimizer = RLS.paper(layer, ratio=0.3)
    x = torch.randn(3, 4, 3, requires_grad=True)
    mask = torch.arange(4) < LENGTHS[:, None]
    with optimizer.rows(mask):
        out = checkpoint(layer, x, use_reentrant=reentrant)
    (out if kind == "Linear" else out[0]).sum().backward()
    optimizer.step()
    row = torch.cat([x[mask].mean(0), torch.ones(1)]).detach()
    expected = torch.eye(4) + 0.3 * 3 * torch.outer(row, row)
    agree(inverses(optimizer)[0][0], expected.inverse())


BAD_MASKS = [
    (torch.ones(2, 3), TypeError, r"bool tensor \(batch, time\) .* got \(2, 3\) of torch.float"),
    ([True], TypeError, r"a mask of rows is a bool tensor"),
    (torch.ones(1, 1, 1).bool(), TypeError, r"a mask of rows is a bool tensor"),
    (torch.zeros(2, 3).bool(), ValueError, r"the mask of rows, \(2, 3\), has no valid row"),
    (torch.ones(3, 2).bool(), ValueError, r"\(3, 2\), fits the input of no layer .* time_first"),
]


@pytest.mark.parametrize(("mask", "error", "message"), BAD_MASKS)
def test_bad_mask(mask, error, message):
    optimizer = RLS.paper(model := nn.Linear(4, 2))
    with pytest.raises(error, match=message), optimizer.rows(mask):
        model(torch.randn(2, 3, 4))


def test_mask_of_a_model_with_time_first():
    layer = nn.Linear(3, 4)
    optimizer = RLS.paper(layer, ratio=0.3)
    x, lengths = torch.randn(3, 3, 3), torch.tensor([3, 1, 2])
    mask = torch.arange(3) < lengths[:, None]
    with optimizer.rows(mask, time_first=True):
        layer(x.transpose(0, 1)).sum().backward()
    optimizer.step()
    row = torch.cat([x[mask].mean(0), torch.ones(1)])
    expected = torch.eye(4) + 0.3 * 2 * torch.outer(row, row)
    agree(inverses(optimizer)[0][0], expected.inverse())


def test_evaluation_under_a_mask_is_no_error():
    optimizer = RLS.paper(model := nn.Linear(4, 2))
    with optimizer.rows(torch.ones(3, 2).bool()), torch.no_grad():
        model(torch.randn(2, 3, 4))


# -- found by reviewing ------------------------------------------------------------------------


def modes_left() -> int:
    return len(torch.overrides._get_current_function_mode_stack())


def test_interrupted_forward_leaves_nothing_that_works():
    lstm = nn.LSTM(3, 4)
    optimizer = RLS.paper(lstm)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = lstm.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        lstm(torch.randn(5, 2, 3))
    handle.remove()
    lstm(torch.randn(5, 2, 3))[0].sum().backward()
    assert modes_left() == 0
    optimizer.step()
    assert len(inverses(optimizer)) == 2


def test_forward_in_two_threads():
    import threading

    lstm = nn.LSTM(3, 4)
    optimizer = RLS.paper(lstm)
    inside, done, errors = threading.Event(), threading.Event(), []

    def wait(*_):
        inside.set()
        assert done.wait(10)

    def evaluate():
        inside.wait(10)
        try:
            with torch.no_grad():
                handle.remove()
                lstm(torch.randn(5, 2, 3))
        except Exception as error:
            errors.append(error)
        done.set()

    handle = lstm.register_forward_pre_hook(wait)
    thread = threading.Thread(target=evaluate)
    thread.start()
    lstm(torch.randn(5, 2, 3))[0].sum().backward()
    thread.join()
    assert not errors
    assert modes_left() == 0
    optimizer.step()
    assert len(inverses(optimizer)) == 2


@pytest.mark.parametrize("kind", ["LSTM", "LSTMCell"])
def test_discarded_backward_is_forgotten(kind):
    results = []
    for stale in (True, False):
        torch.manual_seed(0)
        layer = getattr(nn, kind)(3, 4)
        optimizer = RLS.paper(layer)
        x = torch.randn(5, 3)
        if stale:
            layer(9 * x)[0].sum().backward()
            layer.zero_grad()
        layer(x)[0].sum().backward()
        optimizer.step()
        results.append(inverses(optimizer))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_several_optimizers_on_one_layer():
    lstm = nn.LSTM(3, 4, 2)
    optimizers = [RLS.paper(lstm), RLS.paper(lstm)]
    lstm(torch.randn(5, 2, 3))[0].sum().backward()
    for optimizer in optimizers:
        records = optimizer._capture.records.values()
        assert all(record.statistic() is not None for record in records)
    assert modes_left() == 0


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_reparametrized_weights_go_to_the_fallback():
    lstm = nn.utils.weight_norm(nn.LSTM(3, 4), "weight_hh_l0")
    optimizer = RLS.paper(lstm)
    methods = {n: g["method"] for g in optimizer.param_groups for n in g["param_names"]}
    assert {n for n, method in methods.items() if method == "rls"} == {"weight_ih_l0", "bias_ih_l0"}
    before = lstm.weight_hh_l0_g.clone()
    lstm(torch.randn(5, 2, 3))[0].sum().backward()
    optimizer.step()
    assert not torch.equal(lstm.weight_hh_l0_g, before)


def test_subclass_that_calls_its_kernel_with_keywords():
    class Keyword(nn.GRUCell):
        def forward(self, x, h):
            weights = (self.weight_ih, self.weight_hh)
            return torch.gru_cell(x, h, *weights, b_ih=self.bias_ih, b_hh=self.bias_hh)

    cell = Keyword(3, 4)
    x, h = torch.randn(2, 3), torch.randn(2, 4)
    expected = nn.GRUCell.forward(cell, x, h)
    RLS.paper(cell)
    assert torch.equal(cell(x, h), expected)


@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0"])
def test_half_frozen_layer(frozen):
    gru = nn.GRU(3, 4)
    getattr(gru, frozen).requires_grad_(False)
    optimizer = RLS.paper(gru)
    before = {name: p.clone() for name, p in gru.named_parameters()}
    gru(torch.randn(5, 2, 3))[0].square().sum().backward()
    optimizer.step()
    moved = {n for n, p in gru.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(before) - {frozen}
