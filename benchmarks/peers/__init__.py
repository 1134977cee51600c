"""The parts of `benchmarks/peers_cpu.py`: the setting that all variants share, one file per peer, the rank, the
report."""
