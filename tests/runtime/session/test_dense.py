"""Sessions with weights besides experts at few bits: the bits of the plain model with the
dequantised ones, near them in compiled code, counted alike live and replayed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from artifacts.errors import BadUsage
from artifacts.formats.dense import DENSE
from runtime.model.open import open_model
from runtime.policies.base import Artefacts
from runtime.session.equip import model_on_base
from runtime.session.session import Session, Settings
from runtime.session.settings import FUSED
from tests.conftest import Checkpoint
from tests.helpers import families
from tests.helpers.dense import put_dense
from tests.helpers.families import FAMILIES, VOCABULARY
from tests.runtime.backends.test_cpu_backend import TOLERANCE, decoded
from tests.runtime.replay.test_replay import live_and_replayed
from tests.runtime.session.test_base import logits_of, replayed_and_live
from tests.runtime.session.test_session import plain_model
from tools.gpu.checks.made_replicas import made, put

pytestmark = pytest.mark.slow

PROMPT = torch.randint(3, VOCABULARY, (1, 14), generator=torch.Generator().manual_seed(1))
NEXT = torch.tensor([[5]])
_WIDE = {
    "hidden_size": 160,
    "intermediate_size": 96,
}  # rows of a step of 128 weights, and of a block besides


@pytest.mark.parametrize("bits", DENSE)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((name, "float32") for name in FAMILIES), ("olmoe", "bfloat16"), ("phimoe", "bfloat16")],
)
def test_exact_sessions_have_the_bits_of_the_dequantised_model(
    family: str, dtype: str, bits: int, checkpoint: Checkpoint
) -> None:
    folder = checkpoint(family, "hub", dtype)
    opened = open_model(str(folder), dense=bits)
    plain = plain_model(folder)
    whole = plain(PROMPT).logits.detach()
    assert put_dense(plain, opened) > 1
    with (
        Session(opened, Settings("near", budget="50%", dense=bits)) as session,
        torch.inference_mode(),
    ):
        ours = session.forward(PROMPT)
        ahead = session.forward(NEXT, past=ours.past_key_values).logits
        theirs = plain(PROMPT, use_cache=True)
        assert torch.equal(ours.logits, theirs.logits) and not torch.equal(ours.logits, whole)
        assert torch.equal(ahead, plain(NEXT, past_key_values=theirs.past_key_values).logits)


@pytest.mark.parametrize("bits", DENSE)
@pytest.mark.parametrize("family", ["phimoe", "qwen2_moe"])
def test_compiled_code_is_near_to_it(family: str, bits: int, tmp_path: Path) -> None:
    """phimoe has biases; qwen2_moe has a matrix that embedding and head share, and shared
    experts."""
    folder = families.save(family, "hub", tmp_path / family, fields=_WIDE)
    opened = open_model(str(folder), dense=bits)
    fused = decoded(opened, Settings(), experts=FUSED)
    exact = decoded(opened, Settings())
    deviation = (fused - exact).abs().max() / exact.abs().max()
    assert 0 < deviation <= TOLERANCE[torch.float32]


def test_a_replay_counts_what_the_run_counted(checkpoint: Checkpoint, tmp_path: Path) -> None:
    opened = open_model(str(checkpoint("olmoe")), dense=4)
    settings = Settings("specmd", budget="50%", link="1GB/s", experts=FUSED, dense=4)
    live, replayed = live_and_replayed(opened, settings, Artefacts(), tmp_path / "trace.parquet")
    assert live.counters.totals()["misses"] > 0
    assert live.counters.totals() == replayed.counters.totals()


@pytest.mark.parametrize("bits", DENSE)
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss"])
def test_experts_and_dense_weights_of_few_bits(family: str, bits: int, tmp_path: Path) -> None:
    """`--base 8 --dense 8`, and 4: what loses nothing gives the bits of `full`, which is the plain
    model with both dequantised, as near as products of replicas are to those of their numbers;
    fused kernels are near to that."""
    folder = families.save(family, "hub", tmp_path / family, fields=_WIDE)
    opened = open_model(str(folder), dense=bits)
    plain = plain_model(folder)
    replicas = made(opened, tmp_path)
    based, artefacts = model_on_base(opened, Artefacts(replicas=replicas), bits)
    assert put_dense(plain, opened) > 1
    put(plain, opened, replicas, np.full(opened.shape.num_keys, bits))

    full = Settings("full", dense=bits)
    right = logits_of(Session(based, full, artefacts=artefacts))
    for settings in (
        Settings(budget="50%", dense=bits),
        Settings("near", budget="50%", dense=bits),
    ):
        assert all(
            map(torch.equal, logits_of(Session(based, settings, artefacts=artefacts)), right)
        )
    fused = logits_of(Session(based, replace(full, experts=FUSED), artefacts=artefacts))
    with torch.inference_mode():
        whole = plain(PROMPT, use_cache=True)
        theirs = [
            whole.logits,
            *(plain(NEXT, past_key_values=whole.past_key_values).logits for _ in range(2)),
        ]
    for mine, compiled, plain_logits in zip(right, fused, theirs, strict=True):
        assert (mine - plain_logits).abs().max() <= 2e-4 * plain_logits.abs().max()
        assert (compiled - mine).abs().max() <= TOLERANCE[torch.float32] * mine.abs().max()


@pytest.mark.parametrize("bits", DENSE)
def test_a_replay_of_both_counts_what_the_run_counted(bits: int, tmp_path: Path) -> None:
    opened = open_model(
        str(families.save("olmoe", "hub", tmp_path / "model", fields=_WIDE)), dense=bits
    )
    settings = Settings(
        "specmd", policies={"miss": "fetch_priority:bits=2"}, budget="50%", dense=bits
    )
    counted = replayed_and_live(opened, Artefacts(replicas=made(opened, tmp_path)), settings, bits)
    assert counted["at_2_bits"] > 0


def test_the_receipt_says_what_is_in_force(checkpoint: Checkpoint) -> None:
    folder = str(checkpoint("mixtral"))
    held = {}
    for bits in (None, *DENSE):
        with Session.open(folder, Settings("full", experts=FUSED, dense=bits)) as session:
            receipt = session.receipt()
            memory = session.parts.memory["dense"]
        held[bits] = receipt["dense"].pop("bytes")
        assert held[bits] == sum(tensor.nbytes for tensor in memory)
        assert receipt["dense"] == (
            {} if bits is None else {"bits": bits, "matrices": 5, "as_published": 4}
        )
        lines = [line for line in receipt["fallbacks"] if line.startswith("dense")]
        assert lines == [
            "dense: 4 linear layers stay as published: too small, or no whole blocks of 32"
        ] * bool(bits)
    matrices = 2 * 2 * 32 * 32 + 96 * 32  # q and o of two layers, the head; k and v have 16 rows
    assert held[None] - held[8] == matrices * 4 - matrices // 32 * 34
    assert held[None] - held[4] == matrices * 4 - matrices // 32 * 18
    with Session.open(folder, Settings("full", dense=8)) as session:
        assert (
            "dense: 8 bits are dequantised at each use on cpu" in session.receipt()["fallbacks"][1]
        )


def test_settings_of_another_width_than_the_models_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(BadUsage, match="--dense 3 is no width"):
        Settings(dense=3)
    for opened in (
        open_model(str(checkpoint("olmoe"))),
        open_model(str(checkpoint("olmoe")), dense=4),
    ):
        with pytest.raises(
            BadUsage, match=r"dense=8 is a matter of opening: open_model\(name, dense=8\)"
        ):
            Session(opened, Settings(dense=8))
