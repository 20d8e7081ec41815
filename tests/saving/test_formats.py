"""Checkpoints of earlier formats: they are loaded, and training goes on as it did then.

``tests/data/format-1.pt`` was written by torchrls 0.1.0. For some of the cases of ``golden.py`` it
has the ``state_dict`` of the model and of the optimizer after the steps 0 to 5, and the parameters
after the steps 6, 7 and 8.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import golden
from torchrls import RLS, load_checkpoint, save_checkpoint

FILES = sorted((Path(__file__).parent.parent / "data").glob("format-*.pt"))
ALL = [(file, name) for file in FILES for name in torch.load(file, weights_only=True)]
CASES = [(file, name) for file, name in ALL if not name.startswith("default")]
IDS = [f"{file.stem} {name}" for file, name in CASES]


def loaded(file: Path, name: str) -> tuple[torch.nn.Module, RLS, dict]:
    """The network and the optimizer of a case, with the saved state, and all that was saved."""
    saved = torch.load(file, weights_only=True)[name]
    make, optimizer_of, _, _, dtype = golden.CASES[name]
    model = make().to(dtype)
    optimizer = optimizer_of(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer, saved


def train_on(model: torch.nn.Module, optimizer: RLS, name: str) -> None:
    _, _, shape, step, dtype = golden.CASES[name]
    for seed in (6, 7, 8):
        step(model, optimizer, *golden.batch(seed, shape, dtype))


@pytest.mark.parametrize(("file", "name"), CASES, ids=IDS)
def test_training_goes_on_as_it_did(file, name):
    model, optimizer, saved = loaded(file, name)
    train_on(model, optimizer, name)
    after = dict(model.named_parameters())
    assert after.keys() == saved["after"].keys()
    for key, expected in saved["after"].items():
        difference = (after[key] - expected).abs().max()
        assert difference <= 1e-5 * expected.abs().max(), key
        assert not torch.equal(expected, saved["model"][key])


@pytest.mark.parametrize(("file", "name"), CASES, ids=IDS)
def test_all_of_the_state_is_used(file, name):
    """No entry is left over, forgotten or made anew: only counters differ after a step."""
    model, optimizer, saved = loaded(file, name)
    before = {index: {*state} for index, state in saved["optimizer"]["state"].items()}
    train_on(model, optimizer, name)
    assert {i: {*state} for i, state in optimizer.state_dict()["state"].items()} == before


@pytest.mark.parametrize(("file", "name"), CASES, ids=IDS)
def test_saved_again_it_is_of_the_present_format(file, name, tmp_path):
    model, optimizer, _ = loaded(file, name)
    path = tmp_path / "again.pt"
    save_checkpoint([model.state_dict(), optimizer.state_dict()], path)
    other, resumed, _ = loaded(file, name)
    train_on(other, resumed, name)  # to be overwritten
    for part, state in zip((other, resumed), load_checkpoint(path), strict=True):
        part.load_state_dict(state)
    for pair in ((model, optimizer), (other, resumed)):
        train_on(*pair, name)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_the_default_step_of_format_1_is_refused_with_the_reason():
    """Its state is of another algorithm. Nothing changes, and the network can go on."""
    refused = [case for case in ALL if case not in CASES]
    assert len(refused) == 4
    for file, name in refused:
        saved = torch.load(file, weights_only=True)[name]
        make, optimizer_of, _, _, dtype = golden.CASES[name]
        model = make().to(dtype)
        optimizer = optimizer_of(model)
        with pytest.raises(ValueError, match=r"a default step that has been replaced"):
            optimizer.load_state_dict(saved["optimizer"])
        model.load_state_dict(saved["model"])
        train_on(model, optimizer, name)


def test_a_later_format_is_refused():
    _, optimizer, saved = loaded(*CASES[0])
    state = copy.deepcopy(saved["optimizer"])
    for group in state["param_groups"]:
        group.update(format=1000, version="9.9")
    with pytest.raises(ValueError, match=r"torchrls 9\.9 in format 1000"):
        optimizer.load_state_dict(state)
