"""Generation settings of a checkpoint: which ones generate() follows, which are left out, and which
are refused."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_outputs import CausalLMOutput

from artifacts.errors import BadInput, first_line
from runtime.model.files.source import source_of

_FOLLOWED = """
    min_length min_new_tokens max_time stop_strings
    min_p top_h typical_p epsilon_cutoff eta_cutoff
    repetition_penalty encoder_repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids sequence_bias suppress_tokens begin_suppress_tokens
    forced_bos_token_id forced_eos_token_id
    exponential_decay_length_penalty remove_invalid_values renormalize_logits watermarking_config
    pad_token_id bos_token_id eos_token_id decoder_start_token_id compile_config disable_compile
"""
FOLLOWED = frozenset(_FOLLOWED.split())
"""Settings that stay: transformers' generate() does with them what it always does."""

_REQUESTED = "do_sample temperature top_k top_p max_length max_new_tokens"
_SEVERAL = """
    num_beams num_return_sequences early_stopping length_penalty num_beam_groups diversity_penalty
    constraints force_words_ids low_memory continuous_batching_config
"""
_OTHER_LOOPS = """
    use_mtp penalty_alpha dola_layers guidance_scale token_healing prefill_chunk_size
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit
    assistant_lookbehind target_lookbehind assistant_ensemble_weight speculation_type
"""
_CACHE = "use_cache cache_implementation cache_config max_cache_len"
_OUTPUT = (
    "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate"
)
REASONS = {
    **dict.fromkeys(_REQUESTED.split(), "the options of each request decide"),
    **dict.fromkeys(_SEVERAL.split(), "one sequence is decoded"),
    **dict.fromkeys(_OTHER_LOOPS.split(), "one pass gives one token"),
    **dict.fromkeys(_CACHE.split(), "keys and values are kept as transformers does by default"),
    **dict.fromkeys(_OUTPUT.split(), "only tokens are returned"),
}
"""Settings that are taken out, and the reason that the receipt gives."""

_UNKNOWN = "moectl does not know it"
_METADATA = {"_commit_hash", "_from_model_config", "_original_object_hash", "transformers_version"}
_DEFAULTS = GenerationConfig._get_default_generation_params()
_LONGEST = 60  # characters of a name or a value within one of our lines


def load_generation_config(
    model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[str, ...]:
    """Give `model` the settings of generation_config.json, else those in config.json, as
    `from_pretrained` does, without the settings that moectl does not follow. Returns a line for
    each reason why some are left out.

    Raises BadInput if transformers cannot use them, with the name of the setting if one alone is at
    fault.
    """
    path, is_own, stored = source_of(folder).generation_settings()
    parse = GenerationConfig.from_dict if is_own else GenerationConfig.from_model_config
    shallow = _Shallow(model.get_input_embeddings().num_embeddings)

    def load(settings: dict[str, object]) -> tuple[GenerationConfig, tuple[str, ...]]:
        with warnings.catch_warnings():
            # of lengths that a trial does not reach, and of settings left out below
            warnings.simplefilter("ignore")
            config = parse(dict(settings))
            given = settings if is_own else {}  # a config.json has much else in it
            lines = (
                *_leave_out(config, given, path.name),
                *_endless(config, path.name, shallow.config.vocab_size),
            )
            shallow.try_out(config, tokenizer)
        return config, lines

    try:
        model.generation_config, lines = load(stored)
    # transformers raises anything on a bad value, most of it in the midst of generate()
    except Exception as error:
        raise BadInput(
            f"transformers cannot use {path}: {_fault(stored, load) or first_line(error)}"
        ) from error
    return lines


def _fault(settings: dict[str, object], load: Callable[[dict[str, object]], object]) -> str | None:
    """Return the first setting that cannot be used even by itself, its value and the error; None if
    only several together cannot. Settings that end a text are tried first, as others need them."""
    end = "eos_token_id"
    for name in sorted(settings, key=lambda name: name != end):
        try:
            load({key: settings[key] for key in (end, name) if key in settings})
        except Exception as error:
            return f"{_shown(name, settings[name])}: {first_line(error)}"
    return None


def _leave_out(config: GenerationConfig, given: dict[str, object], file: str) -> tuple[str, ...]:
    """Take the settings that are not followed out of `config`, and return a line for each reason.
    `given` are the settings of the file; transformers may have dropped those it does not know."""
    known = vars(GenerationConfig())
    left_out: dict[str, list[str]] = {}
    for name, value in (given | vars(config)).items():
        if name in FOLLOWED or name in _METADATA or _asks_nothing(name, value):
            continue
        left_out.setdefault(REASONS.get(name, _UNKNOWN), []).append(_shown(name, value))
        if name in known:
            setattr(config, name, None)
        else:  # it may hide a method
            vars(config).pop(name, None)
    return tuple(
        f"{file} asks for {', '.join(asked)}: not followed, {why}"
        for why, asked in left_out.items()
    )


def _asks_nothing(name: str, value: object) -> bool:
    """Return whether neither generate() nor a request does anything else because of this value. A
    setting that requests have too must be None, because their defaults are not generate()'s."""
    if value is None or name in _REQUESTED.split():
        return value is None
    return value == _DEFAULTS[name] if name in _DEFAULTS else value is False


def _shown(name: str, value: object) -> str:
    texts = name if name.isidentifier() else json.dumps(name), json.dumps(value, default=str)
    return " ".join(
        text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..." for text in texts
    )


def _endless(config: GenerationConfig, file: str, vocabulary: int) -> tuple[str, ...]:
    """Return a line on tokens that should end a text and never come. Raises ValueError for a value
    that is no token: torch would cut a fraction off, and take true for 1."""
    ids = config.eos_token_id
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token_id) is int for token_id in ids):
        raise ValueError("it must be a token id, or a list of them")
    outside = [token_id for token_id in ids if not 0 <= token_id < vocabulary]
    line = (
        f"{file} ends texts with {outside}, outside the vocabulary of {vocabulary}: no text ends "
        "with it"
    )
    return (line,) if outside else ()


class _Shallow(PreTrainedModel, GenerationMixin):
    """A model without layers, with the same logits for every token: generate() runs on it in
    milliseconds."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(PreTrainedConfig(vocab_size=vocabulary))
        self._logits = torch.nn.Parameter(
            torch.linspace(-30.0, 30.0, vocabulary), requires_grad=False
        )
        self._prompt = torch.tensor([[vocabulary - 1]])

    def forward(self, input_ids: torch.Tensor, **_: object) -> CausalLMOutput:
        return CausalLMOutput(logits=self._logits.expand(1, 1, -1))

    def try_out(self, config: GenerationConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Draw two tokens by `config`. Raises what generate() raises."""
        self.generation_config = config
        asked = {"do_sample": True, "top_k": 0, "max_new_tokens": 2, "use_cache": False}
        with torch.random.fork_rng(devices=[]):
            self.generate(self._prompt, tokenizer=tokenizer, **asked)
