"""Patterns of small operations in traced forwards, and fused operations for GPUs to replace them."""
