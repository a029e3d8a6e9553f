"""docs/models.md: which families open and which are refused, with the reason, and in which formats
they were tested.

python -m tools.docs.models                          prints the page
python -m tools.docs.models --write docs/models.md   writes it
"""

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from runtime.model.families import REFUSED
from runtime.model.gguf.architectures import ARCHITECTURES
from tools.arguments import parser_of
from tools.make.families import ALONE, FAMILIES, PUBLISHED

_TESTED = PUBLISHED | {
    "gguf": tuple(family for form in ARCHITECTURES.values() for family in form.families)
}
_ABOVE = """# Models

Which model families open, and which are refused and why: find the `model_type` of your checkpoint's `config.json` in
the tables. moectl opens every model of transformers {version} whose experts go through its experts interface, except
those of the last table.

Each family is tested with a small random model in bfloat16 (`tests/runtime/model/test_families.py`), in two layouts: as
published, which is mostly a tensor for every expert and projection, and with all experts of a layer in one tensor. The
logits of a prompt and of two tokens after it are those of transformers, bit for bit: on demand, with experts computed
in the slow tier, and with prefetches. No family has been tested with its published weights.

Of a multimodal model only the language model is opened, and the receipt says so. It computes text as the whole model
does; images and sounds are not accepted.

Embeddings of n-grams (`qwen4_exp`) and embeddings per layer (`gemma4`) stay in the files and are read by row
([memory](memory.md#tables-in-files)).

A config whose attention has a window below two tokens is refused: with 1, transformers' cache keeps all tokens, and
what it computes depends on how prompts are cut and padded.

A folder's weights are those of `model.safetensors`, or of the files that `model.safetensors.index.json` names; of two
files that hold a tensor of one name the index decides, and where it names neither the folder is refused. Names that
training wrapped (`module.`, `_orig_mod.`, `base_model.model.`, `model.model.` and those of FSDP) are read without that.

A [published format](formats.md) can be used with any family, because packed matrices are found by the names of their
tensors. `yes` in a column means that this pair of family and format is tested: bit for bit against the dequantised
model; with `--experts fused` within 1e-5 of the largest logit in float32, and in bfloat16 as close to float32 as the
model's own code; and the live run against its replay.

"""
_REFUSED = """
## Refused

| `model_type` | why |
|---|---|
"""
_ALONE = """
## Several requests at a time

With [`--batch`](serve.md#several-requests-at-a-time) the requests of all other families share passes, and a prompt that
begins like an earlier one takes over what is known of it. That holds for windows (`gpt_oss`, `gemma4`, `phimoe`) and
for layers that keep a state in place of keys and values: linear attention (`qwen3_next`, `qwen3_5_moe`, `kimi_linear`,
`bailing_hybrid`, `minimax`), short convolutions (`lfm2_moe`) and mamba2 (`nemotron_h`, `granitemoehybrid`), and for
`qwen4_exp`, which has linear attention, an index of keys and an embedding of n-grams. The logits of a shared pass of a
small random model are within 1e-5 of the largest one of a run alone, in float32
(`tests/runtime/model/rows/test_attention.py`), and requests that come in any order get the tokens that they get alone
(`tests/runtime/session/test_shared_states.py`, for the families that this paragraph names). Requests of these families
are answered one at a time instead:

| `model_type` | why |
|---|---|
"""
_BELOW = """
A family that transformers adds later is refused if its layers have no router beside their experts, if its layers
differ from each other, if it adds up experts in another way, or if reading its experts from the checkpoint takes more
than copying, transposing or taking rows in pairs. The refusal is one line, before anything is computed.

This page is written by `python -m tools.docs.models --write docs/models.md`.
"""


def page() -> str:
    """The whole page."""
    heads = ["`model_type`", "class of transformers", "is", *_TESTED]
    table = [
        _line(heads),
        "|---|---|---|" + ":-:|" * len(_TESTED) + "\n",
        *map(_family, sorted(FAMILIES)),
    ]
    refused = [_line([f"`{family}`", why]) for family, why in sorted(REFUSED.items())]
    alone = [_line([f"`{family}`", _why_alone(kind)]) for family, kind in sorted(ALONE.items())]
    above = _ABOVE.format(version=version("transformers"))
    return "".join([above, *table, _ALONE, *alone, _REFUSED, *refused, _BELOW])


def _why_alone(kind: str) -> str:
    if kind:
        return f"layers of the kind {kind} hold more than keys and values"
    return "transformers' scan forgets the state where several tokens follow others"


def _family(family: str) -> str:
    is_multimodal = bool(CONFIG_MAPPING[family].sub_configs)
    first = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    second = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    names = first | second if is_multimodal else second | first
    tested = ["yes" if family in families else "" for families in _TESTED.values()]
    return _line(
        [
            f"`{family}`",
            names[family],
            "text part of a multimodal model" if is_multimodal else "text model",
            *tested,
        ]
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    options = parser_of(__doc__, write=(Path, "write the page there")).parse_args()
    if options.write:
        options.write.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
