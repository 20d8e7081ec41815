"""Lazy rows: their sums, squares and extents are those of a loop over rows that are written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from torchrls import RLS, Adapter, Block, Rows, register
from torchrls.layers.adapter import adapter_for, unregister
from torchrls.layers.recurrent import PackedRows
from torchrls.layers.rows import JoinedRows, Mask, extent_of, joined, ranges_of, sizes_of

pytestmark = pytest.mark.usefixtures("double")

SETS = [1, 2, 3, 7, 16]


# -- the loop --------------------------------------------------------------------------------------


def sums_by_a_loop(samples: list[torch.Tensor], sets: int) -> tuple[torch.Tensor, list[int]]:
    """Return sums (sets, inputs) and counts of the rows of each sample, (rows, inputs)."""
    total, counts = torch.zeros(sets, samples[0].shape[-1]), [0] * sets
    for i, rows in enumerate(samples):
        place = i * sets // len(samples)
        for row in rows:
            total[place] += row
            counts[place] += 1
    return total, counts


def squares_by_a_loop(samples: list[torch.Tensor]) -> float:
    return sum(float(entry) ** 2 for rows in samples for entry in rows.flatten())


def extent_by_a_loop(samples: list[torch.Tensor]) -> torch.Tensor:
    columns = [[float(e) for e in column] for column in torch.cat(samples).T]
    numbers = [[sum(c), len(c), max(c), -min(c)] for c in columns]
    return torch.tensor(numbers).T


def check(rows: Rows, groups: list[list[torch.Tensor]]) -> None:
    """Compare sums and squares with the rows of each sample, for each group."""
    for sets in SETS:
        total, counts = rows.sums(sets)
        expected = [sums_by_a_loop(samples, sets) for samples in groups]
        assert total.dtype == torch.float64
        assert total.shape == (len(groups), sets, groups[0][0].shape[-1])
        assert torch.allclose(total, torch.stack([part[0] for part in expected]), atol=1e-12)
        assert counts == [part[1] for part in expected]
    squares = torch.tensor([squares_by_a_loop(samples) for samples in groups])
    assert torch.allclose(rows.squares(), squares, atol=1e-10)


def check_extent(rows: Rows, groups: list[list[torch.Tensor]]) -> None:
    extent = torch.stack([extent_by_a_loop(samples) for samples in groups], 1)
    assert torch.allclose(rows.extent(), extent, atol=1e-12)


# -- features --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 3), (6, 3), (1, 3), (5, 4, 3), (4, 2, 3, 5)])
def test_features(shape):
    x = torch.randn(shape)
    samples = [part.reshape(-1, shape[-1]) for part in x]
    check(Rows(x), [samples])
    check_extent(Rows(x), [samples])


def test_a_single_row():
    x = torch.randn(3)
    check(Rows(x), [[x[None]]])
    check_extent(Rows(x), [[x[None]]])


def test_features_with_time_first():
    x = torch.randn(4, 5, 3)
    samples = list(x.transpose(0, 1))
    check(Rows(x, 5, time_first=True), [samples])
    check(Rows(x.transpose(0, 1), 5, time_first=False), [samples])
    check_extent(Rows(x, 5, time_first=True), [samples])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sets", [1, 3, 4])
def test_sums_are_of_the_precision_of_statistics(dtype, sets):
    x = torch.rand(4000, 2).to(dtype)
    total, _ = Rows(x).sums(sets)
    assert total.dtype == Rows(x).squares().dtype == torch.float32
    expected, _ = Rows(x.double()).sums(sets)
    assert torch.allclose(total.double(), expected, rtol=1e-5)
    assert torch.allclose(Rows(x).squares().double(), Rows(x.double()).squares(), rtol=1e-5)


def test_rows_are_detached():
    x = torch.randn(4, 3, requires_grad=True)
    assert not any(Rows(x).sums(sets)[0].requires_grad for sets in SETS)
    assert not Rows(x).squares().requires_grad


class Count(TorchDispatchMode):
    """Counts the operations within the context."""

    def __enter__(self):
        self.calls = 0
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Linear(3, 2), [(4, 5, 3)]),
        (nn.Conv2d(2, 3, 3), [(4, 2, 6, 6)]),
        (nn.ConvTranspose2d(2, 3, 3), [(4, 2, 6, 6)]),
        (nn.MultiheadAttention(4, 2), [(5, 3, 4)] * 3),
        (nn.LSTMCell(3, 4), [(5, 3), (2, 5, 4)]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_nothing_is_computed_until_it_is_asked_for(module, inputs):
    adapter, _ = adapter_for(module)
    tensors = [torch.randn(shape) for shape in inputs]
    if isinstance(module, nn.LSTMCell):
        tensors[1] = tuple(tensors[1])
    with Count() as count:
        rows = adapter.rows(module, *tensors)
        assert count.calls == 0
        for entry in rows if isinstance(rows, list) else [rows]:
            entry.sums(2)
    assert count.calls > 0


# -- masks -----------------------------------------------------------------------------------------

VALID = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0]]).bool()


@pytest.mark.parametrize("layout", ["batch first", "time first", "as the user says"])
def test_masks(layout):
    """Padding has no influence, whatever stands there; samples are those with a valid row."""
    x = torch.randn(5, 4, 3)
    samples = [part[valid] for part, valid in zip(x, VALID, strict=True)]
    x[~VALID] = torch.nan
    time_first = layout != "batch first"
    given = x.transpose(0, 1) if time_first else x
    rows = Rows(given, 5, time_first=None if layout == "as the user says" else time_first)
    mask = Mask(VALID, layout == "as the user says")
    rows.heed(mask)
    assert mask.heeded
    assert rows.samples == 4
    check(rows, [samples])
    check_extent(rows, [samples])


def test_mask_of_samples_without_time():
    x, valid = torch.randn(6, 3), torch.tensor([True, False, True, True, False, False])
    rows = Rows(x)
    rows.heed(Mask(valid, False))
    assert rows.samples == 0
    check(rows, [[part[None][:kept] for part, kept in zip(x, valid.long(), strict=True)]])
    check_extent(rows, [[x[valid]]])


def test_mask_that_does_not_fit():
    """A head on the last state has other rows."""
    x, mask = torch.randn(5, 3), Mask(VALID, False)
    rows = Rows(x, 5)
    rows.heed(mask)
    assert mask.seen
    assert not mask.heeded
    check(rows, [[part[None] for part in x]])
    with pytest.raises(ValueError, match="fits the input of no layer"):
        mask.check_heeded()


# -- ragged and sparse inputs ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*(prototype|beta)")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_inputs(layout):
    """Their rows are put together: sets are made of neighbouring rows."""
    parts = [torch.randn(length, 3) for length in (2, 5, 1)]
    x = torch.nested.nested_tensor(parts, layout=layout)
    check(Rows(x, 3), [list(torch.cat(parts).unsqueeze(1))])
    assert Rows(x, 3).extent() is None


@pytest.mark.filterwarnings("ignore:.*(prototype|beta)")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_inputs(layout):
    x = torch.randn(6, 3) * (torch.rand(6, 3) < 0.4)
    rows = Rows(x.to_sparse(layout=layout))
    check(rows, [list(x.unsqueeze(1))])
    assert rows.extent() is None


# -- packed sequences and states -------------------------------------------------------------------


class Seen:
    """Notes the rows of a kernel call, by their weights."""

    def __init__(self):
        self.rows = {}

    def attach(self, output, rows):
        self.rows.update({id(weight): entry for weight, entry in rows})
        return output


def rows_of_kernel(module, function, x, states, sizes=None):
    """Return the outputs and the rows of each weight, by its name."""
    adapter, _ = adapter_for(module)
    states = states if len(states) > 1 else states[0]
    options = (module._flat_weights, module.bias, module.num_layers, 0.0, True)
    layout = (x, states) if sizes is None else (x, sizes, states)
    last = (module.bidirectional, False) if sizes is None else (module.bidirectional,)
    seen = Seen()
    outputs = adapter.run(module, function, (*layout, *options, *last), seen)
    return outputs, {n: seen.rows[id(p)] for n, p in module.named_parameters() if "weight" in n}


def test_packed_sequences():
    sequences = [torch.randn(length, 3) for length in (5, 5, 3, 2, 1)]
    packed = pack_sequence(sequences)
    rows = PackedRows(packed.data, packed.batch_sizes, 5)
    check(rows, [sequences])
    check_extent(rows, [sequences])
    assert rows.samples == 5


KERNELS = {
    "LSTM": (nn.LSTM, torch.lstm, 2),
    "GRU": (nn.GRU, torch.gru, 1),
    "RNN": (nn.RNN, torch.rnn_tanh, 1),
}


@pytest.mark.parametrize("lengths", [(4, 4, 4, 4, 4), (5, 3, 3, 2, 1)], ids=["equal", "packed"])
@pytest.mark.parametrize("kind", KERNELS)
def test_rows_of_recurrent_layers(kind, lengths):
    """x_t and h_(t-1) of both layers and directions, with initial states."""
    make, function, count = KERNELS[kind]
    module = make(3, 2, num_layers=2, bidirectional=True)
    sequences = [torch.randn(length, 3) for length in lengths]
    states = [torch.randn(4, 5, 2) for _ in range(count)]
    packed = None
    if len(set(lengths)) > 1:
        packed = pack_sequence(sequences)
        given = (packed.data, states, packed.batch_sizes)
    else:
        given = (torch.stack(sequences, 1), states)
    _, rows = rows_of_kernel(module, function, *given)

    inputs = sequences
    for layer in range(2):
        single = make(inputs[0].shape[-1], 2, bidirectional=True)
        names = [n for n in module._parameters if f"_l{layer}" in n]
        with torch.no_grad():
            for name in names:
                getattr(single, name.replace(f"_l{layer}", "_l0")).copy_(getattr(module, name))
        outputs = []
        for i, sequence in enumerate(inputs):
            own = [s[2 * layer : 2 * layer + 2, i].detach() for s in states]
            outputs.append(single(sequence, tuple(own) if count == 2 else own[0])[0].detach())
        first = states[0][2 * layer : 2 * layer + 2]
        forth = [torch.cat([first[0, i][None], o[:-1, :2]]) for i, o in enumerate(outputs)]
        back = [torch.cat([o[1:, 2:], first[1, i][None]]) for i, o in enumerate(outputs)]
        for suffix, before in (("", forth), ("_reverse", back)):
            check(rows[f"weight_ih_l{layer}{suffix}"], [inputs])
            check(rows[f"weight_hh_l{layer}{suffix}"], [before])
            assert rows[f"weight_hh_l{layer}{suffix}"].extent() is None
        inputs = outputs
    check_extent(rows["weight_ih_l0"], [sequences])
    assert rows["weight_ih_l1"].extent() is None  # a gradient flows to it


@pytest.mark.parametrize("kind", KERNELS)
def test_masked_states(kind):
    """Those before a valid time, in both directions."""
    make, function, count = KERNELS[kind]
    module = make(3, 2, bidirectional=True)
    states = [torch.randn(2, 5, 2) for _ in range(count)]
    x = torch.randn(4, 5, 3)
    (output, *_), rows = rows_of_kernel(module, function, x, states)
    before = torch.cat([states[0][0][None], output[:-1, :, :2]]).detach()
    after = torch.cat([output[1:, :, 2:], states[0][1][None]]).detach()
    for suffix, every in (("", before), ("_reverse", after)):
        entry, mask = rows[f"weight_hh_l0{suffix}"], Mask(VALID, False)
        entry.heed(mask)
        assert mask.heeded
        assert entry.samples == 4
        check(entry, [[every[VALID[i], i] for i in range(5)]])


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_rows_of_cells(cell):
    module, x, state = cell(3, 2), torch.randn(5, 3), torch.randn(5, 2)
    adapter, _ = adapter_for(module)
    given = (state, state) if cell is nn.LSTMCell else state
    inputs, states = adapter.rows(module, x, given)
    check(inputs, [list(x.unsqueeze(1))])
    check_extent(inputs, [[x]])
    check(states, [list(state.unsqueeze(1))])
    assert states.extent() is None
    _, zeros = adapter.rows(module, x)
    check(zeros, [list(torch.zeros(5, 1, 2))])


# -- convolutions ----------------------------------------------------------------------------------


def patches(image: torch.Tensor, conv: nn.Conv2d) -> list[torch.Tensor]:
    """Return the receptive fields of one image, (positions, inputs) of each group."""
    fields = nn.functional.unfold(
        image[None], conv.kernel_size, conv.dilation, conv.padding, conv.stride
    )
    return list(fields[0].T.chunk(conv.groups, 1))


@pytest.mark.parametrize("samples", [5, 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"groups": 2}, {"stride": (2, 1), "padding": 1}, {"dilation": (1, 2), "groups": 2}],
    ids=str,
)
def test_patches_of_convolutions(options, samples):
    conv = nn.Conv2d(4, 6, (2, 3), **options)
    adapter, _ = adapter_for(conv)
    x = torch.randn(samples, 4, 5, 6)
    rows = adapter.rows(conv, x)
    groups = [list(part) for part in zip(*(patches(image, conv) for image in x), strict=True)]
    check(rows, groups)
    # the extent of a column is that of its channel, padding left out
    channels = extent_by_a_loop([x.movedim(1, -1).reshape(-1, 4)])
    assert torch.allclose(rows.extent(), channels.repeat_interleave(6, 1).view(4, conv.groups, -1))
    if samples == 1:
        check(adapter.rows(conv, x[0]), groups)


@pytest.mark.parametrize("groups", [1, 2])
def test_channels_of_transposed_convolutions(groups):
    conv = nn.ConvTranspose2d(4, 6, 2, groups=groups)
    adapter, _ = adapter_for(conv)
    x = torch.randn(5, 4, 3, 2)
    pixels = [image.flatten(1).T.chunk(groups, 1) for image in x]
    samples = [list(part) for part in zip(*pixels, strict=True)]
    check(adapter.rows(conv, x), samples)
    check_extent(adapter.rows(conv, x), samples)


def test_images_do_not_heed_masks():
    """Masks are for sequences; an image of the same size is none."""
    conv, x, mask = nn.Conv1d(2, 3, 1), torch.randn(5, 2, 4), Mask(VALID, False)
    adapter, _ = adapter_for(conv)
    rows = adapter.rows(conv, x)
    rows.heed(mask)
    assert not mask.seen
    check(rows, [[image.T for image in x]])


# -- attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_queries_keys_and_values(packed, batch_first):
    """Each has rows of its own, and queries may be more or fewer than keys."""
    sizes = {} if packed else {"kdim": 3, "vdim": 5}
    attention = nn.MultiheadAttention(4, 2, batch_first=batch_first, **sizes)
    adapter, _ = adapter_for(attention)
    query = torch.randn(5, 3, 4)
    key, value = torch.randn(5, 7, sizes.get("kdim", 4)), torch.randn(5, 7, sizes.get("vdim", 4))
    given = [t if batch_first else t.transpose(0, 1) for t in (query, key, value)]
    rows = adapter.rows(attention, *given)
    if packed:
        (joint,) = rows
        assert isinstance(joint, JoinedRows)
        assert joint.samples == 5
        check(joint, [list(query), list(key), list(value)])
    else:
        for entry, expected in zip(rows, (query, key, value), strict=True):
            assert entry.samples == 5
            check(entry, [list(expected)])


def test_masks_of_self_attention():
    """Queries, keys and values are one tensor, which is summed up once."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    adapter, _ = adapter_for(attention)
    x = torch.randn(5, 4, 4)
    (rows,) = adapter.rows(attention, x, x, x)
    assert len(set(rows.parts)) == 1
    rows.heed(Mask(VALID, False))
    assert rows.samples == 4
    check(rows, [[part[valid] for part, valid in zip(x, VALID, strict=True)]] * 3)


# -- extents ---------------------------------------------------------------------------------------


def test_only_inputs_of_the_network_have_an_extent():
    x = torch.randn(5, 3)
    assert Rows(x).extent() is not None
    assert Rows(x, hidden=True).extent() is None
    assert Rows(nn.Parameter(x)).extent() is None
    for hidden in (nn.Linear(3, 3)(x), x * nn.Parameter(torch.ones(3))):
        assert Rows(hidden.tanh()[:2]).extent() is None
    x.requires_grad_()  # as in adversarial training
    for inputs in (x, x.clone(), (x + torch.randn(5, 3, requires_grad=True)).clamp(0, 1)):
        assert torch.equal(Rows(inputs).extent(), Rows(inputs.detach()).extent())
    assert Rows(torch.zeros(0, 3)).extent() is None


def test_extents_of_parts_make_that_of_the_whole():
    x = 100 + torch.randn(9, 3)
    x[:, 1] = 0.1  # rounding is no range
    whole = None
    for part in x.split([4, 3, 2]):
        whole = joined(whole, extent_of(part))
    assert torch.allclose(whole, extent_of(x))
    mean = x.mean(0)
    ranges = [max(abs(e - mean[i]) for e in x[:, i]) if i != 1 else 0.0 for i in range(3)]
    assert torch.allclose(ranges_of(whole), torch.tensor([ranges]))
    assert torch.allclose(sizes_of(whole), x.abs().amax(0)[None])


# -- layers of the user's own ----------------------------------------------------------------------


class Doubled(nn.Module):
    """The layer of the docstring of Adapter."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(n, m) / n**0.5)

    def forward(self, x):
        return (2 * x) @ self.kernel


@pytest.fixture
def adapter():
    @register(Doubled)
    class DoubledAdapter(Adapter):
        block = Block("kernel", bias=None, inputs_first=True)

        def rows(self, module, x):
            return 2 * x

    yield DoubledAdapter
    unregister(Doubled)


@pytest.mark.usefixtures("adapter")
@pytest.mark.parametrize("kind", [RLS, RLS.paper], ids=["default", "paper"])
def test_an_adapter_of_three_lines_trains(kind):
    """The loss falls as with a linear layer on the doubled inputs, which is the same network."""

    class Twice(nn.Module):
        def forward(self, x):
            return 2 * x

    own = nn.Sequential(Doubled(4, 6), nn.Tanh(), nn.Linear(6, 2))
    linear = nn.Sequential(Twice(), nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():
        linear[1].weight.copy_(own[0].kernel.T)
        linear[3].load_state_dict(own[2].state_dict())
    x = torch.randn(64, 4)
    y = torch.stack([x.sum(1).tanh(), x[:, 0] * x[:, 1]], 1)
    losses = []
    for model in (own, linear):
        optimizer = kind(model)
        losses.append([])
        for _ in range(100):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert [layer.name for layer in RLS(own).layers] == ["0", "2"]
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert all(math.isclose(a, b, rel_tol=1e-8) for a, b in zip(*losses, strict=True))


@pytest.mark.usefixtures("adapter")
@pytest.mark.parametrize("averages", [1, 3])
def test_an_adapter_knows_nothing_of_masks_and_sets(averages):
    """The core asks for what it needs of the rows."""
    model = Doubled(3, 2)
    optimizer = RLS.paper(model, averages=averages, ratio=0.3)
    x = torch.randn(5, 4, 3)
    with optimizer.rows(VALID):
        output = model(x)
    output[VALID].square().sum().backward()
    optimizer.step()
    samples = [2 * part[valid] for part, valid in zip(x, VALID, strict=True)]
    total, counts = sums_by_a_loop(samples, averages)
    A = torch.eye(3)
    for row, count in zip(total, counts, strict=True):
        if count:
            A += 0.3 * count / sum(counts) * torch.outer(row / count, row / count)
    assert torch.allclose(optimizer.state[model.kernel]["inverse"], A.inverse(), atol=1e-12)


def test_an_adapter_of_several_blocks():
    """Rows are a list then, with None for a block that a call has not used."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 5))

        def forward(self, x, *, y=None):
            return x @ self.one.T if y is None else (x @ self.one.T, y @ self.other.T)

    @register(Gated)
    class GatedAdapter(Adapter):
        def blocks(self, module):
            return [Block("one", None), Block("other", None)]

        def rows(self, module, x, *, y=None):
            return [Rows(x, len(x)), y]

    try:
        model = Gated()
        optimizer = RLS.paper(model, ratio=0.3)
        x, y = torch.randn(6, 3, 4), torch.randn(7, 5)
        one, other = model(x, y=y)
        (one.sum() + other.sum()).backward()
        optimizer.step()
        rows = x.mean((0, 1)), y.mean(0)
        for weight, row, c in zip((model.one, model.other), rows, (0.3 * 3, 0.3), strict=True):
            A = torch.eye(len(row)) + c * torch.outer(row, row)
            assert torch.allclose(optimizer.state[weight]["inverse"], A.inverse(), atol=1e-12)
        before = model.other.detach().clone()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        assert torch.equal(model.other, before)
    finally:
        unregister(Gated)
