"""A base of few bits: exact at any budget, counted alike live and replayed, refused where it cannot
be used."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from artifacts.errors import BadUsage, Incompatible, Problem
from artifacts.hardware.costs import Costs, Work
from artifacts.hardware.machines import machine
from artifacts.modelshapes.known import guessed
from artifacts.quantisation.replicas import check_base
from artifacts.quantisation.widths import column_of
from artifacts.shape import FULL_BITS
from moectl.shared.opening import model_info
from moectl.shared.place_trace import trace_on_base
from moectl.shared.trace_source import OpenedTrace
from runtime.model.open import MoeModel, open_model
from runtime.policies.base import Artefacts
from runtime.replay.settings import Setting
from runtime.replay.workload import Workload
from runtime.session.equip import model_on_base
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import EXACT, FUSED, Settings
from tests.conftest import Checkpoint
from tests.helpers import families
from tests.helpers.families import VOCABULARY
from tests.runtime.session.test_session import plain_model
from tools.gpu.checks.made_replicas import made, put

PROMPT = torch.randint(3, VOCABULARY, (1, 14), generator=torch.Generator().manual_seed(1))
NEXT = torch.tensor([[5]])
LOSSLESS = {
    "full": Settings("full"),
    "on demand, from disk": Settings(budget="50%"),
    "predicted, over a link": Settings("specmd", budget="75%", link="1GB/s+5us", window="1KiB"),
    "near": Settings("near", budget="50%", near="1GB/s", link="1GB/s"),
    "near, from disk": Settings("near", budget="50%", policies={"miss": "near:fill=no"}),
    "the hot ones placed": Settings("monde-static", budget="50%", link="1GB/s", window="1KiB"),
    "the hot ones waited for": Settings(
        "monde-static",
        policies={"residency": "hot:migrate=before"},
        budget="50%",
        link="1GB/s",
        window="1KiB",
    ),
    "swapped in": Settings("monde", policies={"miss": "cold:swap=0.5"}, budget="50%", link="1GB/s"),
}
REPLAYED = {
    "fetched at fewer bits": Settings(
        "specmd", policies={"miss": "fetch_priority:bits=2"}, budget="50%"
    ),
    "shadows of 1 bit": Settings("shadow", policies={"residency": "shadow:bits=1"}, budget="60%"),
    "near": Settings("near", budget="25%"),
    "near at fewer bits": Settings(
        "context-aware", policies={"residency": "hot:avg_bits=2.5"}, budget="25%"
    ),
    "near at fewer bits, the hot ones waited for": Settings(
        "context-aware", policies={"residency": "hot:avg_bits=2.5,migrate=before"}, budget="25%"
    ),
    "swapped in": Settings("monde", policies={"miss": "cold:swap=0.5"}, budget="25%"),
    "dropped": Settings(
        "adapmoe", policies={"residency": "uniform", "miss": "drop:rank=1"}, budget="50%"
    ),
}


@pytest.fixture(scope="module", params=["olmoe", "gpt_oss"])
def known(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PreTrainedModel, MoeModel, Artefacts]]:
    """A plain model whose experts are those of the 4-bit replicas, the opened model, and its
    artefacts."""
    folder = checkpoint(request.param)
    plain = plain_model(folder)
    opened = open_model(str(folder))
    replicas = made(opened, tmp_path_factory.mktemp("replicas"))
    put(plain, opened, replicas, np.full(opened.shape.num_keys, 4))
    yield plain, opened, Artefacts(replicas=replicas)
    opened.store.close()


def session_on(
    opened: MoeModel, artefacts: Artefacts, settings: Settings, *, bits: int = 4
) -> Session:
    based, artefacts = model_on_base(opened, artefacts, bits)
    return Session(based, settings, artefacts=artefacts)


def logits_of(session: Session) -> list[torch.Tensor]:
    """The logits of a prompt and of two tokens after it."""
    with session:
        prompt = session.forward(PROMPT)
        first = session.forward(NEXT, past=prompt.past_key_values)
        second = session.forward(NEXT, past=first.past_key_values)
        session.controller.cache.validate()
    return [output.logits for output in (prompt, first, second)]


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_presets_give_the_logits_of_the_replicas(known: tuple, name: str) -> None:
    """Logits equal those of `uniform-bits` at that width to the bit, and those of the plain model
    with the unpacked replicas within 2e-4."""
    plain, opened, artefacts = known
    uniform = Settings(
        budget="100%", policies={"miss": "shadow", "residency": "shadow:bits=4,slots=no"}
    )
    right = logits_of(Session(opened, uniform, artefacts=artefacts))
    session = session_on(opened, artefacts, LOSSLESS[name])
    for mine, other in zip(logits_of(session), right, strict=True):
        assert torch.equal(mine, other)
    with torch.inference_mode():
        theirs = plain(PROMPT).logits
    assert (right[0] - theirs).abs().max() <= 2e-4 * theirs.abs().max()
    totals = session.controller.counters.totals()
    receipt = session.receipt()
    assert totals["at_4_bits"] == 0 < totals["misses"]
    assert receipt["base_bits"] == 4
    assert receipt["expert_bytes"] == artefacts.replicas.nbytes[4] < opened.shape.expert_nbytes
    assert receipt["dtype"] == "float32"


def test_fused_kernels_compute_on_the_base(known: tuple) -> None:
    _, opened, artefacts = known
    settings = Settings("near", budget="50%")
    right = logits_of(session_on(opened, artefacts, settings))
    session = session_on(opened, artefacts, replace(settings, experts="fused"))
    assert (session.receipt()["experts_of_a_token"] == "fused") == (opened.family == "olmoe")
    for mine, theirs in zip(logits_of(session), right, strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("name", REPLAYED)
def test_a_replay_counts_what_the_run_counted(known: tuple, name: str) -> None:
    _, opened, artefacts = known
    live = replayed_and_live(opened, artefacts, REPLAYED[name], 4)
    moved = live["demand_bytes"] + live["prefetch_bytes"]
    assert moved < live["fetched"] * opened.shape.expert_nbytes or not live["fetched"]


def replayed_and_live(
    opened: MoeModel, artefacts: Artefacts, settings: Settings, base: int
) -> dict[str, int]:
    """The counters of a run, which those of its replay equal."""
    settings = replace(settings, window="5KiB", link="1GB/s")
    with session_on(opened, artefacts, settings, bits=base) as session:
        recorder = session.record()
        list(session.tokens(PROMPT, Sampling(8, ignore_eos=True)))
        live = session.controller.counters.totals()
    trace = recorder.trace()
    based = trace_on_base(OpenedTrace("live", trace, guessed(opened.stored_shape), artefacts), base)
    window = session.parts.window
    workload = Workload(
        trace, based.model, machine("a100-pcie4"), artefacts=based.artefacts, window=window
    )
    setting = Setting("replayed", settings.preset, settings.policies, budget=settings.budget)
    outcome = workload.run(setting)
    assert outcome.counters == live
    assert live["misses"] > 0
    assert outcome.num_slots == len(session.parts.slots)
    return live


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, MoeModel, Artefacts]]:
    """A model in bfloat16, which 8-bit replicas are multiplied in whole numbers for, with inputs in
    groups of 64."""
    folder = tmp_path_factory.mktemp("narrow")
    families.save(
        "olmoe",
        "hub",
        folder / "model",
        torch.bfloat16,
        fields={"hidden_size": 64, "intermediate_size": 64},
    )
    opened = open_model(str(folder / "model"))
    yield folder / "model", opened, Artefacts(replicas=made(opened, folder))
    opened.store.close()


@pytest.mark.parametrize("experts", [EXACT, FUSED])
@pytest.mark.parametrize("name", ["on demand, from disk", "near"])
def test_a_base_of_8_bits(narrow: tuple, name: str, experts: str) -> None:
    """What loses nothing gives the bits of `full`, which is as near to the unpacked replicas in
    float32 as bfloat16."""
    folder, opened, artefacts = narrow
    settings = replace(LOSSLESS[name], experts=experts)
    right = logits_of(session_on(opened, artefacts, Settings("full", experts=experts), bits=8))
    session = session_on(opened, artefacts, settings, bits=8)
    for mine, other in zip(logits_of(session), right, strict=True):
        assert torch.equal(mine, other)
    totals = session.controller.counters.totals()
    receipt = session.receipt()
    assert totals["at_8_bits"] == 0 < totals["misses"] and receipt["base_bits"] == 8
    assert receipt["expert_bytes"] == artefacts.replicas.nbytes[8] < opened.shape.expert_nbytes
    plain = plain_model(folder).float()
    put(plain, opened, artefacts.replicas, np.full(opened.shape.num_keys, 8))
    with torch.inference_mode():
        theirs = plain(PROMPT).logits
    apart = (right[0].float() - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    assert apart.median() <= 2e-2  # a token may go to another expert in bfloat16


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        (8, Settings("specmd", policies={"miss": "fetch_priority:bits=4"}, budget="50%")),
        (8, Settings("near", budget="25%")),
        (FULL_BITS, Settings("specmd", policies={"miss": "fetch_priority:bits=8"}, budget="50%")),
        (FULL_BITS, Settings("shadow", policies={"residency": "shadow:bits=8"}, budget="75%")),
    ],
    ids=lambda value: getattr(value, "preset", value),
)
def test_a_replay_with_8_bits_counts_what_the_run_counted(
    narrow: tuple, base: int, settings: Settings
) -> None:
    _, opened, artefacts = narrow
    counted = replayed_and_live(opened, artefacts, settings, base)
    assert counted["at_8_bits" if base == FULL_BITS else "misses"] > 0


def test_budgets_are_of_the_bytes_of_the_base(known: tuple) -> None:
    _, opened, artefacts = known
    with session_on(opened, artefacts, Settings(budget="50%")) as session:
        assert len(session.parts.slots) == opened.shape.num_keys // 2
        assert session.parts.slots[0].numel() == artefacts.replicas.nbytes[4]
    nbytes = 3 * artefacts.replicas.nbytes[4]
    with session_on(opened, artefacts, Settings(budget=f"{nbytes}", scope="global")) as session:
        assert len(session.parts.slots) == 3


def test_losses_count_from_the_base(known: tuple) -> None:
    _, _, artefacts = known
    replicas = artefacts.replicas.on_base(3)
    assert replicas.widths == [1, 2] and replicas.base == 3
    assert replicas.nbytes[FULL_BITS] == artefacts.replicas.nbytes[3]
    assert replicas.loss[0, 0, column_of(1)] == pytest.approx(0.5 + 0.125)
    assert (
        np.isnan(replicas.loss[..., column_of(3) + 1 :]).all()
        and not replicas.lost[..., column_of(3)].any()
    )


def test_stores_know_the_model_by_its_checkpoint(known: tuple) -> None:
    _, opened, artefacts = known
    based, _ = model_on_base(opened, artefacts, 2)
    assert model_info("a", based) == model_info("a", opened)
    assert model_on_base(opened, artefacts, FULL_BITS) == (opened, artefacts)


@pytest.mark.parametrize(
    ("settings", "bits", "message"),
    [
        (
            Settings("moepic"),
            4,
            "split cuts experts of the checkpoint, and a base of 4 bits has them packed",
        ),
        (
            Settings("context-aware"),
            3,
            "hot needs replicas of 4 bits; there are 1, 2 below a base of 3",
        ),
        (
            Settings("hobbit"),
            4,
            "cascade needs replicas of 4 bits; there are 1, 2, 3 below a base of 4",
        ),
        (
            Settings("shadow", policies={"residency": "shadow:bits=3"}),
            3,
            "there are 1, 2 below a base of 3",
        ),
        (Settings("shadow", budget="10%"), 4, "does not hold a replica of every expert at 1 bits"),
    ],
)
def test_settings_that_a_base_excludes_are_refused_in_one_line(
    known: tuple, settings: Settings, bits: int, message: str
) -> None:
    _, opened, artefacts = known
    with pytest.raises(Problem, match=message) as caught:
        session_on(opened, artefacts, settings, bits=bits)
    assert "\n" not in str(caught.value)


def test_missing_replicas_are_refused_with_the_command_that_builds_them(known: tuple) -> None:
    _, opened, artefacts = known
    with pytest.raises(
        Incompatible,
        match="--base 4 takes stored replicas, and there are none: run `moectl quantize`",
    ):
        model_on_base(opened, Artefacts(), 4)
    only = replace(
        artefacts.replicas,
        nbytes={bits: artefacts.replicas.nbytes[bits] for bits in (FULL_BITS, 3)},
    )
    with pytest.raises(
        Incompatible, match="no replicas of 4 bits are stored: run `moectl quantize --bits 4`"
    ):
        model_on_base(opened, Artefacts(replicas=only), 4)
    with pytest.raises(
        Incompatible, match="needs replicas below a base of 3 bits, .* run `moectl quantize`"
    ):
        session_on(opened, Artefacts(replicas=only), Settings("shadow", budget="90%"), bits=3)
    with pytest.raises(
        BadUsage, match="--base 6 is none: 16 is the checkpoint as it is, 8, 4, 3, 2 are stored"
    ):
        check_base(6)


def test_costs_are_those_of_the_width() -> None:
    """Compute takes the measured share of the width, else its share of bytes; narrower widths keep
    their seconds."""
    costs = Costs(
        Work(8e-6, 1e-7),
        4e-6,
        1e-6,
        Work(2e-6),
        Work(5e-6),
        Work(0.0),
        near_host=Work(6e-6),
        copy_s=8e-7,
        shares={4: 0.5, 2: 0.4},
    )
    based = costs.on_base(4, 0.25)
    assert based.expert == Work(4e-6, 1e-7)
    assert (based.load_s, based.load_latency_s, based.near_host.memory_s, based.copy_s) == (
        1e-6,
        1e-6,
        3e-6,
        2e-7,
    )
    assert based.expert.memory_s * based.shares[2] == pytest.approx(
        costs.expert.memory_s * costs.shares[2]
    )
    assert based.shares.keys() == {2}
    assert replace(costs, shares={}).on_base(4, 0.25).expert == Work(2e-6, 1e-7)
    assert costs.on_base(FULL_BITS, 1.0) == costs
