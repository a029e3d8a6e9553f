"""docs/models.md: which families open and which are refused, with the reason, and in which formats they were tested.

python -m tools.docs.models                          prints the page
python -m tools.docs.models --write docs/models.md   writes it
"""

import argparse
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from runtime.model.families import REFUSED
from runtime.model.gguf_architectures import ARCHITECTURES
from tools.make.families import FAMILIES, PUBLISHED

_TESTED = PUBLISHED | {"gguf": tuple(family for form in ARCHITECTURES.values() for family in form.families)}
_ABOVE = """# Models

Every model of transformers {version} opens whose experts go through its experts interface, but for those of the last
table. `tests/runtime/model/test_families.py` makes a small random one of each, in bfloat16, and writes it in both
layouts: as it is published, most with a tensor for every expert and projection, and with the experts of a layer in one
tensor. The logits of a prompt and of two tokens after it are those of transformers, bit for bit, on demand, with near
experts and with prefetches. No published weights were at hand.

Of a multimodal model the language model is opened; its other weights are not loaded, and the receipt says so. A text is
computed as the whole model computes it; images and sounds are not taken.

[Published formats](formats.md) belong to no family: a matrix in few bits is found by the names of its tensors. The
columns name the pairs of family and format that are tested: bit for bit against the dequantised model; fused within
1e-5 of the largest logit in float32, and in bfloat16 as near to float32 as the model's own code; and live against its
replay.

"""
_REFUSED = """
## Refused

| `model_type` | why |
|---|---|
"""
_BELOW = """
A family that transformers adds later is refused where its layers have no router beside their experts, where they differ
from each other, where it adds up experts in another way, and where its checkpoint stores them in a way that is more
than copying, transposing or taking rows in pairs. Each is one line, before anything is computed.

This page is written by `python -m tools.docs.models --write docs/models.md`.
"""


def page() -> str:
    """The whole page."""
    heads = ["`model_type`", "class of transformers", "is", *_TESTED]
    table = [_line(heads), "|---|---|---|" + ":-:|" * len(_TESTED) + "\n", *map(_family, sorted(FAMILIES))]
    refused = [_line([f"`{family}`", why]) for family, why in sorted(REFUSED.items())]
    return "".join([_ABOVE.format(version=version("transformers")), *table, _REFUSED, *refused, _BELOW])


def _family(family: str) -> str:
    is_multimodal = bool(CONFIG_MAPPING[family].sub_configs)
    first, second = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    names = first | second if is_multimodal else second | first
    tested = ["yes" if family in families else "" for families in _TESTED.values()]
    return _line(
        [f"`{family}`", names[family], "text part of a multimodal model" if is_multimodal else "text model", *tested]
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the page there")
    options = parser.parse_args()
    if options.write:
        options.write.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
