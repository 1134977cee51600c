"""Which layouts there are, and the search for the fastest that fits."""
