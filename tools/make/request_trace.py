"""Records requests of several texts through any model, for `moectl simulate --reproduce fmoe
--trace OUT`.

    python -m tools.make.request_trace MODEL OUT.parquet --first A.txt B.jsonl --then C.txt D.jsonl --requests 16

Each text in `--then` gives as many requests as `--requests` says, which come last and are replayed;
each text in `--first` gives three times as many, which make the maps. Texts take turns.
Teacher-forced: the text's own tokens are what was generated.
"""

from pathlib import Path

import numpy as np
import torch

from artifacts.traces.parquet import write_parquet
from moectl.shared.opening import open_quietly
from runtime.model.open import MoeModel
from tools.arguments import parser_of
from tools.reproductions.requests import told, whole_requests


def in_turn(opened: MoeModel, texts: list[str], *, count: int, length: int) -> list[np.ndarray]:
    """`count` requests of each text, the texts taking turns as long as they last."""
    each = [whole_requests(opened, text, count=count, length=length) for text in texts]
    return [sequences[turn] for turn in range(count) for sequences in each if turn < len(sequences)]


def main() -> None:
    parser = parser_of(__doc__, requests=16, length=128, prefill=64, distance=2)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--first", nargs="+", required=True)
    parser.add_argument("--then", nargs="+", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    opened = open_quietly(options.model, device="cpu")
    before = in_turn(opened, options.first, count=3 * options.requests, length=options.length)
    after = in_turn(opened, options.then, count=options.requests, length=options.length)
    before = before[: 3 * len(after)]
    trace = told(opened, [*before, *after], prefill=options.prefill, distance=options.distance)
    write_parquet(trace, options.out)
    print(
        f"{options.out}: {len(before)} requests for maps, {len(after)} to replay, {len(trace):,} "
        "rows"
    )


if __name__ == "__main__":
    main()
