"""What a call did: statistics, traces of steps, and the style of plots."""
