"""Drafters that were slower than `prompt_lookup` in docs/benchmarks/history.md; selected by name like all others."""
