"""`python -m moectl`, for a checkout that is not installed."""

import sys

from moectl.cli import main

sys.exit(main())
