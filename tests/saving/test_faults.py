"""Kills, full disks, damaged checkpoints: what is lost (nothing), and what is said."""

from __future__ import annotations

import copy
import errno
import io
import itertools
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

from models import HYPER, mixed, mlp, plain_step, snapshot
from torchrls import RLS, CheckpointError, load_checkpoint, save_checkpoint
from torchrls.common.version import __version__
from torchrls.saving import files as safe

SHAPE = (4, 2, 3, 3)


# -- kills ---------------------------------------------------------------------------------------


class Nursery:
    """Makes processes that train, see killed_training.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("killed_training.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def begin(self, path: Path, steps: int, trap: str = "nowhere:0") -> tuple[int, int]:
        """Start a life; its process, and where it has begun."""
        self._process.stdin.write(f"{path} {steps} {trap}\n")
        self._process.stdin.flush()
        word, number, done = self._line()
        assert word == "ready"
        return int(number), int(done)

    def end(self) -> str | None:
        """Wait for its end; the sum of all numbers, if it came to that."""
        results = list(iter(self._line, ["gone"]))
        return results[0][1] if results else None

    def _line(self) -> list[str]:
        return self._process.stdout.readline().split()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def nursery():
    made = Nursery()
    yield made
    made.close()


def undisturbed(nursery: Nursery, folder: Path, steps: int) -> str:
    nursery.begin(folder / "whole.pt", steps)
    return nursery.end()


@pytest.mark.parametrize("place", ["write", "rename", "renamed"])
def test_killed_while_it_writes_a_checkpoint(place, nursery, tmp_path):
    path = tmp_path / "run.pt"
    nursery.begin(path, 12, f"{place}:5")
    assert nursery.end() is None
    done = 5 if place == "renamed" else 4
    assert load_checkpoint(path)["done"] == done
    assert nursery.begin(path, 12)[1] == done
    assert nursery.end() == undisturbed(nursery, tmp_path, 12)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.pt", "whole.pt"]


def killed_at_random(nursery: Nursery, folder: Path, kills: int, steps: int) -> dict[str, int]:
    """Kill a run so many times; it must come to the numbers of one that was left alone."""
    rng, path, start = random.Random(0), folder / "run.pt", time.monotonic()
    expected = undisturbed(nursery, folder, steps)
    seconds = (time.monotonic() - start) / steps
    counts = {"kills": 0, "in the midst of a checkpoint": 0, "steps": steps}
    for _ in range(kills):
        process, _ = nursery.begin(path, steps)
        time.sleep(rng.uniform(0, 12 * seconds))
        os.kill(process, signal.SIGKILL)
        assert nursery.end() is None, "it was at its end before it could be killed"
        counts["kills"] += 1
        counts["in the midst of a checkpoint"] += path.with_name("run.pt.new").exists()
    nursery.begin(path, steps)
    assert nursery.end() == expected
    return counts


def test_killed_at_random_moments(nursery, tmp_path):
    killed_at_random(nursery, tmp_path, kills=4, steps=60)


@pytest.mark.slow
def test_killed_fifty_times(nursery, tmp_path):
    print(killed_at_random(nursery, tmp_path, kills=50, steps=600))


# -- disks that are full, and folders that cannot be written -------------------------------------


def first_and_second(path: Path) -> tuple[dict, dict]:
    """A checkpoint that is there, and one that is to be written."""
    first, second = ({"a": torch.full((5000,), float(i)), "step": i} for i in (1, 2))
    save_checkpoint(first, path)
    return first, second


def is_intact(path: Path, state: dict) -> bool:
    results = load_checkpoint(path)
    alone = [p.name for p in path.parent.iterdir()] == [path.name]
    return alone and torch.equal(results["a"], state["a"]) and results["step"] == state["step"]


@pytest.mark.parametrize("room", [0, 100, 5000, 20_000])
def test_disk_that_gets_full_within_a_write(room, tmp_path, monkeypatch):
    first, second = first_and_second(tmp_path / "run.pt")
    real = Path.open

    class Full(io.FileIO):
        def write(self, data):
            if self.tell() + len(data) > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    def opened(self, mode="r"):
        return Full(self, mode) if self.suffix == ".new" else real(self, mode)

    monkeypatch.setattr(Path, "open", opened)
    message = r"No space left on device; nothing was written, .* before is intact: '.*run\.pt'"
    with pytest.raises(OSError, match=message) as caught:
        save_checkpoint(second, tmp_path / "run.pt")
    assert caught.value.errno == errno.ENOSPC
    assert is_intact(tmp_path / "run.pt", first)


def test_limit_of_the_system_on_the_size_of_files(tmp_path):
    """The same by the kernel, not by a stand-in."""
    first, second = first_and_second(tmp_path / "run.pt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(OSError, match="File too large; nothing was written") as caught:
            save_checkpoint(second, tmp_path / "run.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert is_intact(tmp_path / "run.pt", first)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_disk_that_fails_when_it_is_synced(call, tmp_path, monkeypatch):
    first, second = first_and_second(tmp_path / "run.pt")

    def fail(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(f"torchrls.saving.files.os.{call}", fail)
        with pytest.raises(OSError, match="Input/output error; nothing was written"):
            save_checkpoint(second, tmp_path / "run.pt")
    assert is_intact(tmp_path / "run.pt", first)


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("here")
    for folder, error in (("file", NotADirectoryError), ("none", FileNotFoundError)):
        with pytest.raises(error, match="nothing was written"):
            save_checkpoint({}, tmp_path / folder / "run.pt")
    assert (tmp_path / "file").read_text() == "here"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(tmp_path):
    first, second = first_and_second(tmp_path / "run.pt")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="nothing was written"):
            save_checkpoint(second, tmp_path / "run.pt")
    finally:
        tmp_path.chmod(0o700)
    assert is_intact(tmp_path / "run.pt", first)


def test_what_could_not_be_read_is_not_written(tmp_path):
    first, _ = first_and_second(tmp_path / "run.pt")
    with pytest.raises(TypeError, match=r"this one has torch\.nn\.modules\.linear\.Linear"):
        save_checkpoint({"model": nn.Linear(2, 2)}, tmp_path / "run.pt")
    with pytest.raises(TypeError, match=r"this one cannot be written \(.*lambda"):
        save_checkpoint({"rule": lambda: None}, tmp_path / "run.pt")
    assert is_intact(tmp_path / "run.pt", first)


def test_error_of_torch_itself_is_passed_on(tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("torch has a reason of its own")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="of its own"):
        save_checkpoint({}, tmp_path / "run.pt")
    assert not list(tmp_path.iterdir())


def test_check_sums_are_written_whatever_torch_was_told(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint({"a": torch.ones(3)}, tmp_path / "run.pt")
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    assert load_checkpoint(tmp_path / "run.pt")["a"].sum() == 3


# -- damaged files -------------------------------------------------------------------------------


def trained(make=RLS.paper, **options) -> RLS:
    torch.manual_seed(0)
    model = mixed()
    optimizer = make(model, **options)
    for seed in range(2):
        plain_step(model, optimizer, seed, *SHAPE)
    return optimizer


def equal(one, other) -> bool:
    """Of nested states."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def damaged(content: bytes, rng: random.Random, flips: int) -> bytes:
    results = bytearray(content)
    for _ in range(flips):
        results[rng.randrange(len(results))] ^= rng.randrange(1, 256)
    return bytes(results)


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def damage_at_random(folder: Path, count: int) -> dict[str, int]:
    """A damaged file is refused, or (what is damaged is only filling) has what it had."""
    path, rng = folder / "run.pt", random.Random(0)
    state = trained().state_dict()
    save_checkpoint(state, path)
    content, counts, reasons = path.read_bytes(), {"refused": 0, "the same": 0}, set()
    for i in range(count):
        path.write_bytes(cut(content, rng) if i % 3 == 0 else damaged(content, rng, i % 3))
        try:
            results = load_checkpoint(path)
        except CheckpointError as error:
            reasons.add(str(error))
            counts["refused"] += 1
        else:
            assert i % 3, "a file that was cut off has been read"
            assert equal(results, state)
            counts["the same"] += 1
    pattern = re.compile(
        r".*run\.pt is truncated, corrupt or no checkpoint of .* \(\w+.*\); go on.*", re.S
    )
    assert all(pattern.fullmatch(reason) for reason in reasons)
    return counts


def test_damaged_files(tmp_path):
    counts = damage_at_random(tmp_path, 150)
    assert counts["refused"] > 75


@pytest.mark.slow
def test_ten_thousand_damaged_files(tmp_path):
    print(damage_at_random(tmp_path, 10_000))


@pytest.mark.slow
def test_every_bit_of_a_file(tmp_path):
    path, state = tmp_path / "run.pt", {"a": torch.arange(2.0), "step": 3}
    save_checkpoint(state, path)
    content, counts = path.read_bytes(), {"refused": 0, "the same": 0}
    for place, bit in itertools.product(range(len(content)), range(8)):
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        path.write_bytes(changed)
        try:
            results = load_checkpoint(path)
        except CheckpointError:
            counts["refused"] += 1
        else:
            assert equal(results, state), (place, bit)
            counts["the same"] += 1
    print(counts)


def test_a_part_that_is_marked_as_a_folder_is_refused(tmp_path):
    """torch.load returns memory that was never filled."""
    path = tmp_path / "run.pt"
    save_checkpoint({"a": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as archive:
        place = archive.start_dir + 38  # the attributes of the first part
    content = bytearray(path.read_bytes())
    content[place] |= 0x10
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="parts that are no files"):
        load_checkpoint(path)


def test_a_changed_number_is_noticed(tmp_path):
    """torch.load does not notice it."""
    path, a = tmp_path / "run.pt", torch.arange(100.0)
    save_checkpoint({"a": a}, path)
    content = bytearray(path.read_bytes())
    content[content.index(a.numpy().tobytes()) + 50] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path, weights_only=True)["a"], a)
    with pytest.raises(CheckpointError, match=r"the check sum of archive/data/0 is wrong\)"):
        load_checkpoint(path)


def test_files_of_something_else(tmp_path):
    path = tmp_path / "run.pt"
    for content in (b"", b"text", pickle.dumps({"a": 1}), bytes(1000)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="no checkpoint"):
            load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none.pt")


# -- damaged, foreign and newer states -----------------------------------------------------------


def refused(optimizer: RLS, state: dict, message: str) -> None:
    """With the reason, and nothing changed."""
    before, groups = snapshot(optimizer.model, optimizer), described(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    after = snapshot(optimizer.model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert described(optimizer) == groups


def described(optimizer: RLS) -> list[dict]:
    groups = optimizer.param_groups
    return [{**group, "params": [id(p) for p in group["params"]]} for group in groups]


def test_a_newer_format_is_refused_and_an_older_one_is_not():
    optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    assert {(g["format"], g["version"]) for g in saved["param_groups"]} == {(3, __version__)}
    newer = copy.deepcopy(saved)
    for group in newer["param_groups"]:
        group["format"], group["version"] = 4, "7.1.0"
    message = rf"by torchrls 7\.1\.0 in format 4; this is torchrls {__version__}, .* up to 3"
    refused(optimizer, newer, message)
    for group in saved["param_groups"]:  # before there were formats
        del group["format"], group["version"]
    optimizer.load_state_dict(saved)
    assert "format" not in optimizer.param_groups[0]
    plain_step(optimizer.model, optimizer, 5, *SHAPE)


def test_a_file_of_another_architecture_is_refused(tmp_path):
    save_checkpoint(trained().state_dict(), tmp_path / "run.pt")
    other = RLS.paper(mlp(), **HYPER)
    plain_step(other.model, other, 0)
    refused(other, load_checkpoint(tmp_path / "run.pt"), "of another model")


def places(tree, path=()) -> list[tuple]:
    """Where there is something in nested dicts and lists."""
    items = ()
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    results = []
    for key, value in items:
        results += [(*path, key), *places(value, (*path, key))]
    return results


def spoilt(value, kind: str):
    if kind == "not finite" and isinstance(value, torch.Tensor) and value.is_floating_point():
        return value * float("nan")
    others = {"nothing": None, "text": "x", "empty tensor": torch.zeros(0), "dict": {}}
    return others.get(kind, float("nan"))


KINDS = ("nothing", "text", "empty tensor", "dict", "not finite")
MAKERS = {
    "adaptive": lambda model: RLS(model),
    "low rank": lambda model: RLS.paper(model, rank=3),
    "paper": lambda model: RLS.paper(model, momentum=0.5, l1=1e-3),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_whatever_is_wrong_in_the_state_of_a_layer_is_refused(make):
    optimizer = trained(make)
    saved = copy.deepcopy(optimizer.state_dict())
    ours = saved["param_groups"][0]["params"]
    tried = 0
    for path, kind in itertools.product(places(saved["state"]), KINDS):
        is_untrained = len(path) == 1 and kind == "dict"  # which is no fault
        if path[0] in ours and not is_untrained:
            state = copy.deepcopy(saved)
            target = state["state"] if len(path) == 1 else state["state"][path[0]]
            target[path[-1]] = spoilt(target[path[-1]], kind)
            refused(optimizer, state, "checkpoint")
            tried += 1
    assert tried > 30
    plain_step(optimizer.model, optimizer, 5, *SHAPE)


@pytest.mark.parametrize("kind", ["text", "empty tensor", "dict"])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_state_of_adam_in_another_shape_is_refused(key, kind):
    """Fused Adam would read beyond its end."""
    optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    index = state["param_groups"][1]["params"][0]
    state["state"][index][key] = spoilt(None, kind)
    refused(optimizer, state, rf"'{key}' of '1.weight' must be a tensor of shape \(3,\), got")


@pytest.mark.parametrize("make", [RLS, RLS.paper])
def test_inverse_that_is_not_definite_is_refused(make):
    optimizer = trained(make)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["inverse"].neg_()
    refused(optimizer, state, "P of layer '0' is not positive definite: its trace is -")


def test_mean_squares_that_are_negative_are_refused():
    optimizer = trained(RLS)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["square"].neg_()
    refused(optimizer, state, "'square' of '0.weight' has negative values")


def test_state_of_adam_that_is_not_finite_is_refused():
    optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    index = state["param_groups"][1]["params"][0]
    state["state"][index]["exp_avg_sq"][1] = float("inf")
    refused(optimizer, state, "'exp_avg_sq' of '1.weight' has values that are not finite")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["state"].update({99: {}}), "state 99 of type dict for 6 parameters"),
        (lambda s: s["param_groups"][0].update(forgetting=3.0), r"forgetting must be in \(0, 1\]"),
        (lambda s: s["param_groups"][0].update(lr="x"), "damaged: lr must be a number"),
        (lambda s: s["param_groups"][0].update(method="fallback"), "has the param groups"),
        (lambda s: s["param_groups"][0].update(pair=4), "has the param groups"),
        (lambda s: s["param_groups"][0].pop("param_names"), "not a state_dict of torchrls"),
        (lambda s: s["param_groups"].append(3), "not a state_dict of torchrls"),
        (lambda s: s.pop("state"), "not a state_dict of torchrls"),
        (lambda s: s["param_groups"][0]["param_names"].__setitem__(0, {}), "is damaged"),
        (lambda s: s["state"][0].update(mean=torch.ones(3)), r"'mean' of layer '0' has shape"),
    ],
)
def test_damaged_groups_are_refused(change, message):
    optimizer = trained(RLS)
    state = copy.deepcopy(optimizer.state_dict())
    change(state)
    refused(optimizer, state, message)


def test_state_that_belongs_to_no_parameter_is_kept():
    """Some optimizers of others have such a thing."""
    optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"]["of all"] = torch.ones(2)
    optimizer.load_state_dict(state)
    assert torch.equal(optimizer.state["of all"], torch.ones(2))


# -- malicious files -----------------------------------------------------------------------------


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_malicious_checkpoint_does_nothing(tmp_path):
    torch.save({"state": Evil(tmp_path / "evil")}, tmp_path / "zip.pt")
    torch.save(Evil(tmp_path / "evil"), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil(tmp_path / "evil")))
    for name in ("zip.pt", "old.pt", "plain.pt"):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            load_checkpoint(tmp_path / name)
    assert not (tmp_path / "evil").exists()
    with pytest.raises(TypeError, match="this one has"):
        save_checkpoint(Evil(tmp_path / "evil"), tmp_path / "mine.pt")
    assert not (tmp_path / "evil").exists()


def repacked(source: Path, target: Path, method: int, times: int = 1) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for part in old.infolist():
            content = old.read(part)
            new.writestr(part.filename, content * (times if "/data/" in part.filename else 1))


def unmark(archive: zipfile.ZipFile) -> None:
    """Parts without permissions, as torch writes them."""
    for part in archive.filelist:
        part.external_attr = 0


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
    save_checkpoint({"a": torch.zeros(1000)}, tmp_path / "good.pt")
    repacked(tmp_path / "good.pt", tmp_path / "bomb.pt", zipfile.ZIP_DEFLATED, times=5000)
    assert (tmp_path / "bomb.pt").stat().st_size < 50_000
    with pytest.raises(CheckpointError, match="it has compressed parts"):
        load_checkpoint(tmp_path / "bomb.pt")


def test_parts_that_are_the_same_bytes_are_refused(tmp_path):
    """A small file whose directory names its one large part a hundred times."""
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data/0", bytes(10_000))
        unmark(archive)
        archive.filelist *= 100
    with pytest.raises(CheckpointError, match="its parts are larger than itself"):
        load_checkpoint(path)


def test_paths_in_a_checkpoint_lead_nowhere(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    save_checkpoint({"a": torch.ones(2)}, inside / "run.pt")
    with zipfile.ZipFile(inside / "run.pt", "a") as archive:
        archive.writestr("../../outside", b"evil")
        archive.writestr(str(tmp_path / "absolute"), b"evil")
        unmark(archive)
    with pytest.raises(CheckpointError, match="not in a subdirectory"):
        load_checkpoint(inside / "run.pt")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["inside", "run.pt"]


def test_tensor_that_is_larger_than_its_storage_is_refused(tmp_path):
    """It would read what is not its own."""
    save_checkpoint({"a": torch.ones(4)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as old:
        parts = {part.filename: old.read(part) for part in old.infolist()}
    code = parts["archive/data.pkl"]
    assert code.count(b"K\x04") == 2
    parts["archive/data.pkl"] = code.replace(b"K\x04", b"K\xff")
    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as new:
        for name, content in parts.items():
            new.writestr(name, content)
        unmark(new)
    with pytest.raises(CheckpointError, match="storage 0 should have 1020 bytes, and has 16"):
        load_checkpoint(tmp_path / "evil.pt")


def test_a_pickle_that_says_it_has_very_many_things_takes_no_memory(tmp_path):
    """The unpickler that is written in C would make room for all of them."""
    path = tmp_path / "many.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("many/data.pkl", b"\x80\x02}r\xff\xff\xff\xff.")
        archive.writestr("many/version", b"3\n")
        archive.writestr("many/byteorder", b"little")
        unmark(archive)
    assert load_checkpoint(path) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex128, torch.float8_e5m2])
def test_storages_of_every_size_are_read(tmp_path, dtype):
    """Two views of one storage, parameters and containers of all kinds."""
    whole = torch.ones(6).to(dtype)
    state = OrderedDict(a=whole[:2], b=[whole, (whole[3:],)], c={1: nn.Linear(2, 2).state_dict()})
    save_checkpoint({"state": state, "weight": nn.Parameter(torch.ones(3))}, tmp_path / "run.pt")
    results = load_checkpoint(tmp_path / "run.pt")["state"]
    assert torch.equal(results["b"][0].to(torch.complex64), whole.to(torch.complex64))
    assert results["a"].untyped_storage().data_ptr() == results["b"][0].untyped_storage().data_ptr()


def test_folder_is_not_synced_where_that_is_not_known(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECTORY")
    safe.write(tmp_path / "file", lambda file: file.write(b"here"))
    assert (tmp_path / "file").read_bytes() == b"here"
