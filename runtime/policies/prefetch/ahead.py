"""Helpers of the prefetch policies that read predictions: the target layer, the tokens that predict
it, and the order of keys."""

from math import ceil

import numpy as np

from artifacts.shape import Shape
from runtime.policies.base import Step

_NO_KEYS = np.zeros((1, 1), np.int64)  # before those of a layer


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


def named(predicted: np.ndarray, width: int, least: float = 0.0) -> np.ndarray:
    """Return the `width` experts that each token of `predicted` [T, E] makes most probable, none
    below `least`, the most probable first."""
    if len(predicted) == 1:
        return keys_named(predicted, width, _NO_KEYS, least)
    top = (-predicted).argsort(axis=1, kind="stable")[:, :width]
    is_likely = np.take_along_axis(predicted, top, axis=1) >= least
    return most_probable_first(np.unique(top[is_likely]), predicted)


def keys_named(said: np.ndarray, width: int, firsts: np.ndarray, least: float = 0.0) -> np.ndarray:
    """Return keys of the `width` experts that one token makes most probable in each of some layers,
    `said` [D, E], none below `least`, layer by layer; `firsts` [D, 1] are the layers' first
    keys."""
    if len(said) == 1:
        top = (-said[0]).argsort(kind="stable")[:width]
        return (top[said[0, top] >= least] if least else top) + firsts[0]
    top = (-said).argsort(axis=1, kind="stable")[:, :width]
    return (top + firsts)[np.take_along_axis(said, top, axis=1) >= least]


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
