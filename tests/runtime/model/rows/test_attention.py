"""A shared pass gives each request the logits that it gets alone, in every family that can."""

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from runtime.model.rows.attention import attended, reason_not_joined
from runtime.model.rows.memory import RowLine, RowMemory
from runtime.model.rows.passes import RowPass, RowPiece, RowWay
from tools.make.families import ALONE, FAMILIES, tiny

pytestmark = pytest.mark.slow

PROMPTS = (
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8],
    [7, 7, 11, 12, 13],
)  # one is beyond the window of 8
NEXT = ([21, 22, 23], [24, 25, 26])
# Gemma's text model is tested as gemma4_text, and opened from gemma4 in test_shared_states.py; the
# towers of the others take seconds to build.
LEFT_OUT = {"gemma4", "deepseek_ocr2", "muse_spark"}
EAGER = {"qwen4_exp"}  # whose masks then are numbers; qwen4_exp_text is the same model by sdpa
# transformers' cache follows a window in its config, and its masks do not; published are none
NO_WINDOW = {"qwen3_omni_moe_thinker"}
Piece = tuple[list[RowLine], Sequence[Sequence[int]]]


def ids_of(tokens: Sequence[int]) -> torch.Tensor:
    return torch.tensor([tokens])


def shared_pass(model: PreTrainedModel, way: RowWay, pieces: Sequence[Piece]) -> torch.Tensor:
    """The logits of all tokens: of each piece the tokens of each of its lines."""
    given = []
    ids = []
    positions = []
    for lines, tokens in pieces:
        first = torch.tensor([line.length for line in lines])
        given.append(RowPiece(lines[0].block, len(lines), len(tokens[0]), first))
        for line, own in zip(lines, tokens, strict=True):
            ids += own
            positions += range(line.length, line.length + len(own))
            line.length += len(own)
    at = {"input_ids": ids_of(ids), "position_ids": ids_of(positions)}
    return model(**at, **RowPass(given, way).inputs()).logits[0]


def alone(model: PreTrainedModel, prompt: list[int], following: list[int]) -> torch.Tensor:
    """The logits of the last token of a prompt and of two tokens after it."""
    output = model(input_ids=ids_of(prompt), use_cache=True)
    logits = [output.logits[0, -1]]
    for token in following[:2]:
        past = output.past_key_values
        output = model(input_ids=ids_of([token]), past_key_values=past, use_cache=True)
        logits.append(output.logits[0, -1])
    return torch.stack(logits)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - ALONE.keys() - LEFT_OUT))
@torch.inference_mode()
def test_logits_in_a_shared_pass_are_those_of_each_alone(family: str) -> None:
    """A prompt in two pieces and another one beside its second piece, then both in one piece."""
    model = tiny(family, {"sliding_window": None} if family in NO_WINDOW else {})
    if family in EAGER:
        model.set_attn_implementation("eager")
    assert reason_not_joined(model) is None
    expected = torch.stack([alone(model, *asked) for asked in zip(PROMPTS, NEXT, strict=True)])
    memory = RowMemory()
    first, second = (memory.begin(len(prompt)) for prompt in PROMPTS)
    with attended(model) as way:
        shared_pass(model, way, [([first], [PROMPTS[0][:9]])])
        rest = [([first], [PROMPTS[0][9:]]), ([second], [PROMPTS[1]])]
        logits = [shared_pass(model, way, rest)[[2, -1]]]
        lines = [memory.join(line, 20) for line in (first, second)]
        for turn in (0, 1):
            tokens = [[following[turn]] for following in NEXT]
            logits.append(shared_pass(model, way, [(lines, tokens)]))
    found = torch.stack(logits, dim=1)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    again = alone(model, PROMPTS[0], NEXT[0])
    assert torch.equal(again, expected[0])  # the model is given back as it was


@pytest.mark.parametrize("family", ALONE)
def test_families_that_share_no_pass_say_why(family: str) -> None:
    reason = reason_not_joined(tiny(family))
    assert reason
    if kind := ALONE[family]:
        assert reason == f"layers of the kind {kind} hold more than keys and values"
