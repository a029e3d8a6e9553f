"""The command line, whole."""

import io
import sys
from collections.abc import Sequence

from moectl.shared.neighbours import refuse_foreign

refuse_foreign()  # before the imports below, which would fail somewhere inside another distribution's `artifacts`

from moectl.cli import building, comparing, running, serving, showing  # noqa: E402
from moectl.cli.app import app  # noqa: E402
from moectl.shared.exit_codes import exit_code_of  # noqa: E402

__all__ = ["app", "building", "comparing", "main", "running", "serving", "showing"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (by default that of the command line) and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding than UTF-8 is no reason to fail
    return exit_code_of(lambda: app(args=arguments, prog_name="moectl"))
