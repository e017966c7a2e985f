"""Drafters that were slower than `prompt_lookup` in the benchmarks; selected by name like all others."""
