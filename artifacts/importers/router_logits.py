"""Arrays of router logits, or of probabilities, over all experts of a layer.

Three kinds are read: an .npy [tokens, experts] of one layer or [layers, tokens, experts]; an .npz
with an array [tokens, experts] for each layer, the layer's number last in its name; a folder of
.npy with names like the arrays (`ffn_moe_logits-0.npy`, as patched llama.cpp dumps them).
"""

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from artifacts.errors import BadInput, BadUsage
from artifacts.importers.one_by_one import check_same_length, files_by_layer, one_by_one
from artifacts.importers.routing_log import LogOptions, RoutingLog

_EXPECTED = "numbers [tokens, experts] of a layer, or [layers, tokens, experts]"
_SUM_TOLERANCE = 0.02  # of probabilities kept in 16 bits


def read(path: Path, options: LogOptions) -> RoutingLog:
    """Return the log, its weights the probabilities of the `top_k` strongest. Raises BadInput, and
    BadUsage without `top_k`."""
    layers = list(_layers(path))
    check_same_length([(place, len(array)) for _, place, array in layers])
    sizes = {array.shape[1] for _, _, array in layers}
    if len(sizes) > 1:
        raise BadInput(
            f"the layers of {path} have {', '.join(map(str, sorted(sizes)))} experts; expected: "
            "as many in each"
        )
    num_experts = sizes.pop()
    if options.top_k is None or options.top_k > num_experts:
        raise BadUsage(
            f"logits do not say how many of {num_experts} experts a token selects: give --top-k, "
            "as --top-k 8"
        )
    values = np.stack([array[: options.tokens] for _, _, array in layers]).astype(np.float32)
    probabilities, note = _probabilities(values)
    experts = np.argsort(-values, axis=2, kind="stable")[:, :, : options.top_k]
    return one_by_one(
        [layer for layer, _, _ in layers],
        experts,
        np.take_along_axis(probabilities, experts, axis=2),
        lambda layer, token: f"{layers[layer][1]}, row {token}",
        probabilities=probabilities,
        notes=(
            note,
            (
                f"each token selects its {options.top_k} most probable experts, weighed by their "
                "probabilities"
            ),
        ),
    )


def _layers(path: Path) -> Iterator[tuple[int, str, np.ndarray]]:
    """Number, place and array [T, E] of each layer."""
    for layer, file in files_by_layer(path, "*.npy"):
        try:
            loaded = np.load(file, allow_pickle=False)
            arrays = (
                loaded
                if isinstance(loaded, np.ndarray)
                else {name: loaded[name] for name in loaded.files}
            )
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise BadInput(f"{file} cannot be read as a numpy array: {error}") from error
        if isinstance(arrays, dict):
            yield from _of_archive(file, arrays)
        elif arrays.ndim == 3 and not path.is_dir():
            yield from (_checked(at, f"{file}, layer {at}", one) for at, one in enumerate(arrays))
        else:
            yield _checked(layer, str(file), arrays)


def _of_archive(file: Path, arrays: dict[str, np.ndarray]) -> Iterator[tuple[int, str, np.ndarray]]:
    numbers = {name: re.findall(r"\d{1,6}", name) for name in arrays}
    if (
        not arrays
        or not all(numbers.values())
        or len({found[-1] for found in numbers.values()}) < len(arrays)
    ):
        raise BadInput(
            f"{file} needs an array for each layer, its number in its name; it has "
            f"{', '.join(arrays) or 'none'}"
        )
    for name in sorted(arrays, key=lambda name: int(numbers[name][-1])):
        yield _checked(int(numbers[name][-1]), f"{file}, array {name}", arrays[name])


def _checked(layer: int, place: str, array: np.ndarray) -> tuple[int, str, np.ndarray]:
    if array.ndim != 2 or not array.size or array.dtype.kind not in "fiu":
        raise BadInput(f"{place} is {array.dtype} {list(array.shape)}; expected: {_EXPECTED}")
    rows = ~np.isfinite(array).all(axis=1)
    if rows.any():
        raise BadInput(
            f"{place}, row {rows.argmax()} holds a number that is not finite; expected: {_EXPECTED}"
        )
    return layer, place, array


def _probabilities(values: np.ndarray) -> tuple[np.ndarray, str]:
    """Probabilities [L, T, E] of logits or of probabilities, and which of them the values are."""
    if values.min() >= 0 and (np.abs(values.sum(axis=2) - 1) < _SUM_TOLERANCE).all():
        return values, "the numbers of each token sum to 1 and are taken for probabilities"
    exponents = np.exp(values - values.max(axis=2, keepdims=True))
    return exponents / exponents.sum(
        axis=2, keepdims=True
    ), "probabilities are the softmax of the logits"
