"""Drafters that were not worth using in any measurement; available by name (docs/methods/)."""
