"""The demo and the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from torchrls.lab.cli import app
from torchrls.lab.experiments import demo
from torchrls.lab.experiments.curve import Curve
from torchrls.lab.experiments.data import digits
from torchrls.lab.experiments.training import Epoch


def test_demo_prints_a_table_and_saves_a_plot(tmp_path):
    path = tmp_path / "new folder" / "demo.png"
    result = CliRunner().invoke(app, ["demo", "--seeds", "1", "--epochs", "2", "--out", str(path)])
    assert result.exit_code == 0, result.output
    for text in ("Adam", "RLS", "RLS+M+R", "HRLS", "epochs to 95", "Plot saved to"):
        assert text in result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_demo_is_reproducible():
    first, second = (list(demo.run(seeds=1, epochs=1)) for _ in range(2))
    for (_, _, a), (_, _, b) in zip(first, second, strict=True):
        assert (a.train_loss, a.test_accuracy) == (b.train_loss, b.test_accuracy)


def test_curve():
    accuracies = {0: [90.0, 96.0, 97.0], 1: [94.0, 94.9, 95.0]}
    seeds = {
        seed: [Epoch(i + 1, 0.5 + seed, 0.0, None, run[i], 1.0 + i, {}) for i in range(len(run))]
        for seed, run in accuracies.items()
    }
    curve = Curve("Adam", seeds)
    assert curve.accuracy()[0] == (92.0, 90.0, 94.0)
    assert curve.seconds() == [1.0, 3.0, 6.0]
    assert curve.final == (96.0, 2**0.5)
    assert curve.final_loss == 1.0
    assert (curve.epochs_to(95.0), curve.seconds_to(95.0)) == (2, 3.0)
    assert curve.epochs_to(97.0) is curve.seconds_to(97.0) is None
    assert curve.cut([0], 1).epochs_to(95.0) is None
    assert curve.cut([0], 1).final == (90.0, None)


def test_digits_are_split_by_seed():
    one, same, other = digits(0), digits(0), digits(1)
    assert torch.equal(one.test_x, same.test_x)
    assert not torch.equal(one.test_x, other.test_x)
    assert 0 <= one.train_x.min() <= one.train_x.max() <= 1


@pytest.mark.parametrize(
    "arguments", [["demo", "--epochs", "0"], ["demo", "--seed", "1"], ["demo", "--out", "plot.xyz"]]
)
def test_bad_arguments(arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.output.startswith("torchrls 0.")


def test_help():
    result = CliRunner().invoke(app, ["demo", "--help"])
    assert result.exit_code == 0
    assert "handwritten digits" in result.output


def test_missing_packages_are_named():
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['torchrls', 'demo'];"
        "from torchrls.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "'typer', which is not installed" in done.stderr
    assert "pip install 'torchrls[experiments]'" in done.stderr


def test_core_imports_torch_alone():
    code = (
        "import sys, torch; before = set(sys.modules); import torchrls;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "assert new <= {'torchrls', 'fnmatch'} | set(sys.stdlib_module_names), new"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
