"""What each paper shows, in a sentence each, by the measured statements of its reproduction."""

from collections.abc import Mapping

SHOWN: Mapping[str, str] = {}
