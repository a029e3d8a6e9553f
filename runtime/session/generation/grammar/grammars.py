"""Grammars that an answer must have: JSON schemas, grammars of Lark or GBNF and regular
expressions, by llguidance, as a rule for the next token."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from transformers import LogitsProcessor

from artifacts.errors import BadInput, BadUsage, first_line
from runtime.devices import is_host
from runtime.model.open import MoeModel
from runtime.session.generation.grammar.thoughts import Thoughts

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMIT_S = 2  # of processor time to try a grammar, which usually takes some milliseconds
LIMIT_NBYTES = 1 << 30
MOST_CHARACTERS = 1 << 18
_NUM_KEPT = 256
_FEW = 1024  # words of a mask whose tokens are sooner gathered than the others barred
_INFINITY = -0x800000  # the bits of minus infinity in float32, as a whole number
_BESIDE = ThreadPoolExecutor(1, "grammar")  # llguidance computes without the GIL
_CHILD = Path(__file__).with_name("grammar_child.py")


class NoToken(BadInput):
    """A request whose grammar or other options leave no token to draw."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar by its text: a JSON schema, a grammar of Lark or GBNF, or a regular expression."""

    kind: Literal["json_schema", "grammar", "regex"]
    text: str

    @classmethod
    def of_schema(cls, schema: Mapping[str, object] | bool) -> "Grammar":
        """Return the grammar of the JSON texts that are valid by a schema."""
        return cls("json_schema", json.dumps(schema))


JSON_OBJECT = Grammar.of_schema({"type": "object"})


class Grammars:
    """The grammars for answers of one model: each is compiled once, and the last 256 are kept."""

    def __init__(self, opened: MoeModel) -> None:
        self._opened = opened
        self._compiled = lru_cache(_NUM_KEPT)(self._compile)

    def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar, so that `rule` has it at once. Raises BadInput for one that is wrong,
        not supported, or exceeds the limits; BadUsage where llguidance is not installed."""
        self._compiled(grammar)

    def rule(
        self, grammar: Grammar, thoughts: Thoughts | None = None
    ) -> "GrammarRule | ThoughtsRule":
        """Return the rule for one answer, with `thoughts` for what follows them. Raises as
        `prepare`."""
        rule = GrammarRule(self._compiled(grammar).deep_copy(), self.vocabulary.vocab_size)
        return ThoughtsRule(rule, thoughts, self._ends) if thoughts else rule

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes for which a token stands, incomplete characters too; those of its name
        for a special one. Raises as `prepare`."""
        return self.vocabulary.decode_bytes([token_id])

    @cached_property
    def vocabulary(self) -> "LLTokenizer":
        """The tokens as llguidance knows them; it takes a second to build for 150,000. Raises as
        `prepare`."""
        try:
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise BadUsage(
                "grammars and log probabilities need llguidance: pip install 'moectl[serve]'"
            ) from None
        tokenizer = self._opened.tokenizer
        if tokenizer is None:
            raise BadInput("the checkpoint has no tokenizer: put tokenizer.json beside it")
        model = self._opened.model
        # A model may have more embeddings than the tokenizer has tokens, and rarely fewer.
        num_tokens = max(len(tokenizer), model.get_input_embeddings().num_embeddings)
        try:
            return from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=self._ends or None)
        except Exception as error:  # of a tokenizer that is not written in Rust, among others
            raise BadInput(
                f"the tokenizer cannot be used with a grammar: {first_line(error)}"
            ) from error

    @property
    def _ends(self) -> list[int]:
        """Return the tokens that end an answer."""
        ends = self._opened.model.generation_config.eos_token_id
        ends = self._opened.tokenizer.eos_token_id if ends is None else ends
        return ends if isinstance(ends, list) else [ends] * (ends is not None)

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        vocabulary = self.vocabulary
        from runtime.session.generation.grammar.grammar_child import matcher

        if grammar != JSON_OBJECT:
            _try(grammar)
        return matcher(vocabulary, grammar.kind, grammar.text)


class GrammarRule(LogitsProcessor):
    """Bars the tokens after which an answer could no longer become a text of the grammar; the end
    is allowed where it is one."""

    def __init__(self, matcher: "LLMatcher", num_tokens: int) -> None:
        self._matcher = matcher
        self.num_tokens = num_tokens
        self.is_complete = False  # if nothing may follow but the end
        self._mask: np.ndarray | None = None  # of the next token, once it is asked for
        self._coming: Future[bytes] | None = None  # which computes it meanwhile

    def allows(self, token: int) -> bool:
        """Return whether a token may be the next one."""
        if self._coming:
            mask = self._next_mask()
            return token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
        return token < self.num_tokens and self._matcher.validate_tokens([token]) == 1

    def few(self, num_tokens: int) -> torch.Tensor | None:
        """Return the tokens that may be the next one [N] int64, in their order and below
        `num_tokens`; None where they are many, or none."""
        mask = self._next_mask()
        words = mask.view(np.uint32)
        places = np.flatnonzero(words)
        if len(places) > _FEW:
            return None
        bytes_of = words[places, None].view(np.uint8)
        found, bits = np.nonzero(np.unpackbits(bytes_of, axis=1, bitorder="little"))
        tokens = places[found] * 32 + bits
        tokens = tokens[tokens < num_tokens]
        return torch.from_numpy(tokens) if len(tokens) else None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Bar tokens in the scores [1, V] float32, in place."""
        mask = self._next_mask()
        if is_host(scores.device):
            from runtime.session.generation.grammar.mask_loops import bar

            bar(scores[0].numpy(), mask)
            return scores
        # of a vocabulary larger than the grammar's the rest is barred
        allowed = np.unpackbits(mask, bitorder="little", count=scores.shape[-1])
        bits = torch.from_numpy(allowed).to(scores.device, torch.int32) - 1
        # 0 or minus infinity by its bits: masked_fill_ takes ten times as long, for its branches
        return scores.add_(bits.bitwise_and_(_INFINITY).view(torch.float32))

    def note(self, token: int) -> None:
        """Go on by the token that was drawn. Raises NoToken for one that is barred, or
        where the grammar turns out too complex."""
        was_asked = self._mask is not None
        self._mask = None
        self._coming = None
        self._matcher.consume_token(token)
        self._check()
        self.is_complete = self._matcher.is_stopped()
        if was_asked and not self.is_complete:  # the next one may be too: beside the model's pass
            self._coming = _BESIDE.submit(self._matcher.compute_bitmask)

    def _next_mask(self) -> np.ndarray:
        """Return the bits of the tokens that may be the next one, eight in a uint8. Raises
        NoToken where the grammar turns out too complex."""
        if self._mask is None:
            bits = self._coming.result() if self._coming else self._matcher.compute_bitmask()
            self._mask = np.frombuffer(bits, np.uint8).copy()
            self._check()
        return self._mask

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = first_line(Exception(self._matcher.get_error()))
            raise NoToken(f"the answer cannot go on by its grammar, make it simpler: {reason}")


def _try(grammar: Grammar) -> None:
    """Raise BadInput for a grammar that cannot be used, or takes too much time or memory."""
    name = {"json_schema": "JSON schema", "regex": "regular expression"}.get(
        grammar.kind, "grammar"
    )
    if len(grammar.text) > MOST_CHARACTERS:
        raise BadInput(
            f"the {name} has {len(grammar.text)} characters: give at most {MOST_CHARACTERS}"
        )
    tried = subprocess.run(
        [sys.executable, "-P", str(_CHILD), str(LIMIT_S), str(LIMIT_NBYTES)],
        input=json.dumps({"kind": grammar.kind, "text": grammar.text}),
        capture_output=True,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process
    )
    if tried.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise BadInput(f"the {name} takes more than {LIMIT_S} s to compile: make it smaller")
    if tried.returncode:
        raise BadInput(
            f"the {name} takes more than {LIMIT_NBYTES >> 20} MiB to compile: make it smaller"
        )
    if tried.stdout:
        reason = first_line(Exception(json.loads(tried.stdout)))
        raise BadInput(f"the {name} cannot be used: {reason}")


class ThoughtsRule(LogitsProcessor):
    """Leaves reasoning free, but for the tokens `ends` that would end the answer there, and holds
    what follows it to a grammar. A model that does not begin to reason is held to it at once."""

    def __init__(self, rule: GrammarRule, thoughts: Thoughts, ends: Sequence[int]) -> None:
        self._rule = rule
        self._thoughts = thoughts
        self._ends = ends
        self._may_begin = thoughts.begin is not None
        self._thinks = not self._may_begin

    @property
    def is_complete(self) -> bool:
        """True if nothing may follow but the end."""
        return self._rule.is_complete

    def allows(self, token: int) -> bool:
        """Return whether a token may be the next one."""
        if self._thinks:
            return token not in self._ends
        return (self._may_begin and token == self._thoughts.begin) or self._rule.allows(token)

    def few(self, num_tokens: int) -> torch.Tensor | None:
        """Return the tokens that may be the next one, as `GrammarRule.few`; None in reasoning."""
        return None if self._thinks or self._may_begin else self._rule.few(num_tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Bar tokens in the scores [1, V] float32, in place."""
        if self._thinks:
            scores[:, [end for end in self._ends if end < scores.shape[1]]] = -float("inf")
        elif self._may_begin:
            begun = scores[0, self._thoughts.begin].clone()
            self._rule(input_ids, scores)[0, self._thoughts.begin] = begun
        else:
            self._rule(input_ids, scores)
        return scores

    def note(self, token: int) -> None:
        """Go on by the token that was drawn. Raises as `GrammarRule.note`."""
        begins = self._may_begin and token == self._thoughts.begin
        if not (self._thinks or begins):
            self._rule.note(token)
        self._thinks = begins or (self._thinks and token != self._thoughts.end)
        self._may_begin = False
