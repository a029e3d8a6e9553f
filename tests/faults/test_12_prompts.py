"""A prompt that is none, is too long or has a token that the model does not know; a tokenizer that
is another model's.

As a user meets them: tests/moectl/commands/test_bad_input.py.
"""

import json
from math import inf, nan

import pytest

from artifacts.errors import BadUsage
from runtime.session.generation.sampling import Sampling
from tests.faults.models import Copy, refusal
from tests.helpers.families import VOCABULARY


def test_tokenizer_that_cannot_be_loaded(copy: Copy) -> None:
    folder = copy("olmoe")
    (folder / "tokenizer.json").write_text("{")
    assert "the tokenizer in" in refusal(folder)


def test_a_tokenizer_that_loads_and_cannot_be_used(copy: Copy) -> None:
    path = copy("olmoe") / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "long"}))
    assert "the tokenizer in" in refusal(path.parent)


def test_a_tokenizer_with_more_tokens_than_the_model(copy: Copy) -> None:
    """Even if a prompt has none of them, since its tokens probably have another meaning."""
    path = copy("olmoe") / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["~"] = VOCABULARY
    path.write_text(json.dumps(tokenizer))
    assert f"has {VOCABULARY + 1} tokens, the model {VOCABULARY}: it is another model's" in refusal(
        path.parent
    )


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
@pytest.mark.parametrize("value", [-1.0, 1e-320, 1e308, nan, inf])
def test_sampling_that_leaves_no_probabilities(name: str, value: float) -> None:
    with pytest.raises(BadUsage, match="sampling needs temperature"):
        Sampling(**{name: value})
