"""Text through a session: streams that are dropped, closed or read to the end, and the effort of
each."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from artifacts.errors import BadInput, BadUsage, Incompatible
from runtime import Answer, Sampling, Session, Settings
from runtime.session.prompts.chat_prompt import ChatPrompt
from runtime.session.replies.reply import Reply
from tests.conftest import Checkpoint
from tests.helpers import scripted
from tests.helpers.families import VOCABULARY

PROMPTS = ("It was a dark and stormy night;", "sheep", "the old gate")
LONG = Sampling(max_new_tokens=64, ignore_eos=True)
SHORT = Sampling(max_new_tokens=6, ignore_eos=True)


@pytest.fixture
def session(checkpoint: Checkpoint) -> Iterator[Session]:
    with Session.open(checkpoint("olmoe"), Settings(budget="25%", device="cpu")) as session:
        yield session


def test_pieces_are_the_text(session: Session) -> None:
    stream = session.stream(PROMPTS[0], SHORT)
    pieces = list(stream)
    answer = stream.answer()
    assert "".join(pieces) == answer.text and len(answer.token_ids) == 6
    assert answer.effort == session.effort() and answer.receipt == session.receipt()
    assert (
        answer.effort.hit_rate
        == answer.effort.counters["hits"] / answer.effort.counters["requests"]
    )
    assert answer.ttft_ms > 0 and answer.tpot_ms > 0
    assert stream.answer() == answer


def test_a_stream_that_is_dropped_stops_at_once(session: Session) -> None:
    for _ in session.stream(PROMPTS[0], LONG):
        break
    assert session.num_passes == 1
    assert len(session.stream(PROMPTS[1], SHORT).answer().token_ids) == 6


def test_a_stream_that_is_closed_has_what_was_generated_so_far(session: Session) -> None:
    whole = session.stream(PROMPTS[0], SHORT).answer()
    stream = session.stream(PROMPTS[0], LONG)
    next(stream)
    stream.close()
    answer = stream.answer()
    assert len(answer.token_ids) == 1
    assert answer.token_ids[:6] == whole.token_ids[: len(answer.token_ids)]
    assert answer.effort.counters["requests"] > 0
    unread = session.stream(PROMPTS[0], LONG)
    unread.close()
    assert unread.answer().token_ids == [] and unread.answer().effort.counters["requests"] == 0


def test_each_of_several_threads_gets_the_effort_of_its_own_answer(session: Session) -> None:
    """The number of requests of a text does not depend on what the cache holds, so that it tells
    the answers apart."""
    alone = [_requests(session.stream(prompt, SHORT).answer()) for prompt in PROMPTS]
    before = _counted(session)
    answers = dict.fromkeys(PROMPTS)

    def ask(prompt: str) -> None:
        answers[prompt] = session.stream(prompt, SHORT).answer()

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [_requests(answers[prompt]) for prompt in PROMPTS] == alone
    assert sum(alone) == _counted(session) - before


def test_a_stream_yields_the_pieces_of_a_reply(tmp_path: Path) -> None:
    """Marks that are special tokens are seen by the parser, and are no part of the text."""
    call = '{"name": "add", "arguments": {"a": 2}}'
    said = ("<think>so</think>Good.", "<tool_call>", call, "</tool_call>")
    path = scripted.save(tmp_path / "model", {"<|go|>": said}, "<|go|>")
    tool = {"type": "function", "function": {"name": "add"}}
    chat = ChatPrompt([{"role": "user", "content": "a"}], [tool])
    with Session.open(path, Settings(budget="100%", device="cpu")) as session:
        marks = {"additional_special_tokens": ["<tool_call>", "</tool_call>"]}
        session.opened.tokenizer.add_special_tokens(marks)
        stream = session.stream(chat, Sampling(16))
        reply = Reply.of(stream.pieces())
        assert (reply.reasoning, reply.text) == ("so", "Good.")
        assert [(one.name, one.arguments) for one in reply.calls] == [("add", '{"a": 2}')]
        assert stream.answer().text == f"<think>so</think>Good.{call}"
        plain = session.stream(chat.turns, Sampling(16)).pieces()
        assert Reply.of(plain) == Reply(f"Good.{call}", "so", ())


def _requests(answer: Answer) -> int:
    return answer.effort.counters["requests"]


def _counted(session: Session) -> int:
    return session.effort().counters["requests"]


def test_a_prompt_that_the_model_cannot_take_is_refused(session: Session) -> None:
    with pytest.raises(BadInput, match="the prompt is empty"):
        session.stream("").answer()
    with pytest.raises(BadInput, match="is not text in UTF-8"):
        session.stream("\udc80")


def test_options_that_leave_no_token_are_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain generate() fails in the midst of a draw."""
    monkeypatch.setattr(
        session.opened.model.generation_config, "suppress_tokens", list(range(VOCABULARY))
    )
    with pytest.raises(BadInput, match="leave no token to draw"):
        session.stream("a", Sampling(2, temperature=1.0)).answer()
    monkeypatch.undo()
    assert session.stream("a", Sampling(2, temperature=1.0, ignore_eos=True)).answer().token_ids


def test_what_cannot_be_opened_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="--base 5 is none"):
        Session.open("no such model", base=5)
    with pytest.raises(BadInput, match="neither a folder here nor reachable"):
        Session.open(tmp_path / "none")
    with pytest.raises(Incompatible, match="run `moectl quantize`"):
        Session.open(checkpoint("olmoe"), base=4)
    with pytest.raises(BadInput, match="there is no store .*none.duckdb; moectl profile makes one"):
        Session.open(checkpoint("olmoe"), store=tmp_path / "none.duckdb")
    with pytest.raises(Incompatible, match="needs buddies.* `moectl build-buddies`"):
        Session.open(checkpoint("olmoe"), Settings("buddymoe"))
