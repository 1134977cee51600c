"""Expert parallelism: tokens travel to the experts they chose and back."""
