"""GGUF files: opened packed, with layers of different types, computed to the bit of transformers'
own loader, refused where they are not whole or of another kind."""

import json
import re
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch

from artifacts.errors import BadInput
from moectl.cli import main
from profilers.compare.peers import PeerBench
from runtime.model.files.locate import locate
from runtime.model.gguf.config import gguf_config
from runtime.model.gguf.file import open_gguf
from runtime.model.open import open_model
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tests.helpers.gguf_files import (
    ARCHITECTURES,
    BY_PROJECTION,
    IN_MXFP4,
    OF_FEW_BITS,
    Types,
    dequantised,
    every,
    mixed,
    reference,
    unpack,
    write,
)

pytestmark = pytest.mark.slow

IDS = torch.arange(3, 20)[None]


CASES = {
    "Q8_0": ("qwen3_moe", every("Q8_0")),
    "Q4_0, tied, with shared experts": ("qwen2_moe", every("Q4_0")),
    "MXFP4 beside F16": ("qwen3_moe", every("F16", {"_exps": "MXFP4"})),
    "F16": ("qwen3_moe", every("F16")),
    "as Q4_K_M": ("qwen3_moe", mixed),
    "as Unsloth's dynamic files": ("qwen3_moe", BY_PROJECTION),
}


@pytest.mark.parametrize(("family", "types"), CASES.values(), ids=CASES)
def test_logits_and_tokens_are_those_of_transformers_loader(
    tmp_path: Path, family: str, types: Types
) -> None:
    opened = open_model(str(write(family, tmp_path / "model.gguf", types)))
    assert opened.dtype is (torch.float16 if types("ffn_up_exps") == "F16" else torch.bfloat16)
    theirs = reference(tmp_path / "model.gguf", opened.dtype)
    sampling = Sampling(6, ignore_eos=True)
    options = {"attention_mask": torch.ones_like(IDS), **sampling.options()}
    with torch.inference_mode():
        logits = theirs(IDS).logits
        tokens = theirs.generate(IDS, **options)[0, IDS.shape[1] :].tolist()
    for preset in ("on-demand", "near", "horizon") if types is mixed else ("on-demand",):
        with Session(opened, Settings(preset=preset, budget="30%")) as session:
            with torch.inference_mode():
                assert torch.equal(opened.model(IDS).logits, logits)
            assert [token.token_id for token in session.tokens(IDS, sampling)] == tokens


UNREAD = sorted(ARCHITECTURES.keys() - {"qwen3_moe", "qwen2_moe"})


@pytest.mark.parametrize("family", UNREAD)
def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, family: str) -> None:
    """Of architectures that transformers' loader of GGUF files does not open."""
    types = IN_MXFP4 if family == "gpt_oss" else every("Q8_0")
    opened = open_model(str(write(family, tmp_path / "model.gguf", types)))
    theirs = dequantised(family, tmp_path / "plain", types, opened.dtype)
    with Session(opened, Settings(preset="on-demand", budget="50%")), torch.inference_mode():
        assert torch.equal(opened.model(IDS).logits, theirs(IDS).logits)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_moe_text"])
def test_few_bits_give_the_logits_of_their_numbers_in_full(tmp_path: Path, family: str) -> None:
    opened = open_model(str(write(family, tmp_path / "few.gguf", OF_FEW_BITS)))
    full = tmp_path / "full.gguf"
    change = partial(unpack, OF_FEW_BITS)
    theirs = open_model(str(write(family, full, every("BF16"), change=change)))
    assert opened.store.layout.nbytes < theirs.store.layout.nbytes / 5
    logits = []
    for each in (opened, theirs):
        with Session(each, Settings(preset="on-demand", budget="50%")), torch.inference_mode():
            logits.append(each.model(IDS).logits)
    assert torch.equal(*logits)


def test_scales_beside_nvfp4_multiply_its_numbers(tmp_path: Path) -> None:
    types = every("NVFP4", {"token_embd": "Q8_0", "attn_k": "Q8_0"})
    factors = np.array([0.5, 1, 1.5, 2, 0.75, 3], np.float32)

    def scale(arrays: dict[str, np.ndarray], *, is_full: bool) -> None:
        if is_full:
            unpack(types, arrays)
        for name in [name for name in arrays if re.search(r"_exps|attn_[qv]\.", name)]:
            own = factors if "_exps" in name else factors[-1:]
            if is_full:
                arrays[name] *= own.reshape(-1, *[1] * (arrays[name].ndim - 1))
            else:
                arrays[name.replace("weight", "scale")] = own
                arrays[name.replace("weight", "input_scale")] = own

    logits = []
    for is_full, kinds in ((False, types), (True, every("BF16"))):
        change = partial(scale, is_full=is_full)
        path = write("qwen3_moe", tmp_path / f"{is_full}.gguf", kinds, change=change)
        with Session(open_model(str(path)), Settings(budget="50%")) as session:
            logits.append(session.forward(IDS).logits)
    assert torch.equal(*logits)
    factors = factors[:5]
    with pytest.raises(BadInput, match=r"\[6, 256\] rows, and its scale .* \[5\]: download"):
        open_model(str(write("qwen3_moe", path, types, change=partial(scale, is_full=False))))


BETWEEN_PROJECTIONS = every(
    "Q4_K",
    {
        "blk.0.ffn_gate_exps": "Q3_K",
        "blk.0.ffn_down_exps": "Q6_K",
        "blk.1.ffn_gate_exps": "IQ4_XS",
        "blk.1.ffn_up_exps": "Q2_K",
        "blk.1.ffn_down_exps": "Q8_0",
    },
)


@pytest.mark.parametrize("types", [BETWEEN_PROJECTIONS, BY_PROJECTION], ids=["K", "IQ"])
def test_types_that_differ_between_projections_are_fused(tmp_path: Path, types: Types) -> None:
    opened = open_model(str(write("qwen3_moe", tmp_path / "model.gguf", types)))
    logits = []
    for experts in ("exact", "fused"):
        with Session(opened, Settings(budget="30%", experts=experts)) as session:
            past = session.forward(IDS[:, :-1]).past_key_values
            logits.append(session.forward(IDS[:, -1:], past=past).logits[0, -1])
    exact, fused = logits
    assert (fused - exact).abs().max() <= 0.05 * exact.abs().max()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3_moe", tmp_path_factory.mktemp("whole") / "model.gguf", mixed)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write("qwen3_moe", tmp_path_factory.mktemp("parts") / "model.gguf", mixed, parts=3)


def experts(path: Path) -> list[str]:
    """The digest of each expert."""
    opened = open_model(str(path))
    buffer = torch.empty(opened.store.layout.nbytes, dtype=torch.uint8)
    digests = []
    # a large one, then smaller ones in the same buffer
    for key in reversed(range(opened.shape.num_keys)):
        opened.store.read(*divmod(key, opened.shape.num_experts), buffer)
        digests.append(opened.store.layout.digest(buffer))
    return digests


def test_a_folder_and_each_part_lead_to_the_model(whole: Path, parts: Path) -> None:
    assert len(list(parts.parent.iterdir())) == 3
    assert locate(str(whole.parent)) == whole
    assert locate(str(parts.parent)) == parts
    assert (
        experts(whole)
        == experts(parts.parent)
        == experts(parts.with_name("model-00002-of-00003.gguf"))
    )
    assert len(set(experts(whole))) == 12


def test_experts_stay_in_their_blocks(whole: Path) -> None:
    opened = open_model(str(whole))
    inner = 2 * 256 * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q4_K][1]
    down = 256 * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q6_K][1]
    assert opened.shape.expert_nbytes == inner + down + 64
    assert opened.tokenizer("that").input_ids == [258 + 1, *opened.tokenizer("at").input_ids]


def test_gate_and_up_may_be_one_tensor(whole: Path, tmp_path: Path) -> None:
    def join(arrays: dict[str, np.ndarray]) -> None:
        for layer in ("blk.0", "blk.1"):
            halves = [arrays.pop(f"{layer}.ffn_{half}_exps.weight") for half in ("gate", "up")]
            arrays[f"{layer}.ffn_gate_up_exps.weight"] = np.concatenate(halves, 1)

    apart = open_model(str(write("qwen3_moe", tmp_path / "apart.gguf", every("Q8_0"))))
    joined = open_model(
        str(write("qwen3_moe", tmp_path / "joined.gguf", every("Q8_0"), change=join))
    )
    buffers = [
        torch.zeros(opened.store.layout.nbytes, dtype=torch.uint8) for opened in (apart, joined)
    ]
    for opened, buffer in zip((apart, joined), buffers, strict=True):
        opened.store.read(1, 4, buffer)
    assert torch.equal(*buffers)


def test_a_fingerprint_is_of_the_content(whole: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(whole, tmp_path / "other-name.gguf"))
    assert open_model(str(copy)).fingerprint == open_model(str(whole)).fingerprint
    tensor = open_gguf(whole).tensors["blk.1.ffn_up_exps.weight"]
    with copy.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(bytes(8))
    assert open_model(str(copy)).fingerprint != open_model(str(whole)).fingerprint


def test_the_command_line_runs_a_file(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(whole), "--prompt", "that", "--max-new-tokens", "3"]) == 0
    capsys.readouterr()


def test_a_plan_counts_the_bytes_of_the_files(
    whole: Path, parts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = [
        parameter
        for parameter in open_model(str(whole)).model.parameters()
        if not parameter.is_meta
    ]
    for name in (whole, whole.parent, parts):
        assert main(["plan", str(name), "--vram", "8GB", "--json"]) == 0
        memory = json.loads(capsys.readouterr().out)["memory"]
        assert memory["files_nbytes"] == sum(
            tensor.nbytes for tensor in open_gguf(whole).tensors.values()
        )
        assert memory["weights_nbytes"] == sum(parameter.nbytes for parameter in dense)


def test_it_is_not_repacked(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", str(whole), str(tmp_path / "out")]) == 3
    assert (
        "model.gguf is a GGUF file: moectl repacks and exports safetensors only"
        in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())


def test_other_programs_are_not_compared(whole: Path) -> None:
    bench = PeerBench(open_model(str(whole)), whole, None, threads=1)
    with pytest.raises(BadInput, match="accelerate does not read model.gguf"):
        bench.measure(SimpleNamespace(preset="accelerate"), None)


# What is not whole, or of another kind, is refused


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3000])


def _cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:2000])


def _no_gguf(path: Path) -> None:
    path.write_bytes(b"GGML" + path.read_bytes()[4:])


def _replaced(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Put other bytes of the same number into the header, wherever the old ones are."""
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new))


def _of_type(name: bytes, number: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        start = content.index(name) + len(name)
        dimensions = int.from_bytes(content[start : start + 4], "little")
        start += 4 + 8 * dimensions
        content[start : start + 4] = number.to_bytes(4, "little")
        path.write_bytes(content)

    return change


def _nan(path: Path) -> None:
    tensor = open_gguf(path).tensors["blk.1.ffn_down_exps.weight"]
    content = bytearray(path.read_bytes())
    content[tensor.offset : tensor.offset + 2] = b"\xff\xff"
    path.write_bytes(content)


def _two_models(path: Path) -> None:
    shutil.copy(path, path.with_name("other.gguf"))


REFUSED = {
    "cut": (_cut, "ends within .*: it is truncated"),
    "cut in its header": (_cut_header, "is truncated or no GGUF file"),
    "another file": (_no_gguf, "is truncated or no GGUF file"),
    "another architecture": (
        _replaced(b"qwen3moe", b"llamaxyz"),
        "GGUF file of llamaxyz: moectl reads .*deepseek2, .*gpt-oss, ",
    ),
    "a type that is not read": (
        _of_type(b"blk.0.ffn_up_exps.weight", 15),
        "is Q8_K, which moectl does not read: take a file in another",
    ),
    "an unknown type": (
        _of_type(b"blk.0.ffn_up_exps.weight", 999),
        "is the unknown type 999, which moectl does not read",
    ),
    "a missing tensor": (
        _replaced(b"blk.1.ffn_up_exps", b"blk.1.ffn_xx_exps"),
        "ffn_up_exps.weight is missing",
    ),
    "NaN": (_nan, "layer 1, expert 0: down_proj holds NaN"),
    "a tensor twice": (
        _replaced(b"blk.1.ffn_up_exps", b"blk.0.ffn_up_exps"),
        "has two tensors of one name",
    ),
    "a tensor of no use": (
        _replaced(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"),
        "attn_x.weight .* is nothing that",
    ),
    "a vocabulary": (
        _replaced(b"token_embd.weight", b"token_ambd.weight"),
        "has no token_embd.weight",
    ),
    "two models": (_two_models, "has 2 models in GGUF: give the file of one"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_whole_or_known_is_refused(
    tmp_path: Path, whole: Path, change: Callable, message: str
) -> None:
    change(Path(shutil.copy(whole, tmp_path)))
    with pytest.raises(BadInput, match=message) as refused:
        experts(tmp_path)
    assert "\n" not in str(refused.value)


def _without(*numbers: int) -> Callable[[Path], None]:
    return lambda folder: [part(folder, number).unlink() for number in numbers]


def _dangling(folder: Path) -> None:
    part(folder, 2).unlink()
    part(folder, 2).symlink_to(folder / "gone")


def _swapped(folder: Path) -> None:
    part(folder, 2).rename(folder / "other")
    part(folder, 3).rename(part(folder, 2))
    (folder / "other").rename(part(folder, 3))


def _of_two(folder: Path) -> None:
    part(folder, 3).unlink()
    for number in (1, 2):
        part(folder, number).rename(folder / f"model-0000{number}-of-00002.gguf")


def _alone(folder: Path) -> None:
    part(folder, 1).rename(folder / "alone.gguf")
    _without(2, 3)(folder)


def _of_another_split(folder: Path) -> None:
    """A part that has some tensors of the first one."""
    other = part(folder, 2)
    other.write_bytes(
        part(folder, 1).read_bytes().replace(b"split.no" + SPLIT_NO[0], b"split.no" + SPLIT_NO[1])
    )


def part(folder: Path, number: int) -> Path:
    return folder / f"model-0000{number}-of-00003.gguf"


SPLIT_NO = [struct.pack("<IH", 2, number) for number in range(2)]
PARTS = {
    "a missing part": (
        _without(2),
        "model-00002-of-00003.gguf is missing: the model is in several files",
    ),
    "no first part": (_without(1), "model-00001-of-00003.gguf is missing"),
    "a link to nothing": (_dangling, "model-00002-of-00003.gguf is missing"),
    "out of order": (
        _swapped,
        "00002-of-00003.gguf says split.no 2, split.count 3, .* that it is part 2 of 3",
    ),
    "fewer than it says": (
        _of_two,
        "00001-of-00002.gguf says split.no 0, split.count 3, .* part 1 of 2",
    ),
    "one by another name": (_alone, "alone.gguf says split.no 0, split.count 3, .* part 1 of 1"),
    "of another split": (_of_another_split, "they are of different models"),
}


@pytest.mark.parametrize(("change", "message"), PARTS.values(), ids=PARTS)
def test_parts_that_are_no_whole_are_refused(
    tmp_path: Path, parts: Path, change: Callable, message: str
) -> None:
    shutil.copytree(parts.parent, tmp_path, dirs_exist_ok=True)
    change(tmp_path)
    with pytest.raises(BadInput, match=message) as refused:
        gguf_config(locate(str(tmp_path)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("command", ["run", "generate", "plan"])
def test_commands_name_a_missing_part(
    tmp_path: Path, parts: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(parts, tmp_path)
    (tmp_path / "prompts.txt").write_text("that\n")
    options = {
        "run": ["--prompt", "that"],
        "generate": ["--data", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "out.jsonl")],
        "plan": ["--vram", "8GB"],
    }
    assert main([command, str(tmp_path / parts.name), *options[command]]) == 3
    assert "model-00002-of-00003.gguf is missing" in capsys.readouterr().err
