"""The recorded requests: texts in turn, what makes maps first, and all that fmoe's reproduction
asks of a trace."""

from pathlib import Path

import numpy as np
import pytest

from artifacts.traces.parquet import read_parquet
from moectl.bundled import demo_model
from tools.make import request_trace


def test_requests_of_two_texts_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for number, text in enumerate(texts):
        text.write_text(" ".join(f"{word * (number + 3)}" for word in range(200)))
    out = tmp_path / "out.parquet"
    sources = [str(text) for text in texts]
    sizes = ["--requests", "1", "--length", "12", "--prefill", "8"]
    options = [str(demo_model()), str(out), "--first", *sources, "--then", *sources[::-1], *sizes]
    monkeypatch.setattr("sys.argv", ["make_requests", *options])
    request_trace.main()
    assert "6 requests for maps, 2 to replay" in capsys.readouterr().out
    trace = read_parquet(out, num_experts=32)
    assert np.unique(trace.request).tolist() == list(range(8))
    assert trace.probabilities.shape[1] == 32 and trace.predicted.shape[1] == 2
    assert len(trace.embeddings) == 8 * (1 + 4), "a prompt and four tokens each"

    def given(request: int) -> np.ndarray:
        rows = np.unique(trace.iteration[trace.request == request])
        return trace.embeddings[rows]

    assert np.allclose(given(0), given(7)) and np.allclose(given(1), given(6)), (
        "the second part turns the texts round"
    )
    assert not np.allclose(given(0), given(1))
