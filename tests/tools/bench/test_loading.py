"""Both ways of reading experts give the same bytes, and the command tells their rates."""

import os
import sys
from pathlib import Path

import pytest
import torch

from runtime.model.open import open_model
from tests.conftest import Checkpoint
from tools.bench import loading


def test_both_ways_read_the_same(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(checkpoint("olmoe"))
    store = open_model(str(folder)).store
    one, other = (read(store) for read in loading.WAYS.values())
    assert torch.equal(one, other)
    store.close()
    cores = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["loading", "--model", str(folder), "--rounds", "1"])
    try:
        loading.main()
    finally:
        torch.set_num_threads(threads)
    assert os.sched_getaffinity(0) == cores
    said = capsys.readouterr().out
    assert "one after another" in said and "a thread a core" in said
