"""Half a page on each technique. The texts are data, one file per word in words/; pages.py reads and prints them."""
