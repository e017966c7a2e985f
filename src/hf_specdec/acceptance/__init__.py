"""Which drafted tokens are kept: the rules, the paths down a tree, the text of each row."""
