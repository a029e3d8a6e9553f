"""Traces to and from Arrow tables and Parquet files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts.common.files import replacing
from artifacts.errors import BadInput, OutOfResources, first_line
from artifacts.shape import MOST_LAYERS
from artifacts.traces.checks import check_rows
from artifacts.traces.trace import PHASES, Trace, guessed_phase

MOST_NBYTES = 8 << 30
_ROWS_AT_A_TIME = 8192
_REQUIRED = ("pass", "layer", "token", "experts")
_PREDICTED_LAYERS = {"predicted": b"moectl.predicted_layers", "learned": b"moectl.learned_layers"}


def write_parquet(trace: Trace, path: str | Path, *, without: Sequence[str] = ()) -> None:
    """Write the trace whole or not at all, `without` columns that were made up for it. Raises
    BadInput (no such folder) or OutOfResources (disk full)."""
    with replacing(path) as temporary:
        pq.write_table(to_table(trace).drop_columns(list(without)), temporary, compression="zstd")


def read_parquet(path: str | Path, *, num_experts: int | None = None) -> Trace:
    """Read a trace from any Parquet file with the columns `pass`, `layer`, `token` and `experts`.

    `request`, `phase`, `weights`, `probabilities`, `predicted`, `learned`, `embedding`, `rejected`
    and `foretold` may be missing; `Trace.assumed` says what was assumed in place of the first
    three, and whether rows are missing. With `num_experts`, every expert id must be below it.
    Raises BadInput, which names the row, counted from 0, and OutOfResources for a file that unpacks
    to more than `MOST_NBYTES`.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"there is no trace file {path}")
    try:
        with pq.ParquetFile(path) as file:
            table = _unpacked(file, path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as Parquet: {first_line(error)}") from error
    try:
        return from_table(table, num_experts=num_experts)
    except BadInput as error:
        raise BadInput(f"{path} is no usable trace: {error}") from error


def _unpacked(file: pq.ParquetFile, path: Path) -> pa.Table:
    """All rows, read in pieces: repeated values pack a thousandfold, and a small file must not fill
    the memory."""
    pieces = []
    nbytes = 0
    for piece in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
        nbytes += piece.nbytes
        if nbytes > MOST_NBYTES:
            raise OutOfResources(
                f"{path} unpacks to more than {MOST_NBYTES / 2**30:.0f} GiB: cut it into several"
            )
        pieces.append(piece)
    return pa.Table.from_batches(pieces, schema=file.schema_arrow)


def to_table(trace: Trace) -> pa.Table:
    """The trace as an Arrow table: the columns that every trace has, and the optional ones that
    this one has."""
    columns = {
        "request": trace.request,
        "pass": trace.pass_,
        "phase": pa.DictionaryArray.from_arrays(trace.phase.astype(np.int8), list(PHASES)),
        "layer": trace.layer,
        "token": trace.token,
        "experts": _lists(trace.experts),
        "weights": _lists(trace.weights),
    }
    metadata = {}
    if trace.probabilities is not None:
        columns["probabilities"] = _lists(trace.probabilities)
    for name, key in _PREDICTED_LAYERS.items():
        if (values := getattr(trace, name)) is not None:
            columns[name] = _lists(values.reshape(len(trace), -1))
            metadata[key] = str(values.shape[1]).encode()
    if trace.rejected is not None:
        columns["rejected"] = trace.rejected
    if trace.foretold is not None:
        columns["foretold"] = _lists(trace.foretold)
    if trace.iteration is not None:
        columns["embedding"] = _first_rows_only(trace)
    return pa.table(columns, metadata=metadata)


def from_table(table: pa.Table, *, num_experts: int | None = None) -> Trace:
    """Return the trace in an Arrow table; see `read_parquet`. Raises BadInput."""
    if not table.num_rows:
        raise BadInput("it holds no rows")
    # The store's table has every column: those that a trace lacked are empty there.
    table = table.select(
        [name for name in table.column_names if table[name].null_count < table.num_rows]
    )
    names = table.column_names
    missing = [name for name in _REQUIRED if name not in names]
    if missing:
        raise BadInput(f"it has no column {', '.join(missing)} (needed: {', '.join(_REQUIRED)})")
    experts = matrix_of(table, "experts", pa.uint16())
    _check_ids(experts, num_experts)
    probabilities = None
    if "probabilities" in names:
        probabilities = matrix_of(table, "probabilities", pa.float32())
        _check_ids(experts, probabilities.shape[1])
        if num_experts not in (None, probabilities.shape[1]):
            told = f"lists of {probabilities.shape[1]}, a layer {num_experts} experts"
            raise BadInput(f"column probabilities has {told}: it is another model's")
    layer = _numbers(table, "layer")
    if layer.max() >= MOST_LAYERS:
        raise BadInput(
            f"row {layer.argmax()} has a layer {layer.max()}; no model has more than "
            f"{MOST_LAYERS:,}"
        )
    nothing = np.zeros_like(layer)
    trace = Trace(
        request=_numbers(table, "request") if "request" in names else nothing,
        pass_=_numbers(table, "pass"),
        phase=nothing,
        layer=layer,
        token=_numbers(table, "token"),
        experts=experts,
        weights=_weights(table, experts),
        probabilities=probabilities,
        **{
            name: _predicted(table, name, num_experts)
            for name in _PREDICTED_LAYERS
            if name in names
        },
    )
    assumed = (*_assumed(table), *check_rows(trace))
    besides = _embeddings(table, trace) if "embedding" in names else {}
    if "rejected" in names:
        besides["rejected"] = _rejected(table)
    if "foretold" in names:
        besides["foretold"] = matrix_of(table, "foretold", pa.int32(), least=-1)
        _check_ids(besides["foretold"], num_experts)
    phase = _phase(table) if "phase" in names else guessed_phase(trace)
    return replace(trace, assumed=assumed, phase=phase, **besides)


def _rejected(table: pa.Table) -> np.ndarray:
    """Return which rows [N] are drafts that were not accepted. Raises BadInput."""
    try:
        return table["rejected"].cast(pa.bool_()).fill_null(False).to_numpy()
    except pa.ArrowException as error:
        raise BadInput(f"column rejected: {first_line(error)}") from error


def _assumed(table: pa.Table) -> tuple[str, ...]:
    stand_ins = {
        "request": "all rows belong to one request",
        "phase": "a pass with several tokens of one request is prefill, any other decode",
        "weights": "selected experts weigh the same",
    }
    return tuple(
        f"no column {name}: {text}"
        for name, text in stand_ins.items()
        if name not in table.column_names
    )


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    """A column of non-negative whole numbers as [N] int32."""
    values = _cast(table[name].combine_chunks(), pa.int32(), name)
    if values.min() < 0:
        raise BadInput(
            f"column {name} holds {values.min()} in row {values.argmin()}; it counts from 0"
        )
    return values


def matrix_of(
    table: pa.Table,
    name: str,
    kind: pa.DataType,
    *,
    least: float = 0,
    rows: np.ndarray | None = None,
) -> np.ndarray:
    """A column of lists of one length as [N, length]; of `rows` [N] only if they are given."""
    column = table[name].combine_chunks()
    column = column if rows is None else column.take(rows)
    rows = range(len(column)) if rows is None else rows
    length = _length(column, name, rows)
    values = _cast(column.flatten(), kind, name, rows, length).reshape(-1, length)
    if not np.isfinite(values).all() or values.min() < least:
        row = rows[(~(np.isfinite(values) & (values >= least))).any(axis=1).argmax()]
        raise BadInput(f"column {name} holds numbers that are negative or not finite in row {row}")
    return values


def _length(column: pa.Array, name: str, rows: Sequence[int]) -> int:
    """The length of every list of the column. Raises BadInput where they differ."""
    kind = column.type
    if not (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    ):
        raise BadInput(f"column {name} holds {kind}, not lists")
    lengths = pc.list_value_length(column)
    shortest, longest = pc.min_max(lengths).as_py().values()
    if lengths.null_count or shortest != longest or not longest:
        each = lengths.fill_null(0).to_numpy()
        other = (each != each[0]).argmax()
        told = f"{each[0]} in row {rows[0]}, {each[other]} in row {rows[other]}"
        raise BadInput(f"column {name} needs lists of one length in every row, and has {told}")
    return longest


def _cast(
    values: pa.Array,
    kind: pa.DataType,
    name: str,
    rows: Sequence[int] | None = None,
    width: int = 1,
) -> np.ndarray:
    """The numbers of a column, `width` of them in a row."""
    rows = range(len(values)) if rows is None else rows
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        raise BadInput(f"column {name} holds {values.type}, not numbers")
    if values.null_count:
        raise BadInput(
            f"column {name} has an empty place in row "
            f"{rows[pc.index(values.is_null(), True).as_py() // width]}"
        )
    try:
        # Floats may be rounded (float64 files are common); whole numbers must not lose anything.
        # by DLPack, as `to_numpy` imports pandas, which takes longer than the file
        return np.from_dlpack(values.cast(kind, safe=not pa.types.is_floating(kind)))
    except pa.ArrowInvalid as error:
        limits = np.iinfo(kind.to_pandas_dtype())
        is_inside = pc.and_(pc.greater_equal(values, limits.min), pc.less_equal(values, limits.max))
        kept = pc.and_(
            is_inside, pc.equal(values.cast(kind, safe=False).cast(values.type, safe=False), values)
        )
        row = rows[pc.index(kept, False).as_py() // width]
        raise BadInput(f"column {name}, row {row}: {first_line(error)}") from error


def _check_ids(experts: np.ndarray, num_experts: int | None) -> None:
    if num_experts is not None and experts.max() >= num_experts:
        row, rank = np.unravel_index(experts.argmax(), experts.shape)
        raise BadInput(
            f"row {row} selects expert {experts[row, rank]}, but a layer has only {num_experts} "
            f"experts (0 to {num_experts - 1})"
        )


def _weights(table: pa.Table, experts: np.ndarray) -> np.ndarray:
    if "weights" not in table.column_names:
        return np.full(experts.shape, 1 / experts.shape[1], dtype=np.float32)
    weights = matrix_of(table, "weights", pa.float32())
    if weights.shape != experts.shape:
        raise BadInput(f"a row has {experts.shape[1]} experts but {weights.shape[1]} weights")
    return weights


def _phase(table: pa.Table) -> np.ndarray:
    texts = table["phase"].combine_chunks()
    if not pa.types.is_dictionary(texts.type):
        texts = texts.dictionary_encode()
    names = texts.dictionary.to_pylist()
    codes = np.array([PHASES.index(name) if name in PHASES else -1 for name in names])
    is_known = codes >= 0
    if texts.null_count or not is_known.all():
        empty = texts.indices.is_null().to_numpy(zero_copy_only=False)
        at = texts.indices.fill_null(0).to_numpy(zero_copy_only=False)
        row = int((empty | ~is_known[at]).argmax())
        raise BadInput(
            f"column phase must say {' or '.join(PHASES)} in every row, and does not in row {row}"
        )
    return codes[np.from_dlpack(texts.indices)].astype(np.uint8)


def _predicted(table: pa.Table, name: str, num_experts: int | None) -> np.ndarray:
    """The predictions as [N, D, E]. D is in the file's metadata; the store keeps none, but knows E
    from the model."""
    flat = matrix_of(table, name, pa.float32())
    key = _PREDICTED_LAYERS[name]
    assumed = (
        flat.shape[1] // num_experts if num_experts and flat.shape[1] % num_experts == 0 else 0
    )
    text = (table.schema.metadata or {}).get(key, str(assumed).encode())
    num_layers = int(text) if text.isdigit() and len(text) < 10 else 0
    if num_layers < 1 or flat.shape[1] % num_layers:
        raise BadInput(
            f"column {name} needs the file's metadata {key.decode()} to divide its lists"
        )
    return flat.reshape(len(flat), num_layers, -1)


def _first_rows_only(trace: Trace) -> pa.ListArray:
    """Lists in the first row of every request in a pass, empty in its other rows."""
    numbers, first = np.unique(trace.iteration, return_index=True)
    order = first.argsort()
    is_first = np.zeros(len(trace), bool)
    is_first[first] = True
    offsets = np.append(0, is_first.cumsum()) * trace.embeddings.shape[1]
    values = pa.array(trace.embeddings[numbers[order]].ravel())
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=pa.array(~is_first))


def _embeddings(table: pa.Table, trace: Trace) -> dict[str, np.ndarray]:
    given = np.flatnonzero(table["embedding"].is_valid())
    embeddings = matrix_of(table, "embedding", pa.float32(), least=-np.inf, rows=given)
    rows = trace.iteration_numbers()
    given_rows = rows[given]
    numbers, at = np.unique(given_rows, return_index=True)
    iteration = numbers.searchsorted(rows).clip(max=len(numbers) - 1)
    if len(numbers) < len(given_rows) or (numbers[iteration] != rows).any():
        raise BadInput(
            "column embedding needs a list in one row of every request in every pass, and in no "
            "other"
        )
    return {"iteration": at[iteration].astype(np.int32), "embeddings": embeddings}


def _lists(matrix: np.ndarray) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(matrix.reshape(-1), matrix.shape[1])
