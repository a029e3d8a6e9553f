"""A machine is seen without torch as torch sees it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from profilers.hardware import this_machine
from profilers.hardware.this_machine import LocalMachine


def test_a_glance_sees_what_torch_sees() -> None:
    glance = LocalMachine.glance("cpu", torch.get_num_threads())
    assert replace(
        LocalMachine.look(torch.device("cpu")), load=None, available_nbytes=0
    ) == replace(glance, load=None, available_nbytes=0)
    assert this_machine.cuda_of_torch() == torch.version.cuda


def test_a_gpu_is_found_by_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(this_machine, "cuda_of_torch", lambda: "13.0")
    this_machine.gpus_of_driver.cache_clear()
    try:
        here = LocalMachine.glance("auto", 3)
        assert (here.gpu, here.gpu_nbytes, here.threads) == ("NVIDIA H200", 143771 << 20, 3)
        assert LocalMachine.glance("cpu", 3).gpu is None
    finally:
        this_machine.gpus_of_driver.cache_clear()
