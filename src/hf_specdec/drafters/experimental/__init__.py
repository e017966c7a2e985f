"""Drafters that were slower than `prompt_lookup` in docs/benchmarks.md; selected by name like all others."""
