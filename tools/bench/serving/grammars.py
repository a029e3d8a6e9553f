"""Grammars of answers: how right they are by the JSON-Schema-Test-Suite, and what they cost.

    python -m tools.bench.serving.grammars --suite DIR/tests/draft2020-12     a copy of the suite
    python -m tools.bench.serving.grammars                                    the selection in tests/data
    python -m tools.bench.serving.grammars --pairs 8        tokens with and without a grammar, by turns
    python -m tools.bench.serving.grammars --vocabulary FILE    masks of a vocabulary, a token a line in base64
    python -m tools.bench.serving.grammars --vocabulary FILE --pairs 8    the bundled model with this vocabulary

Exits 1 where a schema that is accepted lets an invalid text through.
"""

import base64
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import torch
from jsonschema.validators import Draft202012Validator
from llguidance import LLTokenizer, TokenizerWrapper

from moectl.bundled import demo_model
from runtime.session.generation.grammar.grammar_child import ByteVocabulary, matcher
from runtime.session.generation.grammar.grammars import JSON_OBJECT, Grammar, GrammarRule
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tools.arguments import parser_of

SELECTION = Path(__file__).parents[3] / "tests" / "data" / "json_schema" / "draft2020-12.json"
_NUM_DRAWN = 4  # answers of each schema, of as many bytes at most
_NUM_BYTES = 400
_NUM_MASKED = 9  # records
_RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 2},
        "kind": {"enum": ["home", "work"]},
        "score": {"type": "number"},
    },
    "required": ["name", "age", "email", "tags", "kind", "score"],
    "additionalProperties": False,
}
_RECORDS = {"type": "array", "items": _RECORD, "minItems": 99}  # without an end


@dataclass(slots=True)
class Figures:
    """Counts over groups of the suite. A `narrow` case is valid, and the grammar does not write it
    so; a `wrong` one is invalid, and it does. Of the answers drawn at random, `invalid` ended and
    are not valid."""

    schemas: int = 0
    accepted: int = 0
    cases: int = 0
    right: int = 0
    narrow: int = 0
    wrong: int = 0
    drawn: int = 0
    ended: int = 0
    invalid: int = 0
    unchecked: int = 0
    told: list[str] = field(default_factory=list)

    def add(self, group: dict, tokens: LLTokenizer) -> None:
        """Count the cases of one group, and answers that are drawn by its schema."""
        self.schemas += 1
        try:
            start = matcher(tokens, "json_schema", json.dumps(group["schema"]))
        except ValueError:
            return
        self.accepted += 1
        for case in group["tests"]:
            self.cases += 1
            text = json.dumps(case["data"], ensure_ascii=False).encode()
            state = start.deep_copy()
            is_taken = state.try_consume_tokens(list(text)) == len(text) and state.is_accepting()
            kind = "right" if is_taken == case["valid"] else "narrow" if case["valid"] else "wrong"
            setattr(self, kind, getattr(self, kind) + 1)
            if kind != "right":
                self.told.append(f"{kind}: {group['description']}: {case['description']}")
        for seed in range(_NUM_DRAWN):
            self._draw(group["schema"], GrammarRule(start.deep_copy(), 257), Random(seed))

    def _draw(self, schema: object, rule: GrammarRule, random: Random) -> None:
        self.drawn += 1
        text = bytearray()
        while len(text) < _NUM_BYTES and not rule.is_complete:
            allowed = rule(torch.empty(1, 0), torch.zeros(1, 257)).isfinite()[0].nonzero()
            token = random.choice(allowed.flatten().tolist())
            rule.note(token)
            if token == ByteVocabulary.eos_token_id:
                break
            text.append(token)
        else:
            if not rule.is_complete:
                return
        self.ended += 1
        try:
            is_valid = Draft202012Validator(schema).is_valid(json.loads(text))
        except re.error:  # a pattern of Unicode classes, which Python does not know
            self.unchecked += 1
            return
        if not is_valid:
            self.invalid += 1
            self.told.append(f"invalid answer: {text.decode()} to {json.dumps(schema)}")

    def show(self) -> str:
        """Return a line of the counts."""
        return (
            f"{self.accepted} of {self.schemas} schemas are accepted; of their {self.cases} cases "
            f"{self.wrong} invalid ones pass, {self.narrow} valid ones are not written so, "
            f"{self.right} are as the draft has them; {self.drawn} answers drawn: {self.ended} "
            f"ended, {self.invalid} of them invalid, {self.unchecked} unchecked"
        )


def groups_of(path: Path) -> Iterator[dict]:
    """Yield the groups of a file, or of all files in a folder."""
    for one in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        yield from json.loads(one.read_text())


def judge(groups: Iterable[dict]) -> Figures:
    """Return the counts over groups."""
    tokens = LLTokenizer(TokenizerWrapper(ByteVocabulary()))
    figures = Figures()
    for group in groups:
        figures.add(group, tokens)
    return figures


class _Vocabulary(ByteVocabulary):
    def __init__(self, path: Path) -> None:
        lines = path.read_bytes().splitlines()
        self.tokens = (*(base64.b64decode(line.split()[0]) for line in lines), b"<end>")
        self.eos_token_id = len(lines)
        self.special_token_ids = (len(lines),)
        self._ids = {token: index for index, token in enumerate(self.tokens)}

    def __call__(self, text: bytes) -> list[int]:
        """Return the longest tokens from the left."""
        found = []
        while text:
            size = next(size for size in range(len(text), 0, -1) if text[:size] in self._ids)
            found.append(self._ids[text[:size]])
            text = text[size:]
        return found


def pairs(num: int, path: Path | None) -> Iterator[str]:
    """Run the bundled model with and without a grammar by turns. Yield lines of the processor time
    and the time of a token in both, and the median of the ratios. A `path` gives the model that
    vocabulary, with random numbers for the tokens that are new to it."""
    grammar = Grammar.of_schema(_RECORDS)
    with Session.open(demo_model(), Settings("on-demand", budget="100%", threads=1)) as session:
        if path:
            vocabulary = _Vocabulary(path)
            model = session.opened.model
            model.resize_token_embeddings(len(vocabulary.tokens), mean_resizing=False)
            session.grammars.vocabulary = LLTokenizer(TokenizerWrapper(vocabulary))
        prompt = session.encode("Return the number of")

        def token_ms(sampling: Sampling) -> np.ndarray:
            begin = np.array([time.process_time(), time.perf_counter()])
            num_tokens = sum(1 for _ in session.tokens(prompt, sampling))
            return (np.array([time.process_time(), time.perf_counter()]) - begin) / num_tokens * 1e3

        for name, drawn in (("greedy", {}), ("temperature 1, top-k 50", {"temperature": 1.0})):
            free = Sampling(64, ignore_eos=True, **drawn)
            ruled = replace(free, grammar=grammar)
            token_ms(ruled)
            taken = np.array([(token_ms(free), token_ms(ruled)) for _ in range(num)])
            without, kept = np.median(taken, axis=0)
            ratio, wall_ratio = np.median(taken[:, 1] / taken[:, 0], axis=0)
            yield (
                f"{name}: {without[0]:.2f} ms of processor time a token free, {kept[0]:.2f} with a "
                f"grammar: ratio {ratio:.3f}; time {without[1]:.2f} and {kept[1]:.2f}: ratio "
                f"{wall_ratio:.3f}"
            )


def _token_us(rule: GrammarRule, ids: Sequence[int], *, masked: bool) -> float:
    scores = torch.randn(1, rule.num_tokens)
    begin_ns = time.process_time_ns()
    for token in ids:
        if not masked:
            rule.allows(token)
        elif rule.few(scores.shape[1]) is None:
            rule(torch.empty(1, 0), scores)
        rule.note(token)
    return (time.process_time_ns() - begin_ns) / len(ids) / 1e3


def masks(path: Path) -> Iterator[str]:
    """Yield lines of what masks of a vocabulary cost while a record is written."""
    record = {"name": "Ada Lovelace of London", "age": 36, "email": "ada@example.org"}
    record |= {"tags": ["mathematician", "writer"], "kind": "home", "score": 12.75}
    vocabulary = _Vocabulary(path)
    tokens = LLTokenizer(TokenizerWrapper(vocabulary))
    num = len(vocabulary.tokens)
    for name, grammar in (("a record", Grammar.of_schema(_RECORD)), ("any object", JSON_OBJECT)):
        begin_s = time.process_time()
        state = matcher(tokens, grammar.kind, grammar.text)
        compiled_ms = (time.process_time() - begin_s) * 1e3
        ids = vocabulary(json.dumps(record).encode())

        taken = [
            [
                _token_us(GrammarRule(state.deep_copy(), num), ids, masked=masked)
                for masked in (True, False)
            ]
            for _ in range(_NUM_MASKED)
        ]
        mask_us, check_us = np.median(taken, axis=0)
        yield (
            f"{num} tokens, {name}: compiled in {compiled_ms:.1f} ms; a token by its mask "
            f"{mask_us:.0f} us, by a check of the most probable one {check_us:.0f} us"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser_of(__doc__, suite=SELECTION, pairs=0, vocabulary=Path).parse_args(arguments)
    if given.pairs:
        for line in pairs(given.pairs, given.vocabulary):
            print(line)
    elif given.vocabulary:
        torch.set_num_threads(1)
        for line in masks(given.vocabulary):
            print(line)
    else:
        figures = judge(groups_of(given.suite))
        print("\n".join([*figures.told, figures.show()]))
        return int(bool(figures.wrong or figures.invalid))
    return 0


if __name__ == "__main__":
    sys.exit(main())
