"""moectl as a model type of lm-evaluation-harness. Its requests share passes of a session. Needs
extra `eval`.

Importing this module registers the type for the harness's own interface:

    import profilers.compare.lm_eval_model
    lm_eval.simple_evaluate(
        model="moectl",
        model_args={"pretrained": FOLDER, "preset": "near", "budget": "25%"}, ...)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)

from artifacts.errors import BadInput, BadUsage
from profilers.compare.likelihoods import Likelihood, likelihoods
from runtime.session.generation.round_robin import open_batch, why_one_by_one
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings

BATCH = 64
_GREEDY = {"do_sample": False, "temperature": 0.0}


@dataclass(slots=True)
class Continued:
    """A text to continue: its tokens [1, S], what ends it, and the tokens that were generated."""

    ids: torch.Tensor
    until: Sequence[str]
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)


def continued(session: Session, texts: Sequence[Continued], *, rows: int) -> None:
    """Continue all texts greedily, `rows` at a time, and leave the tokens in them. Raises BadInput
    for a text that the model cannot take or continue."""
    with open_batch(session, rows=rows) as batch:
        under_way = {batch.add(text.ids, Sampling(text.max_new_tokens)): text for text in texts}
        while not batch.is_idle:
            for result in batch.step():
                if result.error:
                    raise result.error
                if result.token_id is None:
                    continue
                text = under_way[result.request]
                text.tokens.append(result.token_id)
                if not result.is_over and _has_ended(session, text):
                    batch.cancel(result.request)


def _has_ended(session: Session, text: Continued) -> bool:
    """Return whether a stop sequence stands among the last tokens. Each token is at least a byte,
    so the longest sequence has at most as many tokens as bytes."""
    longest = max((len(term.encode()) for term in text.until), default=0)
    end = session.opened.tokenizer.decode(text.tokens[-longest - 1 :])
    return any(term in end for term in text.until if term)


@register_model("moectl")
class SessionLM(HFLM):
    """Scores and generates as the harness's own model type does on the plain model.

    `batch_size` requests share a pass, without padding. In a batch of one each is a pass of its
    own, as it is where requests cannot share one. Where the prompt places experts for the decoding
    that follows (residency `hot`), it is read twice, and the second pass, which policies take for
    decoding, is scored: the first computes every expert exactly.
    """

    def __init__(
        self,
        pretrained: str | Session,
        *,
        preset: str = "on-demand",
        budget: str = "25%",
        link: str = "auto",
        device: str | None = None,
        store: str | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
    ) -> None:
        """`pretrained` is a session, or a checkpoint (folder or hub id) to open with `preset`,
        `budget`, `link` and the artefacts of `store`. A `batch_size` of auto is 64, or
        `max_batch_size` if that is less. Raises BadUsage for a batch that is no number, BadInput
        for a model without a tokenizer."""
        rows = _rows(batch_size, max_batch_size)
        if isinstance(pretrained, str):
            settings = Settings(preset, budget=budget, link=link, device=device or "auto")
            pretrained = Session.open(pretrained, settings, store=store)
        if pretrained.opened.tokenizer is None:
            raise BadInput("the checkpoint has no tokenizer: put tokenizer.json beside it")
        self.session = pretrained
        reason = why_one_by_one(pretrained)
        self._shares = rows > 1 and reason is None
        if rows > 1 and reason:
            pretrained.fallbacks.append(f"batch: requests are scored one at a time: {reason}")
        batch = rows if self._shares else 1
        super().__init__(
            pretrained.opened.model, tokenizer=pretrained.opened.tokenizer, batch_size=batch
        )

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: None = None,
    ) -> list[Likelihood]:
        if not self._shares:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        items = [self._fitting(context, continuation) for _, context, continuation in requests]
        answers = likelihoods(self.session, items, rows=self.batch_size, dtype=self.softmax_dtype)
        for (asked, _, _), answer in zip(requests, answers, strict=True):
            if asked is not None:
                self.cache_hook.add_partial("loglikelihood", asked, answer)
        return answers

    def _fitting(
        self, context: Sequence[int], continuation: Sequence[int]
    ) -> tuple[Sequence[int], Sequence[int]]:
        """The item without the beginning of a context that is too long for the model."""
        room = self.max_length + 1 - len(continuation)
        return context[max(0, len(context) - room) :], continuation

    def _model_call(
        self, inps: torch.Tensor, attn_mask: None = None, labels: None = None
    ) -> torch.Tensor:
        """Return the logits [1, S, V] of ids [1, S]."""
        self.session.new_requests(1)
        output = self.session.forward(inps)
        if self.session.parts.policies.residency.places:
            output = self.session.reread(inps)
        self.session.check_logits(inps, output.logits[:, -1])
        return output.logits

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        asked = [
            (*request.args, normalize_gen_kwargs(request.args[1], self.max_gen_toks))
            for request in requests
        ]
        if not self._shares or any(not _is_greedy(options) for *_, options in asked):
            return self._generate_one_by_one(requests, disable_tqdm)
        texts = [self._to_continue(context, options) for context, _, options in asked]
        continued(self.session, texts, rows=self.batch_size)
        answers = []
        for text, (context, given, _) in zip(texts, asked, strict=True):
            generated = self.tok_decode(text.tokens)
            answers.append(postprocess_generated_text(generated, text.until, self.think_end_token))
            self.cache_hook.add_partial("generate_until", (context, given), answers[-1])
        return answers

    def _generate_one_by_one(self, requests: list[Any], disable_tqdm: bool) -> list[str]:
        batch = self.batch_size_per_gpu
        self.batch_size_per_gpu = 1
        try:
            return super().generate_until(requests, disable_tqdm)
        finally:
            self.batch_size_per_gpu = batch

    def _to_continue(self, context: str, options: dict[str, Any]) -> Continued:
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(options["until"], eos=eos)
        room = self.max_length - options["max_gen_toks"]
        ids, _ = self.tok_batch_encode(
            [context], left_truncate_len=room, truncation=self.truncation
        )
        return Continued(ids, until, options["max_gen_toks"])

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **options
    ) -> torch.Tensor:
        self.session.new_requests(1)
        return super()._model_generate(context, max_length, stop, **options)


def _rows(batch_size: int | str | None, most: int | None) -> int:
    if str(batch_size).startswith("auto"):
        return min(BATCH, most or BATCH)
    try:
        rows = int(batch_size or 1)
    except ValueError:
        rows = 0
    if rows < 1:
        raise BadUsage(f"batch_size {batch_size!r} is no number of requests: give 1, 64 or auto")
    return rows


def _is_greedy(options: dict[str, Any]) -> bool:
    """Return whether options of the harness ask for nothing but the most probable tokens."""
    own = {name: value for name, value in options.items() if name not in ("until", "max_gen_toks")}
    return own.items() <= _GREEDY.items()
