"""Families with experts that moectl cannot open, each with its reason; all others of transformers
open."""

from collections.abc import Mapping

from artifacts.errors import BadInput

_ELSEWHERE = "transformers computes its experts outside its experts interface"
REFUSED: Mapping[str, str] = {
    "dbrx": _ELSEWHERE,
    "diffusion_gemma": "it generates blocks of tokens by diffusion, not one token after another",
    "doge": _ELSEWHERE,
    "ernie4_5_vl_moe": "its layers have experts for images beside those for text",
    "jetmoe": _ELSEWHERE,
    "llama4": _ELSEWHERE,
    "llama4_text": _ELSEWHERE,
    "longcat_flash": _ELSEWHERE,
    "openai_privacy_filter": "it labels tokens and generates none",
    "qwen3_omni_moe": "it speaks by a second model with experts of its own",
    "step3p7": _ELSEWHERE,
}
"""Reasons by the model_type of a config.json."""


def check_family(config: Mapping) -> None:
    """Raise BadInput for a config.json of a family in `REFUSED`, also where it describes the text
    part of another."""
    for given in (config, config.get("text_config")):
        family = given.get("model_type") if isinstance(given, Mapping) else None
        if isinstance(family, str) and family in REFUSED:
            raise BadInput(f"{family} cannot be opened: {REFUSED[family]}")
