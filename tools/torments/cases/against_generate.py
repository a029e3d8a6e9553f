"""Whole requests against plain transformers: the tokens are those of `generate()` on the same
options."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig
from transformers.utils import logging

from artifacts.errors import BadInput
from runtime.model.generation_config import load_generation_config
from runtime.session.session import Session
from runtime.session.settings import FUSED, Settings
from tools.torments import lossless
from tools.torments.cases import Lost
from tools.torments.drawn_requests import Asked, draw_fields, draw_request
from tools.torments.engine_checks import check
from tools.torments.lossless import Model, Models


class AgainstGenerate:
    """Any family, config, dtype, format, generation_config.json, settings, options and prompts,
    several requests in a session: plain `generate()` gives the same tokens."""

    classes = (15,)
    share = 3.0

    def __init__(self, ground: Path) -> None:
        torch.set_num_threads(1)
        # generate() warns of settings that a greedy request does not use
        logging.set_verbosity_error()
        self._models = Models(ground)

    def one(self, rng: random.Random) -> str:
        model = self._models.draw(rng)
        settings = _settings(rng, model)
        way = rng.choice(list(_WAYS))
        fields = draw_fields(rng)
        asked = [
            draw_request(rng, model.opened.config.max_position_embeddings)
            for _ in range(rng.randint(1, 3))
        ]
        plain = Plain(model, fields)  # loaded before the file is there, which it might refuse
        (model.folder / "generation_config.json").write_text(json.dumps(fields))
        try:
            told = load_generation_config(model.opened.model, model.folder, model.opened.tokenizer)
            plain.leave_out(" ".join(told))
            with Session(model.opened, settings) as session:
                said = _WAYS[way](session, asked, rng)
                check(session, way)
            _compare(said, asked, plain)
        except (BadInput, Lost) as problem:
            if isinstance(problem, BadInput) and any(map(plain.refuses, asked)):
                return f"{model.opened.family}, refused by both"
            drawn = f"{model.name}, {lossless.described(settings)}, {fields}, {way}"
            raise Lost(f"15: {problem} [{drawn}]") from problem
        return f"{model.opened.family}, {way}"


def _compare(said: Sequence[list[int]], asked: Sequence[Asked], plain: "Plain") -> None:
    for number, (ours, one) in enumerate(zip(said, asked, strict=True)):
        if ours != (theirs := plain.said(one)):
            raise Lost(f"request {number}: {ours} generated, {theirs} by plain generate(), {one}")


class Plain:
    """Plain transformers, with these fields of a generation_config.json."""

    def __init__(self, model: Model, fields: dict[str, object]) -> None:
        self._model = model.plain
        self._fields = fields
        self._tokenizer = AutoTokenizer.from_pretrained(model.folder)

    def leave_out(self, told: str) -> None:
        """Do without the fields that moectl says not to follow."""
        self._fields = {
            name: value for name, value in self._fields.items() if f"{name} " not in told
        }

    def said(self, asked: Asked) -> list[int]:
        """Return the tokens that follow the prompt."""
        prompt = self._encoded(asked)
        options = asked.plain_options() | {"tokenizer": self._tokenizer}
        self._model.generation_config = GenerationConfig.from_dict(self._fields)
        torch.manual_seed(asked.sampling.seed)
        with torch.inference_mode():
            ids = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        return ids[0, prompt.shape[1] :].tolist()

    def refuses(self, asked: Asked) -> bool:
        """Return whether plain transformers refuses the fields, or finds no token to draw.

        The request may leave fields out, such as stops where the end is ignored. They are read all
        the same when the model is opened.
        """
        try:
            self.said(asked)
            self.said(replace(asked, sampling=replace(asked.sampling, ignore_eos=False)))
        except (RuntimeError, ValueError):
            return True
        return False

    def _encoded(self, asked: Asked) -> torch.Tensor:
        if asked.is_ids:
            return torch.tensor([asked.prompt])
        if isinstance(asked.prompt, str):
            return self._tokenizer(asked.prompt, return_tensors="pt").input_ids
        named = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        return self._tokenizer.apply_chat_template(asked.prompt, **named).input_ids


def _settings(rng: random.Random, model: Model) -> Settings:
    """Lossless settings. Split experts and compiled kernels add in another order, which only
    float32 forgives."""
    settings = lossless.draw_settings(rng, model.opened.shape)
    if model.opened.dtype is torch.float32:
        return replace(settings, experts=rng.choice(("exact", "exact", FUSED)))
    return settings if settings.preset != "moepic" else Settings("full")


def _alone(session: Session, asked: Sequence[Asked], rng: random.Random) -> list[list[int]]:
    """Answer one request after another; the state of the session is kept between them."""
    return [
        [token.token_id for token in session.tokens(_ids(session, one), one.sampling)]
        for one in asked
    ]


def _as_text(session: Session, asked: Sequence[Asked], rng: random.Random) -> list[list[int]]:
    """Answer texts as `moectl run` does, and as the server does for a request by itself."""
    streams = [session.stream(one.prompt, one.sampling) for one in asked if not one.is_ids]
    answers = iter([stream.answer().token_ids for stream in streams])
    return [_alone(session, [one], rng)[0] if one.is_ids else next(answers) for one in asked]


def _in_turns(session: Session, asked: Sequence[Asked], rng: random.Random) -> list[list[int]]:
    """Answer pass by pass, in a random order, as the server does for several requests."""
    under_way = [session.begin(_ids(session, one), one.sampling) for one in asked]
    said: list[list[int]] = [[] for _ in asked]
    while going := [
        number for number, generation in enumerate(under_way) if not generation.is_over
    ]:
        number = rng.choice(going)
        said[number].append(session.step(under_way[number])[0][0].token_id)
    return said


def _ids(session: Session, asked: Asked) -> torch.Tensor:
    return torch.tensor([asked.prompt]) if asked.is_ids else session.encode(asked.prompt)


_WAYS = {"one after another": _alone, "as text": _as_text, "in turns": _in_turns}
