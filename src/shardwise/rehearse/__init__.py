"""Rehearsal of a plan without its machines: the program of every class of ranks, all calls matched."""
