"""Speculative `generate()`: the mixin, its options, the decoding loop and the state attached to a model."""
