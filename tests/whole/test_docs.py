"""What the documents say is so: their code runs, their commands and tables name what exists."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import torchrls
from torchrls import RLS
from torchrls.lab.cli import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks/README.md"]
DOCUMENTS = sorted(path for path in DOCUMENTS if "```" in path.read_text())
BLOCK = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
LANGUAGES = {"python", "bash", "text", "bibtex", "mermaid"}


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


def blocks(path: Path) -> list[tuple[str, str]]:
    """Language and content of each block, but those of Sphinx."""
    results = BLOCK.findall(path.read_text())
    return [(language, content) for language, content in results if not language.startswith("{")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_have_a_language(path):
    assert {language for language, _ in blocks(path)} <= LANGUAGES


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_code_in_documents_runs(path, tmp_path, monkeypatch, capsys):
    """A page from top to bottom; a text below code is what it prints."""
    monkeypatch.chdir(tmp_path)
    names = namespace()
    torch.manual_seed(0)
    for language, content in blocks(path):
        if language == "python":
            capsys.readouterr()
            exec(compile(content, str(path), "exec"), names)
        elif language == "text":
            assert capsys.readouterr().out.strip() == content.strip()


COMMANDS = sorted(
    {
        line
        for path in DOCUMENTS
        for language, content in blocks(path)
        if language == "bash"
        for line in content.splitlines()
    }
)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_in_documents_exist(line):
    program, *rest = shlex.split(line, comments=True)
    CHECKS[program](rest)


def check_torchrls(rest):
    """All options are known: --help comes after them."""
    result = CliRunner().invoke(app, [*rest, "--help"])
    assert result.exit_code == 0, result.output


def check_python(rest):
    """The file is there, and knows the options."""
    file = next(word for word in rest if word.endswith(".py"))
    options = [word for word in rest[rest.index(file) :] if word.startswith("--")]
    assert all(option in read(file) for option in options if option != "--help")


def check_make(rest):
    subprocess.run(["make", "-n", *rest], cwd=ROOT, check=True, capture_output=True)


def check_pip(rest):
    extras = re.findall(r"\[(.*)\]", rest[-1])
    assert rest[:1] == ["install"]
    assert all(f"\n{extra} = [" in read("pyproject.toml") for extra in extras)


def check_export(rest):
    """Variables that glibc knows, with numbers."""
    known = {f"MALLOC_{name}_" for name in ("TRIM_THRESHOLD", "MMAP_MAX", "TOP_PAD")}
    assert dict(word.split("=") for word in rest).keys() <= known
    assert all(int(word.split("=")[1]) >= 0 for word in rest)


CHECKS = {
    "export": check_export,
    "torchrls": check_torchrls,
    "python": check_python,
    "torchrun": check_python,
    "make": check_make,
    "pip": check_pip,
}


def test_site_is_built_without_warnings(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    pages = {path.stem for path in tmp_path.glob("*.html")}
    assert {path.stem for path in ROOT.glob("docs/*.md")} <= pages
    assert "recursive least squares" in (tmp_path / "api.html").read_text().lower()


def test_everything_public_is_in_the_api():
    text = read("docs/api.md")
    assert all(f"torchrls.{name}" in text for name in torchrls.__all__)
    own = {name: member for name, member in vars(RLS).items() if not name.startswith("_")}
    methods = {name for name, member in own.items() if callable(member)} | {"paper"}
    assert {name for name in methods if not re.search(rf"\b{name}\b", text)} == set()


def test_every_command_is_on_its_page():
    from typer.main import get_command

    root = get_command(app)
    bench = {f"bench {name}" for name in root.commands["bench"].commands}
    names = (root.commands.keys() - {"bench"}) | bench
    assert {name for name in names if f"torchrls {name}" not in read("docs/commands.md")} == set()


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
                results = importlib.import_module("torchrls." + ".".join(parts))
                break
            except ModuleNotFoundError:
                parts.pop()
        for name in function.split(".")[len(parts) :]:
            results = getattr(results, name)
        assert f"def {test}(" in read(f"tests/{file}")


def test_documents_name_every_argument():
    names = set(inspect.signature(RLS).parameters) - {"model"}
    assert {name for name in names if f"| `{name}` |" in read("docs/modes.md")} == names


def test_every_file_has_its_place():
    """In the table of CONTRIBUTING.md; folders have one place for all that is in them."""
    files = {path.name for path in (ROOT / "src/torchrls").glob("*.py")}
    files -= {"__init__.py", "__main__.py", "version.py"}
    assert {file for file in files if f"`{file}`" not in read("CONTRIBUTING.md")} == set()


def test_tables_of_the_reproduction_are_those_of_the_records():
    """In the document and in the tables that `torchrls plot` has made."""
    row = re.compile(r"^\| (?:Adam|H?RLS\S*|[kη] = \S+) \| \d.*$", re.MULTILINE)
    rows = row.findall(read("docs/reproduction.md"))
    assert len(rows) > 30
    assert set(rows) <= set(read("docs/reproduction/tables.md").splitlines())


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
