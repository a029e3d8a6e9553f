"""Calls of a model that add a few tokens to one sequence, recognised by their arguments."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

_TAKEN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache"}
_TAKEN |= {"return_dict", "tokenizer"}  # which change nothing
_KEPT = "logits_to_keep"


@dataclass(frozen=True, slots=True, eq=False)
class NextTokens:
    """Tokens `ids` [1, T] that follow the `num_tokens` of `past`, at `positions` [1, T], or None
    for the next ones. `mask` [1, num_tokens + T] has ones for tokens that are seen; None: all are.
    `others` are the names of further arguments that the forward is given."""

    ids: torch.Tensor
    positions: torch.Tensor | None
    mask: torch.Tensor | None
    past: Cache
    num_tokens: int
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: tuple, named: Mapping[str, object], most: int = 1) -> "NextTokens | None":
        """Return the tokens that a forward is asked to add; None for anything else than up to
        `most` more tokens of a sequence."""
        ids = named.get("input_ids", args[0] if args else None)
        past = named.get("past_key_values")
        is_plain = (
            len(args) < 2 and bool(named.get("use_cache")) and named.get("return_dict") is not False
        )
        is_plain &= isinstance(past, Cache) and ids is not None and ids.shape[:-1] == (1,)
        if not is_plain or not 0 < ids.shape[1] <= most:
            return None
        positions = named.get("position_ids")
        mask = named.get("attention_mask")
        num_tokens = past.get_seq_length()
        if not isinstance(num_tokens, int):  # it is counted on the device
            return None
        is_next = positions is None or positions.shape == ids.shape
        is_next &= mask is None or mask.shape == (1, num_tokens + ids.shape[1])
        others = [name for name, value in named.items() if _is_asked(name, value, ids.shape[1])]
        if not is_next or not num_tokens:
            return None
        return cls(ids, positions, mask, past, num_tokens, tuple(others))

    @property
    def count(self) -> int:
        """T."""
        return self.ids.shape[1]

    @property
    def sees_all(self) -> bool:
        """True if no earlier token is hidden. Waits for the device where there is a mask."""
        return self.mask is None or bool(self.mask.all())


def _is_asked(name: str, value: object, count: int) -> bool:
    """Return whether an argument asks for something else than the logits of all tokens."""
    if name == _KEPT:
        return count > 1 and not (isinstance(value, int) and (value == 0 or value >= count))
    return name not in _TAKEN and value is not None and value is not False
