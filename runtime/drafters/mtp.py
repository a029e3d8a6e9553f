"""Drafts with the checkpoint's own layer that predicts a further token (multi-token prediction)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from artifacts.errors import BadUsage
from runtime.drafters.base import DraftPasses
from runtime.drafters.greedy import drafted
from runtime.drafters.prediction.layer import PredictionLayer
from runtime.drafters.prediction.opening import open_layer
from runtime.model.open import MoeModel

_AT_ONCE = 256  # tokens that wait at most for the layer to read them


class Mtp:
    """One layer of the checkpoint, held in memory with its experts. Further drafts come from the
    same layer on its own hidden state, as vLLM does."""

    name: ClassVar[str] = "mtp"
    wants_hidden: ClassVar[bool] = True

    def __init__(self, layer: PredictionLayer) -> None:
        self._layer = layer

    @classmethod
    def open(cls, opened: MoeModel, argument: str | None) -> "Mtp":
        """Open the layer. Raises BadUsage for an argument and for a checkpoint without such a
        layer, BadInput for one that cannot be used."""
        if argument is not None:
            raise BadUsage(f"--draft mtp={argument}: mtp takes no argument, give --draft mtp")
        return cls(open_layer(opened))

    def begin(self, prompt: Sequence[int], passes: DraftPasses | None) -> "Predictions":
        """Return the drafter of a request."""
        return Predictions(self._layer)

    def receipt(self) -> dict[str, object]:
        """Return the naming of the layer, and its bytes in memory beside the model's."""
        return {"layer": self._layer.naming, "nbytes": self._layer.nbytes}


class Predictions:
    """Reads each token with the model's hidden state of the token before, and drafts from there.

    Row i of the layer's cache is of token i + 1 and the hidden state of token i, as in training;
    vLLM hides the embedding of its first row, which transformers' `MtpModel` does not. Rows are of
    tokens that stay only: those of drafts are taken away before `propose` returns.
    """

    def __init__(self, layer: PredictionLayer) -> None:
        self._layer = layer
        self._cache = layer.new_cache()
        self._ids: list[int] = []  # to be read with the waiting states
        self._hidden: list[torch.Tensor] = []  # [1, S, ...] that wait
        self._is_open = False  # whether the last waiting state has no token yet

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return drafts while the layer gives its choice a probability of at least `SURE`."""
        if most < 1 or not self._is_open:
            return ()
        self._ids.append(tokens[-1])
        self._is_open = False
        logits, hidden = self._read_waiting()
        num_read = 0

        def read(token: int) -> torch.Tensor:
            nonlocal hidden, num_read
            num_read += 1
            ids = torch.tensor([[token]], device=hidden.device)
            logits, hidden = self._layer.read(ids, hidden, self._cache)
            return logits

        drafts = drafted(logits, read, most)
        self._cache.crop(-num_read)  # also of none: a window lets go of what is behind it
        return drafts

    @torch.inference_mode()
    def note(self, tokens: Sequence[int], output: Any) -> None:
        """Keep the hidden states of tokens that stay, until the layer reads them."""
        assert output.hidden_states is not None, "the pass was not asked for hidden states"
        # the first token was read by `propose`, unless nothing was drafted
        self._ids += tokens if self._is_open else tokens[1:]
        self._hidden.append(output.hidden_states[-1][:, : len(tokens)].clone())
        self._is_open = True
        if len(self._ids) >= _AT_ONCE:
            last = self._hidden[-1][:, -1:]
            self._hidden[-1] = self._hidden[-1][:, :-1]
            self._read_waiting()
            self._cache.crop(0)
            self._hidden = [last]

    def close(self) -> None:
        """Let go of keys, values and waiting states."""
        self._cache = self._layer.new_cache()
        self._hidden.clear()

    def _read_waiting(self) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.cat(self._hidden, dim=1)
        ids = torch.tensor([self._ids], device=hidden.device)
        assert ids.shape[1] == hidden.shape[1], (ids.shape, hidden.shape)
        self._ids.clear()
        self._hidden.clear()
        return self._layer.read(ids, hidden, self._cache)
