"""``torchrls`` and ``python -m torchrls``: the command line, or what to install for it."""

import io
import sys


def main() -> None:
    """Run the command line; its packages are an extra."""
    try:
        from torchrls.lab.cli import app
    except ModuleNotFoundError as error:
        if sys.argv[1:] == ["doctor"]:  # which is what says what is missing
            from torchrls.selftest import doctor

            sys.exit(doctor.run())
        sys.exit(
            f"torchrls: the command line needs the package {error.name!r}, which is not installed. "
            f"Install it with: pip install 'torchrls[experiments]'"
        )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a console that has no η is no reason to stop
    app()


if __name__ == "__main__":
    main()
