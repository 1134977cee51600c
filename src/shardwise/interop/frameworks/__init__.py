"""Writes a plan in the words of other training frameworks."""
