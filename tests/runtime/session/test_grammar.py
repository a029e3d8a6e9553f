"""Grammars of answers: what they let through, where an answer ends, and which are refused."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from artifacts.errors import BadInput
from runtime.model.open import open_model
from runtime.session.generation.grammar import grammars as grammar_module
from runtime.session.generation.grammar.grammars import JSON_OBJECT, Grammar, GrammarRule, Grammars
from runtime.session.generation.grammar.thoughts import Thoughts
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import Settings
from tests.conftest import Checkpoint
from tools.bench.serving.grammars import SELECTION, groups_of, judge

PROMPT = torch.tensor([[5, 9, 2, 14]])
END = 2
NUM_TOKENS = 96


@pytest.fixture(scope="module")
def session(checkpoint: Checkpoint) -> Iterator[Session]:
    settings = Settings(budget="100%", threads=1, preset="on-demand")
    with Session(open_model(str(checkpoint("olmoe"))), settings) as session:
        yield session


def text_of(session: Session, sampling: Sampling) -> str:
    ids = [token.token_id for token in session.tokens(PROMPT, sampling)]
    return session.opened.tokenizer.decode(ids, skip_special_tokens=True)


def test_the_selection_of_the_suite_is_followed() -> None:
    """No invalid text passes, and what is drawn at random is valid. Formats are held to, which the
    draft leaves open."""
    found = judge(groups_of(SELECTION))
    assert (found.schemas, found.accepted, found.cases) == (43, 39, 166)
    assert (found.wrong, found.invalid, found.unchecked) == (0, 0, 0)
    assert (found.narrow, found.ended, found.drawn) == (6, 156, 156), found.told


@pytest.mark.parametrize("few", [0, 99])
def test_a_greedy_answer_is_the_best_of_what_is_allowed(
    session: Session, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most probable token is taken without a mask where it is allowed; otherwise the allowed
    ones are gathered, or the others barred."""
    monkeypatch.setattr(grammar_module, "_FEW", few)
    grammar = Grammar("regex", "[a-m]{4}[ -~]{6}[n-z]{4}")
    found = list(session.tokens(PROMPT, Sampling(20, grammar=grammar)))
    ids = torch.cat([PROMPT, torch.tensor([[token.token_id for token in found]])], dim=1)
    rule = session.grammars.rule(grammar)
    free = 0
    for row, token in zip(session.forward(ids).logits[0, 3:-1], found, strict=True):
        free += int(row.argmax()) == token.token_id
        assert rule(ids, row[None].clone()).argmax() == token.token_id
        rule.note(token.token_id)
    assert len(found) == 14 and 0 < free < 14  # the end is not drawn: nothing else may follow


def test_the_end_is_allowed_where_the_grammar_may_end(session: Session) -> None:
    rule = session.grammars.rule(Grammar("regex", "a+b?"))
    a, b = session.opened.tokenizer.convert_tokens_to_ids(["a", "b"])
    wide = NUM_TOKENS + 40  # embeddings beyond the tokenizer's tokens

    def allowed() -> list[int]:
        return rule(PROMPT, torch.zeros(1, wide)).isfinite()[0].nonzero().flatten().tolist()

    assert allowed() == [a] and not rule.allows(END)
    rule.note(a)
    assert allowed() == sorted([END, a, b]) and rule.allows(END) and not rule.allows(wide - 1)
    rule.note(b)
    assert rule.is_complete


def test_answers_are_texts_of_their_grammar(session: Session) -> None:
    list_of_three = Grammar(
        "grammar", 'start: "[" NUMBER ("," NUMBER){2} "]"\nNUMBER: /[1-9][0-9]{0,2}/'
    )
    gbnf = Grammar("grammar", 'root ::= "yes" | "no" ("!" | "?")')
    for seed in range(3):
        drawn = {"max_new_tokens": 200, "temperature": 1.0, "top_k": 0, "seed": seed}
        assert len(json.loads(text_of(session, Sampling(**drawn, grammar=list_of_three)))) == 3
        assert text_of(session, Sampling(**drawn, grammar=gbnf)) in ("yes", "no!", "no?")
        cut = text_of(session, Sampling(**drawn | {"max_new_tokens": 5}, grammar=JSON_OBJECT))
        assert cut.startswith("{")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("begun", [False, True])
def test_thoughts_come_before_what_a_grammar_holds(
    session: Session, temperature: float, begun: bool
) -> None:
    """They have no end but theirs; an answer without thoughts is held at once."""
    begin, end = session.opened.tokenizer.convert_tokens_to_ids(["[", "]"])
    thoughts = Thoughts(None if begun else begin, end)
    sampling = Sampling(90, temperature, 0, grammar=Grammar("regex", "x{3}"), thoughts=thoughts)

    def answer(**biases: float) -> list[int]:
        given = tuple(
            (session.opened.tokenizer.convert_tokens_to_ids(k), v) for k, v in biases.items()
        )
        taken = replace(sampling, logit_bias=(*given, (END, 30.0)), frequency_penalty=2.0)
        return [token.token_id for token in session.tokens(PROMPT, taken)]

    [x] = session.encode("x")[0].tolist()
    found = answer(**{"[": 50.0, "]": 20.0})
    assert found[-4:] == [end, x, x, x] and END not in found and found.index(end) == len(found) - 4
    assert begun or found[0] == begin
    if not begun:
        assert answer(**{"[": -100.0}) == [x, x, x]


def test_a_grammar_holds_beside_every_other_option(session: Session) -> None:
    grammar = Grammar("regex", "[xyz]{8}")
    given = {"grammar": grammar, "ignore_eos": True, "repetition_penalty": 1.3}
    for own in ({}, {"temperature": 2.0, "min_p": 0.1}, {"logit_bias": ((5, 100.0),)}):
        assert len(text_of(session, Sampling(30, **given, **own)).strip("xyz")) == 0


DEEP: dict = {"type": "string"}
for _ in range(300):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar.of_schema(DEEP), "the JSON schema cannot be used: recursion limit exceeded"),
        (Grammar.of_schema({"$ref": "#"}), "there is no such text"),
        (Grammar.of_schema({"not": {"type": "null"}}), r'Unimplemented keys: \["not"\]'),
        (Grammar.of_schema({"type": "strin"}), "Invalid type: strin"),
        (Grammar.of_schema({"$ref": "https://a/b"}), "is not present in a registry"),
        (Grammar("regex", "("), "the regular expression cannot be used: .*invalid regex"),
        (Grammar("grammar", "start: x"), 'the grammar cannot be used: .*unknown name: "x"'),
        (Grammar("regex", "x" * 300_000), "has 300000 characters: give at most 262144"),
        (
            Grammar.of_schema({"type": "integer", "multipleOf": 7919 * 7907}),
            "takes more than 1 s to compile: make it smaller",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    session: Session, grammar: Grammar, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "LIMIT_S", 1)
    with pytest.raises(BadInput, match=said) as refused:
        session.grammars.prepare(grammar)
    assert len(str(refused.value)) < 300 and "\n" not in str(refused.value)


def test_a_grammar_of_too_much_memory_is_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "LIMIT_NBYTES", 1 << 20)
    with pytest.raises(BadInput, match="takes more than 1 MiB to compile"):
        session.grammars.prepare(Grammar("regex", "ab"))


def test_a_grammar_is_compiled_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(session.opened)
    tried: list[Grammar] = []
    monkeypatch.setattr(grammar_module, "_try", tried.append)
    first, second = (grammars.rule(Grammar("regex", "a{3}")) for _ in range(2))
    first.note(session.opened.tokenizer.convert_tokens_to_ids("a"))
    assert isinstance(second, GrammarRule) and tried == [Grammar("regex", "a{3}")]
    assert len(text_of(session, Sampling(9, grammar=Grammar("regex", "a{3}")))) == 3


def test_bytes_of_tokens_join_to_the_text(session: Session) -> None:
    ids = session.encode('{"a": 1}')[0].tolist()
    assert b"".join(map(session.grammars.bytes_of, ids)) == b'{"a": 1}'
