"""How many logits there are at once: beyond that the loss computes them in chunks. What runs (model/loss.py,
kernels/fused_head.py) and what the planner counts (plan/prediction/activations.py) take the sizes from here."""

MAX_LOGITS_BYTES = 256 * 2**20
"""Bytes of fp32 logits alive at once; a vocabulary of 128k reaches them at 512 tokens."""

CUDA_TIMES = 8
"""How many times as many bytes of logits (in their own format) a fused chunk has on a GPU: each chunk reads and writes
the whole gradient of the weight. A vocabulary of 128k in bf16 has up to 8,372 tokens in a chunk."""
