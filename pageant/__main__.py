"""``python -m pageant``, and the script ``pageant``: the command line, where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, 2 for a user's mistake."""
    try:
        import rich  # noqa: F401  # the commands need it; better said now than in the middle
        import typer  # noqa: F401
    except ModuleNotFoundError as missing:
        needs = f"error: the command line needs {missing.name}; pip install 'pageant[engine]'"
        print(needs, file=sys.stderr)
        return 2
    from pageant.cli import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
