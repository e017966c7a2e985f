"""Access to the Jupyter kernel that runs this process, if any."""

from __future__ import annotations

import sys
from typing import Any


def has_kernel() -> bool:
    """Whether this process is a Jupyter kernel, so that outputs can be updated and widgets shown."""
    # IPython is imported already if this is a kernel
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def notebook_display(shown: Any) -> Any:
    """Display an object in the notebook; return a handle with `update(shown)`, or None outside a notebook."""
    return sys.modules["IPython"].display.display(shown, display_id=True) if has_kernel() else None
