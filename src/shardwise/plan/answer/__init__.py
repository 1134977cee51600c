"""What `shardwise plan` answers: the ranked rows, why, what if, in whose words."""
