"""FLAME-MoE's routing traces: Parquet with `indices` and `scores`, a file a layer, a row a token.

As published (CMU-FLAME/FLAME-MoE-Traces): `actives/iter_NNNN/layer_NN.parquet`, `scores`
list<float16> in falling order and `indices` list<int16>, 52 million rows each, captured in
pretraining.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.errors import BadInput, OutOfResources, first_line
from artifacts.importers.one_by_one import check_same_length, files_by_layer, one_by_one
from artifacts.importers.routing_log import LogOptions, RoutingLog
from artifacts.traces.parquet import MOST_NBYTES, matrix_of

_COLUMNS = ("indices", "scores")
_NBYTES = 64  # of an expert of a token in a layer while a log is made into a trace


def read(path: Path, options: LogOptions) -> RoutingLog:
    """Return the log in a folder of layers, or in one layer's file. Raises BadInput, and
    OutOfResources for more than memory should hold: `tokens` takes the first rows only."""
    files = files_by_layer(path, "layer_*.parquet")
    limit = options.tokens
    columns = []
    for _, file in files:
        try:
            with pq.ParquetFile(file) as opened:
                columns.append(_columns(opened, file, limit, len(files)))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise BadInput(f"{file} cannot be read as Parquet: {first_line(error)}") from error
    check_same_length(
        [(str(file), len(experts)) for (_, file), (experts, _) in zip(files, columns, strict=True)]
    )
    if len({experts.shape[1] for experts, _ in columns}) > 1:
        raise BadInput(
            f"the files in {path} have different numbers of experts a token; expected: layers of "
            "one model"
        )
    experts, scores = (np.stack(column) for column in zip(*columns, strict=True))
    return one_by_one(
        [layer for layer, _ in files],
        experts,
        scores,
        lambda layer, token: f"{files[layer][1]}, row {token}",
    )


def _columns(
    opened: pq.ParquetFile, file: Path, limit: int | None, num_layers: int
) -> tuple[np.ndarray, np.ndarray]:
    """Experts [T, K] and scores [T, K] of one file."""
    missing = [name for name in _COLUMNS if name not in opened.schema_arrow.names]
    if missing:
        raise BadInput(
            f"{file} has no column {' and '.join(missing)}; expected: indices and scores, lists "
            "of one length"
        )
    num_rows = opened.metadata.num_rows if limit is None else min(limit, opened.metadata.num_rows)
    if num_rows * num_layers * _NBYTES > MOST_NBYTES:
        raise OutOfResources(
            f"{file} has {num_rows:,} tokens, too many for the memory: give --tokens, as --tokens "
            "20000"
        )
    batches = []
    held = 0
    for batch in opened.iter_batches(columns=list(_COLUMNS)):
        batches.append(batch)
        held += len(batch)
        if held >= num_rows:
            break
    if not num_rows:
        raise BadInput(f"{file} holds no rows")
    table = pa.Table.from_batches(batches).slice(0, num_rows)
    try:
        experts = matrix_of(table, "indices", pa.uint16()).astype(np.int64)
        scores = matrix_of(table, "scores", pa.float32())
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from error
    if experts.shape != scores.shape:
        raise BadInput(
            f"{file} has {experts.shape[1]} indices but {scores.shape[1]} scores in a row"
        )
    return experts, scores
