"""Fitted predictors: the logits of the routers ahead, predicted from one router's input, as in
ProMoE.

The features of a router input x are x itself, `num_features` fixed random features silu(scale x R +
b), and a constant 1; one matrix per layer and distance turns them into logits. Random features
(Rahimi and Recht, 2007) keep the fit in closed form and capture what a linear map cannot. R and b
follow from the seed alone.

Shapes: T tokens, L layers, D distances, E experts, H hidden, F random features, A = H + F + 1
features in all.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from artifacts.errors import BadInput, Incompatible
from artifacts.shape import Shape

if TYPE_CHECKING:  # pyarrow takes memory that a run without predictors does not need
    import pyarrow as pa


COMMAND = "build-predictor"
TABLE = "predictors"
TARGETS = ("logits", "selected")
_SPREAD = 1.5  # standard deviation of the random features' inputs


@dataclass(frozen=True, slots=True, eq=False)
class Predictors:
    """Predictors of every layer at distances 1..D; past the last layer they predict the next pass's
    first layers."""

    scale: np.ndarray  # [L] float32: 1 over the root mean square of the layer's router inputs
    weights: np.ndarray  # [L, D, A, E] float32
    num_features: int
    seed: int

    @property
    def distance(self) -> int:
        """Layers that they look ahead."""
        return self.weights.shape[1]

    @property
    def hidden(self) -> int:
        return self.weights.shape[2] - self.num_features - 1

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes


# Stands for predictors in a replay: their predictions are in the trace.
RECORDED = Predictors(np.zeros(0, np.float32), np.zeros((0, 0, 1, 0), np.float32), 0, 0)


def projection(hidden: int, num_features: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """R [H, F] and b [F] float32."""
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((hidden, num_features)) * (_SPREAD / np.sqrt(hidden))
    return matrix.astype(np.float32), rng.standard_normal(num_features).astype(np.float32)


def predictor_rows(predictors: Predictors, columns: dict[str, np.ndarray]) -> "pa.Table":
    """Rows of `predictors`; `columns` hold further values per layer and distance, each [L, D]."""
    import pyarrow as pa

    num_layers, distance = predictors.weights.shape[:2]
    layer, ahead = (index.ravel() for index in np.indices((num_layers, distance)))
    flat = predictors.weights.reshape(num_layers * distance, -1)
    return pa.table(
        {"layer": layer.astype(np.uint16), "distance": (ahead + 1).astype(np.uint16)}
        | {name: values.ravel() for name, values in columns.items()}
        | {"scale": predictors.scale[layer], "weights": _lists(flat)}
    )


def predictors_of(rows: "pa.Table", shape: Shape, *, num_features: int, seed: int) -> Predictors:
    """Rebuild predictors from their rows. Raises BadInput when they are damaged or belong to
    another model."""
    distance, rest = divmod(rows.num_rows, shape.num_layers)
    flat = rows["weights"].combine_chunks()
    lengths = set(np.asarray(flat.value_lengths()).tolist())
    at = (
        rows["layer"].to_numpy().astype(int) * distance
        + rows["distance"].to_numpy().astype(int)
        - 1
    )
    if (
        rest
        or not distance
        or len(lengths) != 1
        or lengths.pop() % shape.num_experts
        or sorted(at) != [*range(len(at))]
    ):
        raise BadInput(
            "these predictors are damaged or of another model: run moectl build-predictor again"
        )
    weights = np.empty((len(at), len(flat[0]) // shape.num_experts, shape.num_experts), np.float32)
    weights[at] = flat.flatten().to_numpy(zero_copy_only=False).reshape(weights.shape)
    scale = np.empty(len(at), np.float32)
    scale[at] = rows["scale"].to_numpy()
    if weights.shape[1] < num_features + 2 or num_features < 0:
        raise BadInput(
            "these predictors lack what their features need: run moectl build-predictor again"
        )
    if not (np.isfinite(weights).all() and np.isfinite(scale).all()):
        raise BadInput(
            "these predictors hold numbers that are not finite: run moectl build-predictor again"
        )
    shaped = weights.reshape(shape.num_layers, distance, *weights.shape[1:])
    return Predictors(scale[::distance].copy(), shaped, num_features, seed)


def check_reach(predictors: Predictors, distance: int) -> None:
    """Raise Incompatible when the predictors do not look so far ahead."""
    if predictors is not RECORDED and predictors.distance < distance:
        raise Incompatible(
            f"the store's predictors look {predictors.distance} layers ahead, not {distance}: run "
            f"`moectl build-predictor --distance {distance}`"
        )


def _lists(flat: np.ndarray) -> "pa.FixedSizeListArray":
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1])
