"""What is trained: one decoder described by a `ModelSpec`, its presets, its first weights, and Hugging Face in and out.

Single-device code that knows nothing of parallelism and imports nothing above it. `spec.py`, `presets.py` and the `hf_*`
modules except `hf_weights.py` do not import torch. Start reading at `spec.py`, then `decoder.py`.
"""
