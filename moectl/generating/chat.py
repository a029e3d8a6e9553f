"""`moectl run` without a prompt: a chat on the terminal, or turns from stdin."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from artifacts.common.files import replacing
from artifacts.common.suggestions import unknown
from artifacts.errors import BadInput, Problem
from moectl.generating.asking import QUOTES, asker, is_typed, unechoed
from moectl.show.answers import in_a_line, show_details, tell_fallbacks
from moectl.show.counters import counters_sheet
from moectl.show.flow import flow, flow_markdown, show_aside, shows_markdown
from moectl.show.render import show_sheet
from runtime.session.generation.sampling import Sampling, TooLong
from runtime.session.generation.stream import Answer
from runtime.session.replies.pieces import Piece, TextPiece
from runtime.session.replies.reply import Reply
from runtime.session.session import Session

_JSON = ".json"
_SAVED = (_JSON, ".md")


class Chat:
    """A conversation: the whole of it is the prompt of each answer."""

    def __init__(self, session: Session, sampling: Sampling, *, load_s: float) -> None:
        self._session = session
        self._sampling = sampling
        self._load_s = load_s
        self._system = ""
        self._turns: list[dict[str, str]] = []
        self._last: Answer | None = None
        self._num_told = 0  # of the fallbacks
        self._saved: set[Path] = set()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns, after what the system says."""
        said = [{"role": "system", "content": self._system}] if self._system else []
        return said + self._turns

    def say(self, text: str) -> None:
        """Print the answer to a turn as it comes. Ctrl-C ends the answer; what came of it stays in
        the conversation."""
        self._turns.append({"role": "user", "content": text})
        said: list[Piece] = []
        try:
            self._last = self._answered(said)
        except TooLong as error:
            self._turns.pop()
            if not sys.stdin.isatty():
                raise
            print(f"{error}, or /clear the conversation", file=sys.stderr)
            return
        self._turns.append({"role": "assistant", "content": Reply.of(said).text})
        if is_typed():
            show_aside(in_a_line(self._last))
        tell_fallbacks(self._last.receipt["fallbacks"][self._num_told :])
        self._num_told = len(self._last.receipt["fallbacks"])
        self._session.fold()

    def _answered(self, said: list[Piece]) -> Answer:
        """Print the pieces of an answer while they are generated, and append them to `said`."""
        tokenizer = self._session.opened.tokenizer
        stream = self._session.stream(self.messages, self._sampling)
        pieces = _noted(stream.pieces(), said)
        try:
            # A model without a template goes on with any text, code for one.
            if is_typed() and tokenizer.chat_template and shows_markdown():
                flow_markdown(pieces)
            else:
                flow(one.text for one in pieces if isinstance(one, TextPiece))
        except KeyboardInterrupt:
            stream.close()
            print()
        return stream.answer()

    def tell(self) -> None:
        """Print the line of the last answer on stderr."""
        if self._last is not None:
            print(in_a_line(self._last, load_s=self._load_s), file=sys.stderr)

    def system(self, text: str) -> None:
        """Tell the model how to answer from now on; nothing, without a text."""
        self._system = text
        said = "holds from the next answer on" if text else "is empty"
        print(f"The system's message {said}.", file=sys.stderr)

    def retry(self, _: str) -> None:
        """Answer the last turn anew, with the next seed."""
        if not self._turns:
            print("There is no turn to answer anew.", file=sys.stderr)
            return
        self._sampling = replace(self._sampling, seed=self._sampling.seed + 1)
        turn, _ = self._turns[-2:]
        del self._turns[-2:]
        self.say(turn["content"])

    def save(self, name: str) -> None:
        """Write the conversation into a file of this chat's own, or print why it cannot."""
        try:
            self._save(Path(name).expanduser())
        except Problem as problem:
            print(problem, file=sys.stderr)

    def _save(self, path: Path) -> None:
        if path.suffix not in _SAVED:
            raise BadInput(
                f"/save takes a file that ends in {' or '.join(_SAVED)}, not {str(path)!r}"
            )
        if path.exists() and path.resolve() not in self._saved:
            raise BadInput(f"{path} is there already: name another")
        as_text = _as_json if path.suffix == _JSON else _as_markdown
        with replacing(path) as temporary:
            temporary.write_text(as_text(self.messages), encoding="utf-8")
        self._saved.add(path.resolve())
        print(f"{len(self._turns)} turns are in {path}", file=sys.stderr)

    def stats(self, _: str) -> None:
        """Print what the last answer took, and the counters of all."""
        self.tell()
        show_sheet(counters_sheet(self._session.effort()))

    def clear(self, _: str) -> None:
        """Begin a new conversation."""
        self._turns.clear()
        print("A new conversation begins.", file=sys.stderr)

    def help(self, _: str) -> None:
        """Print the commands."""
        for name, (_, given, what) in _COMMANDS.items():
            print(f"{name + given:12} {what}", file=sys.stderr)
        if is_typed():
            print(f"Alt+Enter, or {QUOTES} around them: several lines", file=sys.stderr)

    def exit(self, _: str) -> None:
        """End as at the end of stdin."""
        raise EOFError


# what each does, its argument, and a line about it
_COMMANDS: dict[str, tuple[Callable[[Chat, str], None], str, str]] = {
    "/system": (Chat.system, " TEXT", "how to answer from now on; without TEXT nothing is said"),
    "/retry": (Chat.retry, "", "another answer to the last turn"),
    "/save": (Chat.save, " FILE", "the conversation as Markdown (.md) or messages (.json)"),
    "/stats": (Chat.stats, "", "what the last answer took, and counters by layer since the start"),
    "/clear": (Chat.clear, "", "forget the conversation, not what the system says"),
    "/help": (Chat.help, "", "these lines"),
    "/exit": (Chat.exit, "", "leave, as Ctrl-D does"),
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
    ask = asker(list(_COMMANDS))
    with unechoed(), suppress(EOFError):
        while (turn := ask()) is not None:
            if _obeyed(talk, turn):
                continue
            talk.say(turn)
            if verbose and not is_typed():
                talk.tell()
    if verbose:
        show_details(session.effort(), session.receipt())


def _obeyed(talk: Chat, turn: str) -> bool:
    """Do what a command says; False for a turn that is none, as one that begins with a path."""
    name, _, rest = turn.partition(" ")
    do, given, _ = _COMMANDS.get(name, (None, "", ""))
    if not turn.startswith("/") or rest and not given:
        return False
    if do:
        do(talk, rest.strip())
    else:
        print(unknown("command", name, _COMMANDS), file=sys.stderr)
    return True


def _noted(pieces: Iterable[Piece], said: list[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        said.append(piece)
        yield piece


def _as_json(messages: list[dict[str, str]]) -> str:
    return json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n"


def _as_markdown(messages: list[dict[str, str]]) -> str:
    return "\n".join(f"## {one['role']}\n\n{one['content'].strip()}\n" for one in messages)
