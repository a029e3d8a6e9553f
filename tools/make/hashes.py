"""Writes hashes.txt: the versions of constraints.txt, each with the sha256 of the files that pip
may install.

    python -m tools.make.hashes                          with the files that the package index has for this machine
    python -m tools.make.hashes --besides torch-*.whl    and files from elsewhere, such as torch for the CPU

Asks pip what it would install, without installing it. What the index's torch needs besides, for
CUDA, is added.
"""

import argparse
import hashlib
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tools import ROOT

CONSTRAINTS = ROOT / "constraints.txt"
HASHES = ROOT / "hashes.txt"
_HEAD = """\
# The versions of constraints.txt with the sha256 of their files, for CPython {python} on Linux x86-64, and what torch
# needs for CUDA. Written by tools/make/hashes.py; how to use it: docs/quickstart.md.
"""
Hashes = dict[tuple[str, str], set[str]]  # by name and version


def resolved() -> Hashes:
    """Return the hashes of everything that pip would install for constraints.txt, dependencies
    included. Raises CalledProcessError."""
    asked = ["install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", "-r"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *asked, CONSTRAINTS], stdout=subprocess.PIPE, check=True
    )
    return {
        _key(each["metadata"]["name"], each["metadata"]["version"]): {
            each["download_info"]["archive_info"]["hashes"]["sha256"]
        }
        for each in json.loads(done.stdout)["install"]
    }


def add_files(hashes: Hashes, wheels: Iterable[Path]) -> None:
    """Add the hashes of these files. Raises KeyError for one of another version than is there."""
    for path in wheels:
        name, version, *_ = path.name.split("-")
        hashes[_key(name, version)].add(hashlib.sha256(path.read_bytes()).hexdigest())


def text_of(hashes: Hashes) -> str:
    """The content of the file, by name."""
    lines = (
        " \\\n    ".join(
            [f"{name}=={version}", *(f"--hash=sha256:{each}" for each in sorted(values))]
        )
        for (name, version), values in sorted(hashes.items())
    )
    return (
        _HEAD.format(python="{}.{}".format(*platform.python_version_tuple()))
        + "\n".join(lines)
        + "\n"
    )


def _key(name: str, version: str) -> tuple[str, str]:
    """The name as constraints.txt has it, and the version without a build's own part: 2.13.0+cpu is
    2.13.0."""
    return re.sub(r"[-_.]+", "-", name).lower(), version.partition("+")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--besides", nargs="*", type=Path, default=[], metavar="WHEEL", help="files from elsewhere"
    )
    options = parser.parse_args()
    hashes = resolved()
    add_files(hashes, options.besides)
    HASHES.write_text(text_of(hashes), encoding="utf-8")


if __name__ == "__main__":
    main()
