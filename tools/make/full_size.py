"""Write a checkpoint of random weights at a published size, in the layout in which it is published.

    python -m tools.make.full_size gpt-oss-20b OUT
    python -m tools.make.full_size qwen3-30b-a3b-fp8 OUT --set num_hidden_layers=2 --set num_experts=16

Names, dtypes, shapes and config.json are those of the published checkpoints; the numbers are slices
of one block of random ones, so that it takes little memory and no longer than the disk. The
tokenizer has 256 bytes. Good for measuring memory, time and exactness of loading, not for measuring
anything that depends on what routers have learned.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from math import prod
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tools.arguments import parser_of
from tools.make.checkpoint import byte_tokenizer
from tools.make.published_configs import CONFIGS
from tools.make.shards import Entry, write_shards

SHARD_NBYTES = 4_500_000_000
_MOST_POOLED = 1 << 25  # numbers in a block, at most
# numbers from the beginning of a tensor in its block to that of the next; a prime
_STEP = 15_485_863
_STD = 0.02  # of weights, as at the beginning of training
# so large that tokens stay apart through all layers: else attention makes them alike, and routers
# too
_EMBEDDED_STD = 8
_FP8_STD = 64  # of codes: the largest of a million is below the largest of e4m3, 448
_EXPONENTS = (119, 122)  # of MXFP4: codes have a standard deviation of 3


def make(
    model: str, folder: Path, *, changes: Mapping[str, int] | None = None, seed: int = 0
) -> int:
    """Write the checkpoint `model` to `folder`, with these entries of its config changed; return
    the bytes of it."""
    config = CONFIGS[model](changes or {})
    folder.mkdir(parents=True, exist_ok=True)
    tensors = list(entries(config))
    nbytes = write_shards(
        folder, tensors, _Blocks(tensors, seed).content, shard_nbytes=SHARD_NBYTES
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    byte_tokenizer().save_pretrained(folder)
    return nbytes


def entries(config: Mapping) -> Iterator[Entry]:
    """Every tensor of the checkpoint, layer by layer; other than experts as transformers' model has
    them."""
    given = {
        name: value
        for name, value in config.items()
        if name not in ("model_type", "quantization_config")
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **given)
        )
    of_experts = _EXPERTS[config["quantization_config"]["quant_method"]]
    begun: set[str] = set()
    for name, tensor in model.state_dict().items():
        stem, is_expert, _ = name.partition(".experts.")
        if not is_expert:
            yield from _dense(name, tuple(tensor.shape), config["quantization_config"])
        elif stem not in begun:
            begun.add(stem)
            yield from of_experts(f"{stem}.experts", config)


def _dense(name: str, shape: tuple[int, ...], quantization: Mapping) -> Iterator[Entry]:
    """A tensor outside the experts. What FP8 quantises there is the attention."""
    if quantization["quant_method"] == "fp8" and ".self_attn." in name and len(shape) == 2:
        yield from _fp8(name, shape)
    else:
        yield Entry(
            name,
            "BF16",
            shape,
            next((of for end, of in _CONTENT.items() if name.endswith(end)), "normal"),
        )


def _fp8_experts(stem: str, config: Mapping) -> Iterator[Entry]:
    hidden = config["hidden_size"]
    inner = config["moe_intermediate_size"]
    shapes = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    for expert in range(config["num_experts"]):
        for name, shape in shapes.items():
            yield from _fp8(f"{stem}.{expert}.{name}.weight", shape)


def _fp8(name: str, shape: Sequence[int]) -> Iterator[Entry]:
    yield Entry(name, "F8_E4M3", tuple(shape), "floats")
    yield Entry(f"{name}_scale_inv", "BF16", tuple(-(-size // 128) for size in shape), "scales")


def _mxfp4_experts(stem: str, config: Mapping) -> Iterator[Entry]:
    experts, hidden, inner = (
        config[name] for name in ("num_local_experts", "hidden_size", "intermediate_size")
    )
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        yield Entry(f"{stem}.{name}_blocks", "U8", (experts, rows, columns // 32, 16), "codes")
        yield Entry(f"{stem}.{name}_scales", "U8", (experts, rows, columns // 32), "exponents")
        yield Entry(f"{stem}.{name}_bias", "BF16", (experts, rows), "normal")


_CONTENT = {"norm.weight": "ones", "embed_tokens.weight": "embedded"}  # by the end of a name
_EXPERTS = {"fp8": _fp8_experts, "mxfp4": _mxfp4_experts}


class _Blocks:
    """Blocks of random numbers, as bytes; every tensor begins elsewhere in its block and goes round
    in it."""

    def __init__(self, tensors: Sequence[Entry], seed: int) -> None:
        # Odd, so that rows of large matrices do not begin at the same places of the block again.
        self._size = min(_MOST_POOLED, max(prod(entry.shape) for entry in tensors)) | 1
        self._made = {
            name: _make_block(name, self._size, seed)
            for name in {entry.content for entry in tensors}
        }
        self._numbers = count()

    def content(self, entry: Entry) -> Iterator[memoryview]:
        """The bytes of the next tensor, in pieces."""
        block = self._made[entry.content]
        start = next(self._numbers) * _STEP % self._size * (len(block) // self._size)
        left = entry.nbytes
        while left:
            piece = block[start : start + left]
            yield piece
            start = 0
            left = left - len(piece)


def _make_block(content: str, size: int, seed: int) -> memoryview:
    random = torch.Generator().manual_seed(seed)
    numbers = torch.ones(size)
    match content:
        case "normal":
            block = numbers.normal_(0, _STD, generator=random).bfloat16()
        case "embedded":
            block = numbers.normal_(0, _EMBEDDED_STD, generator=random).bfloat16()
        case "floats":
            block = numbers.normal_(0, _FP8_STD, generator=random).to(torch.float8_e4m3fn)
        case "scales":
            block = (numbers.uniform_(0.5, 1.5, generator=random) * (_STD / _FP8_STD)).bfloat16()
        case "codes":
            block = numbers.byte().random_(0, 256, generator=random)
        case "exponents":
            block = numbers.byte().random_(*_EXPONENTS, generator=random)
        case _:
            block = numbers.bfloat16()
    return memoryview(block.view(torch.uint8).numpy())


def main() -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("model", choices=sorted(CONFIGS))
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another size in config.json",
    )
    options = parser.parse_args()
    changes = {name: int(value) for name, _, value in (one.partition("=") for one in options.set)}
    print(f"{make(options.model, options.out, changes=changes, seed=options.seed):,} bytes")


if __name__ == "__main__":
    main()
