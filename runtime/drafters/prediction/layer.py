"""The layer of a checkpoint that predicts a further token: the family's own decoder layer between a
fusion of token and hidden state, and the model's own embedding and head."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache


class Fusion(nn.Module):
    """Token embeddings [1, S, H] and hidden states [1, S, H] -> inputs of the layer [1, S, H]:
    `project` (both, normed, side by side), as in DeepSeek-V3 (equation 21,
    https://arxiv.org/abs/2412.19437); MiMo has the hidden state first."""

    def __init__(
        self,
        embed_norm: nn.Module,
        hidden_norm: nn.Module,
        project: Sequence[nn.Linear],
        *,
        is_hidden_first: bool,
    ) -> None:
        super().__init__()
        self.embed_norm = embed_norm
        self.hidden_norm = hidden_norm
        self.project = nn.ModuleList(project)
        self.is_hidden_first = is_hidden_first

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        both = [self.embed_norm(embeds), self.hidden_norm(hidden)]
        return self.project[0](torch.cat(both[::-1] if self.is_hidden_first else both, dim=-1))


class FusionOfStreams(Fusion):
    """The same where the layer takes several streams [1, S, N * H] or [1, S, N, H]: each is
    projected alone, and the projected token added to it."""

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        of_token, of_stream = self.project
        token = of_token(self.embed_norm(embeds)).unsqueeze(-2)
        normed = self.hidden_norm(hidden).view(*embeds.shape[:-1], -1, embeds.shape[-1])
        return (token + of_stream(normed)).view_as(hidden)


class PredictionLayer:
    """Computes the token after the next from the next token and the hidden state before it."""

    def __init__(
        self, naming: str, decoder: PreTrainedModel, fusion: Fusion, model: PreTrainedModel
    ) -> None:
        self.naming = naming
        self._decoder = decoder
        self._fusion = fusion
        self._embed = model.get_input_embeddings()
        self._head = model.get_output_embeddings()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that it has beside the model's."""
        parameters = [*self._decoder.parameters(), *self._fusion.parameters()]
        return sum(one.nbytes for one in parameters)

    def new_cache(self) -> DynamicCache:
        """Return an empty cache, of which `crop` takes the last tokens away."""
        cache = DynamicCache(config=self._decoder.config)
        cache.activate_past_recording()
        return cache

    def read(
        self, ids: torch.Tensor, hidden: torch.Tensor, cache: Cache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read tokens [1, S] with the hidden states of the tokens before them. Return the
        logits [V] after the last, and the hidden state [1, 1, ...] to read the next token with.

        The state is the normed one, as qwen3_next_mtp.py of vLLM and transformers' `MtpModel` hand
        it on; vLLM's deepseek_mtp.py takes it before the norm.
        """
        fused = self._fusion(self._embed(ids).to(hidden), hidden)
        normed, handed = self._decode(fused, cache)
        return self._head(normed[0, -1]), handed[:, -1:]

    def _decode(self, fused: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._decoder(inputs_embeds=fused, past_key_values=cache, use_cache=True)
        return out.last_hidden_state, out.last_hidden_state


class PredictionLayerOfStreams(PredictionLayer):
    """The same for models whose layers hand on several streams, Qwen4-Exp and DeepSeek-V4: the
    layer takes and gives the streams, as SGLang's qwen4_exp_mtp.py."""

    def _decode(self, fused: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        # the model makes streams of one embedding before its first layer: the layer gets ours
        taken: list[torch.Tensor] = []
        layer = self._decoder.layers[0]
        before = layer.register_forward_pre_hook(lambda _, args: (fused, *args[1:]))
        after = layer.register_forward_hook(lambda _, args, out: taken.append(out))
        try:
            hidden_size = self._decoder.config.hidden_size
            embeds = fused.new_zeros(*fused.shape[:2], hidden_size)
            out = self._decoder(inputs_embeds=embeds, past_key_values=cache, use_cache=True)
        finally:
            before.remove()
            after.remove()
        return out.last_hidden_state, taken[0]
