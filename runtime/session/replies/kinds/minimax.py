"""Calls in tags of invocations: MiniMax M2."""

from functools import partial

from runtime.session.replies.invocations import invoked
from runtime.session.replies.registry import CALLS, reply_kind

_SECTION = "minimax:tool_call"

reply_kind("minimax", CALLS, signs=(f"<{_SECTION}>",), markers=(f"<{_SECTION}>", f"</{_SECTION}>"))(
    partial(invoked, sections=(_SECTION,), mark="")
)
