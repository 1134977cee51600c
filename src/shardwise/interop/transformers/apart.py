"""Finds out whether a model of transformers keeps the documents of one row apart.

transformers' attention takes positions that begin anew for the sign that another document begins; architectures that
count positions themselves, or carry a state from token to token, do not. Nobody lists which is which, so a small model
of the same architecture is asked. Loads torch.
"""

from __future__ import annotations

from functools import cache

from shardwise.interop.transformers.spec import TransformersSpec

VOCAB, FIRST, SECOND = 64, 9, 7
LIMIT = 1e-5  # of the largest logit, in fp64: rotary angles are in fp32, and what is seen of another document is 1e-3


@cache
def keeps_apart(spec: TransformersSpec) -> bool:
    """Returns whether two documents in a row have the logits that each has alone."""
    import torch

    from shardwise.interop.transformers.model import TransformersModel
    from shardwise.interop.transformers.shrink import shrink_transformers

    try:
        model = TransformersModel(shrink_transformers(spec, VOCAB), dtype=torch.float64)
        model.draw_from(0)
        draw = torch.Generator().manual_seed(0)
        tokens_BT = torch.randint(model.spec.vocab, (1, FIRST + SECOND), generator=draw)
        documents_BT = (torch.arange(FIRST + SECOND)[None] >= FIRST).long()
        with torch.no_grad():
            packed_BTV = model.logits(tokens_BT, documents_BT)
            alone_BTV = torch.cat([model.logits(part_BT) for part_BT in tokens_BT.split([FIRST, SECOND], 1)], 1)
    except Exception:  # whatever an architecture raises where it is too small, or takes no positions
        return False
    return bool((packed_BTV - alone_BTV).abs().max() <= LIMIT * alone_BTV.abs().max())
