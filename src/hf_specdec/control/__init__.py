"""How much to draft: controllers, and what a step costs."""
