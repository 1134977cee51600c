"""Orders samples by pure functions of (seed, position), so position is one integer and nothing is remembered.
Determinism follows: any number of ranks and workers reads the same rows.

A permutation of n items is a Feistel network on the smallest even-bit domain that holds n, walked until it lands inside
(Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, method 3): a bijection for every key, constant
memory. A mixture by weight divides blocks of BLOCK samples into slots: source k owns slots[k] of them in every block,
in an order that is permuted anew per block, so both the source of a sample and its number within that source are plain
arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NUM_ROUNDS = 6
BLOCK = 2**16


def mix64(values: np.ndarray, key: int) -> np.ndarray:
    """Returns a 64-bit hash of each value under a key (two rounds of the splitmix64 finaliser)."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is the point
        x = values.astype(np.uint64) + np.uint64((key * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
        for _ in range(2):
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
    return x


def combine(*parts: int) -> int:
    """Returns one key made of several integers; every part and its place matter."""
    key = 0
    for part in parts:
        key = int(mix64(np.array([key ^ (part % 2**64)], dtype=np.uint64), len(parts))[0])
    return key


def permute(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Returns where each position of [0, size) goes under the permutation that its key names."""
    assert size > 0 and (positions.size == 0 or (positions.min() >= 0 and positions.max() < size)), (size, positions)
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    x = positions.astype(np.uint64)
    keys = np.broadcast_to(keys, x.shape).astype(np.uint64)
    outside = np.ones(x.shape, dtype=bool)
    while outside.any():  # the domain is under 4 * size, so four rounds on average at worst
        x[outside] = _feistel(x[outside], half, keys[outside])
        outside = x >= np.uint64(size)
    return x.astype(np.int64)


def _feistel(x: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    low_bits = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & low_bits
    for round_number in range(NUM_ROUNDS):
        left, right = right, left ^ (mix64(right ^ keys, round_number + 1) & low_bits)
    return (left << half) | right


def slots_of(weights: Sequence[float]) -> np.ndarray:
    """Returns how many of BLOCK slots each source has, in proportion to the weights: largest remainders, at least one
    slot each."""
    share = np.asarray(weights, dtype=np.float64) / np.sum(weights) * BLOCK
    slots = np.maximum(1, np.floor(share)).astype(np.int64)
    order = np.argsort(slots - share, kind="stable")  # most underserved first
    for step in range(abs(int(BLOCK - slots.sum()))):
        if slots.sum() < BLOCK:
            slots[order[step % len(order)]] += 1
        else:
            slots[np.argmax(slots)] -= 1
    return slots


def mixture(samples: np.ndarray, slots: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns, for each sample, which source it comes from and which sample of that source it is."""
    blocks, within = np.divmod(samples.astype(np.int64), BLOCK)
    slot = permute(within, BLOCK, mix64(blocks.astype(np.uint64), combine(seed, 2)))
    ends = np.cumsum(slots)
    source = np.searchsorted(ends, slot, side="right")
    return source, blocks * slots[source] + slot - (ends - slots)[source]
