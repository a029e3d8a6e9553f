"""Activations of 8 bits: what they lose on a trained model is small and told, and nothing stays
behind in a model that is run without them afterwards."""

import pytest

from artifacts.errors import BadUsage
from moectl.bundled import demo_model
from moectl.shared.opening import settled
from moectl.shared.text import read_text
from profilers.compare.bench import Bench, BenchSample, BenchSetting, LinkEmulations
from profilers.export.gguf import export_gguf
from runtime.model.open import MoeModel, open_model
from runtime.policies.base import Artefacts
from runtime.session.session import Session
from runtime.session.settings import FUSED, Settings

IN_8 = Settings("full", experts=FUSED, threads=1, activations=8)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> MoeModel:
    path = tmp_path_factory.mktemp("files") / "model.gguf"
    export_gguf(open_model(str(demo_model())), demo_model(), path, "q8_0")
    return open_model(str(path), dense=8)


def test_bench_prices_them_against_the_model_without(opened: MoeModel) -> None:
    text = read_text(opened, "builtin:held-out", length=48, num_tokens=48, seed=0)
    paces = LinkEmulations(opened, {}, experts=FUSED)

    def measured(activations: int | None) -> BenchSample:
        bench = Bench(opened, Artefacts(), text, paces, activations=activations)
        bench.read_full()
        return bench.measure(BenchSetting("full", "100%"))

    first, rounded, again = map(measured, (None, 8, None))
    assert (again.kl, again.perplexity_ratio) == (first.kl, first.perplexity_ratio)
    assert first.kl != rounded.kl < 2e-3
    assert abs(rounded.perplexity_ratio - 1) < 0.01


def test_a_run_says_what_it_rounds(opened: MoeModel) -> None:
    assert any("lossy" in line for line in settled(opened, IN_8, None).told)
    with Session(opened, IN_8) as session:
        compiled = session.receipt()["compiled"]
        said = session.receipt()["activations"]
    assert said == {
        "bits": 8,
        "experts": ["Q8_0"],
        "other_experts": [],
        "linear_layers": opened.dense.num_packed,
    }
    assert compiled["whole"] == 1, "rounding must not keep layers from being one call"


@pytest.mark.parametrize(
    "own, message",
    [
        ({"experts": FUSED, "activations": 4}, "give 8"),
        ({"activations": 8}, "give --experts fused"),
    ],
)
def test_other_settings_are_refused(own: dict[str, object], message: str) -> None:
    with pytest.raises(BadUsage, match=message):
        Settings(**own)
