"""Log probabilities of an answer's tokens, in the two formats of OpenAI's API."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from moectl.serving.jobs import LoggedToken

_LEAST = -9999.0  # which OpenAI's API has for a token that cannot be drawn


def of_chat(tokens: Sequence[LoggedToken]) -> dict[str, object]:
    """Return the `logprobs` of a choice of a chat, with the bytes of each token."""

    def entry(data: bytes, logprob: float) -> dict[str, object]:
        return {"token": _text(data), "logprob": _finite(logprob), "bytes": list(data)}

    content = [
        entry(token.data, token.logprob) | {"top_logprobs": [entry(*one) for one in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


@dataclass(slots=True)
class CompletionLog:
    """The `logprobs` of a choice of a completion, part by part."""

    num_before: int = 0  # characters of the text before its tokens
    _data: bytearray = field(default_factory=bytearray)

    def add(self, tokens: Sequence[LoggedToken]) -> dict[str, object]:
        """Return the part of the next tokens: their texts, and where each begins."""
        offsets = []
        for token in tokens:
            offsets.append(self.num_before + len(self._data.decode(errors="ignore")))
            self._data += token.data
        return {
            "tokens": [_text(token.data) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {
                    _text(data): _finite(value)
                    for data, value in (*token.top, (token.data, token.logprob))
                }
                for token in tokens
            ],
            "text_offset": offsets,
        }


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
