"""How other frameworks execute a layout: one TOML file each, read into a `ForeignStack` (foreign.py)."""
