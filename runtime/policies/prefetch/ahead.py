"""What the prefetch policies that read predictions share: the layer meant, the tokens that count, the order."""

from math import ceil

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Step


def width(shape: Shape, overfetch: float) -> int:
    """`top_k * overfetch` experts, or all that a layer has."""
    return ceil(min(shape.top_k * overfetch, shape.num_experts))


def predicted_ahead(step: Step, distance: int, shape: Shape) -> np.ndarray:
    """[T, E] what the router `distance` layers ahead says of this step's input."""
    return of_interest(step, step.predicted, distance, shape)


def of_interest(step: Step, foreseen: np.ndarray | None, distance: int, shape: Shape) -> np.ndarray:
    """[T, E] of `foreseen` [T, D, E] what is said of the layer `distance` ahead, for the tokens that get there.

    Past the last layer the first layers of the next pass are meant, where only each request's last token goes on.
    """
    assert foreseen is not None, "a policy that reads predictions runs without them"
    ahead = foreseen[:, distance - 1]
    if step.layer + distance >= shape.num_layers and step.last is not None:
        return ahead[step.last]
    return ahead


def named(predicted: np.ndarray, width: int) -> np.ndarray:
    """The `width` experts that each token of `predicted` [T, E] makes most probable, the most probable first."""
    if len(predicted) == 1:
        return (-predicted[0]).argsort(kind="stable")[:width]
    top = (-predicted).argsort(axis=1, kind="stable")[:, :width]
    return most_probable_first(np.unique(top), predicted)


def keys_named(said: np.ndarray, width: int, firsts: np.ndarray) -> np.ndarray:
    """Keys of the `width` experts that one token makes most probable in each of some layers, `said` [D, E], layer by
    layer; `firsts` [D, 1] are the layers' first keys."""
    return ((-said).argsort(axis=1, kind="stable")[:, :width] + firsts).ravel()


def first_keys(shape: Shape, distances: range) -> np.ndarray:
    """[L, D, 1] of the layers so far ahead of each, the layers wrapping."""
    layers = np.arange(shape.num_layers)[:, None, None] + np.array(distances)[:, None]
    return layers % shape.num_layers * shape.num_experts


def keys_ahead(step: Step, distance: int, shape: Shape, experts: np.ndarray) -> np.ndarray:
    """Keys of these experts `distance` layers ahead, the layers wrapping."""
    return (step.layer + distance) % shape.num_layers * shape.num_experts + experts


def most_probable_first(experts: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Ascending `experts` by falling probability, summed over the tokens of `predicted` [T, E]."""
    return experts[np.argsort(-predicted.sum(axis=0)[experts], kind="stable")]
