"""Explains each technique on half a page. The texts are data, one file per word in words/; pages.py reads and prints
them."""
