"""`moectl serve` as a command: what it refuses before it listens, and how it ends."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import openai
import pytest
from openai import OpenAI

from moectl.cli import main
from moectl.serving.guard import ServerLimits
from runtime.model.open import open_model
from tests import ROOT
from tests.conftest import Checkpoint
from tests.helpers.serving import EXACT, SETTINGS, rest, serving

pytestmark = pytest.mark.slow


def test_a_server_ends_well(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The page is there while the model loads. After SIGTERM running requests are answered to their
    end, later ones are not, and the exit code is 0."""
    command = ["-m", "moectl", "serve", str(checkpoint("olmoe")), "--port", "0", "--threads", "1"]
    process = subprocess.Popen(
        [sys.executable, *command, "--store", str(tmp_path / "none.duckdb")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = re.search(
            r"is loading; its page is there: (http://[0-9.:]+)/\n", process.stderr.readline()
        )[1]
        client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        assert (
            httpx2.get(f"{url}/health").json() == {"status": "loading"}
            and "<html" in httpx2.get(url).text
        )
        with pytest.raises(openai.InternalServerError, match="is loading: try again") as refused:
            client.models.list()
        assert refused.value.code == "loading"
        *told, listens = [process.stderr.readline() for _ in range(4)]
        assert [line.split()[0] for line in told] == ["Experts", "Budget", "Preset"]
        assert " of 16 experts in the fast tier, 8 requests take turns: compiled layers" in listens
        assert f": {url}/v1 for clients" in listens
        [model] = client.models.list()
        asked = EXACT | {"model": model.id, "prompt": "sheep", "max_tokens": 200, "stream": True}
        stream = client.completions.create(**asked)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        assert len(rest(stream)[1]["token_ids"]) == 200
        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == ""
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
    finally:
        process.kill()
        process.wait()


def test_what_takes_too_long_is_broken_off(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Every accepted client is told, whether its request runs or waits, streamed or whole."""
    limits = ServerLimits(num_rows=1, closing_s=0.2)
    asked = EXACT | {"prompt": "sheep", "max_tokens": 240, "stream": True}
    with serving(
        open_model(str(checkpoint("olmoe"))), SETTINGS, limits, tmp_path / "none.duckdb"
    ) as running:
        streams = [running.client().completions.create(**asked) for _ in range(2)]
        next(iter(streams[0]))
        running.stop()
        for stream in streams:
            with pytest.raises(openai.APIError, match="the server is stopping"):
                list(stream)


def test_it_is_said_what_cannot_be_served(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, code, told in (
        (["--host", "0.0.0.0"], 2, "--host 0.0.0.0 lets anybody in: give --api-key"),
        (["--host", "192.0.2.1", "--api-key", "secret"], 2, "--host 192.0.2.1 --port 8000: "),
        (["--rows", "0"], 2, "--rows"),
        (
            ["--rows", "4", "--batch", "8"],
            2,
            "--rows 4 is for turns: give --batch 1 too, or leave it out",
        ),
        (["--batch", "many"], 2, "--batch many: give a number of requests, or auto"),
        (["--batch", "0"], 2, "--batch 0: give a number of requests, or auto"),
        (["--cors-origin", "localhost:3000"], 2, "is no origin: give it as http://localhost:3000"),
        (
            ["--replicas", "2", "--executor", "local"],
            2,
            "--replicas run on Ray: give --executor ray",
        ),
    ):
        assert main(["serve", *arguments]) == code
        assert told in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "moectl.commands.start.serve.server")
    monkeypatch.delattr("moectl.commands.start.serve.server")
    assert main(["serve"]) == 3
    assert capfd.readouterr().err == "moectl: serving needs uvicorn: pip install 'moectl[serve]'\n"
