"""The preset of a run whose user names none."""

from dataclasses import replace
from pathlib import Path

import pytest

from artifacts.errors import OutOfResources
from artifacts.store import presets as stored
from artifacts.store.runs import RunInfo, utc_now
from artifacts.store.store import add_run
from moectl.cli.options import PresetOptions
from moectl.serving.opening import offered
from moectl.shared import opening, preset_choice
from moectl.shared.opening import Settled, free_budget, model_info, open_session, settled
from moectl.shared.preset_choice import AUTO, Known, choose, known_of, with_choice
from runtime.model.open import MoeModel, open_model
from runtime.policies.presets import CANDIDATES, Preset, preset
from runtime.replay import candidates
from runtime.session import run_costs
from runtime.session.session import Session
from runtime.session.settings import Settings
from runtime.tiers.slots import NoRoom
from tests.conftest import Checkpoint
from tests.helpers.stores import spawn

pytestmark = pytest.mark.slow

HOLD = """
import duckdb, time
connection = duckdb.connect(sys.argv[1])
print("open", flush=True)
time.sleep(100)
"""
TUNED = Preset("tuned", summary="", paper="")
EVERYTHING = Known(True, True, TUNED, True)
NOT_KNOWN = Known(has_predictors=True)


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        (EVERYTHING, "on-demand"),
        (replace(EVERYTHING, names_policies=False), "full"),
        (replace(EVERYTHING, names_policies=False, fits=False), TUNED),
    ],
)
def test_what_is_known_first_decides(known: Known, chosen: str | Preset) -> None:
    choice = choose(known)
    assert choice.preset == chosen and preset(choice.preset).is_lossless and choice.why


def test_the_rest_is_replayed() -> None:
    assert choose(NOT_KNOWN) is None


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> MoeModel:
    return open_model(str(checkpoint("olmoe")))


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        (Settings(AUTO), Known()),
        (Settings(AUTO, budget="1TiB", link="disk"), Known(fits=True)),
        (Settings(AUTO, link="5GB/s", policies={"eviction": "lfu"}), Known(names_policies=True)),
    ],
)
def test_what_settings_say(settings: Settings, known: Known, opened: MoeModel) -> None:
    assert known_of(opened, settings, None) == known


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What is replayed instead of being measured: `horizon` is the fastest."""
    seen = []

    def fastest(
        roads: str, shape: object, share: float, *, names: tuple, scope: str | None
    ) -> tuple[str, float]:
        seen.append((roads, share, names, scope))
        return "horizon" if "horizon" in names else names[0], 1.25

    monkeypatch.setattr(run_costs, "road_costs", lambda opened, settings: "costs")
    monkeypatch.setattr(candidates, "fastest", fastest)
    return seen


def test_the_fastest_candidate_is_taken_and_told(opened: MoeModel, replayed: list[tuple]) -> None:
    settings, why = with_choice(opened, Settings(AUTO, budget="50%", scope="global"), None)
    assert (settings.preset, why) == ("horizon", "the fastest of 4 by replay, 1.25 ms a token")
    device = Settings(AUTO, experts="fused", decide="device")
    assert "of 2 by replay" in with_choice(opened, device, None)[1]
    assert replayed == [
        ("costs", 0.5, CANDIDATES, "global"),
        ("costs", 0.25, CANDIDATES[:2], None),
    ]


def test_predictors_of_the_store_take_the_place_of_next_gates(
    opened: MoeModel, replayed: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset_choice, "known_of", lambda *_: NOT_KNOWN)
    assert with_choice(opened, Settings(AUTO), None)[0].preset == "foresight"


def test_what_is_left_to_choose_is_settled_and_told(
    opened: MoeModel, replayed: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 40
    monkeypatch.setattr(opening, "free_nbytes", lambda device: free)
    asked = Settings(AUTO, experts="auto", decide="auto", budget="auto")
    found = settled(opened, asked, None)
    assert (found.settings.preset, found.settings.budget, found.settings.experts) == (
        "full",
        "100%",
        "fused",
    )
    assert found.is_budget_free
    first, budget, chosen = found.told
    assert "fused" in first and "--experts exact" in first
    assert budget.startswith("Budget 100% of experts (1024.0 GiB free, less ")
    assert chosen == "Preset full: every expert fits the budget"
    own = Settings("near", budget="25%")
    assert settled(opened, own, None) == Settled(own)
    assert settled(opened, replace(asked, preset="full"), None).settings.budget == "100%"
    monkeypatch.setattr(opening, "choose_backend", lambda *_, **__: None)
    without = settled(opened, replace(own, experts="auto"), None)
    assert without.settings.experts == "exact" and "no kernels" in without.told[0]


def test_a_budget_is_what_memory_leaves(opened: MoeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = opened.shape
    half = shape.nbytes // 2
    monkeypatch.setattr(opening, "RESERVE_NBYTES", 1000)
    cache = 64 * opening.cached_nbytes(opened)
    config = opened.config
    width = 2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    assert cache == 64 * config.num_hidden_layers * width * opened.dtype.itemsize
    free = (half + cache) * 10 // 9 + 10
    monkeypatch.setattr(opening, "free_nbytes", lambda device: free)
    budget, line = free_budget(opened, 64)
    assert abs(int(budget.removesuffix("B")) - half) < 10 and line.startswith("Budget 50% of")
    assert "for 64 tokens" in line
    least = shape.num_layers * shape.top_k * shape.expert_nbytes
    assert free_budget(opened, 64, together=8)[0] == f"{least}B"


def test_a_free_budget_that_does_not_fit_is_halved(
    opened: MoeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def over(opened: MoeModel, settings: Settings) -> str:
        tried.append((preset(settings.preset).name, settings.budget))
        if len(tried) < 2:
            raise NoRoom("no room for slots")
        return "a session"

    monkeypatch.setattr(opening.Session, "over", over)
    full = Settings("full", budget="100%")
    num_experts = opened.shape.num_keys
    assert open_session(opened, Settled(full, is_budget_free=True)) == "a session"
    assert tried == [("full", "100%"), ("on-demand", f"{num_experts // 2}x")]
    assert f"halved to {num_experts // 2} experts: no room" in capsys.readouterr().err
    tried.clear()
    with pytest.raises(NoRoom):
        open_session(opened, Settled(full))


def test_what_the_store_says(opened: MoeModel, tmp_path: Path) -> None:
    path = tmp_path / "moe.duckdb"
    model = model_info("x", opened)
    row = stored.StoredPreset(
        "t", "standard", "none", "lfu", "fetch", "uniform", "layer", "25%", "here", 0.0
    )
    others = [replace(row, name="lossy", max_loss=0.01), replace(row, name="fast", machine="5gbps")]
    tuned = RunInfo("tune", model.model_id, utc_now(), 1.0)
    add_run(path, tuned, {stored.TABLE: stored.to_rows([*others, row])}, model=model)
    settings, why = with_choice(opened, Settings(AUTO), path)
    assert (settings.preset.name, settings.preset.eviction, why) == (
        "t",
        "lfu",
        "`moectl tune` found it",
    )
    assert known_of(opened, Settings(AUTO, budget="50%"), path).tuned is None
    assert known_of(opened, Settings(AUTO, scaled_to="5gbps"), path).tuned.name == "fast"
    path.write_text("no store")
    known = known_of(opened, Settings(AUTO), path)
    assert replace(known, note="") == Known() and "is not a store" in known.note


def test_a_store_that_another_process_holds_is_a_note(
    opened: MoeModel, tmp_path: Path, replayed: list[tuple]
) -> None:
    add_run(path := tmp_path / "moe.duckdb", RunInfo("bench", None, utc_now(), 1.0), {})
    holder = spawn(HOLD, path)
    try:
        assert holder.stdout.readline() == "open\n"
        chosen = PresetOptions(budget="25%").settings(path, model=None, base=16)
        settings, _ = with_choice(opened, chosen, path)
        assert settings.preset.name == "horizon"
        with Session.over(opened, settings, store=path) as session:
            [note] = session.receipt()["fallbacks"]
        assert f"{path} is in use by process {holder.pid}" in note and "moectl tune" in note
        assert offered(opened, settings, path).keys() >= {"on-demand", "buddymoe"}
        optional = Settings(
            "moepic", policies={"residency": "hot", "prefetch": "none", "eviction": "lru"}
        )
        with Session.over(opened, optional, store=path) as session:
            assert any(
                "in use by process" in line for line in session.receipt()["fallbacks"]
            ) == bool(optional.wants)
        for needed in (Settings("buddymoe"), Settings(Preset("mine", "", ""))):
            with pytest.raises(OutOfResources, match="in use by process"):
                Session.over(opened, needed, store=path)
        with pytest.raises(OutOfResources, match="in use by process"):
            PresetOptions(preset="buddymoe").settings(path, model=None, base=16)
    finally:
        holder.kill()
        holder.wait()


def test_a_preset_of_the_users_stays(opened: MoeModel) -> None:
    assert with_choice(opened, Settings("near"), None) == (Settings("near"), "")
