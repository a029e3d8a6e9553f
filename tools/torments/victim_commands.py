"""The commands that torments kill or starve, and what each leaves: runs in a store, or a file or
folder beside it."""

import hashlib
import random
from pathlib import Path

_STORE = ("--store", "{folder}/moe.duckdb")
_TEXT = ("--data", "text.jsonl", "--threads", "1", *_STORE)
_QUANTIZE = (
    "quantize",
    "model",
    "--data",
    "text.jsonl",
    "--samples",
    "4",
    "--length",
    "48",
    "--jobs",
    "1",
)
_QUANTIZE += ("--recipe", "refined", *_STORE)
_LIVE = (
    "--budget",
    "50%",
    "--threads",
    "1",
    "--prompt",
    "a cat",
    "--max-new-tokens",
    "5",
    "--greedy",
    *_STORE,
)
_SHORT = ("--tokens", "32", "--length", "16")

COMMANDS = {
    "profile": ("profile", "model", *_TEXT, "--tokens", "400", "--trace", "--samples", "24"),
    "quantize": (*_QUANTIZE, "--bits", "2,4"),
    "build-maps": ("build-maps", "model", *_TEXT, "--tokens", "400"),
    "bench": ("bench", "model", *_TEXT, *_SHORT, "--rounds", "2")
    + ("--presets", "importance", "--budgets", "50%", "--links", "50MB/s"),
    "learn": ("run", "model", "--learn", "--preset", "fmoe", "--link", "50MB/s", *_LIVE),
    "tune": (
        "tune",
        "model",
        *_TEXT,
        *_SHORT,
        "--held-out",
        "text.jsonl",
        "--rounds",
        "1",
        "--jobs",
        "1",
    )
    + ("--candidates", "2", "--budget", "50%", "--link", "50MB/s"),
    "report": ("report", "{folder}/report.html", *_STORE),
    "pack": ("pack", "model", "{folder}/packed"),
    "export": ("export", "model", "--out", "{folder}/exported", *_STORE),
    "generate": ("run", "model", "--trace", "{folder}/trace.parquet", *_LIVE),
}
BEFORE = {  # the earlier runs of a store
    "build-maps before": COMMANDS["build-maps"],
    "profile before": COMMANDS["profile"],
    "quantize before": (*_QUANTIZE, "--bits", "4"),
}
OUTPUTS = ("report.html", "packed", "exported", "trace.parquet")
NEW_FOLDER = frozenset(("pack", "export"))  # refused once their folder is there
TIMED = frozenset(("tune",))  # what they choose depends on what they measure
_OF_RUNS = frozenset(("report", "export"))  # what others wrote is what they read


def drawn(rng: random.Random) -> tuple[str, bool]:
    """Return a command, and whether its store has earlier runs."""
    command = rng.choice(list(COMMANDS))
    return command, rng.random() < 0.5 or command in _OF_RUNS


def outputs(folder: Path) -> frozenset[tuple[str, str]]:
    """Return the outputs in a folder, each with a digest of its files."""
    return frozenset((name, _digest(folder / name)) for name in OUTPUTS if (folder / name).exists())


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    for file in (
        [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    ):
        digest.update(f"{file.relative_to(path)} {file.stat().st_size} ".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
