"""The turns of a chat: lines of stdin, or what is typed on a terminal, where keys edit and recall
it."""

import os
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from artifacts.errors import BadInput

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

QUOTES = '"""'
Ask = Callable[[], str | None]
"""Returns the next turn that is not blank, None at the end. Raises BadInput."""


def asker(commands: Sequence[str]) -> Ask:
    """Return what asks for turns. On a terminal Tab completes the commands, and turns of earlier
    chats are there to recall."""
    if not is_typed():
        return _line
    # late: 0.1 s
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.input import create_input
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,  # what is pasted is one turn, however many lines it has
        prompt_continuation="... ",
        key_bindings=_keys(),
        history=_history(),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
        input=create_input(sys.stdin),
        output=create_output(stdout=sys.stderr),
    )

    def typed() -> str | None:
        try:
            while not (turn := _unquoted(session.prompt()).strip()):
                pass
        except EOFError:
            return None
        return turn

    return typed


def is_typed() -> bool:
    """Return whether turns are typed on a terminal that shows what is said to their writer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


@contextmanager
def unechoed() -> Iterator[None]:
    """Keep the terminal from showing what is typed during an answer; it is there at the next
    turn."""
    if not is_typed():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    hidden = [*before]
    hidden[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _line() -> str | None:
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return next((line.strip() for line in sys.stdin if line.strip()), None)
    except UnicodeDecodeError:
        encoding = sys.stdin.encoding.upper()
        raise BadInput(
            f"what came on stdin is not text in {encoding}: convert it, or set PYTHONIOENCODING"
        ) from None
    except OSError as error:  # a folder, a terminal that is gone
        raise BadInput(f"stdin cannot be read: {error.strerror}") from None


def _keys() -> "KeyBindings":
    """Return the keys that end a turn, a line of it, and what is written so far."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: "KeyPressEvent") -> None:
        if _is_open(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("escape", "c-j")  # as it is where it was typed before this turn
    def _(event: "KeyPressEvent") -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _(event: "KeyPressEvent") -> None:
        event.current_buffer.reset()

    return keys


def _is_open(text: str) -> bool:
    """Return whether a text begins with three quotes and goes on to others."""
    text = text.strip()
    return text.startswith(QUOTES) and (len(text) < 2 * len(QUOTES) or not text.endswith(QUOTES))


def _unquoted(text: str) -> str:
    inner = text.strip()
    return inner.removeprefix(QUOTES).removesuffix(QUOTES) if inner.startswith(QUOTES) else text


def _history() -> "History":
    """Return the turns of all chats, which only their user may read; of this one alone, and a note,
    where they cannot be kept."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    path = Path(state, "moectl", "chat-history")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.read_bytes()
    except OSError as error:
        print(f"note: turns are not kept in {path}: {error.strerror}", file=sys.stderr)
        return InMemoryHistory()
    return FileHistory(str(path))
