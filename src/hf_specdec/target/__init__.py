"""The target model: its parts, its cache and masks, and the two forwards."""
