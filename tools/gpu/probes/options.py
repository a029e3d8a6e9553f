"""The options that all probes take."""

import argparse


def parsed(description: str | None) -> argparse.Namespace:
    """`device` and `tiny`, which makes every size small enough to try the probe itself."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()
