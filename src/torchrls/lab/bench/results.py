"""The files of results: JSON, with the machine and the command that made them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from torchrls.lab.experiments.machine import describe

Results = dict[str, Any]


def save(kind: str, values: Any, path: Path, program: str = "torchrls") -> Results:
    """Write the values that one run of a program has measured; return the content of the file."""
    command = " ".join([program, *sys.argv[1:]])
    results = {"kind": kind, "command": command, "machine": describe(), "results": values}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    return results


def load(path: Path) -> Results:
    """Return the content of a file that :func:`save` has written.

    Raises:
        ValueError: if the file does not exist or is no such file.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a result of torchrls bench: {error}") from error
    if not isinstance(results, dict) or not {"kind", "machine", "results"} <= results.keys():
        raise ValueError(f"{path} is no result of torchrls bench: it has no kind and no machine")
    return results
