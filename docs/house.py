"""The house: the rooms of src/torchrls and who imports whom, read from the imports themselves.

`make house` draws it into CONTRIBUTING.md. `tests/common/test_rooms.py` holds its rules: a room
imports only itself and the rooms below it.
"""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "torchrls"
DOCUMENT = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- house -->", "<!-- end of house -->"

#: The rooms, from the lowest to the highest. Each is a folder, but "top", which are these files:
ROOMS = (
    *("common", "matrix", "layers", "routing", "distributed", "observe", "step"),
    *("saving", "reporting", "top", "selftest", "lab"),
)
TOP = ("__init__.py", "optimizer.py", "losses.py", "__main__.py")
#: The entry point, and the rooms above it that it may import inside of functions.
ENTRY, OPENED_BY_ENTRY = "__main__.py", ("selftest", "lab")


class Import(NamedTuple):
    """An import of one name. Files are relative to the package, as in ``step/paper.py``.

    Attributes:
        name: what is imported, in full, as in ``torch.nn.Linear``.
        target: the file of the package that is imported, or "" if the name is of another package.
        lazy: the import is inside of a function.
        typing: the import is under ``if TYPE_CHECKING``, so that it never runs.
    """

    file: str
    line: int
    name: str
    target: str
    lazy: bool
    typing: bool


# -- reading ---------------------------------------------------------------------------------------


@functools.cache
def read_imports(source: Path = SOURCE) -> tuple[Import, ...]:
    """Return all imports of a package, by file and line."""
    modules = {}
    for path in sorted(source.rglob("*.py")):
        file = path.relative_to(source)
        parts = file.parent.parts if file.name == "__init__.py" else file.with_suffix("").parts
        modules[".".join([source.name, *parts])] = file.as_posix()
    return tuple(
        Import(file, line, name, _target(name, modules), lazy, typing)
        for module, file in modules.items()
        for line, name, lazy, typing in _names(
            ast.parse((source / file).read_text()),
            module if file.endswith("__init__.py") else module.rpartition(".")[0],
        )
    )


def _names(
    node: ast.AST, package: str, lazy: bool = False, typing: bool = False
) -> Iterator[tuple[int, str, bool, bool]]:
    """Yield the line, the full name, lazy and typing of each import below a node of a tree.

    Args:
        package: the package of the file, where relative imports start.
    """
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield node.lineno, alias.name, lazy, typing
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")
        base = ".".join(parents[: len(parents) + 1 - node.level]) if node.level else ""
        module = ".".join(filter(None, (base, node.module)))
        for alias in node.names:
            yield node.lineno, f"{module}.{alias.name}", lazy, typing
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        if node.args and isinstance(node.args[0], ast.Constant):
            yield node.lineno, str(node.args[0].value), lazy, typing
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for statement in node.body:
            yield from _names(statement, package, lazy, True)
        for statement in node.orelse:
            yield from _names(statement, package, lazy, typing)
    else:
        lazy = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from _names(child, package, lazy, typing)


def _target(name: str, modules: dict[str, str]) -> str:
    """Return the file of a module, or of the module in which a name is defined; "" if not ours."""
    return modules.get(name) or modules.get(name.rpartition(".")[0], "")


# -- rules -----------------------------------------------------------------------------------------


def room_of(file: str) -> str:
    """Return the room of a file, "top" for those of ``TOP``; "" if it is in none."""
    room, is_inside, _ = file.partition("/")
    if file in TOP:
        return "top"
    return room if is_inside and room in ROOMS and room != "top" else ""


def homeless(source: Path = SOURCE) -> list[str]:
    """Return the files that are in no room."""
    files = (path.relative_to(source).as_posix() for path in sorted(source.rglob("*.py")))
    return [file for file in files if not room_of(file)]


def between_files(imports: Iterable[Import]) -> list[Import]:
    """Return the imports of one file of the package by another that happen when it runs."""
    return [each for each in imports if each.target not in ("", each.file) and not each.typing]


def upward(imports: Iterable[Import]) -> list[Import]:
    """Return the imports of a higher room, which are not allowed."""
    return [
        each
        for each in between_files(imports)
        if room_of(each.file) and room_of(each.target)
        if ROOMS.index(room_of(each.target)) > ROOMS.index(room_of(each.file))
        if not (each.file == ENTRY and each.lazy and room_of(each.target) in OPENED_BY_ENTRY)
    ]


def graph_of(imports: Iterable[Import]) -> dict[str, set[str]]:
    """Return the files that each file imports."""
    graph: dict[str, set[str]] = {}
    for each in between_files(imports):
        graph.setdefault(each.file, set()).add(each.target)
        graph.setdefault(each.target, set())
    return graph


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return files of which each imports the next, and the last is the first; or an empty list."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


def longest_chains(graph: dict[str, set[str]]) -> dict[str, list[str]]:
    """Return for each file the longest list of files, from it on, of which each imports the next.

    The graph must have no cycle.
    """
    chains: dict[str, list[str]] = {}
    for file in graphlib.TopologicalSorter(graph).static_order():
        chains[file] = [file, *max((chains[t] for t in sorted(graph[file])), key=len, default=[])]
    return chains


# -- the picture -----------------------------------------------------------------------------------


def draw(source: Path = SOURCE) -> str:
    """Return the picture of the rooms in mermaid, and a table of what each room knows.

    Raises:
        SystemExit: rooms import one another, so that there is no order in which to draw them.
    """
    imports = read_imports(source)
    wrong = [f"{each.file}:{each.line} imports {each.target}" for each in upward(imports)]
    wrong += [f"{file} is in no room" for file in homeless(source)]
    if cycle := find_cycle(graph_of(imports)):
        wrong.append(" > ".join(cycle))
    if wrong:
        raise SystemExit("The house is out of order, so it is not drawn: " + "; ".join(wrong))
    legend = (
        'An arrow means "imports"; arrows that follow from others are left out. Imports go down '
        "only, which\n`tests/common/test_rooms.py` holds. `make house` draws this from the imports."
    )
    return f"{_diagram(source, imports)}\n\n{legend}\n\n{_table(source)}"


def _diagram(source: Path, imports: Iterable[Import]) -> str:
    """Return a flowchart of the rooms, without the arrows that follow from others.

    The entry point stands beside the room "top", because it opens rooms that are above that.
    """
    doors: dict[str, set[str]] = {room: set() for room in (ENTRY, *reversed(ROOMS))}
    for each in between_files(imports):
        inside, outside = (
            ENTRY if file == ENTRY else room_of(file) for file in (each.file, each.target)
        )
        if inside != outside:
            doors[inside].add(outside)
    reached: dict[str, set[str]] = {}
    for room in graphlib.TopologicalSorter(doors).static_order():
        reached[room] = doors[room].union(*(reached[below] for below in doors[room]))
    lines = ["flowchart TD"]
    for room in doors:
        title = {ENTRY: "command torchrls", "top": "import torchrls"}.get(room, f"{room}/")
        label = "<br/>".join([f"<b>{title}</b>", *_content(source, room)])
        lines.append(f'    {_box(room)}["{label}"]')
    for room, below in doors.items():
        direct = below.difference(*(reached[other] for other in below))
        arrow = "-.->" if room == ENTRY else "-->"
        targets = map(_box, sorted(direct, key=ROOMS.index, reverse=True))
        lines += [f"    {_box(room)} {arrow} {target}" for target in targets]
    return "\n".join(["```mermaid", *lines, "```"])


def _box(room: str) -> str:
    """Return the id of a box, in which mermaid allows no dots."""
    return "entry" if room == ENTRY else room


def _content(source: Path, room: str) -> list[str]:
    """Return the files and folders of a room."""
    if room == ENTRY:
        return [ENTRY]
    if room == "top":
        return [file for file in TOP if file != ENTRY]
    paths = sorted((source / room).iterdir(), key=lambda path: (path.is_file(), path.name))
    folders = [f"{path.name}/" for path in paths if (path / "__init__.py").exists()]
    files = [path.name for path in paths if path.suffix == ".py" and path.stem != "__init__"]
    return folders + files


def _table(source: Path) -> str:
    """Return a table with a line per room and per file of "top" that has code in it."""
    files = [file for file in TOP if file not in ("__init__.py", ENTRY)]
    names = [ENTRY]
    for room in reversed(ROOMS):
        names += files if room == "top" else [f"{room}/"]
    lines = ["| room | knows |", "| --- | --- |"]
    for name in names:
        path = source / name / "__init__.py" if name.endswith("/") else source / name
        lines.append(f"| `{name}` | {_summary(path)} |")
    return "\n".join(lines)


def _summary(path: Path) -> str:
    """Return the first paragraph of the docstring of a file, as one line of Markdown."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("``", "`").replace("|", "\\|")


def place(picture: str, text: str) -> str:
    """Return the text of a document with the picture between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{DOCUMENT.name} needs the lines {BEGIN} and {END}, once each")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{picture}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    DOCUMENT.write_text(place(draw(), DOCUMENT.read_text()))
