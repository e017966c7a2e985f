"""Drafters that did not pay in any measurement; available by name (docs/methods/)."""
