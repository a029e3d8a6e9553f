"""Embedding tables that stay in the files of a checkpoint: a pass reads the rows of its tokens.

Gemma 4 has a row of the embeddings of all layers for each token, Qwen4-Exp one for each head of
each n-gram of tokens: tables of up to 51 billion weights, of which a token needs a few rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from artifacts.errors import BadInput
from artifacts.formats.base import Format
from runtime.model.files.checkpoint import Shard, StoredTensor
from runtime.model.layout import is_finite
from runtime.model.quantised.quantised_matrix import PLAIN
from runtime.model.quantised.quantised_tensor import QuantisedTensor

TABLES = ("embed_tokens_per_layer", "ngram_embedding")  # of Gemma 4 and of Qwen4-Exp
KEPT_NBYTES = 32 << 20
"""Memory for rows of one table, as stored. Only what was written is held."""
_AT_ONCE = 4096  # rows that are dequantised together, so that a long prompt needs little memory


Matrices = Sequence[StoredTensor | QuantisedTensor]
"""The stored matrices that make up a table, in the order of their rows."""


class _Part(NamedTuple):
    """One tensor of each matrix of a table: the bytes `start` to `stop` of a row's record. Of a
    matrix, `height` rows have these bytes in common."""

    start: int
    stop: int
    tensors: Sequence[StoredTensor]
    height: int

    def of(self, records: np.ndarray) -> torch.Tensor:
        """Return its numbers in records, uint8 [n, bytes], as they are stored: [n, ...]."""
        first = self.tensors[0]
        flat = torch.from_numpy(np.ascontiguousarray(records[:, self.start : self.stop]))
        return flat.view(first.dtype).view(len(records), *first.shape[1:])

    def places(self, matrices: np.ndarray, rows: np.ndarray) -> Iterator[tuple[Shard, int]]:
        """Yield the file and the offset of the bytes of each row, whose matrix and number there
        these are."""
        nbytes = self.stop - self.start
        for matrix, row in zip(matrices.tolist(), (rows // self.height).tolist(), strict=True):
            tensor = self.tensors[matrix]
            yield tensor.shard, tensor.offset + row * nbytes


class StoredRows:
    """The rows of a table that `matrices` make up, read by number, in `dtype`.

    The record of a row, its bytes in each tensor, is kept in memory at the place that is its number
    modulo the number of places, until another row takes that place. `num_read` and `num_kept` count
    the rows that were read from files and those that were found in memory. Raises BadInput for
    matrices of different formats.
    """

    def __init__(self, name: str, matrices: Matrices, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.num_read = self.num_kept = 0
        self._name = name
        self._format = _format(matrices[0])
        self._parts = _parts(name, matrices)
        self._first = np.cumsum([0, *(matrix.shape[0] for matrix in matrices)])
        self.shape = int(self._first[-1]), matrices[0].shape[1]
        self.nbytes = sum(each.nbytes for part in self._parts.values() for each in part.tensors)
        record_nbytes = max(part.stop for part in self._parts.values())
        num_places = min(self.shape[0], max(1, KEPT_NBYTES // record_nbytes))
        self._kept = np.zeros((num_places, record_nbytes), np.uint8)
        self._numbers = np.full(num_places, -1)  # of the row that is kept at a place

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the rows that are kept in memory."""
        return int((self._numbers >= 0).sum()) * self._kept.shape[1]

    def read(self, numbers: np.ndarray, *, is_pinned: bool = False) -> torch.Tensor:
        """Return the rows [n, H] with these numbers, which differ and rise. Raises IndexError for a
        number beyond the table, and BadInput for NaN or infinity."""
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < self.shape[0]:
            first, last = numbers[[0, -1]]
            raise IndexError(f"{self._name} has {self.shape[0]:,} rows, not rows {first} to {last}")
        out = torch.empty(len(numbers), self.shape[1], dtype=self.dtype, pin_memory=is_pinned)
        for first in range(0, len(numbers), _AT_ONCE):
            out[first : first + _AT_ONCE] = self._rows(numbers[first : first + _AT_ONCE])
        if not is_finite(out):
            raise BadInput(f"{self._name} holds NaN or infinity, the checkpoint is damaged")
        return out

    def _rows(self, numbers: np.ndarray) -> torch.Tensor:
        records = self._records(numbers)
        tensors = {role: part.of(records) for role, part in self._parts.items()}
        return self._format.dequantise(tensors) if self._format else tensors[PLAIN]

    def _records(self, numbers: np.ndarray) -> np.ndarray:
        """Return the records of some rows, uint8 [n, bytes], and keep them."""
        places = numbers % len(self._numbers)
        records = self._kept[places]
        absent = np.flatnonzero(self._numbers[places] != numbers)
        records[absent] = self._load(numbers[absent])
        _, first = np.unique(places[absent], return_index=True)  # of several rows for a place
        newly = absent[first]
        self._kept[places[newly]] = records[newly]
        self._numbers[places[newly]] = numbers[newly]
        self.num_read += len(absent)
        self.num_kept += len(numbers) - len(absent)
        return records

    def _load(self, numbers: np.ndarray) -> np.ndarray:
        """Read the records of some rows, uint8 [n, bytes]: first the device is asked for all of
        them, so that it reads many side by side."""
        records = np.empty((len(numbers), self._kept.shape[1]), np.uint8)
        matrices = np.searchsorted(self._first, numbers, side="right") - 1
        rows = numbers - self._first[matrices]
        reads = [
            (*place, memoryview(record[part.start : part.stop]))
            for part in self._parts.values()
            for record, place in zip(records, part.places(matrices, rows), strict=True)
        ]
        for shard, offset, own in reads:
            shard.read_ahead(offset, len(own))
        for shard, offset, own in reads:
            shard.read_into(offset, [own])
        return records


class RowTable(nn.Module):
    """Replacement of an embedding whose table stays in the files: ids [..] -> [.., H].

    The embedding `plain` itself computes, on the rows of these ids in the place of its weight, so
    that the result is bit-identical whatever it does with a row.
    """

    def __init__(self, plain: nn.Embedding, rows: StoredRows) -> None:
        super().__init__()
        self.rows = rows
        self.plain = plain
        plain.padding_idx = None  # it is for training alone, and may lie beyond the rows of a pass
        del plain.weight
        plain.register_buffer("weight", torch.empty(0, dtype=rows.dtype), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor on the device of the model, which families ask for its device."""
        return self.plain.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        here = ids.cpu()  # itself, where it is on the CPU already
        numbers, places = torch.unique(here, return_inverse=True)
        rows = self.rows.read(numbers.numpy(), is_pinned=here is not ids)
        weight = rows.to(ids.device, non_blocking=True)
        return functional_call(self.plain, {"weight": weight}, (places.to(ids.device),))


def table_names(model: nn.Module) -> list[str]:
    """Return the names of the weights that can be tables in files and are parameters so far."""
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in TABLES and isinstance(module, nn.Embedding)
    ]


def has_rows(tensor: StoredTensor | QuantisedTensor) -> bool:
    """Return whether a row of a stored matrix can be read without the others."""
    if len(tensor.shape) != 2:
        return False
    form = _format(tensor)
    return form is None or form.row_heights(tensor.components) is not None


def leave_in_files(
    model: nn.Module, tables: Mapping[str, Matrices], dtype: torch.dtype
) -> tuple[str, ...]:
    """Replace embeddings by tables whose rows are read in `dtype`; `tables` has the stored matrices
    by the name of the weight. Return a line for each other one, which will be held in memory.

    Raises BadInput for matrices that are not of the shape that the config asks for.
    """
    for name, matrices in tables.items():
        own = name.removesuffix(".weight")
        plain = model.get_submodule(own)
        rows = StoredRows(name, matrices, dtype)
        if rows.shape != tuple(plain.weight.shape):
            raise BadInput(
                f"{name} has shape {list(rows.shape)} where the config asks for "
                f"{list(plain.weight.shape)}: config and weights are not of the same model"
            )
        parent, _, child = own.rpartition(".")
        setattr(model.get_submodule(parent), child, RowTable(plain, rows).eval())
    return tuple(
        f"{name} is held in memory as a whole: its format has no rows that could be read alone"
        for name in table_names(model)
    )


def tables_of(model: nn.Module) -> list[StoredRows]:
    """Return the tables of a model that stay in files."""
    return [module.rows for module in model.modules() if isinstance(module, RowTable)]


def _format(tensor: StoredTensor | QuantisedTensor) -> Format | None:
    return tensor.format if isinstance(tensor, QuantisedTensor) else None


def _components(tensor: StoredTensor | QuantisedTensor) -> Mapping[str, StoredTensor]:
    return tensor.components if isinstance(tensor, QuantisedTensor) else {PLAIN: tensor}


def _kind(tensor: StoredTensor | QuantisedTensor) -> tuple[Format | None, dict[str, tuple]]:
    """Return the format of a matrix, and the dtype and the shape of a row of each component."""
    components = _components(tensor).items()
    return _format(tensor), {role: (each.dtype, each.shape[1:]) for role, each in components}


def _parts(name: str, matrices: Matrices) -> dict[str, _Part]:
    """Return the parts of a table by role. Raises BadInput for matrices that are not stored
    alike."""
    form, stored_as = _kind(matrices[0])
    if any(_kind(each) != (form, stored_as) for each in matrices):
        raise BadInput(f"{name} is stored in parts of several kinds: download the model again")
    stored = [_components(each) for each in matrices]
    heights = [form.row_heights(each) if form else {PLAIN: 1} for each in stored]
    parts = {}
    start = 0
    for role in heights[0]:
        dtype, shape = stored_as[role]
        stop = start + prod(shape) * dtype.itemsize
        tensors = [each[role] for each in stored]
        parts[role] = _Part(start, stop, tensors, max(each[role] for each in heights))
        start = stop
    return parts
