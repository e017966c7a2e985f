"""Decide which drafted tokens to keep: acceptance rules, tree traversals and the text of each row."""
