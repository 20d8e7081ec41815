"""Settings of the site: `make docs` builds it into docs/_build/html."""

from __future__ import annotations

from typing import Any

from pygments.lexers.special import TextLexer

from torchrls import __version__

project = "torchrls"
author = "The torchrls developers"
copyright = author
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "reproduction/tables.md"]
templates_path: list[str] = []

html_theme = "furo"
html_title = "torchrls"
html_extra_path = ["reproduction/report.html"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def setup(app: Any) -> None:
    """Show mermaid diagrams as text: GitHub draws them, and the site need not."""
    app.add_lexer("mermaid", TextLexer)
