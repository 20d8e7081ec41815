"""The public API: whatever a user can call is documented and annotated."""

from __future__ import annotations

import inspect

import pytest

import torchrls

NAMES = {name: getattr(torchrls, name) for name in torchrls.__all__ if name != "__version__"}


def functions_of(owner):
    """What is ours among the methods and properties of a class, as functions."""
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("torchrls."):
            for name, member in vars(base).items():
                results = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if inspect.isfunction(results):
                    yield name, inspect.unwrap(results)


METHODS = {
    f"{owner.__name__}.{name}": function
    for owner in filter(inspect.isclass, NAMES.values())
    for name, function in functions_of(owner)
    if name == "__init__" or not name.startswith("_")
}
FUNCTIONS = {
    name: results for name, results in NAMES.items() if inspect.isfunction(results)
} | METHODS


def test_functions_and_methods_are_found():
    expected = {"register", "save_checkpoint", "Adapter.rows", "Adapter.blocks", "Rows.sums"}
    of_rls = ("__init__", "paper", "step", "summary", "diagnostics", "explain", "load_state_dict")
    assert expected | {f"RLS.{name}" for name in of_rls} <= FUNCTIONS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_names_have_docstrings(name):
    assert NAMES[name].__doc__


@pytest.mark.parametrize("name", METHODS)
def test_methods_have_docstrings(name):
    owner, method = name.split(".")
    described = NAMES[owner] if method == "__init__" else getattr(NAMES[owner], method)
    assert inspect.getdoc(described)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_have_annotations(name):
    signature = inspect.signature(FUNCTIONS[name])
    bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty]
    assert bare in ([], ["self"], ["cls"])
    assert signature.return_annotation is not signature.empty
