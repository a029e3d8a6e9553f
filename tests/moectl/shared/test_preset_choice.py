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
from moectl.shared import preset_choice
from moectl.shared.opening import model_info
from moectl.shared.preset_choice import AUTO, Known, choose, known_of, with_choice
from runtime.model.open import MoeModel, open_model
from runtime.policies.presets import Preset, preset
from runtime.session.session import Session
from runtime.session.settings import Settings
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
EVERYTHING = Known(True, True, True, TUNED, True, True, True)


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        (EVERYTHING, "on-demand"),
        (replace(EVERYTHING, names_policies=False), "full"),
        (replace(EVERYTHING, names_policies=False, fits=False), "on-demand"),
        (replace(EVERYTHING, names_policies=False, fits=False, decides_on_device=False), TUNED),
        (Known(is_emulated=True, has_predictors=True), "near"),
        (Known(has_predictors=True, is_in_memory=True), "on-demand"),
        (Known(has_predictors=True), "foresight"),
        (Known(), "horizon"),
    ],
)
def test_what_is_known_first_decides(known: Known, chosen: str | Preset) -> None:
    choice = choose(known)
    assert choice.preset == chosen and preset(choice.preset).is_lossless and choice.why


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> MoeModel:
    return open_model(str(checkpoint("olmoe")))


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        (Settings(AUTO), Known(is_in_memory=True)),
        (Settings(AUTO, budget="1TiB", link="disk"), Known(fits=True, is_in_memory=True)),
        (Settings(AUTO, link="direct"), Known()),
        (Settings(AUTO, link="5GB/s", policies={"eviction": "lfu"}), Known(names_policies=True)),
        (Settings(AUTO, scaled_to="5gbps"), Known(is_emulated=True)),
        (
            Settings(AUTO, link="direct", experts="fused", decide="device"),
            Known(decides_on_device=True),
        ),
    ],
)
def test_what_settings_and_machine_say(settings: Settings, known: Known, opened: MoeModel) -> None:
    assert known_of(opened, settings, None) == known


def test_files_that_memory_cannot_hold_are_slow(
    opened: MoeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preset_choice, "_available_nbytes", lambda: opened.shape.nbytes)
    assert known_of(opened, Settings(AUTO), None) == Known()


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
    assert replace(known, note="") == Known(is_in_memory=True) and "is not a store" in known.note


def test_a_store_that_another_process_holds_is_a_note(opened: MoeModel, tmp_path: Path) -> None:
    add_run(path := tmp_path / "moe.duckdb", RunInfo("bench", None, utc_now(), 1.0), {})
    holder = spawn(HOLD, path)
    try:
        assert holder.stdout.readline() == "open\n"
        chosen = PresetOptions().settings(path, model=None, base=16)
        settings, why = with_choice(opened, chosen, path)
        assert (settings.preset.name, why) == (
            "on-demand",
            "the fastest exact one while memory holds the files",
        )
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
