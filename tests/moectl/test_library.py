"""`from moectl import ...`: what a program needs, by names of one package."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

import moectl
from moectl import BadUsage, Sampling, Session, Setting, Settings, load, simulate
from tests.conftest import Checkpoint

SHORT = Sampling(max_new_tokens=8)


@pytest.fixture(scope="module")
def session(checkpoint: Checkpoint) -> Iterator[Session]:
    """Of a tiny model in float32, in which a batch gives the tokens of each prompt alone."""
    with load(checkpoint("olmoe"), budget=0.5, preset="on-demand") as session:
        yield session


def test_every_name_is_there_and_importing_it_imports_no_torch() -> None:
    assert all(getattr(moectl, name) for name in moectl.__all__)
    asked = "import sys, moectl; print({'torch', 'duckdb', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_a_share_is_a_budget(session: Session) -> None:
    assert session.parts.budget == "50%" and Settings(budget=0.25).budget == "25%"
    with pytest.raises(BadUsage, match="2"):
        load(budget="2")


def test_a_batch_answers_as_one_by_one(session: Session) -> None:
    prompts = ["abc", "sheep", "x"]
    alone = [session.generate(prompt, SHORT) for prompt in prompts]
    together = session.batch(prompts, SHORT)
    assert [one.text for one in together] == [one.text for one in alone]
    assert all(one.tpot_ms > 0 and 0 < one.effort.hit_rate < 1 for one in together)
    assert together.to_pandas()["tokens"].tolist() == [8, 8, 8]


def test_a_notebook_shows_sessions_and_receipts_escaped(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "<td>on-demand</td>" in session._repr_html_() and "on-demand" in repr(session)
    monkeypatch.setattr(session, "fallbacks", ["<script>"])
    shown = session.receipt()._repr_html_()
    assert "<td>policies.eviction</td><td>lru</td>" in shown
    assert "<td>fallbacks</td><td>&lt;script&gt;</td>" in shown


def test_results_without_pandas_say_what_to_install(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("artifacts.tables.find_spec", lambda name: None)
    with pytest.raises(BadUsage, match="pip install pandas"):
        session.batch(["a"], SHORT).to_pandas()


def test_a_chat_gives_the_reply(session: Session) -> None:
    reply = session.chat([{"role": "user", "content": "What?"}], SHORT)
    assert reply.text and reply.calls == ()


def test_a_trace_is_simulated_by_its_name() -> None:
    settings = [Setting(name, policies={"eviction": name}) for name in ("lru", "belady")]
    outcomes = simulate("gpt-oss-20b", settings, machine="rtx4090-pcie4")
    lru, belady = outcomes
    assert belady.counters["hits"] > lru.counters["hits"] > 0
    told = outcomes.to_arrow()
    assert told["label"].to_pylist() == ["lru", "belady"]
    assert told["hits"][0].as_py() == lru.counters["hits"]
    assert "<th>tpot_ms</th>" in outcomes._repr_html_()
