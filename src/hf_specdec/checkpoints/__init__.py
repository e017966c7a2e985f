"""Load heads from disk or the Hub in any published layout, and write them in ours or an engine's."""
