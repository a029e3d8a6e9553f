"""Greedy tokens with drafts against those without: drafters, presets, families, lengths and ways
to compute, drawn by a seed.

    python -m tools.bench.decoding.drafted_answers                2,000 pairs of answers
    python -m tools.bench.decoding.drafted_answers --pairs 40 --seed 3

Prints each difference, the ties that passes of one token settled, and what was accepted by drafter.
A pass of another width rounds otherwise, in the keys that it caches too. So a difference is
explained by the first router before it that chose another expert, or, where none did, by its
logits, if the two that changed places were close without drafts. Exits 1 where they were not. The
drafter `right` drafts the undrafted answer with a wrong token now and then, so that answers of
random models are accepted in part too.
"""

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging

from artifacts.traces.trace import Trace
from runtime.drafters.base import DraftPasses, register_drafter
from runtime.model.open import MoeModel, open_model
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import EXACT, FUSED, Settings
from tools.arguments import parser_of
from tools.make.families import FAMILIES, tiny

PRESETS = ("on-demand", "near", "specmd", "moe-infinity", "fmoe")
DRAFTS = ("right:1", "right:3", "right:8", "ngram=1:4", "ngram", "resident:3", "auto")
_ANSWERS = 12  # of a model that is open
_WRONG = 0.2
_CLOSE = 8.0  # relative steps of the type
_NO_TINY = {"inkling2", "inkling_mm_model", "qwen3_omni_moe_thinker"}


@register_drafter("right")
class Right:
    """Drafts `answer`, but for wrong tokens."""

    name = "right"
    wants_hidden = False
    answer: Sequence[int] = ()

    @classmethod
    def open(cls, opened: MoeModel, argument: str | None) -> "Right":
        return cls()

    def begin(self, prompt: Sequence[int], passes: DraftPasses) -> "Right":
        self._num_prompt = len(prompt)
        self._random = random.Random(len(prompt))
        return self

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        begin = len(tokens) - self._num_prompt
        wrong = self._random.random
        return [(one + (wrong() < _WRONG)) % 90 for one in self.answer[begin : begin + most]]

    def note(self, tokens: Sequence[int], output: object) -> None: ...

    def close(self) -> None: ...

    def receipt(self) -> dict[str, object]:
        return {}


@dataclass(frozen=True, slots=True)
class Pair:
    """One answer of each kind, and what became of the drafts."""

    what: str
    draft: str
    difference: str  # empty if there is none
    is_explained: bool
    drafted: int
    accepted: int
    ties: int


@contextmanager
def opened_tiny(family: str, dtype: torch.dtype) -> Iterator[MoeModel]:
    """Open a random model of a family."""
    with tempfile.TemporaryDirectory() as folder:
        model = tiny(family)
        config = model.config.get_text_config()
        if getattr(config, "sliding_window", None) and not family.startswith("inkling"):
            config.sliding_window = 6
        model.to(dtype).save_pretrained(folder)
        opened = open_model(str(Path(folder)), dtype=dtype)
        yield opened
        opened.store.close()


def pairs(rng: random.Random, num_pairs: int) -> Iterator[Pair]:
    """Yield pairs of answers: one after the other of a model, then of another."""
    families = sorted(set(FAMILIES) - _NO_TINY)
    done = 0
    while done < num_pairs:
        family = rng.choice(families)
        dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
        with opened_tiny(family, dtype) as opened:
            for _ in range(min(_ANSWERS, num_pairs - done)):
                yield _pair(rng, opened, f"{family} {dtype}")
                done += 1


def _pair(rng: random.Random, opened: MoeModel, model: str) -> Pair:
    settings = Settings(
        preset=rng.choice(PRESETS),
        budget=rng.choice(("25%", "50%", "100%")),
        experts=rng.choice((EXACT, FUSED)),
        threads=1,
        draft="none",
    )
    settings = replace(settings, learn=settings.preset == "fmoe")
    ids = [rng.randrange(3, 20) for _ in range(rng.randrange(1, 24))]
    sampling = Sampling(max_new_tokens=rng.randrange(2, 24), ignore_eos=True)
    expected, _ = _answered(opened, settings, ids, sampling)
    Right.answer = expected
    draft = rng.choice(DRAFTS)
    drafted = replace(settings, draft=draft)
    tokens, drafting = _answered(opened, drafted, ids, sampling)
    difference = ""
    is_explained = True
    if tokens != expected:
        at = next(i for i, token in enumerate(expected) if tokens[i] != token)
        read = [*ids, *expected[:at]]
        routed = (_routed(opened, one, ids, sampling) for one in (settings, drafted))
        place, apart = _tipped(*routed, len(read)) or ("its logits", _apart(opened, settings, read))
        steps = apart / torch.finfo(opened.dtype).eps
        is_explained = steps <= _CLOSE
        difference = f"token {at}: {place}, {steps:.2g} steps apart"
    what = f"{model} {settings.preset} {settings.budget} {settings.experts} {draft} after {ids}"
    counts = (drafting[name] for name in ("drafted", "accepted", "ties"))
    return Pair(what, draft, difference, is_explained, *counts)


def _answered(
    opened: MoeModel, settings: Settings, ids: Sequence[int], sampling: Sampling
) -> tuple[list[int], dict]:
    with Session(opened, settings) as session:
        tokens = [token.token_id for token in session.tokens(torch.tensor([[*ids]]), sampling)]
        session.validate()
        return tokens, session.receipt()["draft"]


def _routed(opened: MoeModel, settings: Settings, ids: Sequence[int], sampling: Sampling) -> Trace:
    """Return the trace of an answer without its rejected drafts."""
    with Session(opened, settings) as session:
        recorder = session.record()
        for _ in session.tokens(torch.tensor([[*ids]]), sampling):
            pass
        trace = recorder.trace()
    return trace if trace.rejected is None else trace.take(np.flatnonzero(~trace.rejected))


def _tipped(undrafted: Trace, drafted: Trace, num_read: int) -> tuple[str, float] | None:
    """Return the first place among the first `num_read` tokens at which the routers of two traces
    chose other experts, and by which share of the last chosen one's probability the next was
    behind it without drafts; None if all chose the same."""
    chosen = [
        {
            (token, layer): row
            for row, (token, layer) in enumerate(
                zip(trace.token.tolist(), trace.layer.tolist(), strict=True)
            )
            if token < num_read
        }
        for trace in (undrafted, drafted)
    ]
    for place, row in sorted(chosen[0].items()):
        experts = undrafted.experts[row]
        if {*experts.tolist()} != {*drafted.experts[chosen[1][place]].tolist()}:
            ranked = np.sort(undrafted.probabilities[row])[::-1]
            last, next_one = ranked[len(experts) - 1 : len(experts) + 1].tolist()
            return "experts of token {} in layer {}".format(*place), 1 - next_one / last
    return None


def _apart(opened: MoeModel, settings: Settings, ids: Sequence[int]) -> float:
    """Return the difference of the two best logits behind these tokens as a share of the largest."""
    with Session(opened, settings) as session:
        logits = session.forward(torch.tensor([[*ids]])).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    return (first - second) / float(logits.abs().max())


def main() -> int:
    options = parser_of(__doc__, pairs=2000, seed=0).parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    counts = {name: Counter() for name in DRAFTS}
    num_different = 0
    num_unexplained = 0
    for pair in pairs(random.Random(options.seed), options.pairs):
        own = counts[pair.draft]
        own.update(pairs=1, drafted=pair.drafted, accepted=pair.accepted, ties=pair.ties)
        if pair.difference:
            num_different += 1
            num_unexplained += not pair.is_explained
            print(f"differs: {pair.what}: {pair.difference}", flush=True)
    for name, own in counts.items():
        print(f"{name:12} " + ", ".join(f"{value:,} {what}" for what, value in own.items()))
    print(
        f"{num_different} of {options.pairs:,} answers differ, {num_unexplained} of them "
        "unexplained"
    )
    return 1 if num_unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
