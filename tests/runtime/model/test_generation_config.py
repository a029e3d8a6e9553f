"""Every setting of generation_config.json is followed as transformers follows it, named as left
out, or refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from artifacts.errors import BadInput
from runtime.model.generation_config import FOLLOWED, REASONS, load_generation_config
from runtime.model.open import MoeModel
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import Settings
from tests.conftest import Checkpoint

GREEDY = Sampling(8)
DRAWN = Sampling(8, temperature=1.5, top_k=0, seed=3)
PROMPT = [5, 9, 2, 14, 5, 9]  # the model of the fixture goes on with 31, 31, 31, 72, 72
PROMPTS = {
    "forced_bos_token_id": [5],
    "forced_eos_token_id": [5],
    "encoder_no_repeat_ngram_size": [*PROMPT, 31],
}
FIRST = 31
LAST = 72
BASE = {"eos_token_id": LAST}

CHANGES = {  # by setting: a value that changes the greedy tokens
    "sequence_bias": [[[7], 50.0]],
    "suppress_tokens": [FIRST],
    "bad_words_ids": [[FIRST]],
    "min_length": 12,
    "min_new_tokens": 6,
    "max_time": 0.0,
    "stop_strings": [";;"],  # two of the first tokens
    "repetition_penalty": 1.7,
    "encoder_repetition_penalty": 8.0,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 1,
    "begin_suppress_tokens": [FIRST],
    "forced_bos_token_id": 33,
    "forced_eos_token_id": 44,
    "exponential_decay_length_penalty": [0, 900.0],
    "watermarking_config": {"bias": 40.0},
    "eos_token_id": [FIRST, 5000],
}
CHANGES_DRAWN = {
    "min_p": 0.9,
    "top_h": 0.1,
    "typical_p": 0.1,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.9,
}
CHANGES_NOTHING = {
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "pad_token_id": 3,
    "bos_token_id": 4,
    "decoder_start_token_id": 5,
    "disable_compile": True,
}
REFUSED = {
    "compile_config": {},
    "cache_implementation": "shelf",
    "num_return_sequences": 3,
    "eos_token_id": "x",
    "pad_token_id": [0],
    "repetition_penalty": 0.0,
    "max_time": "x",
    "stop_strings": 5,
    "bad_words_ids": [[5000]],
    "forced_eos_token_id": 5000,
    "suppress_tokens": list(range(96)),
    "min_p": 3.0,
    "update": 5,
    "streamer": None,
}


@pytest.fixture(scope="module")
def plain(checkpoint: Checkpoint) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        checkpoint("olmoe"), experts_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def session(checkpoint: Checkpoint) -> Iterator[Session]:
    with Session.open(checkpoint("olmoe"), Settings(budget="50%", threads=1)) as session:
        yield session


@pytest.fixture
def opened(session: Session) -> MoeModel:
    return session.opened


def tokens_of(session: Session, prompt: list[int], sampling: Sampling) -> list[int]:
    return [token.token_id for token in session.tokens(torch.tensor([prompt]), sampling)]


def tokens_of_transformers(
    plain: PreTrainedModel, prompt: list[int], sampling: Sampling, **given: object
) -> list[int]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sampling.seed)
        return plain.generate(torch.tensor([prompt]), **sampling.options(), **given)[
            0, len(prompt) :
        ].tolist()


def written(folder: Path, **settings: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_every_setting_of_this_transformers_has_its_place() -> None:
    known = vars(GenerationConfig()).keys() - {"_from_model_config", "transformers_version"}
    assert known == FOLLOWED | REASONS.keys() and not FOLLOWED & REASONS.keys()
    assert {*CHANGES, *CHANGES_DRAWN, *CHANGES_NOTHING, "compile_config"} == FOLLOWED


@pytest.mark.parametrize("name", [*CHANGES, *CHANGES_DRAWN, *CHANGES_NOTHING])
def test_what_is_followed_gives_the_tokens_of_transformers(
    name: str, plain: PreTrainedModel, session: Session, tmp_path: Path
) -> None:
    value = (CHANGES | CHANGES_DRAWN | CHANGES_NOTHING)[name]
    asked = PROMPTS.get(name, PROMPT), DRAWN if name in CHANGES_DRAWN else GREEDY
    model = session.opened.model
    tokenizer = session.opened.tokenizer
    load_generation_config(model, written(tmp_path, **BASE), tokenizer)
    without = tokens_of(session, *asked)
    lines = load_generation_config(model, written(tmp_path, **BASE | {name: value}), tokenizer)
    assert all("outside the vocabulary" in line for line in lines)
    ours = tokens_of(session, *asked)
    plain.generation_config = GenerationConfig.from_pretrained(tmp_path)
    assert ours == tokens_of_transformers(plain, *asked, tokenizer=tokenizer)
    assert (ours == without) == (name in CHANGES_NOTHING)


@pytest.mark.parametrize("name", [*REASONS, "repitition_penalty", "get_generation_mode"])
def test_what_is_left_out_is_named(name: str, opened: MoeModel, tmp_path: Path) -> None:
    load_generation_config(opened.model, written(tmp_path, **BASE), opened.tokenizer)
    without = vars(opened.model.generation_config)
    values = {"cache_implementation": "static", "early_stopping": True, "use_cache": False}
    value = (values | {"assistant_ensemble_weight": 0.5}).get(name, 7)
    settings = BASE | {"do_sample": True} | {name: value}
    lines = load_generation_config(opened.model, written(tmp_path, **settings), opened.tokenizer)
    said = [line for line in lines if f" {name} {json.dumps(value)}" in line]
    assert len(said) == 1 and said[0].endswith(
        f": not followed, {REASONS.get(name, 'moectl does not know it')}"
    )
    assert vars(opened.model.generation_config) == without


def test_a_name_that_transformers_drops_is_named_too(opened: MoeModel, tmp_path: Path) -> None:
    folder = written(
        tmp_path,
        _from_model_config=True,
        repitition_penalty=1.5,
        **{"a\n" * 99: None, "b\n": [1] * 99},
    )
    (line,) = load_generation_config(opened.model, folder, opened.tokenizer)
    assert line.startswith('generation_config.json asks for repitition_penalty 1.5, "b\\n" [1, 1,')
    assert line.endswith("...: not followed, moectl does not know it") and len(line) < 200


@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_cannot_use_is_refused_in_a_line(
    name: str, opened: MoeModel, tmp_path: Path
) -> None:
    value = REFUSED[name]
    folder = written(tmp_path, **BASE | {name: value})
    before = torch.get_rng_state()
    with pytest.raises(BadInput) as caught:
        load_generation_config(opened.model, folder, opened.tokenizer)
    path = folder / "generation_config.json"
    assert str(caught.value).startswith(
        f"transformers cannot use {path}: {name} {json.dumps(value)[:40]}"
    )
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("[]", "it holds a list, not a JSON object"),
        ("{", "Expecting property name"),
        ('{"max_length": ' + "[" * 100_000, "nested too deeply"),
        ('{"min_p": 0.5, "num_beams": 2, "num_return_sequences": 3}', "num_return_sequences"),
    ],
)
def test_a_file_that_cannot_be_used(
    settings: str, said: str, opened: MoeModel, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(settings)
    with pytest.raises(
        BadInput, match="transformers cannot use .*generation_config.json: .*" + said
    ):
        load_generation_config(opened.model, tmp_path, opened.tokenizer)


def test_texts_that_end_a_generation_need_a_tokenizer(opened: MoeModel, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="stop_strings .*tokenizer"):
        load_generation_config(opened.model, written(tmp_path, stop_strings=["a"]), None)


def test_an_end_that_never_comes_is_named(opened: MoeModel, tmp_path: Path) -> None:
    lines = load_generation_config(
        opened.model, written(tmp_path, eos_token_id=[2, 96, -1]), opened.tokenizer
    )
    assert lines == (
        (
            "generation_config.json ends texts with [96, -1], outside the vocabulary of 96: no "
            "text ends with it"
        ),
    )


def test_settings_in_the_models_config_count_where_there_is_no_other_file(
    plain: PreTrainedModel, session: Session, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    stored = json.loads((checkpoint("olmoe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(stored | {"repetition_penalty": 1.7, "num_beams": 4})
    )
    lines = load_generation_config(session.opened.model, tmp_path, session.opened.tokenizer)
    assert lines == ("config.json asks for num_beams 4: not followed, one sequence is decoded",)
    ours = tokens_of(session, PROMPT, GREEDY)
    plain.generation_config = GenerationConfig(
        eos_token_id=stored["eos_token_id"], repetition_penalty=1.7
    )
    assert ours == tokens_of_transformers(plain, PROMPT, GREEDY)
    plain.generation_config.repetition_penalty = None
    assert ours != tokens_of_transformers(plain, PROMPT, GREEDY)
