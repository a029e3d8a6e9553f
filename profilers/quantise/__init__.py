"""Calibrates a model layer by layer and writes replicas of every expert."""
