"""Turns text into tokens and tokens into packed batches.

`sources` finds documents, `tokenizer` and `chat` turn them into token ids (and say which ids carry loss), `prepare`
writes them as memory-mapped shards, `shards` opens those, `sequences` cuts them into training rows in an order that is
a pure function of (seed, step), `corpus` puts it all behind one call, `loader` prefetches for the training loop. Only
`loader` imports torch.
"""
