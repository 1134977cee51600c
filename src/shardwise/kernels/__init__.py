"""Faster ways to compute what the plain model computes, and how one is chosen."""
