"""Greedy tokens with drafts against those without: drafters, presets, families, lengths and ways
to compute, drawn by a seed.

    python -m tools.bench.decoding.drafted_answers                2,000 pairs of answers
    python -m tools.bench.decoding.drafted_answers --pairs 40 --seed 3

Prints each difference, the ties that passes of one token settled, and what was accepted by drafter.
Exits 1 where an answer differs. The drafter `right` drafts the undrafted answer with a wrong token
now and then, so that answers of random models are accepted in part too.
"""

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers.utils import logging

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
    is_equal: bool
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
    tokens, drafting = _answered(opened, replace(settings, draft=draft), ids, sampling)
    what = f"{model} {settings.preset} {settings.budget} {settings.experts} {draft} after {ids}"
    counts = (drafting[name] for name in ("drafted", "accepted", "ties"))
    return Pair(what, draft, tokens == expected, *counts)


def _answered(
    opened: MoeModel, settings: Settings, ids: Sequence[int], sampling: Sampling
) -> tuple[list[int], dict]:
    with Session(opened, settings) as session:
        tokens = [token.token_id for token in session.tokens(torch.tensor([[*ids]]), sampling)]
        session.validate()
        return tokens, session.receipt()["draft"]


def main() -> int:
    options = parser_of(__doc__, pairs=2000, seed=0).parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    counts = {name: Counter() for name in DRAFTS}
    num_wrong = 0
    for pair in pairs(random.Random(options.seed), options.pairs):
        own = counts[pair.draft]
        own.update(pairs=1, drafted=pair.drafted, accepted=pair.accepted, ties=pair.ties)
        if not pair.is_equal:
            num_wrong += 1
            print(f"differs: {pair.what}", flush=True)
    for name, own in counts.items():
        print(f"{name:12} " + ", ".join(f"{value:,} {what}" for what, value in own.items()))
    print(f"{num_wrong} of {options.pairs:,} answers differ")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
