"""Checks for fields of a config.json that change the model and that no code would follow:
transformers silently ignores fields that a family does not read."""

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from math import inf
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from artifacts.errors import BadInput

# What the tested families do where their code reads no such field. Unset fields change nothing.
_PLAIN: Mapping[str, object] = {
    "_experts_implementation": "eager",
    "attention_bias": False,
    "attention_multiplier": 1,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "decoder_sparse_step": 1,
    "embedding_multiplier": 1,
    "final_logit_softcapping": None,
    "first_k_dense_replace": 0,
    "hidden_act": "silu",
    "logit_scale": 1,
    "logits_scaling": 1,
    "mlp_bias": False,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_shared_experts": 0,
    "norm_topk_prob": False,
    "num_shared_experts": 0,
    "residual_multiplier": 1,
    "routed_scaling_factor": 1,
    "router_logit_softcapping": None,
    "scoring_func": "softmax",
    "shared_expert_intermediate_size": 0,
    "swiglu_limit": None,
}
UNREAD: Mapping[str, Mapping[str, object]] = {
    **dict.fromkeys(("olmoe", "qwen2_moe", "qwen3_moe", "phimoe", "deepseek_v2"), _PLAIN),
    **dict.fromkeys(
        ("mixtral", "gpt_oss"), _PLAIN | {"norm_topk_prob": True}
    ),  # they always normalise
}
_BASES = ("rope_theta", "global_rope_theta", "local_rope_theta", "rope_local_base_freq")
_ALIKE = 0.9  # of two names, one of which is a slip of the other


def check_fields(stored: Mapping, config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """Raise BadInput for a field of `stored`, the config.json that `config` was parsed from, that
    changes a forward pass and that the model's own code does not read. Raise it also for a field
    whose name looks like a misspelling of a missing one."""
    for given, parsed in ((stored, config), (stored.get("text_config"), config.get_text_config())):
        if isinstance(given, Mapping):
            _check_read(given, model)
            known = {field.name for field in fields(parsed)} | {
                *parsed.attribute_map,
                *parsed.attribute_map.values(),
            }
            _check_names(given, known, parsed.model_type)


def check_value(name: object, value: object, folder: Path) -> None:
    """Raise BadInput for a value of a field, at any depth, that makes the model's computation
    meaningless: an epsilon that is no small number, a base of positions that is not above 0."""
    name = str(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not (name.endswith(("_eps", "_epsilon")) or name in _BASES):
        return
    if not is_number or not (0 < value < inf if name in _BASES else 0 <= value < 1):
        raise BadInput(
            f"the config.json in {folder} says {name} {json.dumps(value)[:40]}, which is none: "
            "download it again"
        )


def unfollowed_fields(stored: Mapping, model: PreTrainedModel) -> tuple[str, ...]:
    """Return a line for each field of a config.json that contradicts another one which is
    followed."""
    rope = stored.get("rope_parameters")
    base = rope.get("rope_theta") if isinstance(rope, Mapping) else None
    newer = (("rope_theta", "rope_parameters", base), ("torch_dtype", "dtype", stored.get("dtype")))
    lines = [
        (
            f"config.json says {name} {_shown(stored[name])}: not followed, its {instead} says "
            f"{_shown(followed)}"
        )
        for name, instead, followed in newer
        if followed is not None and stored.get(name) not in (None, followed)
    ]
    own = type(model).__name__
    named = stored.get("architectures")
    if named is not None and own not in (named if isinstance(named, list) else ()):
        lines.append(
            f"config.json says architectures {_shown(named)}: not followed, "
            f"{model.config.model_type} is {own}"
        )
    return tuple(lines)


def _shown(value: object) -> str:
    return json.dumps(value)[:60]


def _check_read(given: Mapping, model: PreTrainedModel) -> None:
    family = model.config.model_type
    unusual = [
        (name, given[name])
        for name, usual in UNREAD.get(family, {}).items()
        if given.get(name) not in (None, usual)
    ]
    source = inspect.getsource(sys.modules[type(model).__module__]) if unusual else ""
    for name, value in unusual:
        if not re.search(rf'config(\.|, "){name}\b', source):
            raise BadInput(
                f"the config.json says {name} {str(value)[:40]}, which transformers' {family} "
                "does not follow: remove it if the model was trained without it"
            )


def _check_names(given: Mapping, known: set[str], family: str) -> None:
    for name, meant in _slips(given, known):
        raise BadInput(
            f"the config.json says {name}, which {family} does not have: did you mean {meant}?"
        )


def _slips(given: Mapping, known: set[str]) -> Iterator[tuple[str, str]]:
    missing = known - given.keys()
    for name in given.keys() - known:
        for meant in get_close_matches(str(name), missing, n=1, cutoff=_ALIKE):
            yield name, meant
