"""Prompts that are being read in tiles: their order, and the beginnings that are known from earlier
prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from runtime.model.rows.memory import Beginning, RowLine, RowMemory, States, room_for

LEAST_SHARED = 16  # tokens: for fewer, keys and values are not copied
_MOST_BORDERS = 4  # of a prompt: states may take as many bytes as keys and values of many tokens


@dataclass(slots=True, eq=False)
class Prompt:
    """The tokens of a request's prompt and, once it is begun, its keys and values; those of the
    first `num_reused` tokens were copied. `num_tokens` includes its answer.

    `states` are those after as many tokens, from which another prompt can go on. They are also kept
    at `cuts`, where another prompt is known to differ from this one."""

    request: int
    ids: np.ndarray
    num_tokens: int
    line: RowLine | None = None
    num_reused: int = 0
    states: dict[int, States] = field(default_factory=dict)
    cuts: set[int] = field(default_factory=set)

    @property
    def num_read(self) -> int:
        return self.line.length if self.line else 0


class PrefillQueue:
    """The prompts under way, first come, first read, and the last ones that were read. A prompt
    that begins like one of them copies its keys and values. `most_kept_nbytes` bounds the prompts
    that are kept only for that.

    With a `border` the model has states, which nothing but reading can take to another length. So a
    prompt is cut at every multiple of `border` tokens. The states at its end and at up to four of
    these borders are kept with it, and those where another prompt was seen to differ.
    """

    def __init__(self, memory: RowMemory, *, most_kept_nbytes: int, border: int = 0) -> None:
        self.under_way: list[Prompt] = []
        self.most_kept_nbytes = most_kept_nbytes
        self.num_reused = 0
        self.num_forgotten = 0
        self._memory = memory
        self._border = border
        self._kept: list[Prompt] = []  # the oldest first

    def tiles(self, num_tokens: int) -> Iterator[tuple[Prompt, int]]:
        """Yield the prompts of the next pass and how many tokens of each, at most `num_tokens` in
        all."""
        begun = [prompt for prompt in self.under_way if prompt.line or self._begin(prompt)]
        for prompt in begun:
            if num_tokens == 0:
                return
            length = min(num_tokens, self._next_cut(prompt) - prompt.num_read)
            num_tokens -= length
            yield prompt, length

    def note_states(self) -> None:
        """Keep the states of prompts under way that a pass has read to a border."""
        for prompt in self.under_way:
            if self._border and prompt.num_read and self._keeps_states(prompt):
                prompt.states.setdefault(prompt.num_read, prompt.line.snapshot())

    def end(self, prompt: Prompt, *, is_read: bool) -> None:
        """Take a prompt out; one that was read to its end is kept for others."""
        self.under_way.remove(prompt)
        if is_read:
            if self._border:
                prompt.states[prompt.num_read] = prompt.line.states
            if self.most_kept_nbytes:
                self._kept.append(replace(prompt))
            self.shrink(self.most_kept_nbytes)
        prompt.line = None  # its request goes on, and forgotten prompts are freed
        prompt.states = {}

    def shrink(self, nbytes: int) -> None:
        """Forget the oldest kept prompts until the others take at most `nbytes`."""
        while self._kept and self.nbytes_kept > nbytes:
            del self._kept[0]
            self.num_forgotten += 1

    @property
    def nbytes_kept(self) -> int:
        """Bytes of the keys, values and states of kept prompts."""
        kept = [*self._kept]
        num_tokens = sum(prompt.line.block.room for prompt in kept)
        states = {id(one) for prompt in kept for one in prompt.states.values()}
        return num_tokens * self._memory.token_nbytes + len(states) * self._memory.states_nbytes

    @property
    def nbytes_under_way(self) -> int:
        """Bytes of the keys and values of prompts that are being read, without their borders."""
        lines = [prompt.line for prompt in [*self.under_way]]
        return sum(line.block.nbytes for line in lines if line)

    def most_nbytes(self, prompt: Prompt) -> int:
        """Return the most bytes that a prompt takes until it is read."""
        num_states = _MOST_BORDERS + len(prompt.cuts) if self._border else 0
        return self._memory.row_nbytes(len(prompt.ids)) + num_states * self._memory.states_nbytes

    def _begin(self, prompt: Prompt) -> bool:
        """Give a prompt room, with the longest beginning that is known. Returns False if an earlier
        prompt under way is about to read a longer one."""
        others = (*self._kept, *self._before(prompt))
        shared = [shared_beginning(prompt.ids, other.ids) for other in others]
        known = list(map(self._known, others, shared))
        most_shared = max(shared, default=0)
        longest = max(known, default=0)
        if self._is_coming(prompt, longest + LEAST_SHARED):
            return False
        if self._border and most_shared >= longest + LEAST_SHARED:
            prompt.cuts.add(most_shared)  # the next one that begins so goes on from there
        if longest < LEAST_SHARED:
            prompt.line = self._memory.begin(len(prompt.ids))
            return True
        self._begin_like(prompt, others[known.index(longest)], longest)
        return True

    def _begin_like(self, prompt: Prompt, source: Prompt, length: int) -> None:
        """Give a prompt room that holds the first `length` tokens of another one."""
        beginning = Beginning(source.line, length, source.states.get(length, {}))
        prompt.line = self._memory.begin(len(prompt.ids), beginning)
        prompt.states = {count: one for count, one in source.states.items() if count <= length}
        prompt.num_reused = length
        self.num_reused += 1

    def _is_coming(self, prompt: Prompt, least: int) -> bool:
        """Return whether an earlier prompt under way is about to read at least `least` tokens of
        this one; it then keeps its states there."""
        for other in self._before(prompt):
            shared = shared_beginning(prompt.ids, other.ids)
            if max(least - 1, other.num_read) < shared:
                other.cuts.add(shared)
                return True
        return False

    def _known(self, other: Prompt, shared: int) -> int:
        """Return the number of tokens, at most `shared`, from which a prompt can go on that has
        these in common with another one."""
        if not self._border:
            return min(shared, other.num_read)
        return max((count for count in other.states if count <= shared), default=0)

    def _next_cut(self, prompt: Prompt) -> int:
        """Return the number of tokens at which the next tile of a prompt ends at the latest."""
        if not self._border:
            return len(prompt.ids)
        border = (prompt.num_read // self._border + 1) * self._border
        cuts = (cut for cut in prompt.cuts if cut > prompt.num_read)
        return min(len(prompt.ids), border, *cuts)

    def _keeps_states(self, prompt: Prompt) -> bool:
        """Return whether the states are kept where a prompt is now."""
        num_tiles = max(1, room_for(len(prompt.ids)) // (_MOST_BORDERS * self._border))
        return prompt.num_read in prompt.cuts or prompt.num_read % (num_tiles * self._border) == 0

    def _before(self, prompt: Prompt) -> Sequence[Prompt]:
        return self.under_way[: self.under_way.index(prompt)]


def shared_beginning(ids: np.ndarray, others: np.ndarray) -> int:
    """Return the number of tokens that both have in common at the beginning, without the last token
    of `ids`, whose logits are wanted."""
    length = min(len(ids) - 1, len(others))
    differs = ids[:length] != others[:length]
    return int(differs.argmax()) if differs.any() else length
