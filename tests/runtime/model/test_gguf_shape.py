"""What a GGUF header says of the attention cache, layer by layer, and of layers that draft."""

import pytest

from runtime.model.gguf.shape import _cached, num_layers

HEADS = {"attention.head_count": 16, "attention.key_length": 512}
LATENT = {"attention.kv_lora_rank": 512, "rope.dimension_count": 64}


@pytest.mark.parametrize(
    ("own", "layers", "width"),
    [
        ({"block_count": 4, "attention.head_count_kv": 2}, 4, 4 * 2 * 2 * 512),
        (
            {
                "block_count": 49,
                "nextn_predict_layers": 1,
                "full_attention_interval": 4,
                "attention.head_count_kv": 2,
                "attention.compress_ratios": [0, 0, 0, 4] * 12,
            },
            *(48, 12 * 2 * 2 * 512),
        ),
        (
            {
                "block_count": 6,
                "attention.head_count_kv": [8, 8, 8, 8, 8, 2],
                "attention.key_length_swa": 256,
                "attention.sliding_window_pattern": [True] * 5 + [False],
            },
            *(6, 2 * (5 * 8 * 256 + 2 * 512)),
        ),
        ({"block_count": 3, "attention.compress_ratios": [0, 4, 128]}, 3, 512 / 4 + 512 / 128),
        ({"block_count": 4, "attention.head_count_kv": [0, 0, 0, 16]} | LATENT, 4, 576),
        ({"block_count": 2} | LATENT, 2, 2 * 576),
    ],
)
def test_only_layers_with_a_cache_count(own: dict, layers: int, width: float) -> None:
    assert num_layers(own) == layers
    assert sum(_cached(HEADS | own)) == width
