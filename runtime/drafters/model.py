"""Drafts by a small checkpoint with the same tokenizer (speculative decoding: Leviathan et al.,
2023), which stays in memory whole and keeps keys and values of its own."""

import copy
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from artifacts.errors import BadInput, BadUsage
from runtime.drafters.base import DraftPasses
from runtime.drafters.greedy import drafted
from runtime.model.kv_cache import cache_nbytes
from runtime.model.open import MoeModel, open_whole

_PIECE = 512  # tokens of a prompt that are read in one pass


class SmallModel:
    """Drafts while the small model gives its choice a probability of at least `SURE`."""

    name: ClassVar[str] = "model"
    wants_hidden: ClassVar[bool] = False

    def __init__(self, path: str, model: PreTrainedModel, num_tokens: int) -> None:
        """`num_tokens` is the vocabulary of the model for which it drafts."""
        self._path = path
        self._model = model
        self._num_tokens = num_tokens
        self._most_kv_nbytes = 0

    @classmethod
    def open(cls, opened: MoeModel, argument: str | None) -> "SmallModel":
        """Open the checkpoint at the path `argument` on the device of the model for which it
        drafts. Raises BadUsage without a path, and BadInput for a checkpoint that cannot be opened
        or has another tokenizer."""
        if argument is None:
            raise BadUsage("--draft model needs a checkpoint: give model=PATH")
        model, tokenizer = open_whole(argument, device=opened.model.device)
        check_tokenizer(argument, model, tokenizer, opened)
        return cls(argument, model, opened.model.get_input_embeddings().num_embeddings)

    def begin(self, prompt: Sequence[int], passes: DraftPasses | None) -> "ModelDrafter":
        """Return the drafter of a request, once the small model has read the prompt."""
        drafter = ModelDrafter(self)
        drafter.read(prompt)
        return drafter

    def run(self, tokens: Sequence[int], past: DynamicCache) -> torch.Tensor:
        """Read further tokens, and return the logits [V] behind the last."""
        with torch.inference_mode():
            for start in range(0, len(tokens), _PIECE):
                piece = torch.tensor([tokens[start : start + _PIECE]], device=self._model.device)
                given = {"past_key_values": past, "use_cache": True, "logits_to_keep": 1}
                logits = self._model(input_ids=piece, **given).logits
        self._most_kv_nbytes = max(self._most_kv_nbytes, cache_nbytes(past))
        return logits[0, -1, : self._num_tokens]

    def empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def receipt(self) -> Mapping[str, object]:
        """Return the checkpoint, the bytes of its weights and the most that one request's keys and
        values took."""
        held = sum(each.nbytes for each in self._model.parameters())
        return {"model": self._path, "bytes": held, "kv_bytes": self._most_kv_nbytes}


class ModelDrafter:
    """The small model's own reading of one request."""

    def __init__(self, kind: SmallModel) -> None:
        self._kind = kind
        self._past: DynamicCache
        self._read: list[int]  # tokens, then drafts
        self._num_sure: int  # of them: tokens
        # by layer: a copy behind the tokens, None of a layer that can forget what was read
        self._sure: list[CacheLayerMixin | None]
        self.close()

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        """Read the tokens of the request but those that were read; drafts that turned out wrong are
        forgotten. Returns the logits [V] behind the last."""
        same = self._num_sure
        most = min(len(self._read), len(tokens) - 1)  # the last is read again, for its logits
        while same < most and self._read[same] == tokens[same]:
            same += 1
        same = self._forget(min(same, most))
        new = list(tokens[same:])
        self._read[same:] = new
        logits = self._kind.run(new, self._past)
        self._num_sure = len(tokens)
        self._sure = [
            None if type(layer) is DynamicLayer else copy.deepcopy(layer)
            for layer in self._past.layers
        ]
        return logits

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` drafts behind all tokens so far."""
        return drafted(self.read(tokens), self._read_draft, most) if most else []

    def note(self, tokens: Sequence[int], output: object) -> None:
        """Do nothing: what was accepted is read when the next draft is asked for."""

    def close(self) -> None:
        """Free the keys and values."""
        self._past = self._kind.empty_cache()
        self._read = []
        self._num_sure = 0
        self._sure = []

    def _read_draft(self, token: int) -> torch.Tensor:
        self._read.append(token)
        return self._kind.run([token], self._past)

    def _forget(self, length: int) -> int:
        """Forget what was read behind the first `length` tokens, or behind the last that is sure
        where a layer cannot go back to more. Returns how many are left."""
        if length == len(self._read):
            return length
        if any(sure is not None for sure in self._sure):
            length = min(self._num_sure, length)
            if length < self._num_sure:  # the last sure one is asked for again
                self.close()
                return 0
        for index, sure in enumerate(self._sure):
            if sure is None:
                self._past.layers[index].crop(length - len(self._read))
            else:
                self._past.layers[index] = copy.deepcopy(sure)
        return length


def check_tokenizer(
    path: str, model: PreTrainedModel, own: PreTrainedTokenizerBase | None, opened: MoeModel
) -> None:
    """Raise BadInput unless both models mean the same by a token. One may know further tokens."""
    other = opened.tokenizer
    if own is None or other is None:
        raise BadInput(
            f"--draft model: {'it' if own is None else 'the model'} has no tokenizer: put "
            f"tokenizer.json of both models into their folders, or choose another --draft"
        )
    few, many = sorted((own.get_vocab(), other.get_vocab()), key=len)
    is_same = few.items() <= many.items()
    if not is_same or model.get_input_embeddings().num_embeddings < len(other):
        raise BadInput(
            f"--draft model: {path} has another tokenizer than the model, so that its tokens mean "
            "something else: give a small model of the same family, or --draft ngram"
        )
