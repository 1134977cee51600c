"""`shardwise.parallelize` with ZeRO 3 on a transformers model, against Accelerate's FSDP2 and torch's FSDP2 by hand, on
CPU ranks.

    python benchmarks/any_model.py [--ranks 2] [--rounds 220] [--hidden 256] [--layers 6] [--out FILE]

The method is that of peers_cpu.py: every rank holds all variants of the same GPT-NeoX at once, the first losses and
gradient norms must be those of one process, then one step of each per round in random order; only ratios within a round
count. Needs transformers and accelerate. On CPU ranks Accelerate takes its FSDP2 plugin only when it is set by hand
(peers/with_accelerate.py).
"""

from __future__ import annotations

from peers.neox_setting import NeoxSetting
from peers_cpu import arguments, measure

VARIANTS = ["torch-fsdp2", "torch-fsdp2-again", "accelerate-fsdp2", "parallelize-zero3"]


def main() -> None:
    args = arguments(__doc__, variants=VARIANTS)
    measure(NeoxSetting(args.ranks, args.rows, args.seq_len, args.micro_batches, args.hidden, args.layers), args)


if __name__ == "__main__":
    main()
