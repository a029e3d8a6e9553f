"""Replicas in trellis codes: exact beside experts of any format, and counted alike live and
replayed."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import guessed
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
from tools.gpu.checks.made_replicas import CODED, made, put

PLAIN = "bfloat16 or float32"
PRESETS = {
    "shadow": Settings("shadow", budget="60%", window="1KiB"),
    "pruned": Settings(
        "shadow", {"residency": "shadow:bits=pruned"}, "26%", experts=FUSED, window="1KiB"
    ),
    "uniform": Settings("uniform-bits", policies={"residency": "shadow:bits=1.25"}, budget="60%"),
    "fetched": Settings("specmd", policies={"miss": "fetch_lowest"}, budget="50%", window="1KiB"),
}
Known = tuple[str, PreTrainedModel, MoeModel, Artefacts]


@pytest.fixture(
    scope="module",
    params=[(PLAIN, "olmoe"), ("fp8", "mixtral"), ("mxfp4", "gpt_oss"), ("gptq", "olmoe")],
)
def known(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Known]:
    """The format of the base, the plain model of the same numbers, the opened one and its
    artefacts."""
    method, family = request.param
    folder = tmp_path_factory.mktemp(family)
    fields = {"hidden_size": 64, "intermediate_size": 96}
    plain = families.save(family, "hub", folder / "plain", torch.float32, fields=fields)
    opened = open_model(
        str(plain if method == PLAIN else publish(plain, folder / "published", method))
    )
    yield (
        method,
        plain_model(plain),
        opened,
        Artefacts(replicas=made(opened, folder, is_coded=True)),
    )
    opened.store.close()


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "fetched"])
def test_experts_without_a_slot_are_their_replicas(known: Known, name: str) -> None:
    method, plain, opened, artefacts = known
    residency = {
        "residency": PRESETS[name].policies.get("residency", "shadow:bits=mixed") + ",slots=no"
    }
    settings = Settings(
        PRESETS[name].preset, residency, PRESETS[name].budget, experts=PRESETS[name].experts
    )
    with Session(opened, settings, artefacts=artefacts) as session, torch.inference_mode():
        ours = session.forward(PROMPT)
        ahead = session.forward(NEXT, past=ours.past_key_values).logits
        put(plain, opened, artefacts.replicas, session.controller.cache.shadows)
        receipt = session.receipt()
        theirs = plain(PROMPT, use_cache=True)
        _assert_same(ours.logits, theirs.logits)
        _assert_same(ahead, plain(NEXT, past_key_values=theirs.past_key_values).logits)
    told = receipt["replicas"]
    assert (told["code"], sum(told["resident"].values())) == ("trellis", opened.shape.num_keys)
    assert told["kernel"].startswith("trellis codes: numba")
    assert (told["resident"].get("0_bits", 0) > 0) == (name == "pruned" and method != PLAIN)
    if name == "uniform":
        assert told["resident"] == {"1_25_bits": opened.shape.num_keys}


def test_misses_are_fetched_in_few_bits(known: Known) -> None:
    _, plain, opened, artefacts = known
    settings = Settings(
        policies={"miss": "fetch_lowest"}, budget=f"{opened.shape.num_layers}x", link="1GB/s"
    )
    with Session(opened, settings, artefacts=artefacts) as session, torch.inference_mode():
        ours = session.forward(PROMPT).logits
        totals = session.controller.counters.totals()
        put(plain, opened, artefacts.replicas, np.full(opened.shape.num_keys, CODED[0]))
        _assert_same(ours, plain(PROMPT).logits)
    assert totals["at_0_8_bits"] == totals["requests"]
    assert totals["demand_bytes"] == totals["fetched"] * artefacts.replicas.nbytes[CODED[0]]


@pytest.mark.parametrize("name", PRESETS)
def test_a_replay_counts_what_the_run_counted(known: Known, name: str) -> None:
    _, _, opened, artefacts = known
    settings = PRESETS[name]
    with Session(opened, settings, artefacts=artefacts) as session:
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
    outcome = workload.run(
        Setting("replayed", settings.preset, settings.policies, budget=settings.budget)
    )
    assert (outcome.counters, outcome.num_slots) == (live, slots)
    assert live["low"] + live["fetched"] > 0


def test_a_base_of_trellis_codes(known: Known) -> None:
    _, plain, opened, artefacts = known
    based, on_base = model_on_base(opened, artefacts, 2)
    assert on_base.replicas.widths == [0.8, 1.25] and based.expert_format.startswith("trellis, ")
    ways = (
        Settings(budget="50%"),
        Settings(budget="50%", experts=FUSED),
        Settings("full", experts=FUSED),
    )
    for settings in ways:
        with Session(based, settings, artefacts=on_base) as session:
            with torch.inference_mode():
                ours = session.forward(PROMPT)
                ahead = session.forward(NEXT, past=ours.past_key_values).logits
                put(plain, opened, artefacts.replicas, np.full(opened.shape.num_keys, 2))
                theirs = plain(PROMPT, use_cache=True)
                _assert_same(ours.logits, theirs.logits)
                _assert_same(ahead, plain(NEXT, past_key_values=theirs.past_key_values).logits)
            assert session.receipt()["base_bits"] == 2 != FULL_BITS


def _assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours - theirs).abs().max() <= 2e-4 * theirs.abs().max()
