"""Keys and values at few bits: what they lose, the bytes they take, a request alone and beside
others."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.utils import logging

from artifacts.errors import BadUsage
from artifacts.modelshapes.kv_cache import KV_BITS, group_of, kept_nbytes, kept_share
from moectl.bundled import demo_model
from moectl.shared.text import read_text
from runtime.model.kv_cache import PackedLayer, cache_nbytes, packed, unpacked
from runtime.model.open import MoeModel, open_model
from runtime.session.generation.batch import RequestBatch
from runtime.session.generation.sampling import Sampling
from runtime.session.session import Session
from runtime.session.settings import Settings
from tests.conftest import Checkpoint
from tools.make.families import tiny

SIX = Sampling(max_new_tokens=6, ignore_eos=True)
# of the bundled model on its held-out text: KL in nats, and how often the likeliest token is another
LOSSES = {"int8": (0.002, 0.03), "int4": (0.1, 0.15)}


@pytest.fixture(scope="module")
def opened(checkpoint: Checkpoint) -> MoeModel:
    return open_model(str(checkpoint("olmoe")))


def settings(dtype: str) -> Settings:
    return Settings(budget="50%", threads=1, kv_cache_dtype=dtype)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [2, 24, 64, 192])
def test_numbers_come_back_within_half_a_step(width: int, bits: int) -> None:
    x = torch.randn(3, 2, 5, width, generator=torch.Generator().manual_seed(width))
    x[0] *= 1000.0
    x[1, 0, 0] = 7.25  # a group without a range
    kept = packed(x, bits)
    assert kept.dtype is torch.uint8 and kept.shape[-1] == kept_nbytes(width, bits)
    groups = x.unflatten(-1, (-1, group_of(width)))
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    lost = (unpacked(kept, width, bits, x.dtype) - x).abs().unflatten(-1, (-1, group_of(width)))
    # the least number and the step are rounded to float16
    room = 0.51 * step + 2e-3 * groups.abs().amax(-1)
    assert (lost.amax(-1) <= room).all()
    assert not unpacked(torch.zeros_like(kept), width, bits, x.dtype).any()


def test_bytes_of_whole_groups() -> None:
    assert kept_nbytes(128, 8) == 136 and kept_nbytes(128, 4) == 72
    assert [kept_share(bits, 2) for bits in KV_BITS.values()] == [1.0, 68 / 128, 36 / 128]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_trained_model_loses_little(dtype: str) -> None:
    """One pass over a text reads each token's keys and values as decoding would."""
    opened = open_model(str(demo_model()))
    [ids] = read_text(opened, "builtin:held-out", length=256, num_tokens=256, seed=0).sequences
    found = []
    for name in ("auto", dtype):
        with Session(opened, Settings("full", threads=1, kv_cache_dtype=name)) as session:
            output = session.forward(torch.from_numpy(ids)[None])
            found.append(F.log_softmax(output.logits[0].float(), dim=-1))
            nbytes = cache_nbytes(output.past_key_values)
        assert nbytes == 256 * 4096 * kept_share_of_demo(name)
    exact, mine = found
    kl = F.kl_div(mine, exact, log_target=True, reduction="batchmean").item()
    other = (mine.argmax(-1) != exact.argmax(-1)).float().mean().item()
    most_kl, most_other = LOSSES[dtype]
    assert 0 < kl < most_kl and other < most_other


def kept_share_of_demo(name: str) -> float:
    bits = KV_BITS[name]
    return kept_nbytes(32, bits) / 64 if bits else 1.0


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_request_gets_beside_others_what_it_gets_alone(opened: MoeModel, dtype: str) -> None:
    system = list(range(3, 43))
    prompts = [torch.tensor([[*system[:length], 50 + length]]) for length in (40, 40, 7, 21)]
    with Session(opened, settings(dtype)) as session:
        alone = [[one.token_id for one in session.tokens(each, SIX)] for each in prompts]
        found, token_nbytes = together(session, prompts)
        receipt = session.receipt()
    assert found == alone
    config = opened.config
    heads = 2 * config.num_hidden_layers * config.num_key_value_heads
    width = config.hidden_size // config.num_attention_heads
    assert token_nbytes == heads * kept_nbytes(width, KV_BITS[dtype])
    assert receipt["kv_cache"] == {"dtype": dtype, "layers": 2, "other_layers": 0}


def together(session: Session, prompts: list[torch.Tensor]) -> tuple[list[list[int]], int]:
    """Return the tokens of requests that share passes, and the bytes that a token takes."""
    with RequestBatch(session, tile=16) as batch:
        found = defaultdict(list)
        numbers = [batch.add(each, SIX) for each in prompts]
        while not batch.is_idle:
            for result in batch.step():
                if result.token_id is not None:
                    found[result.request].append(result.token_id)
        return [found[number] for number in numbers], batch.memory.token_nbytes


def test_what_was_computed_stays_exact_unless_asked(opened: MoeModel) -> None:
    with Session(opened, settings("auto")) as session:
        past = session.forward(torch.tensor([[1, 2, 3]])).past_key_values
        assert not any(isinstance(layer, PackedLayer) for layer in past.layers)
        assert session.receipt()["kv_cache"] == {"dtype": "auto"}


@pytest.mark.parametrize(("family", "num_others"), [("qwen3_next", 1), ("gpt_oss", 1)])
def test_layers_that_keep_other_things_keep_them_as_computed(
    family: str, num_others: int, tmp_path: Path
) -> None:
    """Those of states, and those of windows."""
    path = windowed(family, tmp_path)
    prompts = [torch.tensor([[5, 9, 2, 14, 7, 7, 3, 1, last]]) for last in (4, 6)]
    with Session(open_model(str(path)), settings("int8")) as session:
        assert session.fallbacks[-1].startswith(f"kv cache: {num_others} layers that keep windows")
        alone = [[one.token_id for one in session.tokens(each, SIX)] for each in prompts]
        assert together(session, prompts)[0] == alone


def test_a_model_without_plain_keys_and_values_is_refused(tmp_path: Path) -> None:
    opened = open_model(str(windowed("mixtral", tmp_path)))
    with pytest.raises(BadUsage, match="--kv-cache-dtype int8: layers of mixtral keep windows"):
        Session(opened, settings("int8"))
    with pytest.raises(BadUsage, match="unknown type of keys and values 'int9'; did you mean int"):
        settings("int9")


def windowed(family: str, folder: Path) -> Path:
    logging.disable_progress_bar()
    model = tiny(family, {})
    model.config.get_text_config().sliding_window = 6
    model.save_pretrained(folder)
    return folder
