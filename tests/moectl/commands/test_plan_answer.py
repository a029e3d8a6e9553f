"""The first answer of `moectl plan`: twelve lines on every model, what RAM and disk change, and what
is read of a model on the hub."""

import re
from pathlib import Path

import pytest

from artifacts.errors import OutOfResources
from artifacts.modelshapes.known import MODELS
from artifacts.modelshapes.repositories import REPOSITORIES
from moectl.commands.start.plan.answer import OWN, PlanAnswer, command, lines, plan_answer
from moectl.commands.start.plan.deployment import plan_deployment
from moectl.commands.start.plan.fitting import PlanRequest
from moectl.commands.start.plan.place import PlanPlace
from tests.conftest import Checkpoint
from tests.helpers import gguf_files
from tests.helpers import hub as stand_in


def answered(model: str, machine: str | None = "rtx4090", **sizes: str) -> PlanAnswer:
    vram = sizes.pop("vram", None)
    return plan_answer(PlanRequest(model, PlanPlace.find(vram, machine, **sizes)))


def places(answer: PlanAnswer) -> dict[str, str]:
    return {fit.quant: fit.place for fit in answer.fits}


def test_every_model_has_a_repository_and_at_most_twelve_lines() -> None:
    assert REPOSITORIES.keys() == MODELS.keys()
    for name in MODELS:
        told = list(lines(answered(name, "h200-pcie5", disk="10TB")))
        assert len(told) <= 12 and max(map(len, told)) <= 100, told
        assert told[1].startswith("fits: ") and told[-1].startswith("next: ")
        assert answered(REPOSITORIES[name].hub, "h200-pcie5").fits[0].place


def test_what_it_says(capfd: pytest.CaptureFixture[str]) -> None:
    told = list(lines(answered("Qwen3.8-Flash-Next", ram="64GB", disk="200GB")))
    assert told[0].endswith("24GB of rtx4090-pcie4, 59.6 GiB of RAM, 186.3 GiB of disk free")
    assert told[1] == "fits: experts in RAM in IQ3_XXS, experts from the disk in Q8_0"
    rows = {line.split()[0]: line for line in told[3:9]}
    assert "no room" in rows["as"] and rows["as"].endswith("nothing")
    assert re.search(r"27\.6% +RAM +26 to 120 +not measured$", rows["IQ3_XXS"])
    assert "95.4 GiB of tables read by row" in told[9]
    run = "moectl run unsloth/Qwen3.8-Flash-Next-GGUF:IQ3_XXS --budget 27.6%"
    assert told[-1] == f"next: {run} (more: --details)"


def test_ram_and_disk_count() -> None:
    much, little = (answered("qwen3-30b-a3b", ram=ram) for ram in ("64GB", "12GB"))
    assert places(much)[OWN] == "RAM" and places(little)[OWN] == "disk"
    assert little.fits[0].least < much.fits[0].least and little.fits[0].most == much.fits[0].most
    assert much.fits[-1] == little.fits[-1] and much.fits[-1].place == "GPU"
    small = answered("qwen3-30b-a3b", disk="20GB")
    assert [fit.quant for fit in small.fits if fit.place] == ["Q4_K_M", "IQ3_XXS", "IQ2_XS"]
    with pytest.raises(OutOfResources, match=r"takes 8.5 GiB in IQ2_XS, and the disk has 4.7 GiB"):
        answered("qwen3-30b-a3b", disk="5GB")
    assert places(answered("qwen3-30b-a3b", "m4-pro"))[OWN] == "disk", "it has no other memory"


def test_the_best_fit_has_four_bits_rather_than_room() -> None:
    """Of what does not need the disk: at least four bits, then whole, then wide; beside memory the
    narrowest of four bits."""
    assert answered("qwen3-30b-a3b").best.quant == "Q4_K_M"
    assert answered("qwen3-30b-a3b", "h100").best.quant == OWN
    assert answered("qwen3-30b-a3b", "rtx4060").best.quant == "Q4_K_M"
    assert answered("qwen3-30b-a3b", "rtx4060", ram="16GB").best.quant == "IQ3_XXS"
    assert command(answered("gpt-oss-20b")) == "moectl run openai/gpt-oss-20b"
    assert command(answered("minimax-m3", "h200")).startswith("find its GGUF on the hub, then ")


def test_of_a_model_on_the_hub_little_is_read_and_bytes_are_those_of_the_files(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    gguf_files.write("qwen3_moe", folder / "Tiny-Q8_0.gguf", gguf_files.every("Q8_0"))
    plain = checkpoint("mixtral", "hub", "bfloat16")
    weights = (plain / "model.safetensors").stat().st_size
    with stand_in.running() as hub:
        stand_in.connect(hub, tmp_path / "home", monkeypatch)
        hub.add("owner/Tiny", plain)
        hub.add("owner/Tiny-GGUF", folder)
        said = answered("owner/Tiny")
        assert [name for name, _ in hub.sent] == ["config.json"]
        file = answered("owner/Tiny-GGUF:Q8_0")
        local = answered(str(folder))
    assert said.fits[0].files_nbytes == pytest.approx(weights, rel=0.1), "its header and norms"
    assert file.fits == local.fits and file.fits[0].quant == OWN and len(file.fits) == 1
    assert command(file) == "moectl run owner/Tiny-GGUF:Q8_0"


def test_keys_and_values_of_few_bits_leave_more_room_to_experts() -> None:
    """48 layers with 4 heads of 128 keys and values each."""
    place = PlanPlace.find("24GiB", "rtx4090")
    rooms = []
    for dtype, nbytes in (("auto", 256), ("int8", 136), ("int4", 72)):
        request = PlanRequest("qwen3-30b-a3b", place, 32768, kv_cache_dtype=dtype)
        memory = plan_deployment(request).memory
        assert memory.cache_nbytes == 32768 * 48 * 4 * 2 * nbytes
        rooms.append(memory.experts_nbytes)
        told = list(lines(plan_answer(request)))
        assert told[3].endswith("nothing") == (dtype == "auto")
        assert (f" --kv-cache-dtype {dtype}" in told[-1]) == (dtype != "auto")
    assert rooms == sorted(rooms)
