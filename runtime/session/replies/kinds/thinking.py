"""Reasoning between two marks at the begin of a reply, which the prompt may have opened already."""

from functools import partial

from runtime.session.replies.pieces import ReasoningPiece, TextPiece
from runtime.session.replies.registry import REASONING, Context, reply_kind
from runtime.session.replies.source import ReplyText, Steps

_MARKS = {
    "think": ("<think>", "</think>"),  # Qwen, DeepSeek, GLM, Kimi, MiniMax M2, Nemotron and others
    "mm_think": ("<mm:think>", "</mm:think>"),  # MiniMax M3
    "seed_think": ("<seed:think>", "</seed:think>"),
    "mistral_think": ("[THINK]", "[/THINK]"),
    "gemma_thought": ("<|channel>thought\n", "<channel|>"),
    "cohere_thinking": ("<|START_THINKING|>", "<|END_THINKING|>"),
}


def _between(source: ReplyText, context: Context, opening: str, closing: str) -> Steps:
    has_begun = context.prompt_end.rstrip().endswith(opening.rstrip())
    if not (has_begun or (yield from source.blank_upto(opening))):
        yield from source.pass_upto()
        return
    marker = yield from source.pass_upto(closing, *context.breaks, kind=ReasoningPiece, begun=False)
    if marker in context.breaks:
        yield TextPiece(marker)
    yield from source.pass_upto(begun=False)


for _name, (_opening, _closing) in _MARKS.items():
    # a mark that ends in a line end is a special token before a plain word
    _tokens = (_opening.partition(">")[0] + ">" if "\n" in _opening else _opening, _closing)
    reply_kind(_name, REASONING, signs=(_closing,), markers=_tokens)(
        partial(_between, opening=_opening, closing=_closing)
    )
