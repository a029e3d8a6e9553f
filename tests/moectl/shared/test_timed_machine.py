"""A machine with a user's own times: parsed, used by plan and simulate, and refused in one line."""

import json

import pytest

from artifacts.errors import BadUsage
from artifacts.hardware.machines import machine
from moectl.cli import main
from moectl.shared.timed_machine import timed_machine


def test_times_replace_what_they_name() -> None:
    timed = timed_machine("a100-pcie4:load=14ms,head=80us")
    assert (timed.load_s, timed.layer_s, timed.head_s) == (0.014, None, pytest.approx(80e-6))
    assert timed.link_gbps == machine("a100-pcie4").link_gbps and timed_machine("5gbps") == machine(
        "5gbps"
    )
    assert timed_machine("a100:load=14ms").name == "a100-pcie4:load=14ms"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a10:load=14ms", "unknown machine 'a10'"),
        ("5gbps:lode=14ms", "unknown time of a machine 'lode'; did you mean load?"),
        ("5gbps:load=14", "time '14' is not understood"),
        ("5gbps:load=0ms", "time '0ms' is not understood"),
        ("5gbps:load", "time '' is not understood"),
    ],
)
def test_what_is_no_time_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadUsage, match=says):
        timed_machine(text)


def test_plan_and_simulate_take_them(capfd: pytest.CaptureFixture[str]) -> None:
    """Half a token per second where each of 32 x 2 experts takes 30 ms to come."""
    assert (
        main(["plan", "mixtral-8x7b", "--vram", "24GB", "--machine", "5gbps:load=30ms", "--json"])
        == 0
    )
    said = json.loads(capfd.readouterr().out)
    assert 1 / said["tokens_per_s"]["none"] - 1 / said["tokens_per_s"]["all"] == pytest.approx(
        32 * 2 * 0.030
    )
    assert said["machine"] == "5gbps:load=30ms"
    dials = [
        "--model",
        "mixtral-8x7b",
        "--synthetic",
        "tokens=40,requests=1,prompt=8",
        "--budget",
        "64x",
    ]
    plain = []
    slow = []
    for named, tpot in (("5gbps", plain), ("5gbps:layer=10ms", slow)):
        assert main(["simulate", *dials, "--machine", named, "--json"]) == 0
        tpot.append(json.loads(capfd.readouterr().out)["tpot_ms"])
    assert slow[0] - plain[0] == pytest.approx(32 * 10, abs=5)
