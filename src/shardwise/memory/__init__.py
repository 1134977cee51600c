"""What a rank keeps between forward and backward: recompute, activation offload, and the account of all bytes."""
