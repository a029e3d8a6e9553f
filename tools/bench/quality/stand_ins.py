"""Compares buddies and controls as stand-ins for absent experts, at an equal share of replaced
ranks.

    python -m tools.bench.quality.stand_ins --store moe.duckdb [--model FOLDER] [--data held-out.jsonl]

Every choice runs live on the same held-out text, teacher-forced, under the same gates, the ranks
being those that a buddy would serve, as many as a quota lets through
(`buddy:stand_in=NAME,quota=SHARE`); the link is not emulated. KL and perplexity are against the
full model on the decoded tokens. Errors are standard errors over the texts, of the paired
difference to the buddies where a difference is shown; a random choice is drawn anew for each seed
and averaged.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from moectl.bundled import demo_model
from moectl.shared.opening import open_quietly
from moectl.shared.stores import stored_artefacts
from moectl.show.render import Sheet, show_sheet
from profilers.compare.bench import BenchText, text_of
from profilers.compare.quality import TextReading, losses_by_text, read
from profilers.text.corpus import documents
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from runtime.policies.miss.buddy import BUDDY, RANDOM, STAND_INS
from runtime.session.session import Session, Settings
from tools.arguments import parser_of


@dataclass(frozen=True, slots=True)
class Price:
    """One choice on N texts: share of replaced ranks, KL and loss of log-likelihood [N] in nats per
    token."""

    replaced: float
    kl: np.ndarray
    loss: np.ndarray


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    opened = open_quietly(options.model or str(demo_model()))
    artefacts = stored_artefacts(options.store, opened)
    if artefacts.buddies is None:
        raise SystemExit(
            "no buddies of this model in the store: run `moectl profile` and `moectl build-buddies`"
        )
    texts = documents(options.data, seed=options.seed)
    text = text_of(texts, opened.tokenizer, length=options.length, num_tokens=options.tokens)
    rows = [line for one in _compared(opened, artefacts, text, options) for line in one]
    columns = (
        "budget",
        "quota",
        "replaced",
        "stand-in",
        "perplexity ratio",
        "KL",
        "KL less buddies'",
        "+-",
    )
    show_sheet(
        Sheet(f"Who stands in, on {len(text.sequences)} texts of {options.data}", columns, rows)
    )


def _compared(
    opened: MoeModel, artefacts: Artefacts, text: BenchText, options: argparse.Namespace
) -> Iterator[list[tuple]]:
    """The rows of every budget and quota."""
    with Session(opened, Settings("full")) as session:
        full = read(session, text.sequences, prefill=text.prefill)
    for budget in options.budget:
        for quota in options.quota:
            limits = f"quota={quota}" + (f",{options.limits}" if options.limits else "")
            prices = {
                name: _mean(
                    [
                        _price(
                            opened,
                            artefacts,
                            text,
                            full,
                            budget,
                            f"buddy:stand_in={name},seed={seed},{limits}",
                        )
                        for seed in range(options.draws if name == RANDOM else 1)
                    ]
                )
                for name in STAND_INS
            }
            yield [
                _line(budget, quota, name, price, prices[BUDDY]) for name, price in prices.items()
            ]


def _price(
    opened: MoeModel,
    artefacts: Artefacts,
    text: BenchText,
    full: TextReading,
    budget: str,
    miss: str,
) -> Price:
    settings = Settings("buddymoe", policies={"miss": miss, "prefetch": "none"}, budget=budget)
    with Session(opened, settings, artefacts=artefacts) as session:
        reading = read(session, text.sequences, prefill=text.prefill)
        counters = session.controller.counters.totals()
    ranks = sum(map(len, text.sequences)) * opened.shape.top_k * opened.shape.num_layers
    replaced = (counters["replaced_ranks"] + counters["dropped_ranks"]) / ranks
    return Price(replaced, *losses_by_text(reading, full, num_texts=len(text.sequences)))


def _mean(prices: Sequence[Price]) -> Price:
    columns = zip(*((price.replaced, price.kl, price.loss) for price in prices), strict=True)
    return Price(*(np.mean(column, axis=0) for column in columns))


def _line(budget: str, quota: float, name: str, price: Price, buddy: Price) -> tuple:
    beside = price.kl - buddy.kl
    error = beside.std(ddof=1) / len(beside) ** 0.5 if name != BUDDY else None
    return (
        budget,
        f"{quota:.0%}",
        f"{price.replaced:.2%}",
        name,
        f"{np.exp(price.loss.mean()):.4f}",
        f"{price.kl.mean():.4f}",
        None if error is None else f"{beside.mean():+.4f}",
        None if error is None else f"{error:.4f}",
    )


def _options() -> argparse.Namespace:
    parser = parser_of(
        __doc__,
        model=str,
        data="builtin:held-out",
        tokens=3072,
        length=128,
        budget=["12.5%", "25%"],
        quota=[0.05, 0.1, 0.2],
        limits=("", "further parameters of buddy, as rho=1"),
        draws=(3, "seeds of the random choice"),
        seed=(0, "of the order of the documents"),
        threads=1,
    )
    parser.add_argument("--store", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
