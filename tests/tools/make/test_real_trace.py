"""The bundled trace is the beginnings of whole requests, small, and says whose it is."""

from pathlib import Path

import numpy as np
import pytest

from artifacts.traces.parquet import read_parquet
from artifacts.traces.trace import DECODE
from moectl.bundled import bundled_trace
from tests import ROOT, TRACE
from tools.make import real_trace
from tools.make.real_trace import REQUESTS, TOKENS, beginnings, joined


def test_beginnings_are_joined_with_their_experts_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(real_trace, "REQUESTS", 2)
    monkeypatch.setattr(real_trace, "TOKENS", 30)
    whole = read_parquet(TRACE)
    later = whole.take(np.flatnonzero(whole.request > 2))
    trace = joined([beginnings(whole), beginnings(later)])
    tokens = np.bincount(trace.request[trace.layer == 0])
    assert tokens.tolist() == [30] * 4 and (np.diff(trace.pass_[trace.layer == 0]) >= 0).all()
    for number, request in enumerate((0, 1, 3, 4)):
        source = whole.take(np.flatnonzero((whole.request == request) & (whole.token < 30)))
        copied = trace.take(np.flatnonzero(trace.request == number))
        assert np.array_equal(copied.experts, source.experts) and np.array_equal(
            copied.layer, source.layer
        )
        assert np.allclose(copied.weights, source.weights, rtol=2**-8)


def test_the_bundled_trace_is_what_its_page_says() -> None:
    path = bundled_trace(Path("gpt-oss-20b"))
    trace = read_parquet(path, num_experts=32)
    assert path.stat().st_size < 500_000 and trace.assumed == () and (trace.phase == DECODE).all()
    tokens = np.bincount(trace.request[trace.layer == 0])
    assert (
        len(tokens) == 2 * REQUESTS
        and tokens.max() == TOKENS
        and (trace.num_layers, trace.top_k) == (24, 4)
    )
    told = (path.parent / "README.md").read_text(encoding="utf-8")
    assert f"{tokens.sum():,} decoded tokens of {len(tokens)} requests" in told
    assert "72b368f60045221f21eeb65debb27d58de92e565" in told and "Apache License" in told
    assert "Version 2.0" in (path.parent / "LICENSE.Apache-2.0").read_text(encoding="utf-8")


def test_a_name_of_a_file_or_of_nothing_is_no_bundled_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bundled_trace(Path("gpt-oss-20b")) == ROOT / "moectl" / "traces" / "gpt-oss-20b.parquet"
    assert (
        bundled_trace(Path("../traces/gpt-oss-20b")) is None
        and bundled_trace(Path("mixtral-8x7b")) is None
    )
    (tmp_path / "gpt-oss-20b").touch()
    assert bundled_trace(Path("gpt-oss-20b")) is None
