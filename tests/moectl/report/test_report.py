"""`moectl report`: every number on the page comes from a query that it shows; the page makes no
network requests."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import duckdb
import numpy as np
import pytest

from artifacts.store.presets import StoredPreset, to_rows
from artifacts.store.runs import RunInfo, utc_now
from artifacts.store.store import Store
from moectl.cli import main
from moectl.report import queries
from moectl.report.page import render
from tests import TRACE
from tests.conftest import Checkpoint
from tests.helpers.browser import LOOKS, Tab, browsing, needs_browser
from tests.moectl.bench.test_other_tools import VLLM, written
from tests.moectl.commands.test_build_buddies import write_profile

pytestmark = pytest.mark.slow

VOID = {"meta", "link"}
LIVE = {"live-summary", "live-front", "live-bench", "layers", "prefetch", "controls"}
SIMULATED = {"simulated-summary", "simulated-front", "simulated-bench"}
OTHERS = {"environment", "tuned", "use", "together", "standins", "loss", "splits", "receipt"}
SECTIONS = LIVE | SIMULATED | OTHERS | {"imported"}


@dataclass
class Part:
    """A section: its queries, and all exact values of its marks and numbers."""

    queries: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)


class Reader(HTMLParser):
    """Parses a page; fails if tags do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.parts: dict[str, Part] = {}
        self.links: list[str] = []
        self.unnamed: list[str] = []
        self.bare: list[str] = []
        self.lacking: dict[str, str] = {}  # commands by title of what is not there
        self.num_scripts = 0
        self.is_lacking = False
        self._inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [
            value
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "action") and value
        ]
        assert not any(name.startswith("on") for name in given)
        self.num_scripts += tag == "script"
        self.is_lacking = self.is_lacking or given.get("id") == "lacking"
        if tag == "section":
            self._inside = given["id"]
            self.parts[self._inside] = Part()
        if tag == "pre":
            self.parts[self._inside].queries.append("")
        values = [given["value"]] if tag == "data" else given.get("data-values", "").split()
        if values:
            self.parts[self._inside].values += values
        if tag == "svg" and not (given.get("role") == "img" and given.get("aria-label")):
            self.unnamed.append(self._inside)
        self.is_empty_number = tag == "td" and given.get("class") == "n"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, (
            f"{tag} closes {self.open[-3:]} at {self.getpos()}"
        )
        self.open.pop()

    def handle_data(self, text: str) -> None:
        if "pre" in self.open:
            self.parts[self._inside].queries[-1] += text
        elif self.open and self.open[-1] == "td" and self.is_empty_number and text != "–":
            self.bare.append(text)
        elif self.is_lacking and self.open[-1:] == ["dt"]:
            self.lacking[text] = ""
        elif self.is_lacking and self.open[-1:] == ["code"] and self.lacking:
            self.lacking[[*self.lacking][-1]] += text


def taken_apart(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    reader.close()
    assert not reader.open
    return reader


@pytest.fixture(scope="module")
def store(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of a small model with everything that a report shows."""
    folder = tmp_path_factory.mktemp("report")
    text = folder / "text.jsonl"
    path = folder / "moe.duckdb"
    model = str(checkpoint("olmoe"))
    text.write_text(
        "\n".join(
            json.dumps({"text": f"{number} sheep and an old dog by the gate"})
            for number in range(8)
        )
    )
    (folder / "one.yaml").write_text(
        f"task: one\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {text.name}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{text}}'\n"
        "doc_to_choice: [' by', ' gate']\ndoc_to_target: 0\n"
    )
    same = ["--data", str(text), "--store", str(path)]
    elsewhere = str(written(folder / "vllm.json", VLLM))
    bench = [
        "bench",
        model,
        *same,
        "--tokens",
        "24",
        "--length",
        "12",
        "--rounds",
        "1",
        "--threads",
        "1",
    ]
    for command in (
        [
            "profile",
            model,
            *same,
            "--tokens",
            "120",
            "--length",
            "16",
            "--prefill",
            "8",
            "--samples",
            "20",
            "--trace",
        ],
        ["build-buddies", "--store", str(path)],
        [
            "quantize",
            model,
            *same,
            "--jobs",
            "1",
            "--samples",
            "4",
            "--recipe",
            "refined",
            "--bits",
            "2,4",
        ],
        [
            "split",
            "--machine",
            "rtx3090-pcie4",
            "--store",
            str(path),
            "--budget",
            "50%",
            "--zeta",
            "0.1",
        ],
        [
            *bench,
            "--presets",
            "importance,specmd,buddymoe,buddymoe-zero,buddymoe-best",
            "--budgets",
            "50%",
        ]
        + ["--links", "5MB/s", "--tasks", str(folder / "one.yaml")],
        [
            "bench",
            model,
            "--simulate",
            "--presets",
            "specmd",
            "--budgets",
            "25%,50%",
            "--store",
            str(path),
        ]
        + ["--import", elsewhere],
    ):
        assert main(command) == 0, command
    axes = {"prefetch": "none", "eviction": "lfu", "miss": "near", "residency": "uniform"}
    tuned = StoredPreset(
        'tuned "own"',
        "standard",
        **axes,
        scope="layer",
        budget="50%",
        machine="5gbps",
        max_loss=0.0125,
    )
    with Store.open(path) as held:
        [model] = held.models()
        quality = {tuned.name: {"loss_error": 0.0021}}
        run = RunInfo("tune", model.model_id, utc_now(), 1.5, parameters={"quality": quality})
        held.write_run(run, {"presets": to_rows([tuned])})
    return path


@pytest.fixture(scope="module")
def page(store: Path) -> Path:
    out = store.with_name("report.html")
    assert main(["report", str(out), "--store", str(store)]) == 0
    return out


def numbers(store: Path, queries: list[str]) -> Iterator[str]:
    with duckdb.connect(str(store), read_only=True) as connection:
        for query in queries:
            for row in connection.execute(unescape(query)).fetchall():
                yield from (
                    repr(value) if isinstance(value, float) else str(value) for value in row
                )


def test_every_number_is_found_by_a_query_of_its_section(page: Path, store: Path) -> None:
    reader = taken_apart(page)
    assert reader.parts.keys() == SECTIONS and not reader.bare
    for name, part in reader.parts.items():
        assert part.queries and part.values, name
        found = set(numbers(store, part.queries))
        assert set(part.values) <= found, name
    assert sum(len(part.values) for part in reader.parts.values()) > 300


def test_the_page_needs_nothing_else(page: Path) -> None:
    reader = taken_apart(page)
    assert all(link.startswith("#") or link == "data:," for link in reader.links)
    assert {link.lstrip("#") for link in reader.links if link.startswith("#")} == SECTIONS
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"https?://|@import|url\(", text) and not reader.unnamed
    assert "vllm serve" in text and "another text" in text
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text


def test_who_stands_in_best_is_said_in_words(page: Path, store: Path) -> None:
    """The difference in KL a rank and its error equal those computed here from the KL by text of
    each run."""
    text = page.read_text(encoding="utf-8")
    section = text[text.index('<section id="controls"') :]
    section = section[section.index("<p>") :]
    with Store.open(store, read_only=True) as held:
        prices = {}
        for run in held.runs():
            if run.info.command == "bench" and run.info.parameters["mode"] == "live":
                [row] = held.read("bench", run.run_id).to_pylist()
                replaced = sum(held.read("bench_layers", run.run_id)["replaced"].to_pylist())
                if row["preset"].startswith("buddymoe"):
                    prices[row["preset"]] = (
                        np.array(run.info.parameters["by_text"]["kl"]) * run.info.tokens / replaced
                    )
    assert prices.keys() == {"buddymoe", "buddymoe-best", "buddymoe-random", "buddymoe-zero"}
    best = min(prices, key=lambda preset: prices[preset].mean())
    others = {preset: price for preset, price in prices.items() if preset != "buddymoe"}
    rival = min(others, key=lambda preset: others[preset].mean())
    difference = prices[rival] - prices["buddymoe"]
    values = [
        float(value)
        for value in re.findall(r'<data value="([^"]+)"', section[: section.index("</p>")])
    ]
    assert f"<code>{best}</code> " in section and f"<code>{rival}</code>" in section
    told = [
        prices[rival].mean(),
        prices["buddymoe"].mean(),
        difference.mean(),
        difference.std(ddof=1) / 2**0.5,
    ]
    assert values[:4] == pytest.approx(told, rel=1e-6)


def test_what_leads(store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The newest live bench leads; on the page of a bench that bench does, and the text has its
    numbers."""
    live = tmp_path / "live.html"
    simulated = tmp_path / "simulated.html"
    assert main(["report", str(live), "--store", str(store), "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"path": str(live), "nbytes": live.stat().st_size}
    again = [
        "bench",
        "--simulate",
        "--presets",
        "specmd",
        "--budgets",
        "25%,50%",
        "--store",
        str(store),
    ]
    with duckdb.connect(str(store), read_only=True) as connection:
        [(model,)] = connection.execute("SELECT name FROM models").fetchall()
        [(exact_ms,)] = connection.execute(
            "SELECT min(tpot_ms) FROM bench WHERE mode = 'live' AND preset IN ('on-demand', "
            "'near', 'specmd')"
        ).fetchall()
    assert main([again[0], model, *again[1:], "--report", str(simulated)]) == 0
    assert f"report: {simulated}" in capfd.readouterr().out
    with Store.open(store, read_only=True) as held:
        run = next(
            run.run_id for run in held.runs() if run.info.parameters.get("mode") == "simulated"
        )
    by_run = simulated.with_name("run.html")
    assert main(["report", str(by_run), "--store", str(store), "--run", str(run)]) == 0
    assert by_run.read_text() == simulated.read_text()
    assert repr(exact_ms) in taken_apart(live).parts["live-summary"].values
    for page, titles in (
        (live, ["Measured live", "Simulated"]),
        (simulated, ["Simulated", "Measured live"]),
    ):
        assert re.findall('class="chapter">([^<]+)', page.read_text())[:2] == titles


def test_a_toy_has_ratios_alone_on_a_data_sheet_and_milliseconds_on_this_machine(
    page: Path,
) -> None:
    text = page.read_text(encoding="utf-8")
    simulated = _seen(
        text[text.index('<section id="simulated-summary"') : text.index('<section id="imported"')]
    )
    live = text[text.index('<section id="live-summary"') : text.index('<section id="layers"')]
    assert (
        "ratios only" in simulated
        and "full = 1" in simulated
        and not re.search(r"\bms\b|tokens/s", simulated)
    )
    assert "emulated link of 5MB/s" in live and "ms a token" in live and "Altered output" in live
    assert re.search("<h1>[^<]* on [^<]+</h1>", text) and re.search(
        "<title>[^<]*20[0-9]{2}: moectl report", text
    )


def test_every_preset_is_named_in_the_picture(page: Path) -> None:
    """On a screen; on a phone those that no other beats."""
    text = page.read_text(encoding="utf-8")
    front = text[text.index('<section id="live-front"') : text.index('<section id="live-bench"')]
    presets = (
        "importance",
        "specmd",
        "buddymoe",
        "buddymoe-zero",
        "on-demand",
        "near",
        "uniform-bits",
        "full",
    )
    named = [front.count(f">{preset}</text>") for preset in presets if preset != "full"]
    assert {*named} == {1, 2} and front.count('class="spread"') > len(presets)
    assert "Lower left is better" in front and front.count("perplexity lost</text>") == 2


def _seen(text: str) -> str:
    """A part of a page without its queries and tags."""
    return re.sub("<[^>]+>", " ", re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL))


def test_what_is_not_there_names_its_command(tmp_path: Path, checkpoint: Checkpoint) -> None:
    trace = str(TRACE)
    out = tmp_path / "out.html"
    store = tmp_path / "moe.duckdb"
    simulate = ["bench", "--simulate", "--trace", trace, "--presets", "near", "--budgets", "25%"]
    assert main([*simulate, "--store", str(store), "--report", str(out)]) == 0
    reader = taken_apart(out)
    lacking = reader.lacking
    assert lacking["Use of experts"] == "moectl profile"
    assert lacking["What few bits cost"] == "moectl quantize"
    assert lacking["What to run"] == "moectl bench --presets all"
    assert lacking.keys() >= {"Stand-ins", "Split experts"} and reader.parts["layers"].values
    assert all(part.queries for part in reader.parts.values())


def test_texts_of_strangers_are_shown_and_not_followed(store: Path, tmp_path: Path) -> None:
    """Of a store whose every free text is hostile, in each section that shows one."""
    evil = """x' OR 1=1; --"><script>alert(1)</script>{y}{{ 7 * 7 }}{% raw %}"""
    for query in (queries.CONDITIONS, queries.TABLE, queries.RECEIPT):
        asked = queries.filled(query, job=evil, jobs=[evil, evil], runs=[1, 2])
        assert "= 'x'' OR 1=1; --" in asked or "('x'' OR 1=1; --" in asked
    assert "IN (NULL)" in queries.filled(queries.RECEIPT, runs=[], jobs=[])
    hostile = tmp_path / "hostile.duckdb"
    hostile.write_bytes(store.read_bytes())
    with duckdb.connect(str(hostile)) as connection:
        for told in (
            "models SET family = $1, name = $1",
            "runs SET data = $1, command = CASE command WHEN 'tune' THEN $1 ELSE command END",
            "bench SET preset = $1 WHERE preset IN ('importance', 'specmd')",
            "bench SET budget = $1 WHERE budget = '50%'",
            "presets SET eviction = $1, machine = $1",
            "bench SET link = $1 WHERE mode = 'imported'",
        ):
            connection.execute(f"UPDATE {told}", [evil])
    with Store.open(hostile, read_only=True) as held:
        text = render(held)
    out = tmp_path / "out.html"
    out.write_text(text, encoding="utf-8")
    reader = taken_apart(out)
    assert reader.parts.keys() == SECTIONS and reader.num_scripts == text.count("<script") == 1
    for name in ("environment", "live-summary", "live-front", "live-bench", "layers", "prefetch"):
        part = text[text.index(f'<section id="{name}"') :].partition("</section>")[0]
        assert "&lt;script&gt;" in part and "{{ 7 * 7 }}" in part, name
    for name in ("controls", "imported", "tuned", "receipt"):
        part = text[text.index(f'<section id="{name}"') :].partition("</section>")[0]
        assert "&lt;script&gt;" in part, name


def test_a_store_without_a_bench(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    store = tmp_path / "moe.duckdb"
    write_profile(store)
    assert main(["report", str(out), "--store", str(store)]) == 0
    reader = taken_apart(out)
    assert reader.parts.keys() < OTHERS and reader.parts["use"].values
    assert reader.lacking["What to run"].startswith("moectl bench toy --presets all")


def test_what_cannot_be_written_is_said_first(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments, code, told in (
        (["report", "out.pdf"], 2, "name it out.html"),
        (["report", str(tmp_path / "no" / "out.html")], 3, "there is no folder"),
        (
            ["report", str(tmp_path / "out.html"), "--store", str(tmp_path / "no.duckdb")],
            3,
            "there is no store",
        ),
        (["bench", "--simulate", "--report", "out.txt"], 2, "name it out.html"),
    ):
        assert main(arguments) == code
        assert told in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@needs_browser
def test_a_browser_has_nothing_to_say_and_asks_for_nothing(page: Path, tmp_path: Path) -> None:
    """And the page fits, light and dark, on a screen and on a phone."""
    asyncio.run(_look(page, tmp_path))


# How many names of the picture that is shown lie on another one.
OVERLAPS = """(() => {
  const boxes = [...document.querySelectorAll("#live-front .mark")].map(name => name.getBoundingClientRect());
  const touch = (a, b) => a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom;
  return boxes.filter((a, i) => a.width && boxes.some((b, j) => j > i && b.width && touch(a, b))).length;
})()"""


async def _look(page: Path, scratch: Path) -> None:
    bad = scratch / "bad.html"
    bad.write_text(
        "<!doctype html><img "
        'src="http://moectl.invalid/a.png"><script>console.error("boom")</script>'
    )
    async with browsing(scratch) as tab:
        await tab.open(bad.as_uri(), width=1280, height=900)
        await tab.until("document.readyState === 'complete'")
        assert any("boom" in said for said in tab.said) and tab.asked == [
            bad.as_uri(),
            "http://moectl.invalid/a.png",
        ]
        tab.said.clear(), tab.asked.clear()
        await tab.call("Page.navigate", url=page.as_uri())
        await tab.until("document.readyState === 'complete' && document.querySelector('h1')")
        cut = (
            "[...document.querySelectorAll('.wide')].filter(table => table.scrollWidth > "
            "table.clientWidth).length"
        )
        for width, scheme in LOOKS:
            await tab.look(width, scheme)
            assert width < 1280 or await tab.value(cut) == 0, "a table is cut off"
            assert await tab.value(OVERLAPS) == 0, "names lie on names"
            await tab.picture(scratch / f"{width}-{scheme}.png")
        await _use(tab)
        assert not tab.said and {url for url in tab.asked if url != "data:,"} == {page.as_uri()}


async def _use(tab: Tab) -> None:
    """Point at the first cell of a heatmap, and copy the first command."""
    x, y = await tab.value(
        "(() => { const grid = document.querySelector('#use [data-cells]'); "
        "grid.scrollIntoView(); const box = grid.getBoundingClientRect(); "
        "return [box.left + 2, box.top + 2]; })()"
    )
    await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    told = await tab.value("document.querySelector('.tip').textContent")
    assert re.fullmatch(r"layer 0, expert 0: [\d.]+", told), told
    await tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite"])
    await tab.call("Page.bringToFront")
    await tab.value("document.querySelector('.command button').click()")
    await tab.until("document.querySelector('.command button').textContent === 'copied'")
    copied = await tab.value("navigator.clipboard.readText()")
    assert copied == await tab.value("document.querySelector('.command code').textContent")
    assert re.match(r"moectl run \S+ --preset \S+ --budget 50% --link 5MB/s$", copied), copied


def test_a_bench_of_prompts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """The newest trace is of a profile without decoding: no time per token, no front."""
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--tokens", "64", "--length", "32", "--trace", "--no-similarity"]) == 0
    assert (
        main(["bench", "--simulate", "--presets", "near", "--budgets", "25%", "--tokens", "64"])
        == 0
    )
    assert main(["report", "page.html"]) == 0, capfd.readouterr().err
    assert Path("page.html").read_text(encoding="utf-8").count("is of prompts alone") == 2
