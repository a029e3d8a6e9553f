"""A digest of what a run wrote, without its number and its times: the same command gives the same
digest, row by row."""

import hashlib
import json

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.store.runs import StoredRun
from artifacts.store.store import Store

# Parameters and columns that depend on the clock, on the machine's load or on the numbers of other
# runs.
_VARYING = frozenset(("job", "artefacts", "spread", "pace", "load", "after", "profile_run"))
_TIMES = {"bench": frozenset(("ttft_ms", "tpot_ms", "tokens_per_s", "exposed_ms"))}


def content_hash(store: Store, run_id: int) -> str:
    """sha256 of a run: of the command, model, data and parameters that made it, and of every row of
    its tables, sorted.

    Hardware that is measured again gives another digest. Raises BadInput as `Store.read` does.
    """
    run = store.run(run_id)
    digest = hashlib.sha256(json.dumps(_description(run), sort_keys=True).encode())
    for table in sorted(run.contents):
        store.read(table, run_id)  # counts its rows
        left_out = ", ".join(sorted({"run_id", *_TIMES.get(table, ())}))
        rows = store.query(
            f"SELECT * EXCLUDE ({left_out}) FROM {table} WHERE run_id = {int(run_id)} ORDER BY ALL"
        )
        digest.update(f"{table} {rows.num_rows}".encode())
        for name in sorted(rows.column_names):
            digest.update(name.encode())
            _update(digest, rows[name].combine_chunks())
    return digest.hexdigest()


def _description(run: StoredRun) -> dict[str, object]:
    info = run.info
    parameters = {name: value for name, value in info.parameters.items() if name not in _VARYING}
    description = {
        name: getattr(info, name)
        for name in ("command", "model_id", "data", "data_digest", "tokens", "seed")
    }
    return description | {"parameters": parameters}


def _update(digest: "hashlib._Hash", values: pa.Array) -> None:
    """Add the values of a column alone: neither slices nor the bytes behind empty places count."""
    digest.update(values.is_valid().to_numpy(zero_copy_only=False).tobytes())
    if (
        pa.types.is_list(values.type)
        or pa.types.is_large_list(values.type)
        or pa.types.is_fixed_size_list(values.type)
    ):
        digest.update(
            pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False).tobytes()
        )
        _update(digest, values.flatten())
    elif pa.types.is_floating(values.type) or pa.types.is_integer(values.type):
        digest.update(values.drop_null().to_numpy(zero_copy_only=False).tobytes())
    else:
        digest.update(json.dumps(values.drop_null().to_pylist()).encode())
