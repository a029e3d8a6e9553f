"""Random requests for torments: prompts, sampling options, and the fields of a
generation_config.json."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from runtime.session.generation.sampling import Sampling
from runtime.session.prompts.encoder import Prompt
from tests.helpers.families import VOCABULARY

_FIRST = 3  # of the tokens that are characters
_CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "é"]
_MOST_FIELDS = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. The prompt is token ids, a text or the turns of a chat."""

    prompt: list[int] | Prompt
    sampling: Sampling

    @property
    def is_ids(self) -> bool:
        return isinstance(self.prompt, list) and isinstance(self.prompt[0], int)

    def plain_options(self) -> dict[str, object]:
        """The keyword arguments of generate() that ask the same of plain transformers."""
        one = self.sampling
        options: dict[str, object] = {
            "max_new_tokens": one.max_new_tokens,
            "do_sample": one.temperature > 0,
        }
        if one.repetition_penalty is not None:
            options["repetition_penalty"] = one.repetition_penalty
        if one.ignore_eos:
            nothing_else_ends_it = {"stop_strings": None, "exponential_decay_length_penalty": None}
            options |= {"min_new_tokens": one.max_new_tokens} | nothing_else_ends_it
        if one.temperature > 0:
            options |= {"temperature": one.temperature, "top_k": one.top_k, "top_p": one.top_p}
        return options


def draw_request(rng: random.Random, positions: int) -> Asked:
    """A request that fits into `positions`; one of ten fills them almost."""
    num_new = rng.choice((1, 2, 5, 8, 12))
    length = rng.choice((1, 2, rng.randint(3, 12), rng.randint(3, 30)))
    if rng.random() < 0.1:
        length = min(positions, 200) - num_new - rng.choice((0, 0, 1, 7))
    sampling = Sampling(
        max_new_tokens=num_new,
        temperature=rng.choice((0.0, 0.0, 0.3, 1.0, 2.5)),
        top_k=rng.choice((0, 1, 3, 50, 500)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.4, 0.01)),
        repetition_penalty=rng.choice((None, None, 1.0, 1.3, 0.7)),
        seed=rng.randrange(1 << 32),
        ignore_eos=rng.random() < 0.3,
    )
    return Asked(_draw_prompt(rng, length, positions), sampling)


def _draw_prompt(rng: random.Random, length: int, positions: int) -> list[int] | Prompt:
    kind = rng.choice(("ids", "ids", "text", "chat"))
    if kind == "text":
        return "a" + _text(rng, length - 1)
    # the roles and as many new tokens as there may be
    if kind == "chat" and 2 * length + 36 < positions:
        return [
            {"role": role, "content": _text(rng, length)}
            for role in ("system", "user")[: rng.randint(1, 2)]
        ]
    return [rng.randrange(_FIRST, VOCABULARY) for _ in range(length)]


def _text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(_CHARACTERS, k=length))


def draw_fields(rng: random.Random) -> dict[str, object]:
    """The fields of a generation_config.json; half of the time there are none of their own."""
    fields = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if rng.random() < 0.5:
        return fields
    return fields | {
        name: FIELDS[name](rng) for name in rng.sample(sorted(FIELDS), rng.randint(1, _MOST_FIELDS))
    }


def _token(rng: random.Random) -> int:
    return rng.randrange(_FIRST, VOCABULARY)


def _tokens(rng: random.Random, most: int = 8) -> list[int]:
    return [_token(rng) for _ in range(rng.randint(1, most))]


FIELDS: Mapping[str, Callable[[random.Random], object]] = {
    "bad_words_ids": lambda rng: [_tokens(rng, 2) for _ in range(rng.randint(1, 9))],
    "begin_suppress_tokens": lambda rng: _tokens(rng, 40),
    "do_sample": lambda rng: rng.random() < 0.5,
    "encoder_no_repeat_ngram_size": lambda rng: rng.randint(1, 3),
    "encoder_repetition_penalty": lambda rng: rng.choice((0.5, 1.5)),
    "eos_token_id": lambda rng: rng.choice((_token(rng), [2, *_tokens(rng, 30)])),
    "epsilon_cutoff": lambda rng: rng.choice((0.01, 0.2)),
    "guidance_scale": lambda rng: 1.5,
    "eta_cutoff": lambda rng: rng.choice((0.01, 0.2)),
    "exponential_decay_length_penalty": lambda rng: [rng.randint(0, 6), rng.choice((0.5, 1.5))],
    "forced_bos_token_id": _token,
    "forced_eos_token_id": _token,
    "max_new_tokens": lambda rng: rng.randint(1, 20),
    "min_length": lambda rng: rng.randint(0, 30),
    "min_new_tokens": lambda rng: rng.randint(0, 10),
    "min_p": lambda rng: rng.choice((0.05, 0.5)),
    "no_repeat_ngram_size": lambda rng: rng.randint(1, 3),
    "num_beams": lambda rng: rng.randint(2, 3),
    "output_scores": lambda rng: True,
    "prompt_lookup_num_tokens": lambda rng: rng.randint(1, 5),
    "remove_invalid_values": lambda rng: True,
    "renormalize_logits": lambda rng: True,
    "repetition_penalty": lambda rng: rng.choice((0.5, 1.7)),
    "sequence_bias": lambda rng: [
        [_tokens(rng, 2), rng.choice((-5.0, 5.0))] for _ in range(rng.randint(1, 4))
    ],
    "stop_strings": lambda rng: [rng.choice(_CHARACTERS) for _ in range(rng.randint(1, 9))],
    "suppress_tokens": lambda rng: _tokens(rng, 60),
    "temperature": lambda rng: rng.choice((0.2, 1.8)),
    "top_h": lambda rng: rng.choice((0.3, 0.8)),
    "top_k": lambda rng: rng.choice((1, 5)),
    "top_p": lambda rng: rng.choice((0.3, 0.95)),
    "typical_p": lambda rng: rng.choice((0.2, 0.9)),
    "use_cache": lambda rng: rng.random() < 0.5,
    "watermarking_config": lambda rng: {"greenlist_ratio": rng.choice((0.25, 0.5)), "bias": 3.0},
}
