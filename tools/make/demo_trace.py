"""Records the routing trace that the tests replay: the bundled model, decoding held-out docstrings.

    python -m tools.make.demo_trace tests/data/demo-trace.parquet

Probabilities, one-layer predictions and embeddings are kept to `MANTISSA_BITS` bits, predictions
farther ahead and those of fitted predictors to fewer, so that the file stays small; the router's
choice and its weights are exact.
"""

import argparse
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.parquet as pq
import torch

from artifacts.common.files import replacing
from artifacts.store.runs import ModelInfo
from artifacts.traces.parquet import to_table
from artifacts.traces.trace import Trace
from moectl.bundled import demo_model
from profilers.compare.quality import read
from profilers.routing.predictors import PredictorPlan, build_predictors
from profilers.text.batches import Batching, Data
from profilers.text.corpus import documents, token_sequences
from runtime.engine.fitted_predictor import Predictor
from runtime.model.open import MoeModel, open_model
from runtime.session.session import Session, Settings

PREFILL = 24
DECODE = 60
REQUESTS = 6
MANTISSA_BITS = 5
FEW_BITS = 2
DISTANCE = 3
FEATURES = 128
FITTED_ON = 16_384
_FLOAT32_MANTISSA_BITS = 23


def record() -> Trace:
    """Teacher-forced requests of `PREFILL + DECODE` tokens, as a session sees them."""
    opened = open_model(str(demo_model()))
    texts = documents("builtin:held-out", seed=0)
    length = PREFILL + DECODE
    sequences = token_sequences(texts, opened.tokenizer, length=length, num_tokens=100 * length)
    whole = list(islice((sequence for sequence in sequences if len(sequence) == length), REQUESTS))
    predictor = fitted(opened)
    with Session(opened, Settings(budget="100%")) as session:
        recorder = session.record()
        session.watcher.see_predictions(DISTANCE, predictor)
        read(session, whole, prefill=PREFILL)
        return recorder.trace()


def fitted(opened: MoeModel) -> Predictor:
    """Predictors of the bundled model, fitted to text that the requests are not of."""
    texts = token_sequences(
        documents("builtin", seed=0), opened.tokenizer, length=128, num_tokens=FITTED_ON
    )
    model = ModelInfo("bundled", opened.fingerprint, opened.family, opened.shape)
    with TemporaryDirectory() as folder, Session(opened, Settings(budget="100%")) as session:
        found = build_predictors(
            session,
            Data("builtin", list(texts)),
            Batching(length=128, prefill=0),
            PredictorPlan(DISTANCE, FEATURES),
            model=model,
            store_path=Path(folder) / "moe.duckdb",
        )
    return Predictor(found.predictors, DISTANCE, opened.model.device)


def shortened(values: np.ndarray, bits: int = MANTISSA_BITS) -> np.ndarray:
    """Round float32 to `bits` bits after the first."""
    dropped = _FLOAT32_MANTISSA_BITS - bits
    whole = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (whole + (1 << (dropped - 1))) >> dropped << dropped
    return rounded.astype(np.uint32).view(np.float32)


def write(trace: Trace, path: Path) -> None:
    """Write the trace as `write_parquet` does, packed tighter: bytes of one significance lie
    together and compress better."""
    floats = [
        f"{name}.list.element" for name in ("weights", "probabilities", "predicted", "learned")
    ]
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
    kept = {name: shortened(getattr(trace, name)) for name in ("probabilities", "embeddings")}
    near = shortened(trace.predicted[:, :1])
    far = shortened(trace.predicted[:, 1:], FEW_BITS)
    learned = shortened(trace.learned, FEW_BITS)
    write(
        replace(trace, **kept, predicted=np.concatenate((near, far), axis=1), learned=learned), path
    )
    print(f"{path}: {len(trace)} rows, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
