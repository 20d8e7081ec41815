"""The entry point of ``torchrls`` and ``python -m torchrls``."""

import io
import sys
from importlib import import_module


def main() -> None:
    """Run the command line, or say which package of the extra ``experiments`` is missing."""
    try:
        app = import_module("torchrls.lab.cli").app
    except ModuleNotFoundError as error:
        if sys.argv[1:] == ["doctor"]:  # reports missing packages, so it must run without them
            sys.exit(import_module("torchrls.selftest.doctor").run())
        sys.exit(
            f"torchrls: the command line needs the package {error.name!r}, which is not installed. "
            f"Install it with: pip install 'torchrls[experiments]'"
        )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # consoles may be unable to print η
    app()


if __name__ == "__main__":
    main()
