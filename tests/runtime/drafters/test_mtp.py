"""The checkpoint's own layer that predicts a further token: what it drafts is what its formula
gives, in every naming."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from artifacts.errors import BadInput, BadUsage
from runtime.drafters import greedy, mtp
from runtime.drafters.mtp import Mtp
from runtime.drafters.prediction.layer import PredictionLayer
from runtime.drafters.prediction.opening import open_layer
from runtime.model.open import open_model
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import Settings
from tests.conftest import Checkpoint
from tests.helpers import gguf_files
from tests.helpers.further import FURTHER, Reference
from tests.helpers.published import publish

PROMPT = [5, 9, 2, 14, 7, 7, 3, 1, 4, 11, 5, 9]


@pytest.mark.parametrize("case", FURTHER)
def test_drafts_are_those_of_the_formula(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greedy, "SURE", 0.0)
    monkeypatch.setattr(mtp, "_AT_ONCE", 5)  # the parts of the prompt are read as they come
    reference = Reference(FURTHER[case])
    drafter = Mtp.open(open_model(str(reference.save(tmp_path))), None).begin(PROMPT, None)
    hidden = reference.hidden(PROMPT)
    drafter.note(PROMPT[:7], SimpleNamespace(hidden_states=(hidden[:, :9],)))
    drafter.note(PROMPT[7:], SimpleNamespace(hidden_states=(hidden[:, 7:],)))
    tokens = [*PROMPT, 8]
    assert drafter.propose(tokens, 3) == reference.drafts(tokens, 3)
    # a pass reads the last token and drafts; some stay, and another token is drawn
    for stay, drawn in (([8, 6], 17), ([17], 3), ([3, 2, 9, 4], 12)):
        tokens[-1:] = stay
        hidden = reference.hidden(tokens)[:, -len(stay) :]
        drafter.note(stay, SimpleNamespace(hidden_states=(hidden,)))
        tokens.append(drawn)
        if drawn != 3:  # a pass without drafts
            assert drafter.propose(tokens, 2) == reference.drafts(tokens, 2)


@pytest.mark.parametrize("case", ["glm4_moe", "qwen4_exp"])
def test_drafted_answer_is_the_undrafted_one(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greedy, "SURE", 0.0)
    path = str(Reference(FURTHER[case]).save(tmp_path))
    answers = []
    for draft in ("none", "mtp:3"):
        with Session(open_model(path), Settings(budget="50%", threads=1, draft=draft)) as session:
            sampling = Sampling(max_new_tokens=24, ignore_eos=True)
            answers.append([*session.tokens(torch.tensor([PROMPT]), sampling)])
            told = session.verifier.receipt() if session.verifier else {}
    assert [one.token_id for one in answers[0]] == [one.token_id for one in answers[1]]
    assert told["drafted"] > 24
    assert told["nbytes"] > 0


def _numbers(layer: PredictionLayer) -> dict[str, torch.Tensor]:
    modules: dict[str, nn.Module] = {"decoder": layer._decoder, "fusion": layer._fusion}
    return {
        f"{name}.{own}": parameter
        for name, module in modules.items()
        for own, parameter in module.named_parameters()
    }


def test_layer_in_few_bits_is_dequantised(tmp_path: Path) -> None:
    plain = Reference(FURTHER["deepseek_v3"], hidden_size=64, moe_intermediate_size=64)
    folder = plain.save(tmp_path / "plain")
    packed = publish(folder, tmp_path / "packed", "fp8")
    wanted = _numbers(open_layer(open_model(str(folder), dtype=torch.float32)))
    found = _numbers(open_layer(open_model(str(packed), dtype=torch.float32)))
    assert found.keys() == wanted.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, wanted[name]), name


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_5_moe_text"])
def test_layer_of_a_gguf_file(family: str, tmp_path: Path) -> None:
    """It is like the last layer of the model; norms of Qwen are stored with 1 added."""
    random = np.random.default_rng(0)
    sides = {
        name: random.normal(size=shape).astype("f4")
        for name, shape in (("enorm", 256), ("hnorm", 256), ("eh_proj", (256, 512)))
    }
    added = family.startswith("qwen")

    def change(arrays: dict[str, np.ndarray]) -> None:
        last = {name: each for name, each in arrays.items() if name.startswith("blk.1.")}
        arrays |= {name.replace("blk.1.", "blk.2."): each for name, each in last.items()}
        arrays |= {
            f"blk.2.nextn.{name}.weight": each + (added and each.ndim == 1)
            for name, each in sides.items()
        }
        arrays["blk.2.nextn.shared_head_norm.weight"] = arrays["output_norm.weight"]

    def describe(writer: gguf.GGUFWriter) -> None:
        if added:
            writer.kv_data[0].pop(f"{writer.arch}.block_count")
            writer.add_block_count(3)
            writer.add_nextn_predict_layers(1)

    path = gguf_files.write(
        family, tmp_path / "model.gguf", lambda name: "F32", change=change, describe=describe
    )
    found = _numbers(open_layer(open_model(str(path), dtype=torch.float32)))
    decoder = gguf_files.made(family).get_decoder()
    state = decoder.layers[1].state_dict(prefix="decoder.layers.0.")
    state["decoder.norm.weight"] = decoder.norm.weight
    state["fusion.project.0.weight"] = torch.from_numpy(sides["eh_proj"])
    state["fusion.embed_norm.weight"] = torch.from_numpy(sides["enorm"])
    state["fusion.hidden_norm.weight"] = torch.from_numpy(sides["hnorm"])
    for name, parameter in found.items():
        torch.testing.assert_close(parameter, state[name], rtol=0, atol=1e-6, msg=name)


def _without(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        del tensors[name]
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return change


@pytest.mark.parametrize("lacking", ["hnorm", "self_attn.o_proj"])
def test_damaged_layer_is_refused(lacking: str, tmp_path: Path) -> None:
    path = Reference(FURTHER["glm4_moe"]).save(tmp_path)
    _without(f"model.layers.2.{lacking}.weight")(path)
    with pytest.raises(BadInput, match="is missing"):
        open_layer(open_model(str(path)))


def test_other_models_and_arguments_are_refused(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    with pytest.raises(BadUsage, match="olmoe has no layers that predict further tokens"):
        Mtp.open(opened, None)
    with pytest.raises(BadUsage, match="takes no argument"):
        Mtp.open(opened, "2")
