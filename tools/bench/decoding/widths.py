"""Times passes over 1, 2, 4 and 8 tokens of one sequence, with every expert resident and experts
fused, in pairs within a round.

    python -m tools.bench.decoding.widths
    python -m tools.bench.decoding.widths --model PATH --threads 2

Without `--model` a random checkpoint of OLMoE's shape is measured. Routing of random weights is
random; `--alike` mixes that share of one vector into all embeddings, so that neighbours choose
experts in common as tokens of real text do. `experts` is how many a layer's tokens choose, over
those of one token. Neighbours in the bundled trace of gpt-oss-20b, which also chooses an eighth of
its experts, choose 1.55, 2.31 and 3.20 times as many; random ones 1.88, 3.31 and 5.25.
"""

import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np
import torch

from moectl.show.render import Sheet, show_sheet
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
from tools.arguments import parser_of
from tools.bench.decoding.resident import OLMOE_SHAPED, PROMPT, random_model
from tools.bench.measuring import in_turns
from tools.bench.performance import Ratio

WIDTHS = (1, 2, 4, 8)


@torch.inference_mode()
def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        folder = options.model or stack.enter_context(random_model(*OLMOE_SHAPED))
        opened = open_model(str(folder), dtype=getattr(torch, options.dtype), dense=options.dense)
        settings = Settings("full", experts=FUSED, threads=options.threads, dense=options.dense)
        session = stack.enter_context(Session(opened, settings))
        embeddings = opened.model.get_input_embeddings()
        plain = embeddings.weight.clone() if options.alike else None
        for share in options.alike or [0.0]:
            if plain is not None:
                embeddings.weight.copy_((1 - share) * plain + share * plain[0])
            _show(session, share, options)


def _show(session: Session, share: float, options: Namespace) -> None:
    """Print the table of one share of what embeddings have in common."""
    times_ms: dict[int, list[float]] = {width: [] for width in WIDTHS}
    chosen: dict[int, list[float]] = {width: [] for width in WIDTHS}
    vocab_size = session.opened.model.config.vocab_size
    random = np.random.default_rng(0)
    _timed(session, random.integers(3, vocab_size, (1, PROMPT + 2 * sum(WIDTHS))), WIDTHS)
    for _, width in in_turns(WIDTHS, options.rounds):
        ids = random.integers(3, vocab_size, (1, PROMPT + WIDTHS[-1] * options.passes))
        seconds, requests = _timed(session, ids, (width,) * options.passes)
        times_ms[width].append(median(seconds) * 1e3)
        chosen[width].append(requests)
    rows = []
    for width, own in times_ms.items():
        ratio = Ratio.of(own, times_ms[1])
        experts = np.mean(chosen[width]) / np.mean(chosen[1])
        rows.append((width, f"{median(own):.2f}", *ratio.cells(), f"{experts:.2f}"))
    columns = ("tokens a pass", "ms a pass", "ratio to 1", "quartiles", "experts")
    note = (
        f"{options.rounds} rounds of {options.passes} passes each, {options.threads} threads, "
        f"{options.dtype}; embeddings have a share of {share} in common"
    )
    show_sheet(Sheet("Passes over several tokens", columns, rows, note))


def _timed(session: Session, ids: np.ndarray, widths: tuple[int, ...]) -> tuple[list[float], float]:
    """Return the processor seconds of each pass behind a prompt, and the experts requested by
    one."""
    tokens = torch.from_numpy(ids)
    past = session.forward(tokens[:, :PROMPT]).past_key_values
    counters = session.controller.counters
    before = counters.totals()["requests"]
    seconds = []
    place = PROMPT
    for width in widths:
        own = tokens[:, place : place + width]
        begin_s = time.process_time()
        past = session.forward(own, past=past).past_key_values
        seconds.append(time.process_time() - begin_s)
        place += width
    return seconds, (counters.totals()["requests"] - before) / len(widths)


def _options() -> Namespace:
    parser = parser_of(
        __doc__,
        rounds=(12, "in which each width is measured once"),
        passes=(6, "of each width in a round, of which the median counts"),
        threads=(1, "that compute"),
        dtype=("bfloat16", "in which the model computes"),
        dense=("", "form of the dense layers, as of `moectl run --dense`"),
    )
    parser.add_argument("--model", type=Path, help="a checkpoint")
    parser.add_argument("--alike", type=float, nargs="+", help="shares, from 0 to 1")
    options = parser.parse_args()
    options.dense = options.dense or None
    return options


if __name__ == "__main__":
    main()
