"""A decoded token of this checkout beside one of another, in turns: what did a change cost?

    git worktree add ../old COMMIT
    python -m tools.bench.checkouts ../old

Both programs have the same model open in processes of their own and compute the same tokens, one
each, so that other load of the machine, which lasts longer than a token, slows both. The ratio is
new over old; quartiles are over pairs of tokens, in which each program went first once.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from tools import ROOT

SETTINGS = (
    ("on-demand", "exact"),
    ("on-demand", "fused"),
    ("horizon", "exact"),
    ("near", "exact"),
    ("near", "fused"),
    ("full", "exact"),
    ("full", "fused"),
)
_PROMPT = 32
_WARM_UP = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path, help="a checkout of the repository at another commit")
    parser.add_argument("--model", type=Path, default=ROOT / "moectl" / "demo")
    parser.add_argument("--tokens", type=int, default=320, help="of each setting, an even number")
    asked = parser.parse_args()
    if not (asked.old / "runtime").is_dir():
        parser.error(f"{asked.old} is no checkout of this repository")
    if asked.tokens % 2:
        parser.error("--tokens takes an even number")
    new = Program(ROOT, asked.model, asked.tokens)
    old = Program(asked.old, asked.model, asked.tokens)
    for preset, experts in SETTINGS:
        print(f"{preset}, {experts}: {beside(new, old, asked.tokens)}", flush=True)


def beside(new: "Program", old: "Program", tokens: int) -> str:
    """Measure both programs in the setting that comes next to both."""
    from tools.bench.performance import Ratio  # an old checkout, which computes alone, may lack it

    new.begin()
    old.begin()
    own = []
    other = []
    for turn in range(tokens):
        for program, times in ((new, own), (old, other))[:: 1 if turn % 2 else -1]:
            times.append(program.token_s())
    ratio = Ratio.of(_pairs(own), _pairs(other))
    median, quartiles = ratio.cells()
    return f"{median} of the old one's time ({quartiles}, {tokens // 2} pairs)"


def _pairs(times: list[float]) -> list[float]:
    return [one + next_one for one, next_one in zip(times[::2], times[1::2], strict=True)]


class Program:
    """The code of a checkout in a process of its own, which computes a token when it is told to."""

    def __init__(self, checkout: Path, model: Path, tokens: int) -> None:
        # -P: the folder of this file, which is not the old checkout's, stays off the path
        command = [sys.executable, "-P", __file__, "--compute", str(model.resolve()), str(tokens)]
        self._process = subprocess.Popen(
            command,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def begin(self) -> None:
        """Wait until the next setting is open and warm."""
        self._line()

    def token_s(self) -> float:
        """Return the seconds of the next token."""
        self._process.stdin.write("\n")
        return float(self._line())

    def _line(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a program ended before it was done: see above")
        return line


def compute(model: str, num_tokens: int) -> None:
    """Print a line where a setting is ready, and the seconds of a token after each line read."""
    import torch

    from runtime.model.open import open_model
    from runtime.session.session import Session, Settings

    torch.set_num_threads(1)
    opened = open_model(model, device=torch.device("cpu"))
    ids = torch.arange(3, 3 + _PROMPT + _WARM_UP + num_tokens)[None]
    for preset, experts in SETTINGS:
        budget = "100%" if preset == "full" else "25%"
        with Session(
            opened, Settings(preset, budget=budget, experts=experts, threads=1)
        ) as session:
            past = session.forward(ids[:, :_PROMPT]).past_key_values
            for at in range(_PROMPT, ids.shape[1]):
                if at == _PROMPT + _WARM_UP:
                    print("ready", flush=True)
                if at >= _PROMPT + _WARM_UP:
                    sys.stdin.readline()
                begin_s = time.perf_counter()
                past = session.forward(ids[:, at : at + 1], past=past).past_key_values
                if at >= _PROMPT + _WARM_UP:
                    print(time.perf_counter() - begin_s, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compute"]:
        compute(sys.argv[2], int(sys.argv[3]))
    else:
        main()
