"""Calls in DeepSeek's markup language: DeepSeek V3.2 and V4."""

from functools import partial

from runtime.session.replies.invocations import invoked
from runtime.session.replies.registry import CALLS, reply_kind

_MARK = "｜DSML｜"
_SECTIONS = ("function_calls", "tool_calls")  # V3.2, V4

reply_kind("dsml", CALLS, signs=(_MARK,), markers=(_MARK,))(
    partial(invoked, sections=_SECTIONS, mark=_MARK)
)
