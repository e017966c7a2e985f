"""Drafters: one file per way to draft, and the registry that lists them."""
