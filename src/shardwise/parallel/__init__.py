"""How one model is split over many ranks: a folder per axis, the transforms in order in apply.py."""
