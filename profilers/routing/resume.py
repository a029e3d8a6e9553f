"""Keeps a half-done profile beside the store, so that the same command continues it."""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from artifacts.common.files import replacing
from artifacts.errors import BadInput
from artifacts.traces.parquet import read_parquet, write_parquet
from artifacts.traces.trace import Trace, concatenate
from profilers.routing.observe import RoutingProfile


class HalfDone:
    """The folder of one profile under way; `identity` holds everything that its numbers depend
    on."""

    def __init__(self, store_path: Path, identity: Mapping[str, object]) -> None:
        digest = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[
            :16
        ]
        self.folder = store_path.with_name(f"{store_path.name}.profile-{digest}")
        self._state = self.folder / "state.npz"

    def load(self) -> tuple[RoutingProfile, set[int]] | None:
        """Return the counts so far and the batches counted, None without a file. Raises BadInput
        for a damaged one."""
        if not self._state.is_file():
            return None
        try:
            with np.load(self._state) as arrays:
                return RoutingProfile.from_arrays(arrays), set(arrays["batches"].tolist())
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise BadInput(
                f"{self._state} is damaged: remove {self.folder}, and the profile begins anew"
            ) from error

    def keep(self, profile: RoutingProfile, batches: Collection[int]) -> None:
        self.folder.mkdir(exist_ok=True)
        with replacing(self._state) as temporary, temporary.open("wb") as file:
            np.savez(file, batches=np.array(sorted(batches), np.int64), **profile.arrays())

    def keep_trace(self, trace: Trace, batch: int) -> None:
        self.folder.mkdir(exist_ok=True)
        write_parquet(trace, self._trace_path(batch))

    def trace(self, num_batches: int) -> Trace:
        """Return the kept traces of the first `num_batches` batches, in order."""
        return concatenate([read_parquet(self._trace_path(batch)) for batch in range(num_batches)])

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _trace_path(self, batch: int) -> Path:
        return self.folder / f"trace-{batch:06d}.parquet"
