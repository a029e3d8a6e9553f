"""Shapes of models by name or from a config.json, without weights, and the memory that a model
needs besides experts."""

from artifacts.modelshapes.known import MODELS, ModelShape, model_shape

__all__ = ["MODELS", "ModelShape", "model_shape"]
