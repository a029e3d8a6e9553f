"""docs/plan.md and docs/lab/advise.md have what `moectl advise` prints, under each command."""

import re
import shlex

import pytest

from artifacts.hardware.machines import machine
from moectl.cli import main
from moectl.commands.start.advise.answer import rounded
from moectl.commands.start.advise.choosing import opened_trace
from moectl.commands.start.advise.engines import ExpertPlacement, engine_of
from moectl.commands.start.advise.predicting import predict
from moectl.commands.start.plan.needs import needs_of
from tests import ROOT

PAGE = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
LAB = (ROOT / "docs" / "lab" / "advise.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```sh\nmoectl (advise .*)\n```\n\n```text\n((?:.+\n)*)```", PAGE + LAB)


@pytest.mark.parametrize(("line", "text"), SHOWN)
def test_what_the_page_shows_is_printed(
    line: str, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(line)) == 0
    assert capfd.readouterr().out == text


def test_what_the_page_says_of_experts_on_the_cpu() -> None:
    needs = needs_of("gpt-oss-20b", None)
    trace = opened_trace(None, needs)
    found = predict(needs, machine("rtx4080"), ExpertPlacement(), engine_of("llama.cpp"), trace)
    told = f"{rounded(found.tokens_per_second)} ({rounded(found.low)} to {rounded(found.high)})"
    assert f"| 33.5 to 34.0 | {told} |" in LAB
