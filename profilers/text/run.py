"""The row that a run over text leaves in the store: what it read, when it began and how long it
took."""

import time
from collections.abc import Mapping

import torch

from artifacts.store.runs import ModelInfo, RunInfo, utc_now
from profilers.text.batches import Data
from profilers.text.corpus import data_digest
from runtime.devices import kind_of
from runtime.model.open import MoeModel


def computed_on(opened: MoeModel, *, threads: int | None = None) -> dict[str, object]:
    """Return what rounding depends on beside the model, as a run's parameters: it decides routes
    that are close."""
    return {
        "device": kind_of(opened.model.device),
        "dtype": str(opened.dtype).removeprefix("torch."),
        "threads": threads or torch.get_num_threads(),
    }


class TextRun:
    """A run over text; its time begins when it is made."""

    def __init__(self, data: Data) -> None:
        self._started_at = utc_now()
        self._start_s = time.monotonic()
        self._data = data
        self.digest = data_digest(data.sequences)

    def info(
        self,
        command: str,
        model: ModelInfo,
        parameters: Mapping[str, object],
        *,
        num_tokens: int | None = None,
    ) -> RunInfo:
        """Return the row; its time ends now. `num_tokens` are those read, all of the data unless
        given."""
        return RunInfo(
            command=command,
            model_id=model.model_id,
            started_at=self._started_at,
            seconds=time.monotonic() - self._start_s,
            data=self._data.spec,
            data_digest=self.digest,
            tokens=self._data.num_tokens if num_tokens is None else num_tokens,
            seed=self._data.seed,
            parameters={
                **parameters,
                **({"shortfall": self._data.shortfall} if self._data.shortfall else {}),
            },
        )
