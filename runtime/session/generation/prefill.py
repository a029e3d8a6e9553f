"""Prompts that are being read in tiles: their order, and the beginnings that are known from earlier
prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from runtime.model.row_memory import RowLine, RowMemory

LEAST_SHARED = 16  # tokens: for fewer, keys and values are not copied


@dataclass(slots=True, eq=False)
class Prompt:
    """The tokens of a request's prompt and, once it is begun, its keys and values; those of the
    first `num_reused` tokens were copied. `num_tokens` includes its answer."""

    request: int
    ids: np.ndarray
    num_tokens: int
    line: RowLine | None = None
    num_reused: int = 0

    @property
    def num_read(self) -> int:
        return self.line.length if self.line else 0


class PrefillQueue:
    """The prompts under way, first come, first read, and the last ones that were read. A prompt
    that begins like one of them copies its keys and values. `most_kept_nbytes` bounds the prompts
    that are kept only for that."""

    def __init__(self, memory: RowMemory, *, most_kept_nbytes: int) -> None:
        self.under_way: list[Prompt] = []
        self.most_kept_nbytes = most_kept_nbytes
        self._memory = memory
        self._kept: list[Prompt] = []  # the oldest first

    def tiles(self, num_tokens: int) -> Iterator[tuple[Prompt, int]]:
        """Yield the prompts of the next pass and how many tokens of each, `num_tokens` in all."""
        for prompt in self.under_way:
            if num_tokens == 0:
                return
            if prompt.line is None and not self._begin(prompt):
                continue
            length = min(num_tokens, len(prompt.ids) - prompt.num_read)
            num_tokens -= length
            yield prompt, length

    def end(self, prompt: Prompt, *, is_read: bool) -> None:
        """Take a prompt out; one that was read to its end is kept for others."""
        self.under_way.remove(prompt)
        if is_read:
            self._kept.append(replace(prompt))
            self.shrink(self.most_kept_nbytes)
        prompt.line = None  # its request goes on, and forgotten prompts are freed

    def shrink(self, nbytes: int) -> None:
        """Forget the oldest kept prompts until the others take at most `nbytes`."""
        while self._kept and self.nbytes_kept > nbytes:
            del self._kept[0]

    @property
    def nbytes_kept(self) -> int:
        """Bytes of the keys and values of kept prompts."""
        return sum(prompt.line.block.room for prompt in self._kept) * self._memory.token_nbytes

    def _begin(self, prompt: Prompt) -> bool:
        """Give a prompt room, with the longest beginning that is known. Returns False if an earlier
        prompt under way is about to read a longer one."""
        longest = 0
        source = None
        for other in (*self._kept, *self._before(prompt)):
            shared = shared_beginning(prompt.ids, other.ids)
            known = min(shared, other.num_read)
            if known > longest:
                longest = known
                source = other
        coming = max(
            (shared_beginning(prompt.ids, other.ids) for other in self._before(prompt)), default=0
        )
        if coming >= longest + LEAST_SHARED:
            return False
        if longest < LEAST_SHARED:
            longest = 0
            source = None
        prompt.line = self._memory.begin(len(prompt.ids), source.line if source else None, longest)
        prompt.num_reused = longest
        return True

    def _before(self, prompt: Prompt) -> Sequence[Prompt]:
        return self.under_way[: self.under_way.index(prompt)]


def shared_beginning(ids: np.ndarray, others: np.ndarray) -> int:
    """Return the number of tokens that both have in common at the beginning, without the last token
    of `ids`, whose logits are wanted."""
    length = min(len(ids) - 1, len(others))
    differs = ids[:length] != others[:length]
    return int(differs.argmax()) if differs.any() else length
