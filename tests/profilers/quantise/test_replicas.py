"""Replicas of small models of every family: their losses equal those of an independent
computation."""

import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from artifacts.errors import BadInput, BadUsage, OutOfResources
from artifacts.quantisation.replica_file import replica_root, verify
from artifacts.quantisation.widths import SCALAR_WIDTHS, as_width, columns_of
from artifacts.store.rows import quant_loss_matrices
from artifacts.store.runs import ModelInfo
from artifacts.store.store import Store
from profilers.quantise import one_expert
from profilers.quantise.method import Method
from profilers.quantise.replicas import BuiltReplicas, build_replicas
from profilers.text.batches import Data
from profilers.workers.workers import Processes
from runtime.model.open import MoeModel, open_model
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES, VOCABULARY
from tests.helpers.rewritten import invert
from tests.profilers.quantise.replicas_by_hand import header, heard, stored_weight

pytestmark = pytest.mark.slow

RANDOM = np.random.default_rng(0)
SEQUENCES = [RANDOM.integers(3, VOCABULARY, length) for length in (20, 31, 9, 31, 14, 25, 8)]
METHOD = Method(bits=SCALAR_WIDTHS, min_samples=12)
TRELLIS = Method(bits=(0.8, 2), min_samples=12, recipe="trellis")


def build(
    opened: MoeModel, folder: str, store: Path, method: Method = METHOD, **options: object
) -> BuiltReplicas:
    model = ModelInfo(folder, opened.fingerprint, opened.family, opened.shape)
    return build_replicas(
        opened, Data("test", SEQUENCES), method, model=model, store_path=store, **options
    )


def files(store: Path) -> dict[str, bytes]:
    found = sorted(replica_root(store).rglob("L*.safetensors"))
    return {str(path.relative_to(replica_root(store))): path.read_bytes() for path in found}


@pytest.mark.parametrize(
    ("family", "method"),
    [*((family, METHOD) for family in FAMILIES), ("gpt_oss", TRELLIS), ("olmoe", TRELLIS)],
)
def test_losses_are_those_of_the_plain_models_own_experts(
    family: str, method: Method, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = str(checkpoint(family))
    opened = open_model(folder)
    built = build(opened, folder, tmp_path / "moe.duckdb", method)
    assert len(built.records) == opened.shape.num_keys and built.resumed == 0
    names = [layer.name for layer in opened.layers]
    inputs = heard(folder, names, SEQUENCES)
    modules = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    for each in built.records:
        layer = int(each.metadata["layer"])
        expert = int(each.metadata["expert"])
        x, ids, weights = inputs[layer]
        module = modules.get_submodule(names[layer])
        tokens, ranks = torch.nonzero(ids == expert, as_tuple=True)
        assert each.metadata["samples"] == str(len(tokens))
        assert each.metadata["basis"] == ("own" if len(tokens) >= METHOD.min_samples else "layer")
        own = alone(module, expert, x[tokens])
        gates = weights[tokens, ranks].double() ** 2
        assert float(each.metadata["energy"]) == pytest.approx(
            float(gates @ squares(own)), rel=1e-4, abs=1e-12
        )
        judged = x[tokens] if len(tokens) >= METHOD.min_samples else torch.cat([x[tokens], x])
        exact = alone(module, expert, judged)
        saved = {
            name: parameter[expert].clone()
            for name, parameter in module.named_parameters(recurse=False)
        }
        for bits in method.bits:
            for name, parameter in module.named_parameters(recurse=False):
                if not name.endswith("_bias"):
                    weight = torch.from_numpy(stored_weight(each.path, name, bits)).float()
                    parameter.data[expert] = weight.T if module.is_transposed else weight
            difference = squares(alone(module, expert, judged) - exact)
            gated = float(gates @ difference[: len(tokens)])
            for name, parameter in module.named_parameters(recurse=False):
                parameter.data[expert] = saved[name]
            mse = float(difference.mean()) / x.shape[1]
            assert float(each.metadata[f"{bits}.mse"]) == pytest.approx(mse, rel=1e-4)
            relative = mse / (float(squares(exact).mean()) / x.shape[1])
            assert float(each.metadata[f"{bits}.relative"]) == pytest.approx(relative, rel=1e-4)
            assert float(each.metadata[f"{bits}.gated"]) == pytest.approx(
                gated, rel=1e-4, abs=1e-12
            )


@torch.inference_mode()
def alone(module: torch.nn.Module, expert: int, x: torch.Tensor) -> torch.Tensor:
    return module(x, torch.full((len(x), 1), expert), torch.ones(len(x), 1)).double()


def squares(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum(dim=1)


@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_twenty_random_rows_from_the_files_alone(
    layout: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = str(checkpoint("olmoe", layout, "bfloat16"))
    opened = open_model(folder)
    store = tmp_path / "moe.duckdb"
    run = build(opened, folder, store).run_id
    inputs = heard(folder, [layer.name for layer in opened.layers], SEQUENCES)
    with Store.open(store, read_only=True) as opened_store:
        losses, kept = (
            opened_store.read(name, run).to_pylist() for name in ("quant_loss", "replicas")
        )
    assert len(losses) == len(kept) == opened.shape.num_keys * len(SCALAR_WIDTHS)
    for at in np.random.default_rng(1).choice(len(losses), 20, replace=False):
        row = losses[at]
        file = kept[at]
        path = replica_root(store) / file["file"]
        verify(path, file["hash"])
        x, ids, _ = (part.float().numpy() for part in inputs[row["layer"]])
        own = x[(ids == row["expert"]).any(axis=1)]
        judged = own if row["basis"] == "own" else np.concatenate([own, x])
        exact = by_hand(judged, full(opened, row["layer"], row["expert"]))
        replica = {
            part: stored_weight(path, part, as_width(row["bits"]))
            for part in ("gate_up_proj", "down_proj")
        }
        difference = by_hand(judged, replica) - exact
        assert row["mse"] == pytest.approx(np.mean(difference**2), rel=1e-4)
        assert row["relative"] == pytest.approx(
            np.mean(difference**2) / np.mean(exact**2), rel=1e-4
        )


def full(opened: MoeModel, layer: int, expert: int) -> dict[str, np.ndarray]:
    buffer = torch.empty(opened.store.layout.nbytes, dtype=torch.uint8)
    opened.store.read(layer, expert, buffer)
    return {name: part.double().numpy() for name, part in opened.store.layout.views(buffer).items()}


def by_hand(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    gate, up = np.split(x @ weights["gate_up_proj"].T, 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * up) @ weights["down_proj"].T


def test_losses_fall_with_the_bits_and_come_out_of_the_store(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = str(checkpoint("qwen2_moe"))
    opened = open_model(folder)
    store = tmp_path / "moe.duckdb"
    run = build(opened, folder, store).run_id
    with Store.open(store, read_only=True) as opened_store:
        found = quant_loss_matrices(opened_store.read("quant_loss", run), 2, 8)
        parameters = opened_store.run(run).info.parameters
    columns = columns_of(SCALAR_WIDTHS)
    assert (np.diff(found["relative"][..., columns], axis=2) < 0).all()
    assert np.isfinite(found["gated"][..., columns]).all()
    assert (parameters["device"], parameters["dtype"]) == (
        "cpu",
        str(opened.dtype).removeprefix("torch."),
    )
    assert parameters["recipe"] == "refined" and parameters["bits"] == [*SCALAR_WIDTHS]


def test_an_expert_without_a_token_has_replicas(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = str(checkpoint("olmoe"))
    opened = open_model(folder)
    model = ModelInfo(folder, opened.fingerprint, opened.family, opened.shape)
    built = build_replicas(
        opened,
        Data("t", [np.array([5, 6])]),
        Method(),
        model=model,
        store_path=tmp_path / "m.duckdb",
    )
    starved = [each for each in built.records if each.metadata["samples"] == "0"]
    assert starved
    for each in starved:
        assert each.metadata["basis"] == "layer" and set(each.nbytes) == {1, 2, 3, 4}
        assert 0 < float(each.metadata["4.relative"]) < float(each.metadata["1.relative"])
        assert float(each.metadata["4.gated"]) == 0


@pytest.mark.parametrize("method", [METHOD, TRELLIS])
def test_stopped_and_taken_up_it_leaves_the_same_bytes(
    method: Method, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(checkpoint("gpt_oss"))
    opened = open_model(folder)
    build(opened, folder, tmp_path / "whole.duckdb", method)
    store = tmp_path / "moe.duckdb"
    done = []

    def stop_after_six(count: int, total: int) -> None:
        done.append(count)
        if count == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(opened, folder, store, method, progress=stop_after_six)
    assert done == [0, 1, 2, 3, 4, 5, 6] and len(files(store)) == 6
    assert not store.exists(), "no row before all is done"
    [damaged] = replica_root(store).rglob("L000-E001.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    [swapped] = replica_root(store).rglob("L000-E002.safetensors")
    swapped.write_bytes(swapped.with_name("L000-E003.safetensors").read_bytes())
    swapped.with_name(".L001-E003.safetensors.123.tmp").write_bytes(b"half")
    work = one_expert.quantise
    redone = []
    monkeypatch.setattr(
        one_expert, "quantise", lambda unit: redone.append((unit.layer, unit.expert)) or work(unit)
    )
    built = build(opened, folder, store, method)
    assert redone == [(0, 1), (0, 2), (1, 2), (1, 3)] and built.resumed == 4
    assert files(store) == files(tmp_path / "whole.duckdb")
    names = {path.name for path in built.folder.iterdir()}
    assert names == {".lock"} | {Path(name).name for name in files(store)}


@pytest.mark.parametrize(("done", "remade"), [(3, 0), (10, 1), (16, 0)])
def test_a_checkpoint_written_into_meanwhile_makes_no_run(
    done: int, remade: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The last expert is changed in an earlier layer, in its own layer before it is read, and
    afterwards."""
    folder = shutil.copytree(checkpoint("olmoe"), tmp_path / "model")
    last = "model.layers.1.mlp.experts.7.up_proj.weight"
    store = tmp_path / "moe.duckdb"
    opened = open_model(str(folder))
    with pytest.raises(BadInput, match="changed while it is in use"):
        build(
            opened,
            str(folder),
            store,
            progress=lambda count, _: count == done and invert(folder, last),
        )
    assert not store.exists()
    invert(folder, last)
    built = build(open_model(str(folder)), str(folder), store)
    assert built.remade == remade and built.resumed == len(built.records) - remade - 8 * (done == 3)
    build(
        opened_again := open_model(str(checkpoint("olmoe"))), str(folder), tmp_path / "whole.duckdb"
    )
    assert opened_again.fingerprint == opened.fingerprint and files(store) == files(
        tmp_path / "whole.duckdb"
    )


def test_processes_leave_the_same_bytes(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes are forked here to save time; those of `moectl quantize --jobs 2` are spawned."""
    monkeypatch.setattr(
        "profilers.workers.workers.get_context", lambda _: multiprocessing.get_context("fork")
    )
    folder = str(checkpoint("deepseek_v2"))
    opened = open_model(folder)
    for jobs in (1, 2):
        build(opened, folder, tmp_path / f"{jobs}.duckdb", executor=Processes(jobs))
    assert files(tmp_path / "1.duckdb") == files(tmp_path / "2.duckdb")


@pytest.mark.parametrize("method", [METHOD, TRELLIS])
def test_a_full_disk_in_the_middle(
    method: Method, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(checkpoint("olmoe"))
    opened = open_model(folder)
    store = tmp_path / "moe.duckdb"
    sync = os.fsync
    left = iter(range(20))

    def full_after_a_while(descriptor: int) -> None:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    with (
        monkeypatch.context() as patched,
        pytest.raises(OutOfResources, match="no space left to write"),
    ):
        patched.setattr(os, "fsync", full_after_a_while)
        build(opened, folder, store, method)
    before = len(files(store))
    assert before and not list(replica_root(store).rglob(".*.tmp")) and not store.exists()
    assert build(opened, folder, store, method).resumed == before


def test_too_little_disk_is_said_at_once(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(checkpoint("olmoe"))
    opened = open_model(folder)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(OutOfResources, match="the replicas take .* fewer --bits"):
        build(opened, folder, tmp_path / "moe.duckdb")
    assert not list(tmp_path.iterdir())


def test_two_at_once_are_kept_apart(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = str(checkpoint("olmoe"))
    opened = open_model(folder)

    def meddle(done: int, total: int) -> None:
        if done == 1:
            with pytest.raises(OutOfResources, match="another moectl quantize is filling"):
                build(opened, folder, tmp_path / "moe.duckdb")

    assert (
        len(build(opened, folder, tmp_path / "moe.duckdb", progress=meddle).records)
        == opened.shape.num_keys
    )


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (Method(bits=(2, 5)), "replicas of the recipe refined have 1, 2, 3, 4 or 8 bits, not 2, 5"),
        (
            Method(bits=(0.6, 8), recipe="trellis"),
            "recipe trellis have 0.6, 0.8, 1, .* or 4 bits, not 0.6, 8",
        ),
        (Method(bits=()), "not none"),
        (Method(recipe="better"), "the recipe is plain, refined or trellis, not 'better'"),
        (Method(damp=0), "damp is a share"),
        (
            Method(group_size=5),
            r"groups of 5 do not divide .* 32 \(gate_up_proj\) and 24 \(down_proj\): give 8, or 32",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(
    method: Method, says: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = str(checkpoint("olmoe"))
    with pytest.raises(BadUsage, match=says):
        build(open_model(folder), folder, tmp_path / "moe.duckdb", method)
    assert not list(tmp_path.iterdir())


def test_groups_give_way_where_they_do_not_divide(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = str(checkpoint("olmoe"))
    opened = open_model(folder)
    for wanted, first, second in ((128, "32", "24"), (8, "8", "8")):
        built = build(
            opened, folder, tmp_path / f"{wanted}.duckdb", Method(bits=(3,), group_size=wanted)
        )
        metadata = header(built.records[0].path)
        assert (metadata["gate_up_proj.group_size"], metadata["down_proj.group_size"]) == (
            first,
            second,
        )
        assert metadata["bits"] == "3"
