"""Keys and values of many requests: each row keeps its own, whatever comes and goes beside it."""

from weakref import ref

import torch

from runtime.model.rows.memory import MOST_ROWS, Beginning, RowLine, RowMemory, room_for
from tests.helpers.uncollected import uncollected

LAYERS = (0, 1)
HEADS = 2
WIDTH = 4
NUM_TOKENS = 5


def read(memory: RowMemory, mark: int, num_tokens: int = NUM_TOKENS) -> RowLine:
    """A prompt whose keys and values tell it by `mark`."""
    line = memory.begin(num_tokens)
    for layer in LAYERS:
        line.block.write(layer, torch.tensor([0]), *said(mark, layer, num_tokens))
    line.length = num_tokens
    return line


def said(mark: int, layer: int, num_tokens: int = NUM_TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    keys = (
        100.0 * mark
        + 10 * layer
        + torch.arange(num_tokens).view(1, 1, -1, 1).expand(1, HEADS, -1, WIDTH)
    )
    return keys, -keys


def holds(line: RowLine, mark: int) -> bool:
    held = [(layer, kind) for layer in LAYERS for kind in (0, 1)]
    rows = [
        (line.block.keys, line.block.values)[kind][layer][line.place, :, :NUM_TOKENS]
        for layer, kind in held
    ]
    return all(
        torch.equal(row, said(mark, layer)[kind][0])
        for row, (layer, kind) in zip(rows, held, strict=True)
    )


def test_every_row_keeps_its_own_while_a_block_grows() -> None:
    """Also when it is full, and another begins."""
    memory = RowMemory()
    lines = [memory.join(read(memory, mark), 2 * NUM_TOKENS) for mark in range(MOST_ROWS + 1)]
    assert all(holds(line, mark) for mark, line in enumerate(lines))
    assert [len(rows) for rows in memory.blocks.values()] == [MOST_ROWS, 1]
    assert all(
        [line.place for line in rows] == list(range(len(rows))) for rows in memory.blocks.values()
    )


def test_the_last_row_moves_into_a_gap() -> None:
    memory = RowMemory()
    lines = [memory.join(read(memory, mark), NUM_TOKENS) for mark in range(4)]
    memory.drop(lines[1])
    assert [*memory.blocks.values()] == [[lines[0], lines[3], lines[2]]]
    assert [line.place for line in (lines[0], lines[3], lines[2])] == [0, 1, 2]
    assert all(holds(lines[mark], mark) for mark in (0, 2, 3))
    for mark in (3, 0, 2):
        memory.drop(lines[mark])
    assert not memory.blocks


def test_what_is_dropped_is_freed_at_once() -> None:
    """Lines of a block, prompts, and prompts that others began from: without the collector."""
    memory = RowMemory()
    held = []
    with uncollected():
        for mark in range(200):
            prompt = read(memory, mark)
            line = memory.join(memory.begin(NUM_TOKENS, Beginning(prompt, 3)), NUM_TOKENS)
            assert memory.nbytes == 4 * room_for(NUM_TOKENS) * memory.token_nbytes > 0
            blocks = (prompt.block, line.block)
            held += [
                ref(tensor)
                for block in blocks
                for tensor in (*block.keys.values(), *block.values.values())
            ]
            memory.drop(line)
        del prompt, line, blocks
        assert len(held) == 200 * 2 * 2 * len(LAYERS) and not any(
            tensor() is not None for tensor in held
        )
