"""Differences between a row of a batch and the same request run alone: logits and greedy answer, by
type of number and kernels of experts.

    python -m tools.bench.serving.batch_answers                              prints the table
    python -m tools.bench.serving.batch_answers --write docs/generate.md     puts it there

The bundled model, converted to each type. `logits`: the largest difference of a logit from the run
alone, over the largest logit, for the first token after each prompt. Exits 1 where a float32 answer
differs, or its logits by more than 1e-5.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moectl.bundled import demo_model
from moectl.shared.opening import quieten
from runtime.session.generation import batch as batch_module
from runtime.session.generation.batch import RequestBatch
from runtime.session.generation.sampling import Sampler, Sampling, draw
from runtime.session.session import Session, Settings
from tools.arguments import parser_of
from tools.bench.performance import Section, Table, publish
from tools.bench.serving.batches import prompts

TYPES = ("float32", "bfloat16", "float16")
WAYS = ("exact", "fused")
WITHIN = 1e-5  # float32


@dataclass(frozen=True, slots=True)
class Compared:
    """Comparison for one type, way and size of a batch.

    `differ`: the share of answers that differ from those of runs alone. `tokens_before`: the share
    of tokens that come before the first different one. `logits`: the largest relative difference of
    a logit.
    """

    rows: int
    differ: float
    tokens_before: float
    logits: float


def main() -> int:
    options = _options()
    torch.set_num_threads(1)
    quieten()
    cells = []
    is_sound = True
    with tempfile.TemporaryDirectory(prefix="moectl-types-") as folder:
        for kind in TYPES:
            path = _converted(Path(folder), kind)
            for way in WAYS:
                for found in _compared(path, way, options):
                    cells.append((kind, way, found.rows, *_shown(found)))
                    is_sound &= kind != "float32" or found.differ == 0 and found.logits <= WITHIN
    columns = (
        "numbers",
        "experts",
        "at a time",
        "answers that differ",
        "tokens before the first other",
        "logits",
    )
    note = (
        f"{options.count} greedy answers of {options.tokens} tokens, the bundled toy model "
        "converted to each type"
    )
    section = Section(
        "batch-answers", [Table("A row of a batch and a run alone", columns, cells, note)]
    )
    command = " ".join(["python -m tools.bench.serving.batch_answers", *sys.argv[1:]])
    publish(section, options.write, command)
    return 0 if is_sound else 1


def _converted(folder: Path, kind: str) -> Path:
    path = folder / kind
    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=getattr(torch, kind))
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(demo_model()).save_pretrained(path)
    return path


def _compared(path: Path, way: str, options: argparse.Namespace) -> Iterator[Compared]:
    sampling = Sampling(max_new_tokens=options.tokens)
    with Session.open(path, Settings(budget="50%", threads=1, experts=way)) as session:
        asked = list(prompts(session, options.count))
        alone = [
            [token.token_id for token in session.generate(prompt, sampling)] for prompt in asked
        ]
        first = [session.forward(prompt).logits[0, -1].float() for prompt in asked]
        for rows in options.rows:
            answers, logits = _together(session, asked, sampling, rows)
            pairs = list(zip(answers, alone, strict=True))
            equal = [_num_equal(ours, theirs) for ours, theirs in pairs]
            yield Compared(
                rows,
                sum(ours != theirs for ours, theirs in pairs) / len(pairs),
                sum(equal) / sum(map(len, alone)),
                max(
                    float((a - b).abs().max() / b.abs().max())
                    for a, b in zip(logits, first, strict=True)
                ),
            )


def _together(
    session: Session, asked: list[torch.Tensor], sampling: Sampling, rows: int
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The answers of a batch, and the logits of their first tokens."""
    first: dict[tuple[int, ...], torch.Tensor] = {}

    def seen(samplers: list[Sampler], logits: torch.Tensor) -> list:
        for one, row in zip(samplers, logits.float(), strict=True):
            # by the prompt, where it is the first
            first.setdefault(tuple(one.tokens[0].tolist()), row)
        return draw(samplers, logits)

    batch_module.draw = seen
    try:
        with RequestBatch(session, rows=rows) as batch:
            numbers = [batch.add(prompt, sampling) for prompt in asked]
            answers: dict[int, list[int]] = defaultdict(list)
            while not batch.is_idle:
                for result in batch.step():
                    answers[result.request] += [] if result.token_id is None else [result.token_id]
    finally:
        batch_module.draw = draw
    return [answers[number] for number in numbers], [
        first[tuple(prompt[0].tolist())] for prompt in asked
    ]


def _num_equal(ours: list[int], theirs: list[int]) -> int:
    """Return the number of tokens that both begin with."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _shown(found: Compared) -> tuple[str, str, str]:
    return f"{found.differ:.0%}", f"{found.tokens_before:.0%}", f"{found.logits:.1e}"


def _options() -> argparse.Namespace:
    return parser_of(
        __doc__,
        rows=([16, 64], "requests at a time"),
        count=(64, "prompts"),
        tokens=(24, "of each answer"),
        write=(Path, "put the table into this page"),
    ).parse_args()


if __name__ == "__main__":
    sys.exit(main())
