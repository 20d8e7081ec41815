"""What the documents say is so: their code runs, their tables name what exists."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchrls import RLS

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.norm(self.body(x)).relu())


def namespace() -> dict:
    model = Model()
    return {
        "torch": torch,
        "RLS": RLS,
        "model": model,
        "optimizer": RLS.paper(model),
        "loader": [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(2)],
        "loss_fn": nn.CrossEntropyLoss(),
        "writer": SimpleNamespace(add_scalar=lambda *numbers: None),
        "step": 0,
    }


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/*.md")))
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_code_in_documents_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in BLOCK.findall(path.read_text()):
        exec(compile(code, str(path), "exec"), namespace())


def test_table_of_equations_names_what_exists():
    rows = re.findall(
        r"^\| .* \| `(.*)` \| `(.*)::(.*)` \|$", read("docs/algorithm.md"), re.MULTILINE
    )
    assert len(rows) >= 10
    for function, file, test in rows:
        module, *path = function.split(".")
        parts = [module, *path]
        while True:
            try:
                found = importlib.import_module("torchrls." + ".".join(parts))
                break
            except ModuleNotFoundError:
                parts.pop()
        for name in function.split(".")[len(parts) :]:
            found = getattr(found, name)
        assert f"def {test}(" in read(f"tests/{file}")


def test_readme_names_every_argument():
    import inspect

    names = set(inspect.signature(RLS).parameters) - {"model"}
    assert {name for name in names if f"| `{name}` |" in read("README.md")} == names


EXAMPLES = {
    "own_layer.py": [],
    "hybrid_cnn.py": ["--epochs", "1"],
    "sequence_classification.py": ["--epochs", "1"],
    "chaotic_series.py": ["--epochs", "1"],
    "character_model.py": ["--steps", "20"],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, tmp_path):
    """In a short form, with warnings as errors."""
    plot = tmp_path / "plot.png"
    out = ["--out", plot] if "--out" in read(f"examples/{name}") else []
    command = [sys.executable, "-W", "error", ROOT / "examples" / name, *EXAMPLES[name], *out]
    subprocess.run(command, check=True, capture_output=True)
    assert plot.exists() == bool(out)


def test_every_example_is_tested():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXAMPLES)


def read(name: str) -> str:
    return (ROOT / name).read_text()
