"""The report: one HTML file with all figures, settings and tables, which needs no other files."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from torchrls.common.version import __version__
from torchrls.lab.experiments.panel import Panel
from torchrls.lab.experiments.plot import draw_panel
from torchrls.lab.experiments.table import markdown, reduction, settings, table, target_of
from torchrls.lab.experiments.tasks import TASKS

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
       max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.3rem; margin-top: 3rem; }
h3 { font-size: 1.05rem; margin-top: 2.2rem; }
nav ul { padding-left: 1.2rem; } a { color: #0060a0; }
img { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd; }
th { vertical-align: bottom; font-weight: 600; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
td { white-space: nowrap; } tr.reference { background: #f4f4f4; } td.best { font-weight: 700; }
.note { color: #555; font-size: 0.9rem; }
details { font-size: 0.9rem; margin-top: 0.6rem; } summary { cursor: pointer; color: #0060a0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.1rem 1rem; margin: 0.5rem 0; }
dt { color: #555; } dd { margin: 0; }
"""


def write(panels: Sequence[Panel], folder: Path, target: float | None = None) -> Path:
    """Draw every panel, write ``report.html`` and ``tables.md``; return the path of the report."""
    sections = []
    for task, group in groupby(panels, key=lambda panel: panel.task):
        parts = [_section(panel, folder, target) for panel in group]
        sections.append(f"<h2>{escape(TASKS[task].title)}</h2>\n" + "\n".join(parts))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    path.write_text(_page(panels, sections), encoding="utf-8")
    tables = "\n".join(markdown(panel, target) for panel in panels)
    (folder / "tables.md").write_text(tables, encoding="utf-8")
    return path


def _page(panels: Sequence[Panel], sections: list[str]) -> str:
    """Return the HTML page: introduction, links to the panels, sections."""
    links = "\n".join(
        f'<li><a href="#{_anchor(panel)}">{escape(panel.title)}</a>{_reduced(panel)}</li>'
        for panel in panels
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>torchrls: the paper's experiments</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Recursive least squares against Adam: the experiments of section VI</h1>
<p>Zhang et al., <cite>Revisiting Recursive Least Squares for Training Deep Neural Networks</cite>,
repeated with torchrls {escape(__version__)}. RLS has the paper's values throughout
(<code>RLS.paper</code>), Adam its defaults. +M is momentum 0.5, +R is L1 regularization, HRLS is
RLS with Adam on the output layer.</p>
<nav><ul>
{links}
</ul></nav>
{"".join(sections)}
</body>
</html>
"""


def _section(panel: Panel, folder: Path, target: float | None) -> str:
    """Draw a panel into the folder, and return its section: picture, table and settings."""
    _, svg = draw_panel(panel, folder / panel.name)
    picture = base64.b64encode(svg.read_bytes()).decode()
    alt = f"Test accuracy and training loss: {panel.title}"
    entries = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in settings(panel).items()
    )
    goal = target_of(panel, target)
    seeds = f"{panel.seeds} seed{'s' * (panel.seeds > 1)}"
    meaning = "" if target is not None else f", the final accuracy of {panel.reference.label}"
    return f"""<section id="{_anchor(panel)}">
<h3>{escape(panel.title)}{_reduced(panel)}</h3>
<img src="data:image/svg+xml;base64,{picture}" alt="{escape(alt)}">
<div class="scroll">{_table(panel, target)}</div>
<p class="note">Test accuracy after {panel.epochs} epochs, and the best on the way: means over
{seeds}, ± one standard deviation. Losses are those of the training set. Seconds are
those of training steps, without tests; of runs with one thread they are the processor's, so that
other work on the machine does not count. The target is
{goal:.2f} %{escape(meaning)}; it is reached where the mean over the seeds is.</p>
<details><summary>Settings</summary><dl>{entries}</dl></details>
</section>"""


def _table(panel: Panel, target: float | None) -> str:
    """Return the HTML table of a panel, with marks for the reference and the best accuracy."""
    headings, rows = table(panel, target)
    best = max(range(len(rows)), key=lambda i: panel.curves[i].final[0])
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in headings)
    body = ""
    for i, row in enumerate(rows):
        kind = ' class="reference"' if panel.curves[i] is panel.reference else ""
        cells = [f"<td>{escape(text)}</td>" for text in row]
        if i == best:
            cells[1] = f'<td class="best">{escape(row[1])}</td>'
        body += f"<tr{kind}>{''.join(cells)}</tr>\n"
    return f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"


def _anchor(panel: Panel) -> str:
    """Return the id of the panel's section."""
    return escape(panel.name, quote=True)


def _reduced(panel: Panel) -> str:
    """Return a note of the choices that are not the paper's, if there are any."""
    if not panel.unlike_paper:
        return ""
    return f' <span class="note">({escape(reduction(panel))})</span>'
