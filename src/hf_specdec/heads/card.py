"""Model cards of heads: purpose, usage, training recipe and measurements."""

from __future__ import annotations

from typing import Any

from huggingface_hub import ModelCardData

CARD_NAME = "README.md"
RUN_PICTURE = "training.png"
"""File name of the plot of a training run, which is in the same directory as the card."""

TITLES = {
    "hf_specdec_eagle": "EAGLE head",
    "hf_specdec_eagle3": "EAGLE-3 head",
    "hf_specdec_medusa": "Medusa heads",
    "hf_specdec_mtp": "MTP module",
    "hf_specdec_dflash": "Block head",
}
"""Kind of head in the card's title, by `model_type`."""


def model_card(config: Any, method: str, repo: str | None = None, picture: str | None = None) -> str:
    """Return the card of a head as Markdown.

    Args:
        config: Config of the head.
        method: Name for `speculative=`.
        repo: Hub id of the head, if known.
        picture: Path of the plot of the training run, relative to the card.
    """
    base = config.base_model_name_or_path
    parts = [
        _heading(config, [method, config.model_type.replace("_", "-")]),
        "A draft head for speculative decoding with hf-specdec: it makes generation faster without changing the "
        "model's output.",
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
            "If hf-specdec is installed, a plain transformers model can use it too: "
            f'`model.generate(**inputs, custom_generate="{repo}", trust_remote_code=True)`.'
        )
    if config.tau:
        parts += ["## Measured", _table(("tokens per target forward (tau)", ""), config.tau)]
    length = getattr(config, "trained_length", None)
    facts = {**({"longest training text, in tokens": length} if length else {}), **(config.recipe or {})}
    if facts:
        parts += ["## Training", _table(("", ""), facts)]
    if picture:
        parts.append(f"![Loss and accuracy by training step]({picture})")
    return "\n\n".join(parts) + "\n"


def export_card(config: Any, format: str, readers: str) -> str:
    """Return the card of a head exported to a layout; `readers` is a text about the programs that read it."""
    summary = f"A draft head for speculative decoding, converted by hf-specdec to the layout `{format}`."
    return "\n\n".join([_heading(config, [format]), summary, readers]) + "\n"


def _heading(config: Any, tags: list[str]) -> str:
    base, title = config.base_model_name_or_path, TITLES.get(config.model_type, "Draft head")
    known = base and "/" in base and not base.startswith(("/", ".", "~"))
    data = ModelCardData(
        library_name="hf-specdec", base_model=base if known else None, tags=["speculative-decoding", *tags]
    )
    return f"---\n{data.to_yaml()}\n---\n\n# {title} for {base or 'an unknown model'}"


def _table(header: tuple[str, str], rows: dict[str, Any]) -> str:
    lines = [f"| {header[0]} | {header[1]} |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(lines)
