"""A checkpoint format of another package, as docs/models.md shows it: opened packed, computed to
the bit, told in one line where it cannot be used."""

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from artifacts.common.outside import installed
from artifacts.errors import BadUsage, Incompatible
from artifacts.formats.schemes import Said
from artifacts.formats.stated import METHODS, register_format, stated_quantisation
from moectl.cli import main
from moectl.shared.glance import glance
from runtime.backends.cpu.forms_published import has_published_form
from runtime.model.open import open_model
from runtime.session.session import Session, Settings
from tests.helpers import families, outside
from tests.helpers.published import Tensors, publish
from tools.make.published import is_expert

FILE, NAMED = outside.shown("models.md")
CONFIG = {"quant_method": "bytes"}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 96}
IDS = torch.arange(3, 20)[None]


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    methods = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(methods)


def random_bytes(rows: int, columns: int, generator: torch.Generator) -> Tensors:
    codes = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    scale = (0.5 + torch.rand((rows, columns // 32), generator=generator)) * 1e-3
    return {"codes": codes, "scale": scale.bfloat16()}


def test_a_format_of_another_package_gives_the_logits_of_the_decoded_model(tmp_path: Path) -> None:
    plain = families.save("qwen3_moe", "hub", tmp_path / "plain", torch.bfloat16, fields=SIZES)
    with outside.package(tmp_path, "bytes_format", FILE, NAMED):
        assert "bytes" not in METHODS
        published = publish(
            plain,
            tmp_path / "published",
            "bytes",
            config=CONFIG,
            choose=lambda name, tensor: (
                random_bytes if is_expert(name, tensor) or "o_proj" in name else None
            ),
        )
        assert glance(str(published)).expert_format == "bytes, 8.5 bits"
        opened = open_model(str(published))
        assert opened.store.layout.format == "bytes"
        reference = AutoModelForCausalLM.from_pretrained(plain, experts_implementation="eager")
        with torch.inference_mode(), Session(opened, Settings(budget="30%")):
            assert torch.equal(opened.model(IDS).logits, reference.eval()(IDS).logits)
        with (
            torch.inference_mode(),
            Session(opened, Settings(budget="30%", experts="fused")) as run,
        ):
            assert has_published_form(opened.store.layout)
            past = run.forward(IDS[:, :-1]).past_key_values
            fused = run.forward(IDS[:, -1:], past=past).logits[0, -1]
            exact = reference(IDS).logits[0, -1]
        # both round to 16 bits, at other places
        assert 0 < (fused - exact).abs().max() <= 0.05 * exact.abs().max()
        opened.store.close()


def test_what_cannot_be_imported_is_told_where_it_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = families.save("qwen3_moe", "hub", tmp_path / "plain")
    publish(plain, tmp_path / "fp8", "fp8")
    config = tmp_path / "fp8" / "config.json"
    with outside.package(tmp_path, "bytes_format", "import nowhere_at_all\n", NAMED):
        plan = ["plan", str(tmp_path / "fp8"), "--machine", "rtx4060", "--json"]
        assert main(plan) == 0
        config.write_text(config.read_text().replace('"fp8"', '"bytes"'))
        capfd.readouterr()
        assert main(plan) == 5
        told = capfd.readouterr().err
    assert told.startswith("moectl: the format bytes cannot be imported from bytes_format:said")
    assert told.count("\n") == 1


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    with (
        outside.package(tmp_path, "bytes_format", FILE, NAMED.replace("bytes =", "gptq =")),
        pytest.raises(Incompatible, match="from bytes_format:said: .*gptq .*: it is taken"),
    ):
        stated_quantisation({"quantization_config": {"quant_method": "gptq", "bits": 4}})


def test_two_packages_with_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("bytes", f"{module}:said", "moectl.formats") for module in ("a", "a", "b")]
    monkeypatch.setattr("artifacts.common.outside.entry_points", lambda group: points)
    installed.cache_clear()
    with pytest.raises(Incompatible, match="b:said and a:said both are bytes of moectl.formats"):
        stated_quantisation({"quantization_config": CONFIG})
    installed.cache_clear()


def test_a_format_is_registered_by_a_call() -> None:
    def said(config: Mapping) -> Said:
        return Said(())

    register_format("bytes", said)
    register_format("bytes", said)
    assert stated_quantisation({"quantization_config": CONFIG}).method == "bytes"
    for name, read in (("fp8", said), ("bytes", METHODS["fp8"]), ("another", 3)):
        with pytest.raises(BadUsage, match=f"{name}.* taken|{name} is no function"):
            register_format(name, read)
