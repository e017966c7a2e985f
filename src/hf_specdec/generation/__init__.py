"""One `generate()` call: the mixin, its options, and what attaching keeps with a model."""
