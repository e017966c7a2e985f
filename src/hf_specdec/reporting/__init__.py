"""Statistics and traces of a generation, and the style of plots."""
