"""Context parallelism: ring attention and Ulysses."""
