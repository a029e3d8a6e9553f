"""Every field of config.json that a family's own code reads is followed to the bit; what no code
follows is refused in one line."""

import ast
import inspect
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from artifacts.modelshapes.known import from_config
from runtime.model.open import MoeModel, open_model
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import FUSED, Settings
from tests.conftest import Checkpoint
from tests.faults.models import refusal
from tests.helpers.families import FAMILIES, save
from tests.helpers.varied import VARIED
from tests.runtime.session.test_session import plain_model
from tools.torments.lossless import differs

SAME_FOR_BOTH = {
    "_attn_implementation"
}  # transformers chooses it, for its own model and for moectl's
SETS = [(family, number) for family, sets in VARIED.items() for number in range(len(sets))]
PROMPT = torch.tensor([[7, 3, 90, 41, 8, 22, 5, 61, 33, 12, 4, 70, 19, 55, 28, 6, 11, 47, 39, 88]])


@pytest.fixture(params=SETS, ids=lambda param: f"{param[0]}-{param[1]}")
def pair(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[PreTrainedModel, MoeModel]]:
    family, number = request.param
    folder = save(family, "hub", tmp_path / "model", fields=VARIED[family][number])
    opened = open_model(str(folder))
    yield plain_model(folder), opened
    opened.store.close()


def test_every_varied_field_is_followed_to_the_bit(
    pair: tuple[PreTrainedModel, MoeModel], tmp_path: Path
) -> None:
    plain, opened = pair
    with torch.inference_mode():
        logits = of_passes(plain)
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        tokens = plain.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **options)[
            0, PROMPT.shape[1] :
        ]
    with Session(opened, Settings("specmd", budget="50%", window="2KiB", link="disk")) as session:
        assert not differs(of_passes(session), logits)
        assert [
            token.token_id for token in session.tokens(PROMPT, Sampling(4, ignore_eos=True))
        ] == tokens.tolist()
    with Session(opened, Settings("full", experts=FUSED)) as session:
        assert not differs(of_passes(session), logits, to_the_bit=False)
    known = from_config(tmp_path / "model" / "config.json").shape
    assert known == opened.shape or opened.layers[0].experts.has_bias


def of_passes(model: PreTrainedModel | Session) -> list[torch.Tensor]:
    """The logits of a prompt and of two tokens after it."""
    logits = []
    past = None
    for ids in (PROMPT.view(2, -1), PROMPT[:, :2].T, PROMPT[:, 2:4].T):
        output = (
            model.forward(ids, past=past)
            if isinstance(model, Session)
            else model(ids, past_key_values=past)
        )
        logits.append(output.logits)
        past = output.past_key_values
    return logits


REFUSED = {
    "phimoe": (
        {"num_experts_per_tok": 1},
        "the router beside model.layers.0.mlp.experts always takes 2",
    ),
    "deepseek_v2": ({"norm_topk_prob": True}, "transformers' deepseek_v2 does not follow"),
    "gpt_oss": ({"hidden_act": "gelu"}, "transformers' gpt_oss does not follow"),
    "mixtral": ({"attention_bias": True}, "transformers' mixtral does not follow"),
    "qwen3_moe": (
        {"num_experts_per_token": 1, "num_experts_per_tok": None},
        "did you mean num_experts_per_tok",
    ),
    "olmoe": ({"kv_sharing_modes": ["x"]}, "transformers' olmoe cannot run with this config.json"),
    "qwen2_moe": (
        {"vision_config": {"quantization_config": {"quant_method": "hqq"}}},
        "quantised by 'hqq'",
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_no_code_follows_is_refused_in_one_line(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    fields, line = REFUSED[family]
    assert re.search(line, refusal_of(checkpoint(family), tmp_path, fields))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"return_dict": False}, "cannot run with this config.json"),
        ({"is_encoder_decoder": True}, "is a decoder only"),
        ({"quantization_config": {}}, "quantised by 'unknown method'"),
        (
            {"text_config": {"moe": {"compression_config": {"quant_method": "hqq"}}}},
            "quantised by 'hqq'",
        ),
        ({"scoring_func": "sigmoid"}, "does not follow"),
        ({"_experts_implementation": "batched_mm"}, "does not follow"),
        ({"routed_scaling_factor": 2.5}, "does not follow"),
    ],
)
def test_a_field_of_another_familys_is_refused(
    fields: dict, line: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    assert re.search(line, refusal_of(checkpoint("olmoe"), tmp_path, fields))


def test_fields_that_change_nothing_are_none_of_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    copied(
        checkpoint("olmoe"),
        tmp_path,
        {"scoring_func": "softmax", "moe_layer_freq": 1, "n_shared_experts": None},
    )
    open_model(str(tmp_path)).store.close()


def test_experts_that_add_up_otherwise_are_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No family does so now: the change of one bit in the sum stands for a family of a later
    version."""
    eager = OlmoeExperts.forward.__wrapped__
    monkeypatch.setattr(
        OlmoeExperts.forward, "__wrapped__", lambda *given: eager(*given) * (1 + 2**-23)
    )
    line = refusal_of(checkpoint("olmoe"), tmp_path, {})
    assert "OlmoeExperts adds up experts in torch.float32 in another way" in line


def copied(folder: Path, to: Path, fields: dict[str, object]) -> None:
    """Copy a checkpoint with these fields in its config.json, without those that are None."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    stored = json.loads((to / "config.json").read_text()) | fields
    (to / "config.json").write_text(
        json.dumps({name: value for name, value in stored.items() if value is not None})
    )


def refusal_of(folder: Path, to: Path, fields: dict[str, object]) -> str:
    copied(folder, to, fields)
    return refusal(to)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"rms_norm_eps": math.nan}, "says rms_norm_eps nan: download it again"),
        ({"rms_norm_eps": -1.0}, "says rms_norm_eps -1.0, which is none"),
        ({"rms_norm_eps": math.inf}, "says rms_norm_eps Infinity, which is none"),
        ({"rms_norm_eps": "1e-5"}, 'says rms_norm_eps "1e-5", which is none'),
        ({"rope_theta": "x"}, 'says rope_theta "x", which is none'),
        (
            {"rope_parameters": {"rope_theta": -5.0, "rope_type": "default"}},
            "says rope_theta -5.0, which is none",
        ),
        ({"clip_qkv": math.nan}, "says clip_qkv nan"),
        ({"dtype": "float8_e4m3fn"}, "says dtype float8_e4m3fn: write one of bfloat16, float16"),
        ({"dtype": "int8"}, "says dtype int8: write one of bfloat16, float16"),
        ({"num_hidden_layers": "2"}, "Validation error for field 'num_hidden_layers': TypeError"),
    ],
)
def test_a_value_that_no_model_has_is_refused(
    fields: dict[str, object], line: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    assert line in refusal_of(checkpoint("olmoe"), tmp_path, fields)


def test_what_an_older_or_unread_entry_says_otherwise_is_told(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = checkpoint("olmoe")
    stored = json.loads((source / "config.json").read_text())
    assert open_model(str(source)).unfollowed == ()
    copied(
        source, tmp_path, {"rope_theta": 5.0, "torch_dtype": "float8_e4m3fn", "architectures": [1]}
    )
    assert open_model(str(tmp_path)).unfollowed == (
        f"config.json says rope_theta 5.0: not followed, its rope_parameters says "
        f"{json.dumps(stored['rope_parameters']['rope_theta'])}",
        (
            'config.json says torch_dtype "float8_e4m3fn": not followed, its dtype says '
            f'"{stored["dtype"]}"'
        ),
        "config.json says architectures [1]: not followed, olmoe is OlmoeForCausalLM",
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_a_familys_code_reads_is_varied(family: str) -> None:
    config, model = FAMILIES[family]()
    changed = {
        name
        for fields in VARIED[family]
        for name in fields
        if fields[name] != getattr(config, name, None)
    }
    changed |= REFUSED[family][0].keys()
    changed |= {alias for alias, name in config.attribute_map.items() if name in changed}
    fields = fields_read(inspect.getsource(sys.modules[type(model).__module__]))
    assert "num_experts_per_tok" in fields
    assert sorted(fields - changed - SAME_FOR_BOTH) == []


def fields_read(source: str) -> set[str]:
    """Names of the attributes of anything called `config` that the source reads."""
    fields = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(
                value=ast.Name(id="config") | ast.Attribute(attr="config"), attr=name
            ):
                fields.add(name)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=name), *_]):
                if ast.unparse(owner).endswith("config"):
                    fields.add(name)
    return fields
