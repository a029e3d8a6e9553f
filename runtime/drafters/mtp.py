"""Drafts with the checkpoint's own layer that predicts a further token (multi-token prediction)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from artifacts.errors import BadUsage, Incompatible
from runtime.drafters.base import DraftPasses
from runtime.drafters.prediction.layer import PredictionLayer
from runtime.drafters.prediction.opening import open_layer
from runtime.model.open import MoeModel

_AT_ONCE = 256  # tokens that wait at most for the layer to read them


class Mtp:
    """One layer of the checkpoint, held in memory with its experts. Further drafts come from the
    same layer on its own hidden state, as in vLLM (vllm/v1/spec_decode/eagle.py)."""

    name: ClassVar[str] = "mtp"
    wants_hidden: ClassVar[bool] = True

    def __init__(self, layer: PredictionLayer) -> None:
        self._layer = layer

    @classmethod
    def open(cls, opened: MoeModel, argument: str | None) -> "Mtp":
        """Open the layer. Raises BadUsage for an argument, Incompatible for a checkpoint without
        such a layer, BadInput for one that cannot be used."""
        if argument is not None:
            raise BadUsage(f"--draft mtp={argument}: mtp takes no argument, give --draft mtp")
        return cls(open_layer(opened))

    def begin(self, prompt: Sequence[int], passes: DraftPasses) -> "Predictions":
        return Predictions(self._layer)

    def receipt(self) -> dict[str, object]:
        """Return the naming of the layer, and its bytes in memory beside the model's."""
        return {"layer": self._layer.naming, "nbytes": self._layer.nbytes}


class Predictions:
    """Reads each token with the model's hidden state of the token before, and drafts from there.

    Row i of the layer's cache is of token i + 1 and the hidden state of token i. Rows are of tokens
    that stay only: those of drafts are taken away before `propose` returns.
    """

    def __init__(self, layer: PredictionLayer) -> None:
        self._layer = layer
        self._cache = layer.new_cache()
        self._ids: list[int] = []  # behind a waiting state each; the last state waits for its own
        self._hidden: list[torch.Tensor] = []  # [1, S, ...] that wait
        self._has_open = False  # whether the last waiting state has no token yet

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        if most < 1 or not self._has_open:
            return ()
        self._ids.append(tokens[-1])
        self._has_open = False
        draft, hidden = self._read_waiting()
        drafts = [draft]
        while len(drafts) < most:
            draft, hidden = self._layer.read(draft, hidden, self._cache)
            drafts.append(draft)
        # also after one draft: a window lets go of what is behind it
        self._cache.crop(1 - len(drafts))
        return torch.cat(drafts, dim=1)[0].tolist()

    @torch.inference_mode()
    def note(self, tokens: Sequence[int], output: Any) -> None:
        """Keep the hidden states of tokens that stay, until the layer reads them. Raises
        Incompatible where the pass gave none."""
        if output.hidden_states is None:
            raise Incompatible("--draft mtp needs hidden states, and this pass gave none")
        # the first token was read by `propose` already, unless nothing was drafted
        self._ids += tokens if self._has_open else tokens[1:]
        self._hidden.append(output.hidden_states[-1][:, : len(tokens)].clone())
        self._has_open = True
        if len(self._ids) >= _AT_ONCE:
            last = self._hidden[-1][:, -1:]
            self._hidden[-1] = self._hidden[-1][:, :-1]
            self._read_waiting()
            self._cache.crop(0)
            self._hidden = [last]

    def close(self) -> None:
        """Let go of the cache and of waiting states."""
        del self._cache
        self._hidden.clear()

    def _read_waiting(self) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.cat(self._hidden, dim=1)
        ids = torch.tensor([self._ids], device=hidden.device)
        assert ids.shape[1] == hidden.shape[1], (ids.shape, hidden.shape)
        self._ids.clear()
        self._hidden.clear()
        return self._layer.read(ids, hidden, self._cache)
