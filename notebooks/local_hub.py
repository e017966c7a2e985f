"""A small Hub on this machine for 6_heads_in_and_out, the one of this repository's tests."""

import os
import sys
import tempfile
import threading
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from hub_server import TOKEN, Hub


def start_hub():
    """Start the Hub; this process and commands started from it use it instead of huggingface.co.

    Raises:
        RuntimeError: huggingface_hub is imported already, which reads its settings only then.
    """
    if "huggingface_hub" in sys.modules:
        raise RuntimeError("huggingface_hub is imported. Restart the kernel, then run this first.")
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    os.environ |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    os.environ |= {"HF_HUB_OFFLINE": "0", "HF_HOME": tempfile.mkdtemp()}
