"""Renders chat templates within limits of time and memory, in a process of its own: a request a
line, an answer a line.

`chat_template.py` starts this file as a script. It imports transformers' own renderer, but not the
package's `__init__`, which takes three times as long, and nothing of moectl.
"""

import json
import os
import resource
import signal
import sys
import types
from collections.abc import Callable
from importlib.util import find_spec

OUT_OF_MEMORY = 99  # exit code


def main(limit_s: float, limit_nbytes: int) -> None:
    """Answer requests until stdin ends. SIGALRM ends the process when a template takes longer than
    `limit_s`; it exits with OUT_OF_MEMORY when it needs more than `limit_nbytes` of address
    space."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a thread for each processor would count as address space
    render = _renderer()
    resource.setrlimit(resource.RLIMIT_AS, (limit_nbytes, limit_nbytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        # The default action of SIGALRM also ends a single long operation, such as a power of large
        # numbers.
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            answer = json.dumps(_answer(render, **json.loads(line)))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(answer, flush=True)


def _answer(
    render: Callable,
    template: str,
    turns: list[dict[str, object]],
    tools: list[dict[str, object]] | None,
    options: dict[str, object],
) -> dict[str, str]:
    asked = {"tools": tools, "chat_template": template, "add_generation_prompt": True} | options
    try:
        try:
            [text], _ = render([_with_objects(turns)], **asked)
        except TypeError:  # a few templates join the arguments of earlier calls to their text
            [text], _ = render([turns], **asked)
        return {"text": text}
    except MemoryError:
        raise
    except Exception as error:  # a template is a program, which may raise anything
        # by raise_exception; those of jinja2 itself are below it
        is_refused = type(error).__name__ == "TemplateError"
        return {"refused" if is_refused else "error": str(error) or type(error).__name__}


def _with_objects(turns: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return turns in which the arguments of calls are objects, as most templates take them, where
    they are the JSON of one."""
    return [
        turn | {"tool_calls": [_with_object(call) for call in turn["tool_calls"]]}
        if turn.get("tool_calls")
        else turn
        for turn in turns
    ]


def _with_object(call: dict[str, object]) -> dict[str, object]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, TypeError, RecursionError):
        return call
    is_object = isinstance(arguments, dict)
    return call | {"function": function | {"arguments": arguments}} if is_object else call


def _renderer() -> Callable:
    for name in ("transformers", "transformers.utils"):
        package = types.ModuleType(name)
        package.__path__ = find_spec(name).submodule_search_locations
        sys.modules[name] = package
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
