"""Models and adapters of other libraries, in and out."""
