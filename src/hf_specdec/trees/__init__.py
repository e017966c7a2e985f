"""Trees of drafted tokens: the tree itself, how much may be drafted, and how a tree grows."""
