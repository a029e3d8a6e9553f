"""Replicas of checkpoints that are published in few bits: made of the dequantised weights, also
after a kill."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from artifacts.errors import BadUsage
from artifacts.quantisation.replica_file import SOURCE, read_replica, replica_root
from artifacts.store.check import check_store
from artifacts.store.runs import ModelInfo
from artifacts.store.store import Store
from profilers.quantise.method import Method
from profilers.quantise.replicas import BuiltReplicas, build_replicas
from profilers.text.batches import Data
from runtime.model.open import MoeModel, open_model
from tests.helpers import families, gguf_files
from tests.helpers.published import MAKERS, publish
from tests.profilers.quantise.test_replicas import METHOD, SEQUENCES, files

pytestmark = pytest.mark.slow

WIDE = {"hidden_size": 64, "intermediate_size": 96}
TWO_BITS = Method(bits=(2,), min_samples=METHOD.min_samples)


@pytest.fixture(scope="module", params=[("fp8", "mixtral"), ("mxfp4", "gpt_oss")], ids="-".join)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, MoeModel, MoeModel]:
    """The format, the model of a published checkpoint, and the plain one of the same numbers."""
    method, family = request.param
    folder = tmp_path_factory.mktemp(family)
    plain = families.save(family, "hub", folder / "plain", torch.bfloat16, fields=WIDE)
    published = publish(plain, folder / "published", method)
    return method, open_model(str(published)), open_model(str(plain))


def build(
    opened: MoeModel, store: Path, method: Method = METHOD, **options: object
) -> BuiltReplicas:
    model = ModelInfo("a model", opened.fingerprint, opened.family, opened.shape)
    return build_replicas(
        opened, Data("test", SEQUENCES), method, model=model, store_path=store, **options
    )


def test_they_are_those_of_the_dequantised_model(pair: tuple, tmp_path: Path) -> None:
    """Codes, scales and losses; in groups of 32, replicas of 4 bits are larger than MXFP4."""
    method, published, plain = pair
    ours, theirs = (
        build(opened, tmp_path / f"{at}.duckdb") for at, opened in enumerate((published, plain))
    )
    assert theirs.skipped == () and ours.skipped == ((4, 8) if method == "mxfp4" else (8,))
    widths = [bits for bits in METHOD.bits if bits not in ours.skipped]
    own = {SOURCE, "model", "bits", "digest"}
    for mine, other in zip(ours.records, theirs.records, strict=True):
        assert sorted(mine.nbytes) == widths and mine.metadata[SOURCE] != other.metadata[SOURCE]
        assert {
            name: text for name, text in mine.metadata.items() if name not in own
        }.items() <= other.metadata.items()
        for bits in widths:
            left, right = (read_replica(each.path, bits) for each in (mine, other))
            assert left.keys() == right.keys()
            assert all(_equal(left[name], right[name]) for name in left)
    with Store.open(tmp_path / "0.duckdb") as store:
        assert store.run(ours.run_id).info.parameters["expert_format"] == published.expert_format


def _equal(one: object, other: object) -> bool:
    tensors = (
        [(one, other)]
        if isinstance(one, torch.Tensor)
        else zip(_tensors(one), _tensors(other), strict=True)
    )
    return all(torch.equal(left, right) for left, right in tensors)


def _tensors(packed: object) -> list[torch.Tensor]:
    return [part for part in (packed.qweight, packed.qzeros, packed.scales) if part is not None]


def published(method: str, folder: Path) -> Path:
    """A small model in this format."""
    if method == "gguf":
        return gguf_files.write("qwen3_moe", folder / "model.gguf", gguf_files.mixed)
    family = "gpt_oss" if method == "mxfp4" else "mixtral"
    plain = families.save(family, "hub", folder / "plain", torch.bfloat16, fields=WIDE)
    return publish(plain, folder / "published", method)


@pytest.mark.parametrize("method", [*MAKERS, "gguf"])
def test_killed_and_taken_up_it_is_whole(method: str, tmp_path: Path) -> None:
    """The process that quantises kills itself with the signal that nothing can catch."""
    opened = open_model(str(published(method, tmp_path)))
    whole = tmp_path / "whole.duckdb"
    store = tmp_path / "moe.duckdb"
    build(opened, whole, TWO_BITS)
    assert (
        _in_a_process(lambda: build(opened, store, TWO_BITS, progress=_killing_after(3)))
        == -signal.SIGKILL
    )
    assert not store.exists() and 0 < len(files(store)) < opened.shape.num_keys
    built = build(opened, store, TWO_BITS)
    assert built.resumed == 3 and files(store) == files(whole)
    with Store.open(store) as held:
        assert not check_store(held).findings
    assert not list(replica_root(store).rglob(".*.tmp"))


def _killing_after(count: int) -> Callable[[int, int], None]:
    return lambda done, total: os.kill(os.getpid(), signal.SIGKILL) if done == count else None


def _in_a_process(work: Callable[[], object]) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(120)
    return process.exitcode


def test_widths_of_which_none_is_smaller_are_refused(pair: tuple, tmp_path: Path) -> None:
    method, opened, _ = pair
    if method == "mxfp4":
        with pytest.raises(
            BadUsage, match=r"replicas of 4 bits are no smaller than .* \(mxfp4, 4\.\d+ bits\)"
        ):
            build(opened, tmp_path / "moe.duckdb", Method(bits=(4,)))
        assert not list(tmp_path.iterdir())
