"""What of a prompt is known from earlier ones, and how long they are kept."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from runtime.model.rows.memory import RowMemory, room_for
from runtime.session.generation.prefill import LEAST_SHARED, PrefillQueue, Prompt, shared_beginning

TOKEN_NBYTES = 8  # keys and values of one head of one float32
ROOM = 1 << 20


def asked(ids: Sequence[int], request: int = 0) -> Prompt:
    return Prompt(request, np.array(ids), len(ids) + 4)


def queue(*, most_kept_nbytes: int = ROOM) -> PrefillQueue:
    memory = RowMemory()
    memory.token_nbytes = TOKEN_NBYTES
    return PrefillQueue(memory, most_kept_nbytes=most_kept_nbytes)


def read(queue: PrefillQueue, ids: Sequence[int]) -> Prompt:
    """A prompt that was read to its end, whose keys are its ids."""
    prompt = asked(ids)
    queue.under_way.append(prompt)
    for one, length in queue.tiles(len(ids)):
        begin = one.num_read
        values = torch.tensor(ids[begin : begin + length], dtype=torch.float32).view(1, 1, -1, 1)
        one.line.block.write(0, torch.tensor([begin]), values, values)
        one.line.length += length
    assert prompt.line.block.keys[0][0, 0, : len(ids), 0].tolist() == list(ids)
    queue.end(prompt, is_read=True)
    return prompt


@pytest.mark.parametrize("num_shared", [LEAST_SHARED - 1, LEAST_SHARED, LEAST_SHARED + 1])
def test_sixteen_equal_tokens_are_the_fewest_that_are_taken_over(num_shared: int) -> None:
    known = queue()
    read(known, range(40))
    prompt = read(known, [*range(num_shared), *range(900, 910)])
    assert LEAST_SHARED == 16 and prompt.num_reused == (num_shared if num_shared >= 16 else 0)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """Its logits are wanted; also of one that was there before, and of one that goes on after
    it."""
    known = queue()
    read(known, range(40))
    assert [read(known, range(count)).num_reused for count in (40, 30, 41)] == [39, 29, 40]
    one = np.arange(3)
    assert [
        shared_beginning(one, np.array(others)) for others in ([0, 1, 2, 3], [0, 9], [9], [])
    ] == [2, 1, 0, 0]


def test_a_prompt_waits_for_one_under_way_that_reads_more_of_it() -> None:
    """By at least as many tokens as are worth it."""
    for num_shared, are_begun in ((LEAST_SHARED, 1), (LEAST_SHARED - 1, 2)):
        both = queue()
        both.under_way += [asked(range(40)), asked([*range(num_shared), *range(900, 930)], 1)]
        assert len([*both.tiles(100)]) == are_begun


def test_the_oldest_prompts_are_forgotten_for_their_bytes() -> None:
    """As many are kept as the budget has room for, and one that is used by no request is freed."""
    nbytes = room_for(40) * TOKEN_NBYTES
    known = queue(most_kept_nbytes=2 * nbytes)
    prompts = [[*range(first, first + 40)] for first in (0, 100, 200, 300)]
    kept = []
    for ids in prompts:
        ended = read(known, ids)
        kept.append(known.nbytes_kept)
        assert ended.line is None  # its request goes on without
    assert kept == [nbytes, 2 * nbytes, 2 * nbytes, 2 * nbytes]
    assert [read(known, ids).num_reused for ids in (prompts[3], prompts[1])] == [39, 0]
    known.shrink(nbytes)
    assert known.nbytes_kept == nbytes
    known.shrink(0)
    assert known.nbytes_kept == 0 and read(known, prompts[3]).num_reused == 0
    assert (known.num_reused, known.num_forgotten) == (1, 6)


def test_a_prompt_that_was_not_read_to_its_end_is_not_kept() -> None:
    known = queue()
    known.under_way.append(prompt := asked(range(40)))
    assert [length for _, length in known.tiles(20)] == [20]
    known.end(prompt, is_read=False)
    assert known.nbytes_kept == 0 and not known.under_way


def read_with_states(queue: PrefillQueue, ids: Sequence[int]) -> tuple[Prompt, list[int]]:
    """A prompt that was read to its end, whose state is the number of tokens; and its tiles."""
    prompt = asked(ids)
    queue.under_way.append(prompt)
    tiles = []
    while prompt.num_read < len(ids):
        [(_, length)] = queue.tiles(100)
        tiles.append(length)
        prompt.line.length += length
        state = torch.tensor([[float(prompt.num_read)]])
        prompt.line.block.states[0] = {("recurrent_states", 0): state}
        queue.note_states()
    states = prompt.states
    queue.end(prompt, is_read=True)
    for count, of_layers in states.items():
        assert of_layers[0]["recurrent_states", 0].item() == count
    return prompt, tiles


def test_a_prompt_of_a_model_with_states_goes_on_where_states_were_kept() -> None:
    """At its end, at borders of whole tiles, four at the most, and where it parts from another."""
    known = PrefillQueue(RowMemory(), most_kept_nbytes=ROOM, border=16)
    begun, tiles = read_with_states(known, range(60))
    assert (begun.num_reused, tiles) == (0, [16, 16, 16, 12])
    cases = (([*range(60), 900], 60, [1]), ([*range(45), 900], 32, [14]), (range(16), 0, [16]))
    for ids, num_reused, tiles in cases:
        prompt, its_tiles = read_with_states(known, ids)
        assert (prompt.num_reused, its_tiles) == (num_reused, tiles)
    long = [*range(1000, 1200)]
    read_with_states(known, long)  # its borders are four tiles apart
    for last, num_reused, tiles in ((900, 64, [16, 10, 6, 1]), (901, 90, [6, 1])):
        prompt, its_tiles = read_with_states(known, [*long[:90], *[last] * 7])
        assert (prompt.num_reused, its_tiles) == (num_reused, tiles)
