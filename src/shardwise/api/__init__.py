"""What a Python program calls: `shardwise.train`, `plan`, `verify` and `load`, over the same code as the commands."""
