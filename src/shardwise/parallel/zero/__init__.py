"""ZeRO and hybrid sharding over FSDP2."""
