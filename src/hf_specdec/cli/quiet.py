"""Keep the output of libraries off the terminal, in which the answer or one line on an error is expected."""

from __future__ import annotations

import transformers
from huggingface_hub.utils import logging as hub_logging


def silence_libraries() -> None:
    """Show no warnings and progress bars of transformers, and none of the Hub client's warnings on each new try."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    hub_logging.set_verbosity_error()
