"""Keys, values and states of many requests, each at its own length: blocks of rows that have equal
room.

A line refers to its block and no block to its lines, so that the tensors of a finished request are
freed at once. A cycle would wait for Python's collector, which counts objects and not bytes.

Shapes: R rows of a block, A heads of keys, C tokens of room, D numbers a head, S tokens.
"""

from dataclasses import dataclass, field

import torch

from runtime.devices import is_host
from runtime.model.kv_cache import KvCoding

LEAST_ROOM = 64
MOST_ROWS = 32
_GROWTH = 4
States = dict[int, dict[tuple[str, int], torch.Tensor]]
"""States [R, ...] by layer, and there by kind and number: of linear attention and convolutions."""


def room_for(num_tokens: int) -> int:
    """Return the room of a row that gets `num_tokens` tokens: the next power of two, at least
    64."""
    return max(LEAST_ROOM, 1 << (num_tokens - 1).bit_length())


@dataclass(slots=True, eq=False)
class RowLine:
    """The keys and values of one request: row `place` of `block`, `length` tokens of it filled."""

    block: "Block"
    place: int
    length: int = 0

    @property
    def states(self) -> States:
        """The states of this row, [1, ...] each, as they lie in its block."""
        return {
            layer: {name: rows[self.place : self.place + 1] for name, rows in of_layer.items()}
            for layer, of_layer in self.block.states.items()
        }

    def snapshot(self) -> States:
        """Return a copy of the states of this row."""
        return {
            layer: {name: state.clone() for name, state in of_layer.items()}
            for layer, of_layer in self.states.items()
        }


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """The first `length` tokens of a prompt that was read into `line`, and the states after them,
    [1, ...] each."""

    line: RowLine
    length: int
    states: States = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Block:
    """Rows with room for C tokens each. Layers are made at their first write, [R, A, C, D], in RAM
    if `in_ram`, page-locked beside a GPU, and else where they are computed; a `coding` makes bytes
    of some. States have no room to grow and are always where they are computed."""

    room: int
    num_rows: int
    in_ram: bool = False
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    states: States = field(default_factory=dict)
    coding: KvCoding | None = None

    def write(
        self,
        layer: int,
        first: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        row: int = 0,
    ) -> None:
        """Put S tokens [n, A, S, D] into n rows, `row` the first, from position `first` [n] of each
        on. Either n or S is 1."""
        for name, held, new in (("keys", self.keys, keys), ("values", self.values, values)):
            if self.coding:
                new = self.coding.pack(layer, name, new)
            if layer not in held:
                held[layer] = self._zeros(new)
            to = held[layer]
            if len(new) == 1:
                begin = int(first[0])
                to[row, :, begin : begin + new.shape[2]] = new[0]
            else:
                rows = torch.arange(row, row + len(new), device=to.device)
                to[rows, :, first.to(to.device)] = new[:, :, 0].to(to.device)

    def read(
        self, layer: int, rows: slice, end: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [n, A, end, D] of some rows on a device. Those in RAM are copied
        there whole, in one copy each, since parts of rows would be many small copies."""
        keys, values = (
            held[layer][rows].to(device, non_blocking=True)[:, :, :end]
            for held in (self.keys, self.values)
        )
        if not self.coding:
            return keys, values
        return self.coding.unpack(layer, "keys", keys), self.coding.unpack(layer, "values", values)

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Return room for the keys or values of a layer, with the dtype, heads and head size of
        `like` [n, A, S, D]. It holds zeros because masked values are multiplied by 0, which leaves
        a NaN a NaN."""
        shape = (self.num_rows, like.shape[1], self.room, like.shape[3])
        if not self.in_ram:
            return like.new_zeros(shape)
        pin = not is_host(like.device) or like.is_pinned()
        return torch.zeros(shape, dtype=like.dtype, pin_memory=pin)

    def grow(self, num_rows: int) -> None:
        """Make room for more rows."""
        self.num_rows = num_rows
        for held in (self.keys, self.values):
            for layer, old in held.items():
                held[layer] = self._zeros(old)
                held[layer][: len(old)] = old
        for of_layer in self.states.values():
            for name, old in of_layer.items():
                of_layer[name] = old.new_zeros(num_rows, *old.shape[1:])
                of_layer[name][: len(old)] = old

    def copy(self, source: RowLine, place: int) -> None:
        """Fill row `place` with the filled part of another row, and with its states."""
        self.begin(Beginning(source, source.length, source.states), place)

    def begin(self, beginning: Beginning, place: int) -> None:
        """Fill row `place` with a beginning of another row."""
        line = beginning.line
        for held, theirs in ((self.keys, line.block.keys), (self.values, line.block.values)):
            for layer, old in theirs.items():
                if layer not in held:
                    held[layer] = self._zeros(old)
                held[layer][place, :, : beginning.length] = old[line.place, :, : beginning.length]
        for layer, of_layer in beginning.states.items():
            held = self.states.setdefault(layer, {})
            for name, state in of_layer.items():
                if name not in held:
                    held[name] = state.new_zeros(self.num_rows, *state.shape[1:])
                held[name][place] = state[0]

    @property
    def token_nbytes(self) -> int:
        """Bytes that one token takes in all layers; 0 before anything was written."""
        tensors = [*self.keys.values(), *self.values.values()]
        return sum(each.shape[1] * each.shape[3] * each.element_size() for each in tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.num_rows * (self.room * self.token_nbytes + self.states_nbytes)

    @property
    def states_nbytes(self) -> int:
        """Bytes of the states of one row; 0 before anything was read."""
        tensors = [one for of_layer in [*self.states.values()] for one in [*of_layer.values()]]
        return sum(one.nbytes // self.num_rows for one in tensors)


class RowMemory:
    """Keys, values and states of running requests. A prompt that is being read lies by itself
    (`begin`). It then joins a block of rows with as much room (`join`), so that one product attends
    for all of them.

    `blocks` has the lines of each block: row i belongs to line i, without gaps. `token_nbytes`:
    bytes of keys and values of one token in all layers, and `states_nbytes`: of the states of one
    request, both 0 until a pass has been run. With `in_ram` keys and values lie in RAM and are
    brought to the device of the model layer by layer.
    """

    def __init__(self, *, in_ram: bool = False, coding: KvCoding | None = None) -> None:
        self.blocks: dict[Block, list[RowLine]] = {}
        self._in_ram = in_ram
        self._coding = coding
        self.token_nbytes = 0
        self.states_nbytes = 0

    def begin(self, num_tokens: int, beginning: Beginning | None = None) -> RowLine:
        """Return room for a prompt of `num_tokens` tokens, which begins with a copy of
        `beginning`."""
        line = RowLine(self._new_block(room_for(num_tokens), 1), 0)
        if beginning is not None:
            line.block.begin(beginning, 0)
            line.length = beginning.length
        return line

    def join(self, prompt: RowLine, num_tokens: int) -> RowLine:
        """Move a prompt that was read into a block of rows that get `num_tokens` tokens in all.
        `prompt` stays as it is."""
        self.token_nbytes = self.token_nbytes or prompt.block.token_nbytes
        self.states_nbytes = self.states_nbytes or prompt.block.states_nbytes
        block = self._block(room_for(num_tokens))
        lines = self.blocks[block]
        line = RowLine(block, len(lines), prompt.length)
        lines.append(line)
        block.copy(prompt, line.place)
        return line

    def row_nbytes(self, num_tokens: int) -> int:
        """Return the bytes of a row that gets `num_tokens` tokens."""
        return room_for(num_tokens) * self.token_nbytes + self.states_nbytes

    def drop(self, line: RowLine) -> None:
        """Free the row of a request that is over: the last row of its block moves into its
        place."""
        block = line.block
        lines = self.blocks[line.block]
        last = lines.pop()
        if last is not line:
            block.copy(last, line.place)
            last.place = line.place
            lines[line.place] = last
        if not lines:
            del self.blocks[block]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, without prompts that are being read."""
        return sum(block.nbytes for block in [*self.blocks])

    def _new_block(self, room: int, num_rows: int) -> Block:
        return Block(room, num_rows, self._in_ram, coding=self._coding)

    def _block(self, room: int) -> Block:
        """Return a block with this room and a free row."""
        for block, lines in self.blocks.items():
            if block.room == room and len(lines) < MOST_ROWS:
                break
        else:
            block = self._new_block(room, 0)
            lines = []
            self.blocks[block] = lines
        if len(lines) == block.num_rows:
            block.grow(min(block.num_rows + _GROWTH, MOST_ROWS))
        return block
