"""The machine and the software that a result comes from."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from torchrls.common.version import __version__


def describe() -> dict[str, Any]:
    """Return processor, cores, threads, and the versions of Python, torch and torchrls."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchrls": __version__,
        "commit": _commit(),
    }


def _processor() -> str:
    """Return the model name of the processor, or what Python knows of it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    """Return the commit of the clone that the package is run from, or an empty string."""
    if not _git("ls-files", "--error-unmatch", Path(__file__).name):
        return ""  # an installed package: a repository around it is another project
    return _git("describe", "--always", "--dirty")


def _git(*arguments: str) -> str:
    """Return the output of git in the folder of the package; empty if git fails or is missing."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
