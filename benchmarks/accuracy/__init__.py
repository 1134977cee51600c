"""Published training runs as questions to the planner: reading rows, rebuilding what ran, scoring the answers."""
