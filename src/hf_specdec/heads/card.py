"""The model card of a head: what it is for, how to use it, how it was made, what it reached."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCardData

CARD_NAME = "README.md"
RUN_PICTURE = "training.png"
"""Beside the card: what a training run looked like."""

TITLES = {
    "hf_specdec_eagle": "EAGLE head",
    "hf_specdec_eagle3": "EAGLE-3 head",
    "hf_specdec_medusa": "Medusa heads",
    "hf_specdec_mtp": "MTP module",
}


def model_card(config: Any, method: str, repo: str | None = None, picture: str | None = None) -> str:
    """The text of a card.

    Args:
        config: The head's; `base_model_name_or_path`, `recipe` and `tau` are read.
        method: What the head is called in `speculative=`.
        repo: Its Hub id, where it is known.
        picture: File beside the card that shows the training run, if there is one.
    """
    base = config.base_model_name_or_path
    parts = [
        _heading(config, [method, config.model_type.replace("_", "-")]),
        "A draft head for speculative decoding with hf-specdec: generation gets "
        "faster, the answer stays what the model alone would give.",
        f"""```python
from transformers import AutoModelForCausalLM
from hf_specdec import SpeculativeGenerationMixin

model = SpeculativeGenerationMixin.attach(AutoModelForCausalLM.from_pretrained("{base or "TARGET"}"))
model.load_drafter("{repo or "PATH OR HUB ID OF THIS HEAD"}")
model.generate(**inputs, speculative="{method}")
```""",
    ]
    if repo:
        parts.append(
            "Where hf-specdec is installed, the target alone does too: "
            f'`model.generate(**inputs, custom_generate="{repo}", trust_remote_code=True)`.'
        )
    if config.tau:
        parts += ["## Measured", _table(("tokens per target forward (tau)", ""), config.tau)]
    if config.recipe:
        parts += ["## Training", _table(("", ""), config.recipe)]
    if picture:
        parts.append(f"![Loss and accuracy over the steps of the run]({picture})")
    return "\n\n".join(parts) + "\n"


def export_card(config: Any, format: str, readers: str) -> str:
    """The text of a card for a head in an engine's layout.

    Args:
        config: The head's.
        format: The layout.
        readers: Who reads it, and how.
    """
    said = "A draft head for speculative decoding, converted by hf-specdec into the layout "
    return "\n\n".join([_heading(config, [format]), f"{said}`{format}`.", readers]) + "\n"


def _heading(config: Any, tags: list[str]) -> str:
    """The metadata and the title."""
    base, title = config.base_model_name_or_path, TITLES.get(config.model_type, "Draft head")
    known = base and "/" in base and not base.startswith(("/", ".", "~"))
    data = ModelCardData(
        library_name="hf-specdec", base_model=base if known else None, tags=["speculative-decoding", *tags]
    )
    return f"---\n{data.to_yaml()}\n---\n\n# {title} for {base or 'a model that its config does not name'}"


def _table(header: tuple[str, str], rows: dict[str, Any]) -> str:
    lines = [f"| {header[0]} | {header[1]} |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(lines)
