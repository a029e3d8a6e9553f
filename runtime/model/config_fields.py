"""Refuses what a config.json says and no code would follow: transformers ignores in silence what a family does not
read."""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches

from transformers import PreTrainedModel

from artifacts.errors import BadInput

# Fields that change the forward pass of the families that have them, with the values that change nothing. Unset fields
# change nothing either.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "attention_multiplier": (1,),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "decoder_sparse_step": (1,),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "first_k_dense_replace": (0,),
    "hidden_act": ("silu", "swish"),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "mlp_only_layers": ([],),
    "moe_layer_freq": (1,),
    "n_group": (0, 1),
    "n_shared_experts": (0,),
    "norm_topk_prob": (False,),
    "num_shared_experts": (0,),
    "residual_multiplier": (1,),
    "routed_scaling_factor": (1,),
    "router_logit_softcapping": (),
    "scoring_func": ("softmax",),
    "shared_expert_intermediate_size": (0,),
    "swiglu_limit": (),
    "topk_method": ("greedy",),
}
_ALIKE = 0.9  # of two names, one of which is a slip of the other
_QUANTISED = ("quantization_config", "compression_config")


def check_fields(stored: Mapping, model: PreTrainedModel) -> None:
    """Raise BadInput for a field of `stored`, a config.json, that changes a forward pass and that the model's own code
    does not read, and for one whose name is a slip of a missing field's."""
    config = model.config.get_text_config()
    source = "".join(inspect.getsource(sys.modules[type(part).__module__]) for part in (model, config))
    own = {field.name: field.default for field in fields(config)}
    for given in (stored, stored.get("text_config")):
        if isinstance(given, Mapping):
            _check_read(given, own, source, config.model_type)
            _check_names(given, own.keys() | config.attribute_map.keys(), config.model_type)


def quantisation(stored: object) -> object:
    """Return how a config.json says, at any depth, that its checkpoint is quantised; None if it does not."""
    if isinstance(stored, Mapping):
        found = (stored.get(name) for name in _QUANTISED)
        return next((one for one in (*found, *map(quantisation, stored.values())) if one is not None), None)
    return None


def _check_read(given: Mapping, own: Mapping, source: str, family: str) -> None:
    """What a family has by default needs no reading."""
    for name, neutral in NEUTRAL.items():
        value = given.get(name)
        if value is None or value in neutral or value == own.get(name):
            continue
        if not re.search(rf'(config|self)(\.|, "){name}\b', source):
            raise BadInput(
                f"the config.json says {name} {str(value)[:40]}, which transformers' {family} does not follow: "
                "remove it if the model was trained without it"
            )


def _check_names(given: Mapping, known: set[str], family: str) -> None:
    for name, meant in _slips(given, known):
        raise BadInput(f"the config.json says {name}, which {family} does not have: did you mean {meant}?")


def _slips(given: Mapping, known: set[str]) -> Iterator[tuple[str, str]]:
    missing = known - given.keys()
    for name in given.keys() - known:
        for meant in get_close_matches(str(name), missing, n=1, cutoff=_ALIKE):
            yield name, meant
