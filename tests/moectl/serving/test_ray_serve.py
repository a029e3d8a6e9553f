"""Replicas of a server behind Ray Serve: their answers, one that is killed, the end. The
environment of `make test` has no Ray Serve; `pip install 'moectl[ray]'` adds it."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI

from tests import ROOT
from tests.conftest import Checkpoint
from tests.helpers.serving import EXACT, rest

try:
    import ray.serve  # noqa: F401
except ImportError:
    pytest.skip("needs Ray Serve: pip install 'moectl[ray]'", allow_module_level=True)


@pytest.fixture
def replicas(checkpoint: Checkpoint, tmp_path: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    command = [
        "-m",
        "moectl",
        "serve",
        str(checkpoint("olmoe")),
        "--replicas",
        "2",
        "--port",
        "0",
        "--threads",
        "1",
    ]
    process = subprocess.Popen(
        [sys.executable, *command, "--store", str(tmp_path / "none.duckdb")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert "2 replicas of" in process.stderr.readline()
        yield (
            process,
            re.search(r": (http://[0-9.:]+)/v1 for clients", process.stderr.readline())[1],
        )
    finally:
        process.kill()
        process.wait()


def test_requests_are_answered_though_a_replica_is_killed_and_to_the_end(
    replicas: tuple[subprocess.Popen, str],
) -> None:
    process, url = replicas
    assert httpx2.get(f"{url}/health").json() == {"status": "ok"}
    client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=5)
    [model] = client.models.list()
    asked = EXACT | {"model": model.id, "prompt": "sheep", "max_tokens": 8}
    texts = {client.completions.create(**asked).choices[0].text for _ in range(4)}
    assert len(texts) == 1
    found = subprocess.run(
        ["pgrep", "-f", "ServeReplica:moectl"], capture_output=True, text=True, check=True
    )
    assert len(pids := found.stdout.split()) == 2
    subprocess.run(["kill", "-9", pids[0]], check=True)
    assert {client.completions.create(**asked).choices[0].text for _ in range(4)} == texts
    stream = client.completions.create(**asked | {"max_tokens": 200, "stream": True})
    next(iter(stream))
    process.send_signal(signal.SIGTERM)
    assert len(rest(stream)[1]["token_ids"]) == 200
    assert process.wait(timeout=60) == 0
