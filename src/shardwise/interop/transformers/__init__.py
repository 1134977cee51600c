"""Models that transformers builds, behind the interface of our decoder."""
