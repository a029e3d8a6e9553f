"""moectl as a model type of lm-evaluation-harness: its requests, one by one, through a session. Needs the extra `eval`.

By the harness's own interface, where importing this module registers the type:

    import profilers.compare.lm_eval_model
    lm_eval.simple_evaluate(model="moectl", model_args={"pretrained": FOLDER, "preset": "near", "budget": "25%"}, ...)
"""

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from artifacts.errors import BadInput, BadUsage
from runtime.session.session import Session, Settings


@register_model("moectl")
class SessionLM(HFLM):
    """Scores and generates as the harness's own model type does on the plain model, in batches of one.

    The harness pads batches without a mask: so each request is a pass of its own, and routers, caches and counters see
    what a user's tokens would show them.
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
        """`pretrained`: a session, or the checkpoint (folder or hub id) of one that `preset`, `budget` and `link` make,
        with the artefacts of `store`. Raises BadUsage for batches, BadInput for a model without a tokenizer."""
        if str(batch_size or 1) != "1" or max_batch_size not in (None, 1):
            raise BadUsage(f"moectl evaluates in batches of 1, not of {batch_size}: padding would reach the routers")
        if isinstance(pretrained, str):
            settings = Settings(preset, budget=budget, link=link, device=device or "auto")
            pretrained = Session.open(pretrained, settings, store=store)
        if pretrained.opened.tokenizer is None:
            raise BadInput("the checkpoint has no tokenizer: put tokenizer.json beside it")
        self.session = pretrained
        super().__init__(pretrained.opened.model, tokenizer=pretrained.opened.tokenizer, batch_size=1)

    def _model_call(self, inps: torch.Tensor, attn_mask: None = None, labels: None = None) -> torch.Tensor:
        """ids [1, S] to logits [1, S, V]."""
        self.session.new_requests(1)
        return self.session.forward(inps).logits

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options) -> torch.Tensor:
        self.session.new_requests(1)
        return super()._model_generate(context, max_length, stop, **options)
