"""Drafters, one module per method, and their registry."""
