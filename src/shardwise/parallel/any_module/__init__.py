"""Any `nn.Module` in a hand-written loop: `shardwise.parallelize`."""
