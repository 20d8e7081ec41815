"""RLS on several ranks: two real processes with gloo."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import jobs
import pytest
import torch
from torch import nn

from processes import SECONDS, Pair
from requirements import shards_on_cpus
from torchrls import RLS


@pytest.fixture(scope="module")
def pair():
    made = Pair()
    yield made
    made.close()


def close(results, expected, atol=1e-8):  # keys of attention have biases whose gradient is rounding
    return len(results) == len(expected) and all(
        torch.allclose(a, b, rtol=1e-6, atol=atol) for a, b in zip(results, expected, strict=True)
    )


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("first", ["wrapper", "optimizer"])
@pytest.mark.parametrize("kind", jobs.OPTIMIZERS)
@pytest.mark.parametrize("net", jobs.NETS)
def test_replicas_are_one_process_on_the_whole_batch(pair, net, kind, first):
    one, other = pair.run(jobs.train_replicated, net, kind, first)
    assert equal(one, other)
    assert close(one, jobs.alone(net, kind))


@pytest.mark.parametrize("kind", jobs.OPTIMIZERS)
@pytest.mark.parametrize("net", jobs.NETS)
@shards_on_cpus
def test_fully_sharded_is_one_process_on_the_whole_batch(pair, net, kind):
    one, other = pair.run(jobs.train_spread, net, kind)
    assert equal(one, other)
    assert close(one, jobs.alone(net, kind))


@pytest.mark.parametrize("outputs", [1, 2, 127, 129, 131, 257, 300, 385])
@shards_on_cpus
def test_tiles_of_outputs_are_cut_anywhere(pair, outputs):
    """Tiles have at most 128 outputs: ranks have all of one, parts of one, or none."""
    one, other = pair.run(jobs.train_spread, outputs, "default")
    assert equal(one, other)
    assert close(one, jobs.alone(outputs, "default"))


def test_one_small_message_a_step(pair):
    first, *later = pair.run(jobs.count_collectives, "convolutions")[0]
    layers = RLS(jobs.network("convolutions")).layers
    size = sum(layer.groups * 16 * (layer.inputs + 5) for layer in layers)
    assert len(first) == 3  # from where to where the inputs go, once
    assert later == [[size + 2]] * 2


@pytest.mark.parametrize("kind", ["default", "paper"])
def test_accumulation_without_synchronisation(pair, kind):
    one, other = pair.run(jobs.accumulate, kind)
    assert equal(one, other)
    assert close(one, jobs.alone("convolutions", kind, steps=4))


def test_uneven_minibatches_weigh_by_their_rows(pair):
    one, other = pair.run(jobs.uneven)
    model = jobs.network("convolutions")
    optimizer = RLS.paper(model)
    jobs.step(model, optimizer, *jobs.data(0))
    assert equal(one, other)
    assert close(one, [optimizer.state[layer.weight]["inverse"] for layer in optimizer.layers])


@pytest.mark.parametrize("where", ["replicated", "shared"])
def test_what_is_not_finite_on_one_rank_changes_nothing_on_any(pair, where):
    assert pair.run(jobs.not_finite, where) == [(True, 1)] * 2


def test_a_bad_gradient_on_one_rank_changes_nothing_on_any(pair):
    assert pair.run(jobs.bad_gradient) == [(True, 1)] * 2


def test_a_layer_that_one_rank_does_not_use(pair):
    one, other = pair.run(jobs.unused)
    assert equal(one, other)


@pytest.mark.parametrize("kind", jobs.OPTIMIZERS)
@pytest.mark.parametrize("net", jobs.NETS)
def test_shared_inverses(pair, net, kind):
    (one, own, size), (other, others, other_size) = pair.run(jobs.share_inverses, net, kind)
    whole, optimizer = jobs.network(net), RLS(nn.Linear(1, 1))
    optimizer = jobs.OPTIMIZERS[kind](whole)
    for seed in range(5):
        jobs.step(whole, optimizer, *jobs.data(seed))
    assert equal(one, other)
    assert close(one, [*whole.parameters()])
    assert own
    assert others
    assert sorted(own + others) == sorted(layer.name for layer in optimizer.layers)
    state = [v for x in optimizer.layers for v in optimizer.state[x.weight].values()]
    kept = [v for v in state if isinstance(v, torch.Tensor)]
    assert size + other_size == sum(v.numel() * v.element_size() for v in kept)


def test_shared_inverses_have_to_be_consolidated_before_they_are_saved(pair):
    assert all("consolidate_state_dict" in text for text in pair.run(jobs.refuse_state))


def test_ranks_whose_inputs_end_earlier(pair):
    one, other = pair.run(jobs.join)
    assert equal(one, other)


def test_tensor_parallel_weights_go_to_the_fallback(pair):
    (one, reasons), (other, _) = pair.run(jobs.parallel)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    with pytest.warns(UserWarning, match="no layer of the model is trained by RLS"):
        whole = RLS(model, exclude=[nn.Linear])
    torch.manual_seed(1)
    for _ in range(3):
        jobs.step(model, whole, torch.randn(8, 4).double(), torch.randn(8, 3).double())
    assert all("tensor parallelism" in reason for reason in reasons)
    assert equal(one, other)
    assert close(one, [*model.parameters()])


def test_models_that_differ(pair):
    one, other = pair.run(jobs.other_models)
    assert "rank 0 trains other layers than rank 1" in one
    assert "process_group=False" in other


def test_groups_that_are_not_those_of_the_wrapper(pair):
    for messages, count in pair.run(jobs.wrong_groups):
        assert ["DistributedDataParallel" in text for text in messages] == [True, True, False]
        assert "is not in the process_group" in messages[2]
        assert count == 1


@shards_on_cpus
def test_optimizer_made_before_fully_shard(pair):
    for results in pair.run(jobs.too_early):
        assert any("make the optimizer after fully_shard" in text for text in results)


@shards_on_cpus
def test_checkpoint_of_shards(pair, tmp_path):
    (one, _), (again, _) = (
        pair.run(jobs.save_spread, str(tmp_path)),
        pair.run(jobs.load_spread, str(tmp_path)),
    )
    assert equal(one, again)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@shards_on_cpus
def test_checkpoint_of_shards_on_one_rank(pair, tmp_path):
    """Saved by two ranks, loaded by one process that has whole weights."""
    expected = pair.run(jobs.save_spread, str(tmp_path))[0]
    model = jobs.network("sequences")
    assert close(jobs.go_on(model, RLS(model), str(tmp_path), jobs.data), expected)


def test_state_that_is_kept_room_for_is_no_state():
    """As torch.distributed.checkpoint makes it: a step with zeros, which teaches nothing."""
    first, second = jobs.network("sequences"), jobs.network("sequences")
    optimizer, other = RLS(first), RLS(second)
    for parameter in first.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(optimizer.state[layer.weight] for layer in optimizer.layers)
    optimizer.load_state_dict(optimizer.state_dict())
    for parameter in optimizer.fallback.param_groups[0]["params"]:  # Adam counts that step
        optimizer.state.pop(parameter)
    for seed in range(3):
        jobs.step(first, optimizer, *jobs.data(seed))
        jobs.step(second, other, *jobs.data(seed))
    assert equal(jobs.content(first, optimizer), jobs.content(second, other))


def test_a_killed_rank_ends_the_job_and_the_survivor_goes_on(tmp_path):
    file, start = tmp_path / "checkpoint.pt", time.monotonic()
    doomed = Pair()
    with pytest.raises(RuntimeError, match="rank 0"):
        doomed.run(jobs.train_until_killed, str(file))
    assert time.monotonic() - start < 4 * SECONDS
    model = jobs.network("convolutions")
    optimizer = RLS(model)
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for seed in range(saved["steps"], 5):
        jobs.step(model, optimizer, *jobs.data(seed))
    assert close(jobs.content(model, optimizer), jobs.alone("convolutions", "default"))


def test_example():
    script = Path(__file__).parents[2] / "examples" / "distributed" / "digits.py"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    results = subprocess.run([*run, script], check=True, capture_output=True, text=True).stdout
    lines = sorted(results.splitlines())
    assert [line[:7] for line in lines] == ["rank 0:", "rank 1:"]
    assert lines[0][7:] == lines[1][7:]


def test_shared_inverses_need_ranks():
    with pytest.raises(ValueError, match="shard_inverse=True needs ranks"):
        RLS(nn.Linear(2, 1), shard_inverse=True, process_group=False)


def test_process_group_must_be_one():
    with pytest.raises(TypeError, match="process_group must be"):
        RLS(nn.Linear(2, 1), process_group="gloo")
