"""Heads on disk and on the Hub: every published layout read, ours written, engines' exported."""
