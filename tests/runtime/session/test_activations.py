"""Activations of 8 bits: what they lose on a trained model is small and told, and nothing stays
behind in a model that is run without them afterwards."""

import pytest

from artifacts.errors import BadUsage
from moectl.bundled import demo_model
from moectl.shared.opening import settled
from moectl.shared.text import read_text
from profilers.compare.bench import Bench, BenchSetting, LinkEmulations
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


def test_bench_prices_them_once(opened: MoeModel) -> None:
    """Against the model without; a preset that loses nothing adds nothing."""
    text = read_text(opened, "builtin:held-out", length=48, num_tokens=48, seed=0)

    def bench(activations: int | None) -> Bench:
        paces = LinkEmulations(opened, {}, experts=FUSED)
        return Bench(opened, Artefacts(), text, paces, activations=activations)

    exact, rounded = bench(None), bench(8)
    lost = rounded.loss_of_base(opened)
    assert 1e-6 < lost.kl < 2e-3 and abs(lost.perplexity_ratio - 1) < 0.01
    assert rounded.measure(BenchSetting("full", "100%")).kl == pytest.approx(0, abs=1e-9)
    assert exact.loss_of_base(opened).kl == pytest.approx(0, abs=1e-9), "nothing stays behind"


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
