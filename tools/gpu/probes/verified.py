"""Passes that verify drafts, as CUDA graphs of their own width, by each way to know where experts
are: milliseconds of a pass of 2, 4 and 8 tokens beside one of 1, in turns, of which one token
stays. Then answers with drafts and without, in turns: milliseconds a token. Three quarters of the
experts are in slots, so that four tokens' experts fit.

python -m tools.gpu.probes.verified
"""

import statistics
import time
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from transformers.cache_utils import Cache

from runtime.model.open import MoeModel
from runtime.model.rows.rollback import forgettable
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tools.gpu.groups import tell
from tools.gpu.probes.captured import ways
from tools.gpu.probes.options import parsed
from tools.gpu.probes.small_model import small_olmoe
from tools.gpu.timing import finish

WIDTHS = (1, 2, 4, 8)
PROMPT = 32
TURNS = 12  # of which the first two launch and capture
TOKENS = 48
ROUNDS = 3
LAYERS = 4
BUDGET = "75%"
DRAFT = "ngram=1:7"


def main() -> None:
    options = parsed(__doc__)
    turns, tokens, rounds = (3, 6, 1) if options.tiny else (TURNS, TOKENS, ROUNDS)
    length = PROMPT + len(WIDTHS) * turns + max(WIDTHS)
    with small_olmoe(options, layers=LAYERS, length=length) as (opened, ids):
        for way, settings in ways(options.device).items():
            own = settings if settings.preset == "full" else replace(settings, budget=BUDGET)
            measure_passes(opened, replace(own, draft=DRAFT), ids, way, turns)
            measure_answers(opened, own, ids[:PROMPT], way, tokens=tokens, rounds=rounds)


def verify(session: Session, past: Cache, ids: torch.Tensor, num_stay: int) -> torch.Tensor:
    """Read tokens [1, T], all but the first as drafts, of which `num_stay` tokens stay. Returns
    logits [T, V]."""
    count = ids.shape[1]
    drafted = np.arange(count) > 0
    given = {"input_ids": ids.to(session.opened.model.device), "past_key_values": past}
    model = session.opened.model
    with forgettable(model, past) if count > 1 else nullcontext() as added:
        output = session.run_pass(
            np.zeros(count, np.int32),
            drafted=drafted if count > 1 else None,
            **given,
            use_cache=True,
            return_dict=True,
        )
    if added is not None:
        added.forget(count - num_stay)
        session.engine.settle(drafted & (np.arange(count) < num_stay))
    return output.logits[0]


def measure_passes(
    opened: MoeModel, settings: Settings, ids: np.ndarray, way: str, turns: int
) -> None:
    """A line for each width."""
    given = torch.from_numpy(ids)[None]
    device = str(opened.model.device)
    ms = defaultdict(list)
    with Session(opened, settings) as session:
        past = session.forward(given[:, :PROMPT]).past_key_values
        read = PROMPT
        for _ in range(turns):
            for width in WIDTHS:
                finish(device)
                begin_s = time.perf_counter()
                verify(session, past, given[:, read : read + width], 1)
                finish(device)
                ms[width].append((time.perf_counter() - begin_s) * 1e3)
                read += 1
        captured = session.engine.captured.receipt() if session.engine.captured else {}
    one = statistics.median(ms[1][2:])
    left = captured.get("wide_why_not", {})
    for width in WIDTHS:
        median = statistics.median(ms[width][2:])
        told = {"ms_per_pass": median, "times_one": median / one}
        if why := captured.get("why_not") if width == 1 else left.get(width):
            told["why_not"] = why
        if width in (widths := captured.get("widths", {})):
            told["replayed"] = widths[width]
        tell(name=f"{way}, a pass of {width}", **told)


def measure_answers(
    opened: MoeModel, settings: Settings, ids: np.ndarray, way: str, *, tokens: int, rounds: int
) -> None:
    """A line for answers with drafts and for those without."""
    prompt = torch.from_numpy(ids)[None]
    sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
    ms = defaultdict(list)
    drafting = {}
    for _ in range(rounds):
        for draft in ("none", DRAFT):
            with Session(opened, replace(settings, draft=draft)) as session:
                [*session.tokens(prompt, sampling)]  # captures
                *_, first, last = [*session.tokens(prompt, sampling)][:: tokens - 1]
                ms[draft].append((last.seconds - first.seconds) * 1e3 / (tokens - 1))
                drafting = session.receipt().get("draft") or {}
    for draft, each in ms.items():
        told = {} if draft == "none" else {name: drafting[name] for name in ("drafted", "accepted")}
        ratio = statistics.median(each) / statistics.median(ms["none"])
        name = f"{way}, answers with --draft {draft}"
        tell(name=name, ms_per_token=statistics.median(each), times_undrafted=ratio, **told)


if __name__ == "__main__":
    main()
