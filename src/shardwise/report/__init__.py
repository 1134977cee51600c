"""Holds everything that a run prints."""
