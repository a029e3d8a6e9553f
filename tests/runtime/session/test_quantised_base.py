"""Replicas of a checkpoint that is published in few bits: exact beside its packed experts, counted
alike live and replayed, refused where they would be no smaller."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from artifacts.errors import Incompatible
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import guessed
from artifacts.quantisation.widths import column_of
from artifacts.shape import FULL_BITS
from runtime.model.open import MoeModel, open_model
from runtime.policies.base import Artefacts
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from runtime.session.equip import model_on_base
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import FUSED, Settings
from tests.helpers import families
from tests.helpers.published import publish
from tests.runtime.session.test_base import NEXT, PROMPT
from tests.runtime.session.test_session import plain_model
from tools.gpu.checks.made_replicas import made, put

PRESETS = {
    "shadow": Settings("shadow", budget="70%"),
    "uniform-bits": Settings("uniform-bits", budget="60%"),
    "hot ones whole, the others near": Settings("context-aware", budget="50%"),
    "fetched at 2 bits": Settings(
        "specmd", policies={"miss": "fetch_priority:bits=2"}, budget="50%"
    ),
}


@pytest.fixture(scope="module", params=[("fp8", "mixtral"), ("mxfp4", "gpt_oss")], ids="-".join)
def known(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, PreTrainedModel, MoeModel, Artefacts]]:
    """The format, the plain model of the same numbers, the opened one and its artefacts. With 64
    and 96 inputs, groups have 64 and 32: 4 bits take more than MXFP4."""
    method, family = request.param
    folder = tmp_path_factory.mktemp(family)
    fields = {"hidden_size": 64, "intermediate_size": 96}
    plain = families.save(family, "hub", folder / "plain", torch.float32, fields=fields)
    opened = open_model(str(publish(plain, folder / "published", method)))
    yield method, plain_model(plain), opened, Artefacts(replicas=made(opened, folder))
    opened.store.close()


def test_widths_are_those_that_are_smaller(known: tuple) -> None:
    method, _, opened, artefacts = known
    replicas = artefacts.replicas
    is_4_bits = method == "mxfp4"
    assert (
        replicas.widths == [1, 2, 3, 4][: 4 - is_4_bits]
        and replicas.at_full == (4, 8)[1 - is_4_bits :]
    )
    assert (
        max(size for bits, size in replicas.nbytes.items() if bits != FULL_BITS)
        < opened.shape.expert_nbytes
    )
    assert (replicas.loss[..., column_of(4)] == 0).all() == is_4_bits
    assert opened.expert_format.startswith(f"{method}, {4 if is_4_bits else 8}.")


@pytest.mark.parametrize(("bits", "experts"), [("2", "exact"), ("mixed", FUSED)])
def test_replicas_in_the_place_of_packed_experts(known: tuple, bits: str, experts: str) -> None:
    _, plain, opened, artefacts = known
    residency = {"residency": f"shadow:bits={bits},slots=no"}
    settings = Settings("uniform-bits", policies=residency, budget="65%", experts=experts)
    with Session(opened, settings, artefacts=artefacts) as session, torch.inference_mode():
        ours = session.forward(PROMPT)
        ahead = session.forward(NEXT, past=ours.past_key_values).logits
        put(plain, opened, artefacts.replicas, session.controller.cache.shadows)
        receipt = session.receipt()
        theirs = plain(PROMPT, use_cache=True)
        _assert_same(ours.logits, theirs.logits)
        _assert_same(ahead, plain(NEXT, past_key_values=theirs.past_key_values).logits)
    assert receipt["expert_format"] == opened.expert_format and receipt["base_bits"] == FULL_BITS
    assert receipt["fast_bytes"] <= 0.65 * opened.shape.nbytes


@pytest.mark.parametrize("name", PRESETS)
def test_a_replay_counts_what_the_run_counted(known: tuple, name: str) -> None:
    _, _, opened, artefacts = known
    with Session(opened, PRESETS[name], artefacts=artefacts) as session:
        recorder = session.record()
        list(session.tokens(PROMPT, Sampling(8, ignore_eos=True)))
        live = session.controller.counters.totals()
        slots = len(session.parts.slots)
        window = session.parts.window
    workload = Workload(
        recorder.trace(),
        guessed(opened.stored_shape),
        machine("a100-pcie4"),
        artefacts=artefacts,
        window=window,
    )
    settings = PRESETS[name]
    outcome = workload.run(
        Setting("replayed", settings.preset, settings.policies, budget=settings.budget)
    )
    assert (outcome.counters, outcome.num_slots) == (live, slots)
    assert live["low"] + live["near"] + live["fetched"] > 0


def test_a_base_of_fewer_bits(known: tuple) -> None:
    """Every expert is its replica, whatever the checkpoint's format; a replica that is no smaller
    is refused."""
    method, plain, opened, artefacts = known
    based, on_base = model_on_base(opened, artefacts, 2)
    assert on_base.replicas.widths == [1] and based.expert_format.startswith("replicas, 2.")
    with (
        Session(based, Settings(budget="50%"), artefacts=on_base) as session,
        torch.inference_mode(),
    ):
        logits = session.forward(PROMPT).logits
        put(plain, opened, artefacts.replicas, np.full(opened.shape.num_keys, 2))
        _assert_same(logits, plain(PROMPT).logits)
    if method == "mxfp4":
        with pytest.raises(
            Incompatible,
            match="4 bits are no smaller than the experts of the checkpoint: leave out",
        ):
            model_on_base(opened, artefacts, 4)
        with pytest.raises(
            Incompatible,
            match="cascade needs replicas of 4 bits, which are no smaller .* of 1, 2, 3",
        ):
            Session(opened, Settings("hobbit"), artefacts=artefacts)


def _assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() <= 2e-4 * theirs.abs().max()
