"""The bench: the order of settings, their summary, the content of a sample, and samples kept across
processes."""

from dataclasses import replace
from pathlib import Path

import pytest

from artifacts.errors import BadInput, BadUsage, Incompatible
from profilers.compare.bench import (
    Bench,
    BenchSample,
    BenchSetting,
    BenchText,
    LinkEmulations,
    schedule,
    summary,
    text_of,
)
from profilers.compare.drafted import Answers, DraftedPairs
from profilers.compare.samples import KeptSamples
from profilers.text.files import Document
from runtime.model.open import MoeModel
from runtime.policies.base import Artefacts
from tests.helpers.families import character_tokenizer

DOCUMENTS = [Document(f"{number}", f"{number} sheep and an old dog. " * 3) for number in range(3)]
TEXT = text_of(iter(DOCUMENTS), character_tokenizer(), length=12, num_tokens=24)
BY_TEXT = (0.2, 0.3), (0.1, 0.2)  # KL, loss
SAMPLE = BenchSample(
    (1.0, 2.0), (3.0, 5.0), ({"requests": 4, "hits": 1},), 7.0, 100, 1.5, 0.25, 0.5, *BY_TEXT, 9.0
)


@pytest.fixture
def bench(opened: MoeModel) -> Bench:
    made = Bench(opened, Artefacts(), TEXT, LinkEmulations(opened, {}))
    made.read_full()
    return made


def test_every_round_has_every_setting_in_another_order() -> None:
    settings = [BenchSetting("near", f"{number}x") for number in range(6)]
    order = schedule(settings, rounds=3, seed=1)
    rounds = [[setting for turn, setting in order if turn == number] for number in range(3)]
    assert [turn for turn, _ in order] == [0] * 6 + [1] * 6 + [2] * 6
    assert all(set(one) == set(settings) for one in rounds) and rounds[0] != rounds[1]
    assert order == schedule(settings, rounds=3, seed=1) != schedule(settings, rounds=3, seed=2)


def test_a_summary_is_of_all_sequences_in_all_rounds() -> None:
    other = BenchSample(
        (3.0, 4.0),
        (7.0, 9.0),
        ({"requests": 4, "hits": 3},),
        9.0,
        100,
        1.7,
        0.75,
        0.5,
        *BY_TEXT,
        9.0,
    )
    found = summary([SAMPLE, other, SAMPLE])
    assert (found.ttft_ms.lower, found.ttft_ms.median, found.ttft_ms.upper) == (1.25, 2.0, 2.75)
    assert (found.tpot_ms.median, found.exposed_ms, found.perplexity_ratio, found.kl) == (
        5.0,
        7.0,
        1.5,
        0.25,
    )
    assert found.counters == {"requests": 4, "hits": 1}


def test_text_is_the_beginning_of_what_is_long_enough() -> None:
    texts = [Document("short", "a dog"), *DOCUMENTS]
    found = text_of(iter(texts), character_tokenizer(), length=12, num_tokens=35)
    assert len(found.sequences) == 2 and {len(sequence) for sequence in found.sequences} == {12}
    assert (found.prefill, found.num_decoded) == (6, 12)
    with pytest.raises(BadInput, match="no document of 900 tokens"):
        text_of(iter(texts), character_tokenizer(), length=900, num_tokens=900)
    with pytest.raises(BadUsage, match="no sequence of --length 12"):
        text_of(iter(texts), character_tokenizer(), length=12, num_tokens=11)


def test_documents_that_are_too_few_are_cut_into_pieces_one_after_another() -> None:
    """Their beginnings first, so that texts of many documents are what they were; and fewer than
    asked is said."""
    long = Document("long", "0123456789" * 3)
    other = Document("other", "abcdefghijkl")
    first, second = text_of(iter([long]), character_tokenizer(), length=10, num_tokens=20).sequences
    assert first.tolist() == second.tolist()

    def read(num_tokens: int) -> BenchText:
        return text_of(
            iter([long, other, other]), character_tokenizer(), length=4, num_tokens=num_tokens
        )

    firsts = read(12)
    more = read(28)
    assert [one[0] for one in firsts.sequences] == [one[0] for one in more.sequences[:3]]
    assert len(more.sequences) == 7 and (firsts.shortfall, more.shortfall) == ("", "")
    assert more.sequences[3].tolist() == long_tokens(long)[4:8], "what follows the first beginning"
    whole = read(4000)
    assert len(whole.sequences) == 7 + 3 + 3
    assert whole.shortfall == "52 tokens of the 4,000 that were asked for: 13 texts of 4"


def long_tokens(document: Document) -> list[int]:
    return character_tokenizer()(document.text, add_special_tokens=False)["input_ids"]


def test_what_is_lossless_is_measured_so(bench: Bench) -> None:
    heard: list[int] = []
    for preset in ("full", "near", "on-demand"):
        sample = bench.measure(BenchSetting(preset, "25%"), heard.append)
        assert (sample.perplexity_ratio, sample.kl, sample.top1_agreement) == (1, 0, 1)
        assert len(sample.ttft_ms) == len(sample.tpot_ms) == 2 and min(sample.tpot_ms) > 0
    assert heard == [*range(1, 13)] * 3


def test_what_is_lossy_is_priced_and_counts_the_same_twice(bench: Bench) -> None:
    first, second = (bench.measure(BenchSetting("importance", "25%", "1MB/s")) for _ in range(2))
    assert first.kl > 0 and first.perplexity_ratio != 1
    assert (first.by_layer, first.kl, first.fast_nbytes) == (
        second.by_layer,
        second.kl,
        second.fast_nbytes,
    )
    assert first.exposed_ms > 0 and sum(layer["demand_bytes"] for layer in first.by_layer) > 0


def test_a_setting_that_cannot_run_says_why(bench: Bench) -> None:
    with pytest.raises(Incompatible, match="moectl quantize"):
        bench.measure(BenchSetting("shadow", "25%"))
    with pytest.raises(BadUsage, match="holds 0 experts"):
        bench.measure(BenchSetting("on-demand", "1B"))


def test_every_setting_of_a_link_has_the_same_pace(opened: MoeModel, bench: Bench) -> None:
    bench.measure(BenchSetting("specmd", "50%", "1MB/s"))
    pace = bench.paces.of("1MB/s")
    assert pace["link"] == "1MB/s" and pace["window"].endswith("B")
    bench.paces.known["1MB/s"]["window"] = "7B"
    bench.measure(BenchSetting("specmd", "25%", "1MB/s"))
    assert bench.paces.of("1MB/s")["window"] == "7B"
    scaled = bench.paces.of("rtx3090-pcie4")
    assert scaled.keys() == {"link", "near", "window", "machine", "experts"}
    assert scaled == bench.paces.of("rtx3090-pcie4")
    assert LinkEmulations(opened, bench.paces.known).of("rtx3090-pcie4") == scaled


def test_samples_outlive_a_process(tmp_path: Path) -> None:
    kept = KeptSamples(tmp_path / "moe.duckdb", "abc")
    setting = BenchSetting("near", "25%", "5GB/s")
    assert kept.load() == ({}, {})
    answers = Answers((1.5, 2.0), tokens=8, passes=5, drafted=6, accepted=3)
    drafted = replace(SAMPLE, drafted=DraftedPairs(answers, answers))
    kept.add(0, setting, drafted, pace={"link": "5GB/s"})
    kept.add(1, setting, SAMPLE, pace={"link": "5GB/s", "window": "8B"})
    with kept.path.open("a") as file:
        file.write('{"round": 2, "setti')
    assert kept.load() == (
        {(0, setting): drafted, (1, setting): SAMPLE},
        {"5GB/s": {"link": "5GB/s", "window": "8B"}},
    )
    kept.add(2, setting, SAMPLE, pace={"link": "5GB/s"})
    assert len(kept.load()[0]) == 3
    kept.remove()
    assert not list(tmp_path.iterdir())


def test_text_that_the_model_cannot_read(opened: MoeModel) -> None:
    strange = BenchText((TEXT.sequences[0] + 10_000,), 6)
    with pytest.raises(BadInput):
        Bench(opened, Artefacts(), strange, LinkEmulations(opened, {}))


def test_keys_and_values_of_few_bits_have_their_loss(opened: MoeModel) -> None:
    """Against the model with them as computed; a preset that loses nothing adds none."""
    lost = []
    for dtype in ("auto", "int8", "int4"):
        paces = LinkEmulations(opened, {})
        few = Bench(opened, Artefacts(), TEXT, paces, kv_cache_dtype=dtype)
        lost.append(few.loss_of_base(opened).kl)
        assert few.measure(BenchSetting("full", "100%")).kl == pytest.approx(0, abs=1e-9)
    exact, int8, int4 = lost
    assert exact == pytest.approx(0, abs=1e-9) and 1e-9 < int8 < int4
