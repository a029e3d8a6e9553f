"""Checkpoints whose experts are published in few bits: opened packed, computed to the bit, refused
where they are not whole."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from artifacts.errors import BadInput
from artifacts.formats.numbers import numbers
from runtime.model.open import MoeModel, open_model
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session, Settings
from tests.helpers import families
from tests.helpers.published import CONFIGS, publish

IDS = torch.arange(3, 20)[None]
SIZES = {"hidden_size": 64, "intermediate_size": 96}
WIDER = SIZES | {"moe_intermediate_size": 96}
CASES = {  # the families that are published in a format
    "fp8": {"qwen3_moe": WIDER, "deepseek_v2": WIDER, "mixtral": SIZES},
    "mxfp4": {"gpt_oss": SIZES},
    "compressed-tensors": {"deepseek_v2": WIDER, "qwen3_moe": WIDER},
    "gptq": {"qwen2_moe": WIDER, "mixtral": SIZES},
    "awq": {"mixtral": SIZES},
    "nvfp4": {"qwen3_moe": WIDER},
}
PAIRS = [(method, family) for method, sizes in CASES.items() for family in sizes]


def made(folder: Path, method: str, family: str) -> tuple[Path, Path]:
    """A plain checkpoint and the published one of the same numbers."""
    plain = families.save(
        family, "hub", folder / "plain", torch.bfloat16, fields=CASES[method][family]
    )
    return plain, publish(plain, folder / "published", method)


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple]:
    plain, published = made(tmp_path_factory.mktemp("pair"), *request.param)
    reference = AutoModelForCausalLM.from_pretrained(plain, experts_implementation="eager").eval()
    opened = open_model(str(published))
    yield reference, opened
    opened.store.close()


@pytest.mark.parametrize("preset", ["on-demand", "near", "horizon", "full"])
def test_logits_and_tokens_are_those_of_the_dequantised_model(pair: tuple, preset: str) -> None:
    reference, opened = pair
    sampling = Sampling(6, ignore_eos=True)
    with torch.inference_mode():
        whole = reference(IDS).logits
    theirs = reference.generate(IDS, attention_mask=torch.ones_like(IDS), **sampling.options())[
        0, IDS.shape[1] :
    ]
    with Session(opened, Settings(preset=preset, budget="30%")) as session:
        with torch.inference_mode():
            assert torch.equal(opened.model(IDS).logits, whole)
        assert [token.token_id for token in session.tokens(IDS, sampling)] == theirs.tolist()


def test_experts_stay_packed(pair: tuple) -> None:
    _, opened = pair
    plain_nbytes = sum(2 * torch.Size(shape).numel() for shape in opened.layers[0].shapes.values())
    assert opened.shape.expert_nbytes == opened.store.layout.nbytes < 0.7 * plain_nbytes
    assert not opened.store.layout.is_plain


def test_a_nested_quantisation_is_read(tmp_path: Path) -> None:
    plain, published = made(tmp_path, "fp8", "qwen3_moe")
    path = published / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            config | {"language": {"quantization_config": config.pop("quantization_config")}}
        )
    )
    assert not open_model(str(published)).store.layout.is_plain


# What is not whole is refused


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def source(method: str) -> Path:
        if method not in folders:
            family = next(iter(CASES[method]))
            folders[method] = made(tmp_path_factory.mktemp(method), method, family)[1]
        return folders[method]

    return source


def _without(ending: str) -> Callable[[dict, dict], None]:
    def change(tensors: dict[str, torch.Tensor], config: dict) -> None:
        del tensors[
            next(name for name in sorted(tensors) if name.endswith(ending) and ".experts." in name)
        ]

    return change


def _with(
    ending: str, new: Callable[[torch.Tensor], torch.Tensor], *, at: int = 0
) -> Callable[[dict, dict], None]:
    def change(tensors: dict[str, torch.Tensor], config: dict) -> None:
        name = [name for name in sorted(tensors) if name.endswith(ending) and ".experts." in name][
            at
        ]
        tensors[name] = new(tensors[name]).contiguous()

    return change


def _indexed(first: int, others: int) -> Callable[[dict, dict], None]:
    """Give every expert of compressed-tensors the group of its first input and that of all
    others."""

    def change(tensors: dict[str, torch.Tensor], config: dict) -> None:
        for name in [
            name for name in tensors if name.endswith("weight_packed") and ".experts." in name
        ]:
            index = torch.full((8 * tensors[name].shape[1],), others, dtype=torch.int32)
            index[0] = first
            tensors[name.replace("packed", "g_idx")] = index

    return change


def _config(**entries: object) -> Callable[[dict, dict], None]:
    return lambda tensors, config: config["quantization_config"].update(entries)


def _no_config(tensors: dict, config: dict) -> None:
    del config["quantization_config"]


def _group(**weights: object) -> Callable[[dict, dict], None]:
    """Change what compressed-tensors' only group says of its weights."""
    return lambda tensors, config: config["quantization_config"]["config_groups"]["group_0"][
        "weights"
    ].update(weights)


def _all(*changes: Callable[[dict, dict], None]) -> Callable[[dict, dict], None]:
    def change(tensors: dict, config: dict) -> None:
        for each in changes:
            each(tensors, config)

    return change


def _no_scales(tensors: dict, config: dict) -> None:
    for name in [name for name in tensors if name.endswith(("_scale_inv", "_scale", "_scale_2"))]:
        del tensors[name]


def _named(name: str) -> Callable[[dict, dict], None]:
    return lambda tensors, config: tensors.update({name: torch.ones(1)})


def _symmetric(code: int) -> Callable[[dict, dict], None]:
    """Give all zero-points of GPTQ this code of 4 bits, in a config that says that they are
    symmetric."""

    def change(tensors: dict[str, torch.Tensor], config: dict) -> None:
        config["quantization_config"]["sym"] = True
        for name in [name for name in tensors if name.endswith(".qzeros")]:
            tensors[name].fill_(int.from_bytes(bytes([code * 17] * 4), "little", signed=True))

    return change


EXPERT = "model.layers.0.mlp.experts.0.gate_proj"
REFUSED = [
    (
        "fp8",
        _all(_no_scales, _no_config),
        "is float8_e4m3fn without scales, and config.json has no quantisation",
    ),
    (
        "nvfp4",
        _all(_no_scales, _no_config),
        "is uint8 without scales, and config.json has no quantisation",
    ),
    (
        "fp8",
        _named(f"{EXPERT}.weight_offset"),
        "weight_offset in the checkpoint is nothing that",
    ),
    (
        "fp8",
        _named("model.layers.0.self_attn.o_proj.pre_quant_scale"),
        "pre_quant_scale in the checkpoint is nothing",
    ),
    (
        "fp8",
        _named(f"{EXPERT}.qzeros"),
        "qzeros belongs to no matrix that is whole, quantised by fp8",
    ),
    (
        "fp8",
        _all(*map(_named, (f"{EXPERT}.input_scale", "model.layers.0.self_attn.k_proj.k_scale"))),
        None,
    ),
    (
        "fp8",
        _all(
            *map(_named, ("model.layers.9.eh_proj.weight", "mtp.norm.weight", "visual.norm.weight"))
        ),
        None,
    ),
    (
        "gptq",
        _all(_config(desc_act=True), _without(".g_idx")),
        "desc_act is set and g_idx is missing",
    ),
    ("gptq", _with(".g_idx", lambda groups: groups + 9), "holds an index beyond its groups"),
    ("gptq", _with(".g_idx", lambda groups: groups[:0]), None),
    ("gptq", _config(bits="4", group_size="32", desc_act="false"), None),
    ("gptq", _config(sym=True), "holds zero-points other than 8, and config.json says"),
    (
        "gptq",
        _all(_symmetric(7), _with(".qzeros", lambda zeros: zeros + 1, at=-1)),
        "layer 1, expert 7: .* zero-points other",
    ),
    ("awq", _config(zero_point=False), "holds zero-points other than 8, and config.json says"),
    ("compressed-tensors", _indexed(-1, 0), "holds an index beyond its groups"),
    ("compressed-tensors", _indexed(-1, -1), None),
    (
        "compressed-tensors",
        _indexed(0, 1),
        "holds a g_idx with (31|1) to .* inputs in a group where each has 32",
    ),
    ("compressed-tensors", _with("_shape", lambda size: -size), "whose weight_shape says"),
    ("gptq", _config(group_size=64), "groups of (64|96) inputs, and by the config"),
    ("gptq", _config(bits=8), "are of no such groups"),
    ("awq", _config(group_size=16), "groups of (64|96) inputs, and by the config"),
    ("compressed-tensors", _group(group_size=64), "groups of 64 do not divide 32 inputs"),
    ("compressed-tensors", _group(num_bits=8), "groups of 32 do not divide 16 inputs"),
    (
        "compressed-tensors",
        _group(symmetric=False),
        "not symmetric, and the zero-points are missing",
    ),
    ("compressed-tensors", _group(actorder="group"), "actorder is group, and g_idx is missing"),
    ("fp8", _without("_scale_inv"), "is float8_e4m3fn without scales"),
    ("fp8", _without("proj.weight"), "belongs to no matrix that is whole"),
    ("fp8", _no_config, "config.json has no quantisation"),
    ("fp8", _with("_scale_inv", lambda scale: scale[1:]), "are of no blocks of a matrix"),
    ("fp8", _with("_scale_inv", lambda scale: scale * torch.nan), "holds NaN or infinity"),
    ("fp8", _config(weight_block_size=[32, 32]), "are of no blocks of a matrix"),
    ("fp8", _config(weight_block_size=[0, 16]), "which is no size of a block"),
    (
        "fp8",
        _config(quant_method="bitsandbytes"),
        "quantised by 'bitsandbytes': moectl reads fp8, mxfp4",
    ),
    ("mxfp4", _without("_scales"), "is stored without _scales"),
    ("mxfp4", _with("_blocks", lambda blocks: blocks[..., :-1]), "do not fit scales"),
    ("mxfp4", _with("_scales", lambda scales: scales | 255), "holds NaN or infinity"),
    ("gptq", _config(desc_act=True, bits=4), None),
    ("gptq", _config(bits=5), "bits is 5: moectl reads 2, 3, 4, 8"),
    ("gptq", _config(checkpoint_format="marlin"), "in the layout 'marlin'"),
    ("gptq", _without(".qzeros"), "is stored without .qzeros"),
    ("gptq", _with(".scales", lambda scales: scales[:-1]), "are of no such groups"),
    ("awq", _with(".qzeros", lambda zeros: zeros[:-1]), "are of no such groups"),
    ("awq", _config(version="gemv"), "in the layout 'gemv'"),
    (
        "compressed-tensors",
        _with("_scale", lambda scale: scale[:, :1].expand(-1, 5)),
        "5 groups of",
    ),
    ("compressed-tensors", _config(config_groups={}), "without config_groups"),
    ("compressed-tensors", _config(format="marlin-24"), "in the format 'marlin-24'"),
    ("nvfp4", _without("_scale_2"), "is uint8 without scales, quantised by modelopt"),
]


@pytest.mark.parametrize(("method", "change", "message"), REFUSED)
def test_what_is_not_whole_is_refused(
    tmp_path: Path,
    sources: Callable[[str], Path],
    method: str,
    change: Callable,
    message: str | None,
) -> None:
    source = sources(method)
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    if message is None:
        read_every_expert(open_model(str(tmp_path)))
        return
    with pytest.raises(BadInput, match=message):
        read_every_expert(open_model(str(tmp_path)))


def test_symmetric_gptq_is_read_whatever_its_zero_points_are_called(
    tmp_path: Path, sources: Callable[[str], Path]
) -> None:
    """Stored by the version that the config names, by the other one, empty, and not at all, beside
    an empty index."""
    source = sources("gptq")
    texts = []
    for case in ("usual", "other", "empty", "missing"):
        tensors = load_file(source / "model.safetensors")
        config = json.loads((source / "config.json").read_text())
        _symmetric(8 if case == "other" else 7)(tensors, config)
        for name in [name for name in tensors if name.endswith((".qzeros", ".g_idx"))]:
            if case == "empty" or case == "missing" and name.endswith(".g_idx"):
                tensors[name] = tensors[name][..., :0].contiguous()
            elif case == "missing":
                del tensors[name]
        folder = tmp_path / case
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        opened = open_model(str(folder))
        with Session(opened, Settings(budget="30%")) as session:
            texts.append(
                [token.token_id for token in session.tokens(IDS, Sampling(6, ignore_eos=True))]
            )
            with torch.inference_mode():
                texts[-1].append(opened.model(IDS).logits)
    assert all(
        text[:-1] == texts[0][:-1] and torch.equal(text[-1], texts[0][-1]) for text in texts[1:]
    )


def read_every_expert(opened: MoeModel) -> None:
    buffer = torch.empty(opened.store.layout.nbytes, dtype=torch.uint8)
    for layer in range(opened.shape.num_layers):
        for expert in range(opened.shape.num_experts):
            opened.store.read(layer, expert, buffer)


def test_an_expert_in_another_format_than_the_others_opens(
    tmp_path: Path, sources: Callable[[str], Path]
) -> None:
    source = sources("fp8")
    tensors = load_file(source / "model.safetensors")
    opened = open_model(str(source))
    name = next(
        name for name in sorted(tensors) if ".experts.3." in name and name.endswith("proj.weight")
    )
    form = next(part.format for part in opened.store.layout.parts if part.format)
    matrix = {"weight": tensors[name], "scale": tensors.pop(f"{name}_scale_inv")}
    tensors[name] = numbers(form, matrix, torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    mixed = open_model(str(tmp_path))
    with (
        Session(opened, Settings(budget="30%")) as one,
        Session(mixed, Settings(budget="30%")) as other,
    ):
        texts = [
            [token.token_id for token in each.tokens(IDS, Sampling(6, ignore_eos=True))]
            for each in (one, other)
        ]
    assert texts[0] == texts[1]
    assert mixed.shape.expert_nbytes > opened.shape.expert_nbytes


def test_every_method_of_a_config_is_tested() -> None:
    assert set(CONFIGS) == set(CASES)
