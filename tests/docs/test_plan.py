"""`docs/plan.md` has what `moectl plan` prints: the numbers of its table, and its first answer."""

import json
import re

import pytest

from moectl.cli import main
from tests import ROOT

PAGE = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
MACHINES = {"RTX 4060, 8 GB": "rtx4060", "RTX 4090, 24 GB": "rtx4090", "H100 PCIe, 80 GB": "h100"}


def cells() -> list[tuple[str, str, str]]:
    """Model, machine and text of each cell."""
    heading, _, *rows = [line.strip("|").split("|") for line in PAGE.split("\n\n")[2].splitlines()]
    machines = [MACHINES[name.strip()] for name in heading[1:]]
    models = [(re.search("`(.*)`", name).group(1), texts) for name, *texts in rows]
    return [
        (model, *cell)
        for model, texts in models
        for cell in zip(machines, map(str.strip, texts), strict=True)
    ]


@pytest.mark.parametrize(("model", "machine", "text"), cells())
def test_what_the_table_says(
    model: str, machine: str, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", model, "--machine", machine, "--json"])
    out, err = capfd.readouterr()
    if code == 4:
        assert text.removeprefix("does not fit: ") == re.search(
            r"it takes (.*? GiB at least)", err
        ).group(1)
        return
    said = json.loads(out)
    least, most = (
        f"{float(format(said['tokens_per_s'][name], '.2g')):g}" for name in ("none", "all")
    )
    share = f"{100 * said['memory']['share']:.1f} %"
    speeds = f"{least} to {most}"
    expected = f"all: at most {most}" if said["memory"]["share"] == 1 else f"{share}: {speeds}"
    assert text.replace(" of the experts", "") == expected


def test_the_answer_that_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    command, shown = re.search(
        r"```sh\nmoectl (plan Q[^\n]*)\n```\n\n```text\n(.*?)```", PAGE, re.S
    ).groups()
    assert main(command.split()) == 0
    assert capfd.readouterr().out == shown and shown.count("\n") <= 12
