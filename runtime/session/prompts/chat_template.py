"""Chats as text by the model's own template, which is a program: it runs in a process with
limits."""

import json
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from artifacts.errors import BadInput, BadUsage, first_line
from runtime.session.prompts import template_child
from runtime.session.prompts.chat_prompt import ChatPrompt

_REMEDY = "give a prompt of plain text instead"
LIMIT_S = 5.0  # of one rendering, which usually takes some milliseconds
# of the process: Python and its imports take 170 MiB, a chat of 4 MiB some copies of it
LIMIT_NBYTES = 1 << 30


class ChatTemplates:
    """Renders chats in one process, which starts at the first `render` and ends at `close`. Threads
    take turns."""

    def __init__(self, *, limit_s: float = LIMIT_S, limit_nbytes: int = LIMIT_NBYTES) -> None:
        self._limit_s = limit_s
        self._limit_nbytes = limit_nbytes
        self._lock = threading.Lock()
        self._process = None
        self._is_closed = False

    def render(self, tokenizer: PreTrainedTokenizerBase, chat: ChatPrompt) -> str:
        """The prompt for the answer to a chat, as `tokenizer.apply_chat_template` makes it. Raises
        BadInput for a template that fails or exceeds a limit, and BadUsage after `close` and for
        an option that has the name of a special token."""
        special = tokenizer.special_tokens_map
        if taken := special.keys() & chat.options.keys():
            raise BadUsage(f"{min(taken)} is the model's own: leave it out of the options")
        asked = {
            "template": template_of(tokenizer, chat),
            "turns": list(chat.turns),
            "tools": list(chat.tools) or None,
            "options": special | dict(chat.options),
        }
        with self._lock:
            answer = self._answer(json.dumps(asked))
        if "refused" in answer:
            reason = first_line(Exception(answer["refused"]))
            raise BadInput(
                f"the model's chat template refuses these messages ({reason}): change them, or "
                f"{_REMEDY}"
            )
        if "error" in answer:
            raise _unusable(first_line(Exception(answer["error"])))
        return answer["text"]

    def close(self) -> None:
        """End the process. Further calls do nothing."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _answer(self, asked: str) -> dict[str, str]:
        if self._is_closed:
            raise BadUsage("the session is closed: open another one")
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = self._start()
        try:
            with suppress(BrokenPipeError):  # the process has ended: its exit code says why
                print(asked, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except (
            BaseException
        ):  # Ctrl-C, for one: the answer would be taken for that of the next request
            self._end()
            raise
        return json.loads(answer) if answer else self._raise_end()

    def _start(self) -> subprocess.Popen[str]:
        limits = str(self._limit_s), str(self._limit_nbytes)
        # In a session of its own: Ctrl-C is for the parent, which then ends this process.
        return subprocess.Popen(
            [sys.executable, "-P", str(Path(template_child.__file__)), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="ascii",
            start_new_session=True,
        )

    def _raise_end(self) -> dict[str, str]:
        code = self._process.wait()
        self._end()
        if code == -signal.SIGALRM:
            raise BadInput(
                f"the model's chat template takes more than {self._limit_s:g} s: {_REMEDY}"
            )
        if code == template_child.OUT_OF_MEMORY:
            most = f"{self._limit_nbytes >> 20} MiB"
            raise BadInput(f"the model's chat template takes more than {most} of memory: {_REMEDY}")
        raise _unusable(f"its process ended with code {code}")

    def _end(self) -> None:
        if self._process is not None:
            process = self._process
            self._process = None
            process.kill()
            process.communicate()


def template_of(tokenizer: PreTrainedTokenizerBase, chat: ChatPrompt) -> str:
    """Return the template for a chat; some models have another one for tools. Raises BadInput where
    there are several and none is the default."""
    try:
        return tokenizer.get_chat_template(tools=list(chat.tools) or None)
    except ValueError as error:
        raise _unusable(first_line(error)) from error


def _unusable(reason: str) -> BadInput:
    return BadInput(f"the model's chat template cannot be used ({reason}): {_REMEDY}")
