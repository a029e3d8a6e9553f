"""Records the routing trace that the tests replay: the bundled model, decoding held-out docstrings.

    python -m tools.make_trace tests/data/demo-trace.parquet

Probabilities, one-layer predictions and embeddings are kept to `MANTISSA_BITS` bits, so that the file stays small; the
router's choice and its weights are exact.
"""

import argparse
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from artifacts.files import replacing
from artifacts.trace import Trace
from artifacts.tracefile import to_table
from moectl.bundled import demo_model
from profilers.corpus import documents, token_sequences
from profilers.quality import read
from runtime.model import open_model
from runtime.session import Session, Settings

PREFILL, DECODE, REQUESTS = 24, 60, 6
MANTISSA_BITS = 5
_FLOAT32_MANTISSA_BITS = 23


def record() -> Trace:
    """Teacher-forced requests of `PREFILL + DECODE` tokens, as a session sees them."""
    opened = open_model(str(demo_model()))
    texts = documents("builtin:held-out", seed=0)
    length = PREFILL + DECODE
    sequences = token_sequences(texts, opened.tokenizer, length=length, num_tokens=100 * length)
    whole = list(islice((sequence for sequence in sequences if len(sequence) == length), REQUESTS))
    with Session(opened, Settings(policies={"prefetch": "next_gate"}, budget="100%", window="1B")) as session:
        recorder = session.record()
        read(session, whole, prefill=PREFILL)
        return recorder.trace()


def shortened(values: np.ndarray) -> np.ndarray:
    """float32 rounded to `MANTISSA_BITS` bits after the first."""
    dropped = _FLOAT32_MANTISSA_BITS - MANTISSA_BITS
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + (1 << (dropped - 1))) >> dropped << dropped
    return rounded.astype(np.uint32).view(np.float32)


def write(trace: Trace, path: Path) -> None:
    """As `write_parquet`, packed tighter: bytes of one significance lie together and compress better."""
    floats = [f"{name}.list.element" for name in ("weights", "probabilities", "predicted")]
    with replacing(path) as temporary:
        pq.write_table(
            to_table(trace),
            temporary,
            compression="zstd",
            compression_level=19,
            use_dictionary=["request", "pass", "phase", "layer", "token"],
            use_byte_stream_split=floats,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path)
    path = parser.parse_args().path
    torch.set_num_threads(1)
    trace = record()
    kept = {name: shortened(getattr(trace, name)) for name in ("predicted", "probabilities", "embeddings")}
    write(replace(trace, **kept), path)
    print(f"{path}: {len(trace)} rows, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
