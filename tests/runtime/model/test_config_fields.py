"""Every field of config.json that a family's own code reads is followed to the bit; what no code follows is refused in
one line."""

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from artifacts.modelshapes.known import from_config
from runtime.model.open import MoeModel, open_model
from runtime.session.generate import Sampling
from runtime.session.session import Session
from runtime.session.settings import FUSED, Settings
from tests.helpers.families import FAMILIES, save
from tests.helpers.varied import VARIED
from tests.runtime.session.test_session import plain_model
from tools.torments.lossless import differs

SAME_FOR_BOTH = {"_attn_implementation"}  # transformers chooses it, for its own model and for moectl's
SETS = [(family, number) for family, sets in VARIED.items() for number in range(len(sets))]
PROMPT = torch.tensor([[7, 3, 90, 41, 8, 22, 5, 61, 33, 12, 4, 70, 19, 55, 28, 6, 11, 47, 39, 88]])


@pytest.fixture(params=SETS, ids=lambda param: f"{param[0]}-{param[1]}")
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[PreTrainedModel, MoeModel]]:
    family, number = request.param
    folder = save(family, "hub", tmp_path / "model", fields=VARIED[family][number])
    opened = open_model(str(folder))
    yield plain_model(folder), opened
    opened.store.close()


def test_every_varied_field_is_followed_to_the_bit(pair: tuple[PreTrainedModel, MoeModel], tmp_path: Path) -> None:
    plain, opened = pair
    with torch.inference_mode():
        logits = of_passes(plain)
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        tokens = plain.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **options)[0, PROMPT.shape[1] :]
    with Session(opened, Settings("specmd", budget="50%", window="2KiB", link="disk")) as session:
        assert not differs(of_passes(session), logits)
        assert [token.token_id for token in session.generate(PROMPT, Sampling(4, ignore_eos=True))] == tokens.tolist()
    with Session(opened, Settings("full", experts=FUSED)) as session:
        assert not differs(of_passes(session), logits, to_the_bit=False)
    known = from_config(tmp_path / "model" / "config.json").shape
    assert known == opened.shape or opened.layers[0].experts.has_bias


def model_forward(model):
    return lambda ids, past: model(ids, past_key_values=past, use_cache=True)


def of_passes(model: PreTrainedModel | Session) -> list[torch.Tensor]:
    """The logits of a prompt and of two tokens after it."""
    forward = (lambda ids, past: model.forward(ids, past=past)) if isinstance(model, Session) else model_forward(model)
    logits, past = [], None
    for ids in (PROMPT.view(2, -1), PROMPT[:, :2].T, PROMPT[:, 2:4].T):
        output = forward(ids, past)
        logits.append(output.logits)
        past = output.past_key_values
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_a_familys_code_reads_is_varied(family: str) -> None:
    config, model = FAMILIES[family]()
    changed = {name for fields in VARIED[family] for name in fields if fields[name] != getattr(config, name, None)}
    changed |= {alias for alias, name in config.attribute_map.items() if name in changed}
    fields = fields_read(inspect.getsource(sys.modules[type(model).__module__]))
    assert "num_experts_per_tok" in fields
    assert sorted(fields - changed - SAME_FOR_BOTH) == []


def fields_read(source: str) -> set[str]:
    """Names of the attributes of anything called `config` that the source reads."""
    fields = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="config") | ast.Attribute(attr="config"), attr=name):
                fields.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=name), *_]):
                if ast.unparse(owner).endswith("config"):
                    fields.add(name)
    return fields
