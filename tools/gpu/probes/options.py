"""The options that all probes take."""

import argparse

from tools.arguments import parser_of


def parsed(description: str | None) -> argparse.Namespace:
    """`device` and `tiny`, which makes every size small enough to try the probe itself."""
    return parser_of(description, device="cuda", tiny=False).parse_args()
