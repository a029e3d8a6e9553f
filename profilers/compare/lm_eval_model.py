"""moectl as a model type of lm-evaluation-harness. Its requests run one by one through a session. Needs extra `eval`.

Importing this module registers the type for the harness's own interface:

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

    The harness pads batches without a mask. Each request is therefore a pass of its own: routers, caches and counters
    see no padding. Where the prompt places experts for the decoding that follows (residency `hot`), it is read twice,
    and the second pass, which policies take for decoding, is scored: the first computes every expert exactly.
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
        """`pretrained` is a session, or a checkpoint (folder or hub id) to open with `preset`, `budget`, `link` and the
        artefacts of `store`. Raises BadUsage for batches, BadInput for a model without a tokenizer."""
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
        """Return the logits [1, S, V] of ids [1, S]."""
        self.session.new_requests(1)
        output = self.session.forward(inps)
        if self.session.parts.policies.residency.places:
            output = self.session.reread(inps)
        return output.logits

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options) -> torch.Tensor:
        self.session.new_requests(1)
        return super()._model_generate(context, max_length, stop, **options)
