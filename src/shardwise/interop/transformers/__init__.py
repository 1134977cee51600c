"""Runs models that transformers builds, behind the interface of our decoder."""
