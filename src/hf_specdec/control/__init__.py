"""Control of how much to draft: controllers and measured step costs."""
