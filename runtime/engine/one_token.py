"""Calls of a model that decode one token of one sequence, recognised by their arguments."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

_TAKEN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache"}
_TAKEN |= {"logits_to_keep", "return_dict", "tokenizer"}  # which change nothing for one token


@dataclass(frozen=True, slots=True, eq=False)
class OneToken:
    """A token `ids` [1, 1] that follows the `num_tokens` of `past`, at `positions` [1, 1], or None
    for the next one. `mask` [1, num_tokens + 1] has ones for tokens that are seen; None: all are.
    `others` are the names of further arguments that the forward is given."""

    ids: torch.Tensor
    positions: torch.Tensor | None
    mask: torch.Tensor | None
    past: Cache
    num_tokens: int
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: tuple, named: Mapping[str, object]) -> "OneToken | None":
        """Return the token that a forward is asked to decode; None for anything else than one more
        token of a sequence."""
        ids = named.get("input_ids", args[0] if args else None)
        past = named.get("past_key_values")
        is_plain = (
            len(args) < 2 and bool(named.get("use_cache")) and named.get("return_dict") is not False
        )
        is_plain &= isinstance(past, Cache) and ids is not None and ids.shape == (1, 1)
        if not is_plain:
            return None
        positions = named.get("position_ids")
        mask = named.get("attention_mask")
        num_tokens = past.get_seq_length()
        if not isinstance(num_tokens, int):  # it is counted on the device
            return None
        is_next = positions is None or positions.shape == (1, 1)
        is_next &= mask is None or mask.shape == (1, num_tokens + 1)
        others = tuple(
            name for name, value in named.items() if name not in _TAKEN and _is_asked(value)
        )
        return (
            cls(ids, positions, mask, past, num_tokens, others) if is_next and num_tokens else None
        )

    @property
    def sees_all(self) -> bool:
        """True if no earlier token is hidden. Waits for the device where there is a mask."""
        return self.mask is None or bool(self.mask.all())


def _is_asked(value: object) -> bool:
    return value is not None and value is not False
