"""Helpers of the prefetch policies that read predictions: the target layer, the tokens that predict
it, and the order of keys."""

from math import ceil

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Step


def width(shape: Shape, overfetch: float) -> int:
    """Return `top_k * overfetch`, at most the experts of a layer."""
    return ceil(min(shape.top_k * overfetch, shape.num_experts))


def predicted_ahead(step: Step, distance: int, shape: Shape) -> np.ndarray:
    """Return [T, E] what the router `distance` layers ahead gives for this step's input."""
    return of_interest(step, step.predicted, distance, shape)


def of_interest(step: Step, foreseen: np.ndarray | None, distance: int, shape: Shape) -> np.ndarray:
    """Return [T, E] the prediction in `foreseen` [T, D, E] of the layer `distance` ahead, for the
    tokens that reach it.

    Past the last layer this is a layer of the next pass, which only each request's last token
    reaches.
    """
    assert foreseen is not None, "a policy that reads predictions runs without them"
    ahead = foreseen[:, distance - 1]
    if step.layer + distance >= shape.num_layers and step.last is not None:
        return ahead[step.last]
    return ahead


def named(predicted: np.ndarray, width: int) -> np.ndarray:
    """Return the `width` experts that each token of `predicted` [T, E] makes most probable, the
    most probable first."""
    if len(predicted) == 1:
        return (-predicted[0]).argsort(kind="stable")[:width]
    top = (-predicted).argsort(axis=1, kind="stable")[:, :width]
    return most_probable_first(np.unique(top), predicted)


def keys_named(said: np.ndarray, width: int, firsts: np.ndarray) -> np.ndarray:
    """Return keys of the `width` experts that one token makes most probable in each of some layers,
    `said` [D, E], layer by layer; `firsts` [D, 1] are the layers' first keys."""
    if len(said) == 1:
        return (-said[0]).argsort(kind="stable")[:width] + firsts[0]
    return ((-said).argsort(axis=1, kind="stable")[:, :width] + firsts).ravel()


def first_keys(shape: Shape, distances: range) -> np.ndarray:
    """Return [L, D, 1] the first keys of the D layers ahead of each layer, the layers wrapping."""
    layers = np.arange(shape.num_layers)[:, None, None] + np.array(distances)[:, None]
    return layers % shape.num_layers * shape.num_experts


def keys_ahead(step: Step, distance: int, shape: Shape, experts: np.ndarray) -> np.ndarray:
    """Return keys of these experts `distance` layers ahead, the layers wrapping."""
    return (step.layer + distance) % shape.num_layers * shape.num_experts + experts


def most_probable_first(experts: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Return ascending `experts` by falling probability, summed over the tokens of `predicted` [T,
    E]."""
    return experts[np.argsort(-predicted.sum(axis=0)[experts], kind="stable")]
