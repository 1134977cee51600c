"""The decoder in plain single-device PyTorch, described by a `ModelSpec`, and nothing else.

Nothing here knows of kernels, adapters or other devices; this room imports `spec`, `errors` and torch. Start reading at
`decoder.py`, then `attention.py`, `feedforward.py` and `experts.py`. What other rooms replace, they replace by the one
function of `replacement.py`; the list of replacements is in parallel/transforms.py.
"""
