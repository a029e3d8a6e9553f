"""Exactness: at any budget and over any link, the offloaded model gives the plain model's logits
and tokens."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from artifacts.errors import BadInput, BadUsage, Incompatible
from runtime.model.open import MoeModel, open_model
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import FUSED, Settings
from tests.conftest import Checkpoint
from tests.helpers.families import FAMILIES, VOCABULARY
from tests.helpers.uncollected import live_nbytes, uncollected

LOSSLESS = {
    "one expert a layer, from disk": Settings(budget="{least}x"),
    "a quarter, global scope, predicted": Settings(preset="specmd", budget="25%"),
    "half, over an emulated link, late prefetches": Settings(
        budget="50%", link="1GB/s+5us", policies={"prefetch": "next_gate:distance=2"}, window="1KiB"
    ),
    "near, paced": Settings(preset="near", budget="25%", near="1GB/s", link="1GB/s"),
    "near, from disk": Settings(
        preset="near", budget="{least}x", policies={"miss": "near:fill=no"}
    ),
    "some near and some fetched, in waves": Settings(
        budget="25%",
        link="1GB/s",
        near="1GB/s",
        window="1KiB",
        policies={"prefetch": "next_gate", "miss": "qstar"},
    ),
    "near now and brought behind": Settings(
        preset="behind", budget="25%", link="1GB/s", near="4GB/s", window="1KiB"
    ),
    "everything resident": Settings(preset="full"),
}


def plain_model(folder: Path) -> PreTrainedModel:
    """transformers' own model, eager. Its parameters are cloned, as kernels round differently on
    views of a file, which are aligned differently."""
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def settings_for(name: str, opened: MoeModel) -> Settings:
    chosen = LOSSLESS[name]
    least = max(opened.shape.num_layers, 1)
    quarter = -(-opened.shape.num_keys // 4)
    budget = {"{least}x": f"{least}x", "25%": f"{max(quarter, least)}x"}.get(
        chosen.budget, chosen.budget
    )
    return Settings(
        preset=chosen.preset,
        policies=chosen.policies,
        budget=budget,
        link=chosen.link,
        near=chosen.near,
        window=chosen.window,
    )


@pytest.fixture(
    scope="module",
    params=[*((name, "float32") for name in FAMILIES), ("olmoe", "bfloat16")],
    ids="-".join,
)
def pair(
    request: pytest.FixtureRequest, checkpoint: Checkpoint
) -> Iterator[tuple[PreTrainedModel, MoeModel]]:
    family, dtype = request.param
    folder = checkpoint(family, "hub", dtype)
    opened = open_model(str(folder))
    yield plain_model(folder), opened
    opened.store.close()


@pytest.mark.parametrize("name", LOSSLESS)
def test_logits_and_greedy_tokens_are_those_of_the_plain_model(
    pair: tuple[PreTrainedModel, MoeModel], name: str
) -> None:
    """Equal to the bit without padding, as both compute the same rows by the same kernels. With
    padding within 1e-5 relative in float32 (1e-2 in bfloat16), as the plain model sends padding
    through its experts too."""
    plain, opened = pair
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[2, :1] = 0
    prompt = ids[1:2]
    with torch.inference_mode():
        alone = plain(input_ids=ids).logits
        batch = plain(input_ids=ids, attention_mask=mask).logits
        tokens = plain.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)[
            0, 9:
        ].tolist()
    with Session(opened, settings_for(name, opened)) as session:
        assert torch.equal(session.forward(ids).logits, alone)
        real = mask.bool()
        ours = session.forward(ids, mask=mask).logits[real]
        theirs = batch[real]
        tolerance = 1e-5 if ours.dtype is torch.float32 else 1e-2
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
        assert [
            token.token_id for token in session.tokens(prompt, Sampling(6, ignore_eos=True))
        ] == tokens
        totals = session.controller.counters.totals()
        assert totals["requests"] > 0
        assert totals["misses"] > 0
        session.controller.cache.validate()


def test_the_check_can_fail(checkpoint: Checkpoint) -> None:
    """Two experts swapped in the fast tier change the logits."""
    folder = checkpoint("olmoe")
    plain = plain_model(folder)
    opened = open_model(str(folder))
    ids = torch.arange(3, 12)[None]
    with torch.inference_mode():
        right = plain(input_ids=ids).logits
    with Session(opened, Settings(preset="full")) as session:
        session.forward(ids)
        first, second = [place.slot for place in session.controller.cache.places if place][:2]
        kept = session.parts.slots[first].clone()
        session.parts.slots[first].copy_(session.parts.slots[second])
        session.parts.slots[second].copy_(kept)
        assert not torch.equal(session.forward(ids).logits, right)


def test_a_session_gives_the_model_back(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("mixtral")))
    ids = torch.arange(3, 9)[None]
    with Session(opened, Settings(budget="50%")) as session:
        first = session.forward(ids).logits
    with Session(opened, Settings(preset="full")) as session:
        assert torch.equal(session.forward(ids).logits, first)


def test_a_batch_that_needs_what_the_config_does_not_say_is_refused(checkpoint: Checkpoint) -> None:
    """As transformers' qwen3_omni_moe_thinker does for any mask; without one it runs."""

    def padded(model: PreTrainedModel, args: tuple, named: dict) -> None:
        if named["attention_mask"] is not None:
            _ = model.config.vision_start_token_id

    opened = open_model(str(checkpoint("olmoe")))
    ids = torch.ones(2, 3, dtype=torch.int64)
    opened.model.register_forward_pre_hook(padded, with_kwargs=True)
    with Session(opened, Settings(budget="50%")) as session:
        with pytest.raises(
            BadInput, match="vision_start_token_id for a batch.*one prompt at a time"
        ):
            session.forward(ids, mask=torch.ones_like(ids))
        session.forward(ids)


def test_a_failed_read_ends_the_request_and_leaves_the_next_one_exact(
    checkpoint: Checkpoint,
) -> None:
    folder = checkpoint("olmoe")
    plain = plain_model(folder)
    opened = open_model(str(folder))
    ids = torch.arange(3, 9)[None]
    with Session(opened, Settings(budget="50%")) as session:
        read = session.parts.tiers.link._source.read
        calls = []

        def failing(layer: int, expert: int, out: torch.Tensor, **bits: int) -> None:
            calls.append(expert)
            if len(calls) == 4:
                raise BadInput("the disk is gone")
            read(layer, expert, out)

        session.parts.tiers.link._source = type("Source", (), {"read": staticmethod(failing)})()
        with pytest.raises(BadInput, match="disk is gone"):
            session.forward(ids)
        session.controller.cache.validate()
        with torch.inference_mode():
            assert torch.equal(session.forward(ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"budget": "0"}, BadUsage, "give at least"),
        ({"budget": "-25%"}, BadUsage, "not understood"),
        ({"budget": "abc"}, BadUsage, "not understood"),
        ({"preset": "fulll"}, BadUsage, "did you mean full"),
        ({"policies": {"eviction": "mru"}}, BadUsage, "unknown eviction policy"),
        ({"link": "fast"}, BadUsage, "rate 'fast'"),
        ({"scope": "planet"}, BadUsage, "layer or global"),
        ({"scaled_to": "cray"}, BadUsage, "unknown machine"),
        ({"scaled_to": "5gbps", "link": "1GB/s"}, BadUsage, "leave out --link"),
        ({"link": "cuda"}, BadUsage, "needs the model on a CUDA device"),
        ({"preset": "buddymoe"}, Incompatible, "run `moectl profile`"),
    ],
)
def test_settings_that_cannot_run_are_refused_in_one_line(
    checkpoint: Checkpoint, settings: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        Session(open_model(str(checkpoint("olmoe"))), Settings(**settings))
    assert "\n" not in str(caught.value)


def test_a_session_that_fails_to_open_leaves_the_model_free(checkpoint: Checkpoint) -> None:
    """This error is the last that is possible: the link is open and the engine installed by
    then."""
    opened = open_model(str(checkpoint("olmoe")))
    threads = threading.active_count()
    with pytest.raises(BadUsage, match="--reconfigure-every solves a split anew"):
        Session(opened, Settings(experts=FUSED, reconfigure_every=100))
    assert threading.active_count() == threads
    assert not any(hasattr(layer.experts, "moectl_forward") for layer in opened.layers)
    assert not any("forward" in vars(module) for module in opened.model.modules())
    with Session(opened, Settings()) as session:
        session.forward(torch.arange(3, 9)[None])


def test_the_receipt_says_what_is_in_force(checkpoint: Checkpoint) -> None:
    opened = open_model(str(checkpoint("olmoe")))
    settings = Settings(
        budget="400%", scaled_to="rtx3090-pcie4", policies={"eviction": "least_stale"}
    )
    with Session(opened, settings) as session:
        receipt = session.receipt()
    assert receipt["slots"] == receipt["experts"] == opened.shape.num_keys
    assert "every expert stays resident" in receipt["fallbacks"][0]
    assert receipt["policies"]["eviction"] == "least_stale"
    assert list(receipt["huge_pages"]) == ["mode", "slots", "dense", "ram"]
    assert receipt["link"]["bandwidth_gbps"] / receipt["near"]["near_gbps"] == pytest.approx(
        25 / 80
    )


def test_a_session_that_is_closed_frees_its_memory_at_once(checkpoint: Checkpoint) -> None:
    """Without Python's collector."""
    opened = open_model(str(checkpoint("olmoe")))
    held = []
    with uncollected():
        for _ in range(2):
            with Session(opened, Settings(preset="specmd", budget="50%", threads=1)) as session:
                [*session.tokens(torch.tensor([[5, 6, 7]]), Sampling(max_new_tokens=2))]
                nbytes = session.parts.slots.nbytes
            del session
            held.append(live_nbytes())
    assert held[0] == held[1] and nbytes > 0
