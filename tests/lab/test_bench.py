"""The benchmarks run, and say what they should; times themselves are not tested."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from torchrls.lab.bench import (
    compare,
    contenders,
    growth,
    heap,
    memory,
    networks,
    plot,
    profile,
    results,
    step_time,
)
from torchrls.lab.cli import app
from torchrls.lab.experiments.models import Feedforward

TINY = networks.Network(lambda: Feedforward(6, 5, 3), (4, 6), 3, steps=2, turns=2)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(networks.NETWORKS, "tiny", TINY)
    return "tiny"


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["bench", *(str(a) for a in arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_step_time(tiny, tmp_path):
    out = tmp_path / "new" / "times.json"
    text = run("step-time", "--only", tiny, "--no-peers", "--keep-memory", "--out", out)
    saved = results.load(out)
    obtained = saved["results"][tiny]
    assert list(obtained) == [*contenders.FIRST_ORDER, *contenders.OURS]
    assert obtained["Adam"]["to Adam"] == 1.0
    assert obtained["Adam"]["page faults"] >= 0
    assert obtained["RLS+M"]["to SGD"] == obtained["RLS+M"]["seconds"] / obtained["SGD"]["seconds"]
    assert {"processor", "threads", "torch", "commit"} <= saved["machine"].keys()
    assert saved["kind"] == "step-time"
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "RLS+M, rank 64" in text


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_kept_memory_is_not_faulted_in_for_ever():
    with heap.kept():
        obtained = []
        for _ in range(20):
            before = heap.faults()
            torch.ones(1 << 22)  # 4,096 pages
            obtained.append(heap.faults() - before)
    assert sum(obtained[10:]) < 4096


def test_an_allocator_that_cannot_be_asked(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(heap, "resource", None)
    with heap.kept():
        assert heap.faults() == 0


def test_some_contenders_only(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(step_time, "SLOW", float("inf"))  # one step on a busy machine says nothing
    out = tmp_path / "times.json"
    names = ["--contender", "RLS+M", "--turns", "3"]
    run("step-time", "--only", tiny, *names, "--out", out)
    obtained = results.load(out)["results"][tiny]
    assert list(obtained) == [*contenders.FIRST_ORDER, "RLS+M"]
    assert obtained["RLS+M"]["turns"] == 3


def test_a_contender_that_fails_is_reported():
    def broken(model):
        raise RuntimeError("cannot train this\nat all")

    obtained = step_time.measure(TINY, {"Adam": contenders.FIRST_ORDER["Adam"], "broken": broken})
    assert obtained["broken"] == {"failure": "RuntimeError: cannot train this"}
    assert obtained["Adam"]["turns"] == 2


def test_memory_in_a_process_of_its_own(tmp_path):
    name = "64-64-10, batch 32"
    ((network, contender, obtained),) = memory.measure_all([name], ["RLS+M"])
    assert (network, contender) == (name, "RLS+M")
    assert obtained["P"] == 4 * (65 * 65 + 65 * 65)
    assert obtained["state"] == obtained["P"] + 4 * (64 * 64 + 64 + 64 * 10 + 10)
    ((_, _, failed),) = memory.measure_all([name], ["nobody"])
    assert "nobody" in failed["failure"]


def test_memory_command(monkeypatch, tmp_path):
    figures = [
        ("net", "Adam", {"peak": 100, "state": 8, "P": 0}),
        ("net", "SINGD", {"failure": "no"}),
    ]
    monkeypatch.setattr(memory, "measure_all", lambda networks, contenders: figures)
    text = run("memory", "--only", "64-64", "--out", tmp_path / "memory.json")
    assert "fails: no" in text
    assert (tmp_path / "memory.png").exists()


def test_growth(monkeypatch, tmp_path):
    monkeypatch.setattr(
        growth, "AXES", {"width": [growth.Point(width=w, batch=4) for w in (4, 8, 16, 32)]}
    )
    text = run("growth", "--out", tmp_path / "growth.json")
    assert "Table II" in text
    obtained = results.load(tmp_path / "growth.json")["results"]["width"]
    assert obtained["RLS, not factored"]["exponents"]["bytes"] == pytest.approx(2, abs=0.2)
    assert [point["width"] for point in obtained["SGD"]["points"]] == [4, 8, 16, 32]


def test_profile_accounts_for_the_whole_step(tiny, tmp_path):
    names = ["--contender", "RLS+M", "--contender", "RLS+M+R"]
    run("profile", "--only", tiny, *names, "--out", tmp_path / "profile.json")
    obtained = results.load(tmp_path / "profile.json")["results"][tiny]
    assert list(obtained) == ["RLS+M", "RLS+M+R"]
    assert {"forward and backward", "the update of P", "u = P x"} <= obtained["RLS+M"].keys()
    assert all(seconds >= 0 for seconds in obtained["RLS+M"].values())


def test_profile_leaves_everything_as_it_was():
    before = [vars(place)[name] for place, name, _ in profile.PARTS]
    with profile.clocked():
        pass
    assert [vars(place)[name] for place, name, _ in profile.PARTS] == before


def times(ratio: float) -> dict:
    obtained = {
        "net": {"Adam": {"to Adam": 1.0}, "RLS": {"to Adam": ratio}, "SINGD": {"failure": ""}}
    }
    return {"kind": "step-time", "machine": {}, "results": obtained}


def test_compare_says_what_got_slower(tmp_path):
    paths = []
    for name, ratio in (("a", 1.2), ("b", 1.8)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(times(ratio)))
    result = CliRunner().invoke(app, ["bench", "compare", *map(str, paths)])
    assert result.exit_code == 1
    assert "+50 %" in result.output
    assert "1 of 2 figures got worse" in result.output
    assert "0 of 2" in run("compare", *paths[::-1])
    assert "xAdam" in "".join(result.output.split())
    assert "--keep-memory" not in result.output
    paths[0].write_text(json.dumps({**times(1.2), "command": "step-time --keep-memory"}))
    assert "Only one of the files" in run("compare", *paths, "--tolerance", "1")
    (change, _) = compare.compare(times(1.2), times(1.8))
    assert (change.contender, change.ratio) == ("RLS", pytest.approx(1.5))


def test_compare_refuses_what_it_cannot_compare(tmp_path):
    with pytest.raises(ValueError, match="different kinds: memory and step-time"):
        compare.compare(times(1), {**times(1), "kind": "memory"})
    with pytest.raises(ValueError, match="results of growth cannot be compared"):
        compare.compare({**times(1), "kind": "growth"}, {**times(1), "kind": "growth"})
    with pytest.raises(ValueError, match="in common"):
        compare.compare(times(1), {**times(1), "results": {}})
    for text in ("no json", "[]", "{}"):
        path = tmp_path / "file.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"file\.json"):
            results.load(path)
    result = CliRunner().invoke(app, ["bench", "compare", str(path), str(tmp_path / "none.json")])
    assert result.exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["step-time", "--only", "nothing"],
        ["step-time", "--contender", "RLS+"],
        ["profile", "--contender", "Adam"],
    ],
)
def test_bad_arguments(arguments):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert "Error" in result.output


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_networks_have_a_head_and_as_many_outputs_as_classes(name):
    network = networks.NETWORKS[name]
    model = network.make()
    assert isinstance(model.head, nn.Linear)
    with torch.no_grad():
        assert model(torch.rand(2, *network.shape[1:])).shape == (2, network.classes)


@pytest.mark.parametrize("name", contenders.PEERS)
def test_peers(name):
    package = "singd" if name == "SINGD" else "pytorch_optimizer"
    pytest.importorskip(package)
    obtained = step_time.measure(
        TINY, {"Adam": contenders.FIRST_ORDER["Adam"], name: contenders.PEERS[name]}
    )
    assert obtained[name]["seconds"] > 0


def test_exponents_of_the_papers_tables():
    assert growth.predicted("width", "SGD") == pytest.approx({"seconds": 2, "bytes": 2})
    assert growth.predicted("batch", "SGD") == pytest.approx({"seconds": 1, "bytes": 0})
    obtained = growth.predicted("width", "RLS, not factored")
    assert 2.8 < obtained["seconds"] < 3
    assert obtained["bytes"] == pytest.approx(2)
    assert growth.predicted("depth", "Adam") == {}


def test_plots_of_failures_only(tmp_path):
    saved = {
        "kind": "step-time",
        "results": {"net": {"Adam": {"to Adam": 1.0}, "x": {"failure": "y"}}},
    }
    assert plot.draw(saved, tmp_path / "plot.png").exists()


def test_module_can_be_run_alone():
    command = [sys.executable, "-m", "torchrls.lab.bench.memory", "no network", "Adam"]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0
