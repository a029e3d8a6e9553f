"""A chat on a terminal: keys, turns of earlier chats, commands, Markdown; turns through a pipe are
in tests/moectl/commands/test_run.py."""

import json
import os
import pty
import re
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from moectl.generating.chat import chat
from moectl.show import flow
from runtime.model.open import open_model
from runtime.session.generation.sampling import Sampling
from runtime.session.replies.pieces import CallPiece, ReasoningPiece, TextPiece
from runtime.session.session import Session
from tests.conftest import Checkpoint
from tests.helpers.serving import SETTINGS

SAMPLING = Sampling(max_new_tokens=4, temperature=1.0)
UP = "\x1b[A"
LEFT = "\x1b[D"
ALT_ENTER = "\x1b\r"
NO_ASKING = "PROMPT_TOOLKIT_NO_CPR"  # of the terminal, where the cursor is
READY = "\x1b[?2004h"  # what is pasted from here on is told apart


class Terminal:
    """A terminal, and what it has shown."""

    def __init__(self) -> None:
        self.near, far = pty.openpty()
        termios.tcsetwinsize(far, (24, 80))
        self.stdin, self.stdout = (os.fdopen(os.dup(far), mode) for mode in ("r", "w"))
        os.close(far)
        self.shown = ""
        self._num_prompts = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self.shown += os.read(self.near, 65536).decode(errors="replace")
            except OSError:
                return

    def type(self, *texts: str) -> None:
        """Type each text at the next prompt."""
        for text in texts:
            self._num_prompts += 1
            self._wait_for(self._num_prompts)
            for key in re.findall(r"\x1b\[.|\x1b\r|.", text, re.DOTALL):
                os.write(self.near, key.encode())
                time.sleep(0.002)  # else an escape and what follows it are one key
            os.write(self.near, b"\r")

    def _wait_for(self, num_prompts: int) -> None:
        for _ in range(1000):
            if self.shown.count(READY) == num_prompts:
                return
            time.sleep(0.01)
        os.write(self.near, b"\x03\x04")  # ends the chat
        raise AssertionError(f"{num_prompts} prompts are not in {self.shown!r}")

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Have the process read and write here."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", self.stdin)
            patch.setattr(sys, "stdout", self.stdout)
            patch.setattr(sys, "stderr", self.stdout)
            yield

    def close(self) -> None:
        self.stdin.close()
        self.stdout.close()
        self._reader.join(5)
        os.close(self.near)


@pytest.fixture(scope="module")
def session(checkpoint: Checkpoint) -> Iterator[Session]:
    with Session(open_model(str(checkpoint("olmoe"))), SETTINGS) as session:
        yield session


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    terminal = Terminal()
    for name, value in (("XDG_STATE_HOME", str(tmp_path)), ("TERM", "xterm"), (NO_ASKING, "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield terminal
    terminal.close()


def chatted(terminal: Terminal, session: Session, *texts: str) -> list[dict[str, str]]:
    """Return the messages of a chat, as it saves them."""
    Path("saved.json").unlink(missing_ok=True)
    typing = threading.Thread(target=terminal.type, args=(*texts, "/save saved.json", "/exit"))
    typing.start()
    with terminal.streams():
        chat(session, SAMPLING, load_s=1.0, verbose=False)
    typing.join()
    return json.loads(Path("saved.json").read_text())["messages"]


def users(messages: list[dict[str, str]]) -> list[str]:
    return [one["content"] for one in messages if one["role"] == "user"]


def test_keys_edit_a_turn_and_recall_those_of_earlier_chats(
    terminal: Terminal, session: Session, tmp_path: Path
) -> None:
    lines = (f"one{ALT_ENTER}two", '"""three\rfour"""', "\x1b[200~five\rsix\x1b[201~")
    said = users(chatted(terminal, session, *lines, "ab" + LEFT + "x"))
    assert said == ["one\ntwo", "three\nfour", "five\nsix", "axb"]
    # the two commands that ended the chat are recalled first
    assert users(chatted(terminal, session, 3 * UP)) == ["axb"]
    assert "^[[" not in terminal.shown and terminal.shown.count("\x1b[2m") == 5
    history = tmp_path / "moectl" / "chat-history"
    assert history.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_keeps_no_turns_is_told(
    terminal: Terminal, session: Session, tmp_path: Path
) -> None:
    (tmp_path / "moectl").write_text("")
    assert users(chatted(terminal, session, "one")) == ["one"]
    assert "note: turns are not kept in " in terminal.shown


def test_commands_of_a_chat(terminal: Terminal, session: Session) -> None:
    (Path("there.md")).write_text("mine")
    asked = ("/retry", "one", "/retry", "/system Be brief.", "/save there.md", "/save a.txt")
    messages = chatted(terminal, session, *asked, "/save new.md", "/save new.md", "/etc/hosts is")
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert users(messages) == ["one", "/etc/hosts is"]
    answers = [
        session.stream([messages[1]], replace(SAMPLING, seed=seed)).answer().text for seed in (0, 1)
    ]
    assert messages[2]["content"] == answers[1] != answers[0]
    shown = terminal.shown
    for line in (
        "There is no turn to answer anew.",
        "there.md is there already: name another",
        "/save takes a file that ends in .json or .md, not 'a.txt'",
    ):
        assert shown.count(line) == 1
    assert shown.count("2 turns are in new.md") == 2 and Path("there.md").read_text() == "mine"
    begin = "## system\n\nBe brief.\n\n## user\n\none\n\n## assistant\n\n"
    assert Path("new.md").read_text() == f"{begin}{answers[1].strip()}\n"


def test_an_answer_is_shown_as_markdown(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has left the screen is not written again; nothing commands the terminal."""
    monkeypatch.setattr(flow, "_EVERY_S", 0)
    monkeypatch.setattr(flow, "_RENDER_SHARE", 0)
    items = "".join(f"- item {number}\n" for number in range(40))
    text = f"# Title\n\nSome **bold** \x1b[2J text.\n\n{items}"
    cut = [TextPiece(text[begin : begin + 7]) for begin in range(0, len(text), 7)]
    calls = [CallPiece(0, "a", "look")]
    with terminal.streams():
        flow.flow_markdown(
            [TextPiece(""), ReasoningPiece("a"), ReasoningPiece("b c"), *cut, *calls]
        )
    time.sleep(0.05)
    shown = terminal.shown
    assert shown.startswith("\x1b[2mab \x1b[0m\x1b[2mc\x1b[0m\r\n")
    assert "\x1b[1mbold\x1b[0m" in shown and "**" not in shown.rpartition("Some")[2]
    assert "\x1b[2J" not in shown and "look" not in shown
    assert shown.rstrip().endswith("item 39")
    assert 1 < shown.count("item 0 ") < shown.count("item 20 ") < 100


def test_what_a_model_thinks_is_dimmed_and_forgotten(
    terminal: Terminal, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt opens a thought, which this model never ends."""
    template = "{{ messages[-1].content }}<think>\n{# </think> #}"
    monkeypatch.setattr(session.opened.tokenizer, "chat_template", template)
    messages = chatted(terminal, session, "one")
    assert messages == [{"role": "user", "content": "one"}, {"role": "assistant", "content": ""}]
    [thought] = re.findall(r"\x1b\[2m([^\x1b]*)\x1b\[0m", terminal.shown.partition("tokens/s")[0])[
        :1
    ]
    assert thought.strip()
