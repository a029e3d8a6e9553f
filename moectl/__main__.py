"""`python -m moectl`, for a checkout that is not installed."""

import sys

from moectl.cli import main

if __name__ == "__main__":  # a process that is spawned imports this file too
    sys.exit(main())
