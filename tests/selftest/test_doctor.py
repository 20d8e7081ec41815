"""``torchrls doctor``: it finds nothing here, and finds what was broken on purpose."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from torchrls import RLS
from torchrls.lab.cli import app
from torchrls.matrix.inverse import Dense
from torchrls.selftest import doctor
from torchrls.step import default, paper

CPU = torch.device("cpu")


def check(name: str) -> doctor.Check:
    return doctor._carried_out(name, doctor.CHECKS[name], CPU)


def test_all_is_well():
    seed = torch.random.get_rng_state()
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for name in doctor.CHECKS:
        assert f"PASS  {name}: difference" in result.output
    assert "FAIL" not in result.output
    differences = re.findall(r"difference (\S+),", result.output)
    assert len(differences) == 9
    assert max(map(float, differences[:6])) < 1e-13
    assert result.output.endswith("All is well.\n")
    for fact in ("torchrls", "torch", "python", "packages", "devices", "threads", "BLAS", "memory"):
        assert f"\n{fact} " in f"\n{result.output}"
    assert f"typer {doctor._version('typer')}" in result.output
    assert torch.equal(seed, torch.random.get_rng_state())


def longer(move):
    """The same step with a rate that is a thousandth larger."""

    def broken(response, norm):
        group = response.slot.group
        rate = group["lr"]
        group["lr"] = 1.001 * float(rate)
        move(response, norm)
        group["lr"] = rate

    return broken


def failing() -> set[str]:
    return {name for name in doctor.CHECKS if not check(name).passed}


def of(step: str) -> set[str]:
    return {name for name in doctor.CHECKS if name.endswith(f"the {step} step")}


def test_a_broken_step_is_found(monkeypatch):
    monkeypatch.setattr(paper, "move", longer(paper.move))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    for name in of("paper's"):
        assert f"FAIL  {name}: difference" in result.output
    for name in of("default"):
        assert f"PASS  {name}: difference" in result.output
    assert "3 checks failed" in result.output
    assert "OMP_NUM_THREADS=1" in result.output


def test_a_broken_default_step_is_found(monkeypatch):
    monkeypatch.setattr(default, "move", longer(default.move))
    assert failing() == of("default")


def test_an_inverse_that_is_not_symmetric_is_found(monkeypatch):
    update, subtract = Dense.update_, Dense.subtract_

    def lopsided(method):
        def broken(self, *args):
            growth = method(self, *args)
            self.P[..., 0, 1] += 1e-3
            return growth

        return broken

    monkeypatch.setattr(Dense, "update_", lopsided(update))
    monkeypatch.setattr(Dense, "subtract_", lopsided(subtract))
    results = check("P symmetric and positive definite")
    assert not results.passed
    assert results.difference > 1e-4


def test_an_inverse_that_is_not_definite_is_found(monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda P: torch.tensor([-1e-9, 1.0]))
    assert check("P symmetric and positive definite").difference == float("inf")


def test_a_state_that_is_not_restored_is_found(monkeypatch):
    monkeypatch.setattr(RLS, "load_state_dict", lambda self, state: None)
    results = check("saving and loading")
    assert not results.passed
    assert results.difference > 0


def test_a_step_that_is_not_skipped_is_found(monkeypatch):
    monkeypatch.setattr(RLS, "_is_fit", lambda self, results: True)
    assert check("a step with a NaN changes nothing").difference == float("inf")


def test_a_trace_of_a_skipped_step_is_found(monkeypatch):
    is_fit = RLS._is_fit

    def trace(self, results):
        fit = is_fit(self, results)
        if not fit:
            self.layers[0].weight[0, 0] += 1e-3
        return fit

    monkeypatch.setattr(RLS, "_is_fit", trace)
    results = check("a step with a NaN changes nothing")
    assert results.difference == pytest.approx(1e-3, rel=1e-3)
    assert not results.passed


def test_an_exception_is_a_failure(monkeypatch):
    def fails(*args):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(torch, "mv", fails)
    results = check("linear layers, the paper's step")
    assert not results.passed
    assert str(results) == "FAIL  linear layers, the paper's step: RuntimeError: no kernel"


def test_missing_state_is_a_difference():
    one = [torch.zeros(2)]
    assert doctor.distance(one, []) == float("inf")
    assert doctor.distance(one, [torch.tensor([0.0, 0.5])]) == 0.5


def test_what_is_not_known_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "OPTIONAL", ("torch", "no-such-package"))
    monkeypatch.setattr(doctor.os, "sysconf", lambda name: (_ for _ in ()).throw(ValueError))
    monkeypatch.setattr(torch.__config__, "show", lambda: "")
    results = dict(doctor.facts())
    assert results["missing (all optional)"] == "no-such-package"
    assert results["packages"] == f"torch {doctor._version('torch')}"
    assert results["memory"] == results["BLAS"] == "unknown"


def test_accelerators_are_tested_too(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
        results = doctor.devices()
    monkeypatch.setattr(doctor, "devices", lambda: results)
    assert dict(doctor.facts())["devices"] == "cpu, meta"
    name = "linear layers, the paper's step"
    monkeypatch.setattr(doctor, "CHECKS", {name: doctor.CHECKS[name]})
    here, there = doctor.checks()
    assert (here.name, here.passed) == (name, True)
    assert (there.name, there.passed) == (f"{name} on meta", False)  # it has no values
    assert doctor.dtype_of(torch.device("mps")) == torch.float32
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    assert doctor._describe(torch.device("cuda")).startswith("2 x A100 (cuda ")


def test_runs_without_the_packages_of_the_command_line():
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['torchrls', 'doctor'];"
        "from torchrls.selftest import doctor; doctor.CHECKS.clear();"
        "from torchrls.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "All is well." in done.stdout
