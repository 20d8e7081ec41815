"""The house: imports go down, private torch is in one file, and the picture is the current one."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.nn.modules.module
from torch import nn

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("house", ROOT / "docs" / "house.py")
house = importlib.util.module_from_spec(spec)
spec.loader.exec_module(house)

LONGEST_CHAIN = 7
PRIVATE = "common/torch_private.py"
HOOKS = {name for name in vars(nn.Module()) if "hooks" in name}
HOOKS |= {name for name in vars(torch.nn.modules.module) if "_hooks" in name}
ENGINE = {"_execution_engine", "_will_engine_execute_node"}


def in_core(file: str) -> bool:
    """Return whether a file is neither in the laboratory nor the entry point of its commands."""
    return house.room_of(file) != "lab" and file != house.ENTRY


# -- the rules -------------------------------------------------------------------------------------


def test_every_file_is_in_a_room():
    assert house.homeless() == [], (
        "files in no room: move them into a room, or give them one in ROOMS or TOP of docs/house.py"
    )


def test_imports_go_down():
    wrong = [complaint(each) for each in house.upward(house.read_imports())]
    assert not wrong, "\n" + "\n".join(wrong)


def complaint(each) -> str:
    """Return what is wrong with an import of a higher room, and what to do."""
    lower, higher = house.room_of(each.file), house.room_of(each.target)
    if each.file == house.ENTRY:
        return f"{each.file}:{each.line} imports {each.target}: import it inside of a function"
    return (
        f"{each.file}:{each.line} imports {each.target}, but {higher} is above {lower}. Move "
        f"{each.name} down into {lower} or a room below it, or pass it as an argument; for "
        f"an annotation alone, import it under TYPE_CHECKING. Order: {' < '.join(house.ROOMS)}"
    )


def test_no_import_cycles():
    cycle = house.find_cycle(house.graph_of(house.read_imports()))
    assert not cycle, (
        f"import cycle: {' > '.join(cycle)}. Move what two of these files share into a third one"
    )


def test_chains_of_imports_are_short():
    graph = house.graph_of(each for each in house.read_imports() if in_core(each.file))
    chains = sorted(house.longest_chains(graph).values(), key=len, reverse=True)
    long = [chain for chain in chains if len(chain) > LONGEST_CHAIN]
    assert not long, (
        f"at most {LONGEST_CHAIN} files may import one another in a row, but these are "
        f"{len(long[0])}: {' > '.join(long[0])}. Shorten the chain where a file imports little of "
        f"the next: pass that as an argument, or move it further down. The chains from these "
        f"files are too long: {', '.join(f'{chain[0]} ({len(chain)})' for chain in long)}"
    )


def test_private_torch_is_named_in_one_file():
    wrong = [
        f"{file}:{line} names {name}: give it a function or a name in {PRIVATE}, and import that"
        for path in sorted(house.SOURCE.rglob("*.py"))
        if (file := path.relative_to(house.SOURCE).as_posix()) != PRIVATE
        if house.room_of(file) != "lab"
        for line, name in private_torch(path.read_text())
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def private_torch(text: str) -> list[tuple[int, str]]:
    """Return the lines and names of private torch in a source text; one name per line.

    These are imports and attributes of torch's modules and classes that have a part with an
    underscore in front, and the hook dictionaries and engine of any object.
    """
    tree = ast.parse(text)
    bound = {}  # what each name of the file stands for in torch
    named = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                named.append((node.lineno, alias.name))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                named.append((node.lineno, f"{node.module}.{alias.name}"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            named.append((node.lineno, resolve(node, bound)))
            named.append((node.lineno, node.attr))
        elif isinstance(node, ast.Name):
            named.append((node.lineno, node.id))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.append((node.lineno, node.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            owner, attribute = node.args[:2]
            if isinstance(attribute, ast.Constant):
                named.append((node.lineno, f"{resolve(owner, bound)}.{attribute.value}"))
    longest: dict[int, str] = {}
    for line, name in named:
        if is_private(name) and len(name) > len(longest.get(line, "")):
            longest[line] = name
    return sorted(longest.items())


def resolve(node: ast.AST, bound: dict[str, str]) -> str:
    """Return the full name of a chain of attributes: "torch.nn.Module._x" for nn.Module._x.

    The result is "" if the chain begins with something that has not been imported.
    """
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value, bound)
        return owner and f"{owner}.{node.attr}"
    return bound.get(node.id, "") if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    if name in HOOKS | ENGINE:
        return True
    parts = name.split(".")
    return bool(
        re.fullmatch(r"torch(\.\w+)+", name)
        and any(re.match(r"_(?!_.*__$)", part) for part in parts)
    )


def test_core_needs_torch_alone():
    allowed = {"torch", "torchrls", *sys.stdlib_module_names}
    wrong = [
        f"{each.file}:{each.line} imports {each.name}: only the lab may need more than torch"
        for each in house.read_imports()
        if in_core(each.file) and not each.typing and each.name.partition(".")[0] not in allowed
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_import_brings_no_laboratory_and_no_other_package():
    """In a process of its own. What torch itself imports, such as numpy, does not count."""
    program = (
        "import sys, torch; before = set(sys.modules); import torchrls; "
        "print(torchrls.__file__, *sorted(set(sys.modules) - before))"
    )
    path = os.pathsep.join(filter(None, (str(house.SOURCE.parent), os.environ.get("PYTHONPATH"))))
    file, *modules = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert Path(file).parent == house.SOURCE
    laboratory = [name for name in modules if name.startswith("torchrls.lab")]
    assert not laboratory, f"`import torchrls` imports {laboratory[0]}: see test_imports_go_down"
    others = {name.partition(".")[0] for name in modules} - {"torch", "torchrls"}
    others -= sys.stdlib_module_names
    assert not others, (
        f"`import torchrls` imports {', '.join(sorted(others))}: import it in the lab, "
        f"or inside of the function that needs it"
    )


def test_picture_is_the_current_one():
    text = house.DOCUMENT.read_text()
    assert house.place(house.draw(), text) == text, (
        "the picture of the rooms in CONTRIBUTING.md is of other imports: run `make house`"
    )


# -- the rules see what they are for ---------------------------------------------------------------


@pytest.fixture
def build(tmp_path):
    """A function that writes a package with all rooms and these files, and returns its folder."""

    def write(files: dict[str, str]) -> Path:
        source = tmp_path / "torchrls"
        rooms = {
            f"{room}/__init__.py": f'"""The {room}."""' for room in house.ROOMS if room != "top"
        }
        for file, text in (dict.fromkeys(house.TOP, "") | rooms | files).items():
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            (source / file).write_text(text)
        return source

    return write


@pytest.mark.parametrize(
    "text",
    [
        "import torchrls.step.paper",
        "import torchrls.step.paper as p",
        "from torchrls.step.paper import f",
        "from torchrls.step import paper",
        "from ..step.paper import f",
        "from ..step import paper",
        "def f():\n    from torchrls.step import paper",
        "import importlib\nimportlib.import_module('torchrls.step.paper')",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import torchrls.step.paper",
    ],
)
def test_upward_import_is_seen(build, text):
    imports = house.read_imports(build({"matrix/a.py": text, "step/paper.py": ""}))
    (wrong,) = house.upward(imports)
    assert (wrong.file, wrong.target) == ("matrix/a.py", "step/paper.py")
    assert "step is above matrix" in complaint(wrong)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("step/a.py", "import torchrls.step.paper\nfrom torchrls.matrix import *"),
        ("matrix/a.py", "if TYPE_CHECKING:\n    import torchrls.step.paper"),
        ("matrix/a.py", "from torchrls.common.version import __version__"),
        ("__main__.py", "def main():\n    from torchrls.lab import cli"),
        ("__main__.py", "def main():\n    from torchrls.selftest import doctor"),
        ("lab/bench/a.py", "from torchrls import RLS\nimport torchrls.selftest"),
    ],
)
def test_downward_import_is_allowed(build, file, text):
    source = build({file: text, "step/paper.py": "", "lab/cli.py": "", "selftest/doctor.py": ""})
    assert house.upward(house.read_imports(source)) == []


def test_entry_point_opens_the_laboratory_only_in_functions(build):
    (wrong,) = house.upward(
        house.read_imports(build({"__main__.py": "import torchrls.lab.cli", "lab/cli.py": ""}))
    )
    assert "inside of a function" in complaint(wrong)


def test_file_without_a_room_is_seen(build):
    source = build({"attic.py": "", "cellar/a.py": "", "lab/bench/a.py": ""})
    assert house.homeless(source) == ["attic.py", "cellar/a.py"]
    with pytest.raises(SystemExit, match=r"attic\.py is in no room"):
        house.draw(source)


def test_cycles_and_chains_are_seen(build):
    text = "from torchrls.matrix import {}"
    files = {"matrix/a.py": text.format("b"), "matrix/b.py": text.format("c"), "matrix/c.py": ""}
    graph = house.graph_of(house.read_imports(build(files)))
    assert house.find_cycle(graph) == []
    assert house.longest_chains(graph)["matrix/a.py"] == list(files)
    files["matrix/d.py"] = text.format("e")
    files["matrix/e.py"] = "def f():\n    import torchrls.matrix.d"
    house.read_imports.cache_clear()
    first, second, last = house.find_cycle(house.graph_of(house.read_imports(build(files))))
    assert first == last
    assert {first, second} == {"matrix/d.py", "matrix/e.py"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch\ntorch._C._f()", "torch._C._f"),
        ("import torch\nf = torch.nn.functional._g", "torch.nn.functional._g"),
        ("import torch.nn.functional as F\nF._g()", "torch.nn.functional._g"),
        ("from torch import nn\nnn.Module._call_impl", "torch.nn.Module._call_impl"),
        ("from torch import _C", "torch._C"),
        ("def f():\n    from torch._C import g", "torch._C.g"),
        ("if TYPE_CHECKING:\n    from torch.utils._pytree import tree_map", None),
        ("import torch._dynamo", "torch._dynamo"),
        ("import importlib\nimportlib.import_module('torch._dynamo')", "torch._dynamo"),
        ("import torch\ngetattr(torch, '_foreach_add')", "torch._foreach_add"),
        ("module._forward_hooks.clear()", "_forward_hooks"),
        ("getattr(module, '_forward_pre_hooks')", "_forward_pre_hooks"),
        ("tensor._backward_hooks", "_backward_hooks"),
        ("'_forward_hooks_with_kwargs' in vars(module)", "_forward_hooks_with_kwargs"),
        ("module._forward_hooks_always_called", "_forward_hooks_always_called"),
        ("modules._global_forward_hooks", "_global_forward_hooks"),
        ("variable._execution_engine", "_execution_engine"),
        ("c._will_engine_execute_node(leaf)", "_will_engine_execute_node"),
    ],
)
def test_private_torch_is_seen(text, name):
    ((line, seen),) = private_torch(text)
    assert line == text.count("\n") + 1
    assert seen == (name or "torch.utils._pytree.tree_map")


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.__version__, torch.empty(1)._is_view()",
        "module._parameters, tensor._base, self._hooks",
        "from torchrls.common import torch_private\ntorch_private._HOOK_IDS",
        "import os\nos._exit",
        "'''A comment on torch._C and _forward_hooks.'''",
    ],
)
def test_public_torch_is_allowed(text):
    assert private_torch(text) == []


def test_picture_has_rooms_files_and_no_arrows_that_follow_from_others(build):
    picture = house.draw(
        build(
            {
                "common/a.py": "",
                "matrix/b.py": "import torchrls.common.a",
                "step/c.py": "import torchrls.common.a, torchrls.matrix.b",
                "lab/bench/__init__.py": "import torchrls.step.c",
                "__main__.py": "def main():\n    import torchrls.lab.bench, torchrls.step.c",
            }
        )
    )
    arrows = re.findall(r"^ +(\w+ -.*->? \w+)$", picture, re.MULTILINE)
    expected = ["entry -.-> lab", "lab --> step", "step --> matrix", "matrix --> common"]
    assert arrows == expected
    assert '    matrix["<b>matrix/</b><br/>b.py"]' in picture
    assert '    lab["<b>lab/</b><br/>bench/"]' in picture
    assert "| `matrix/` | The matrix. |" in picture
    assert house.place(picture, f"a\n{house.BEGIN}\nold\n{house.END}\nz") == (
        f"a\n{house.BEGIN}\n\n{picture}\n\n{house.END}\nz"
    )
    with pytest.raises(SystemExit, match="needs the lines"):
        house.place(picture, "no markers")
