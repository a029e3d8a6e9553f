"""`moectl run` without a prompt: a chat on the terminal, or turns from stdin."""

import sys
from collections.abc import Callable
from contextlib import suppress

from artifacts.common.suggestions import unknown
from artifacts.errors import BadInput
from moectl.show.answers import in_a_line, show_details, tell_fallbacks
from moectl.show.counters import counters_sheet
from moectl.show.flow import flow
from moectl.show.render import show_sheet
from runtime.session.generation.sampling import Sampling, TooLong
from runtime.session.generation.stream import Answer
from runtime.session.session import Session


class Chat:
    """A conversation: the whole of it is the prompt of each answer."""

    def __init__(self, session: Session, sampling: Sampling, *, load_s: float) -> None:
        self._session = session
        self._sampling = sampling
        self._load_s = load_s
        self._turns: list[dict[str, str]] = []
        self._last: Answer | None = None
        self._num_told = 0  # of the fallbacks

    def say(self, text: str) -> None:
        """Print the answer to a turn as it comes. Ctrl-C ends the answer; what came of it stays in
        the conversation."""
        self._turns.append({"role": "user", "content": text})
        try:
            self._last = self._answered()
        except TooLong as error:
            self._turns.pop()
            if not sys.stdin.isatty():
                raise
            print(f"{error}, or /clear the conversation", file=sys.stderr)
            return
        self._turns.append({"role": "assistant", "content": self._last.text})
        tell_fallbacks(self._last.receipt["fallbacks"][self._num_told :])
        self._num_told = len(self._last.receipt["fallbacks"])
        self._session.fold()

    def _answered(self) -> Answer:
        stream = self._session.stream(self._turns, self._sampling)
        try:
            flow(stream)
        except KeyboardInterrupt:
            print()
        return stream.answer()

    def tell(self) -> None:
        """Print the line of the last answer on stderr."""
        if self._last is not None:
            print(in_a_line(self._last, load_s=self._load_s), file=sys.stderr)

    def stats(self) -> None:
        """Print what the last answer took, and the counters of all."""
        self.tell()
        show_sheet(counters_sheet(self._session.effort()))

    def clear(self) -> None:
        """Begin a new conversation."""
        self._turns.clear()
        print("A new conversation begins.", file=sys.stderr)

    def help(self) -> None:
        """Print the commands."""
        for name, (_, what) in _COMMANDS.items():
            print(f"{name:7} {what}", file=sys.stderr)

    def exit(self) -> None:
        """End as at the end of stdin."""
        raise EOFError


_COMMANDS: dict[str, tuple[Callable[[Chat], None], str]] = {
    "/stats": (Chat.stats, "what the last answer took, and counters by layer since the start"),
    "/clear": (Chat.clear, "forget the conversation"),
    "/help": (Chat.help, "these lines"),
    "/exit": (Chat.exit, "leave, as Ctrl-D does"),
}


def chat(session: Session, sampling: Sampling, *, load_s: float, verbose: bool) -> None:
    """Answer turns from stdin until it ends; with `verbose` say after each what it took, and show
    all counters and the receipt at the end."""
    if sys.stdin.isatty():
        print(
            "Chat: Ctrl-D or /exit leaves, Ctrl-C ends an answer, /help lists commands",
            file=sys.stderr,
        )
    talk = Chat(session, sampling, load_s=load_s)
    with suppress(EOFError):
        while (line := _ask()) is not None:
            if line.startswith("/") and " " not in line:
                _obey(talk, line)
                continue
            talk.say(line)
            if verbose:
                talk.tell()
    if verbose:
        show_details(session.effort(), session.receipt())


def _obey(talk: Chat, command: str) -> None:
    if command in _COMMANDS:
        _COMMANDS[command][0](talk)
    else:
        print(unknown("command", command, _COMMANDS), file=sys.stderr)


def _ask() -> str | None:
    """Return the next line that is not blank, None at the end of stdin."""
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
