"""Time the forward that verifies drafts: how many tokens a step of some size must emit to pay follows from it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from hf_specdec.control import costs
from hf_specdec.validation import Rule, require_integer


def verify_seconds(
    model: PreTrainedModel, sizes: Sequence[int], *, context: int = 256, rows: int = 1
) -> dict[int, float]:
    """Return the median seconds of one forward of the model, by the number of drafted nodes that it verifies.

    The forwards are those of generation, with the same cache and masks, neither compiled nor captured. The trees are
    binary, or chains if the model supports no trees. Time on an idle machine.

    Args:
        model: The model; speculation need not be attached.
        sizes: Numbers of nodes, the root included: 1 is a plain step.
        context: Tokens of the text before the tree.
        rows: Batch size.

    Returns:
        Seconds by number of nodes. A step with n nodes pays if it emits more than `seconds[n] / seconds[1]` tokens;
        drafting itself takes time as well.

    Raises:
        InvalidConfigError: `sizes` is empty, or a number is below 1.
        UnsupportedModelError: The model can verify neither trees nor chains.

    Example:
        ```python
        seconds = verify_seconds(model, [1, 4, 16])
        print(f"16 nodes pay above {seconds[16] / seconds[1]:.2f} tokens per step")
        ```
    """
    Rule("a sequence of at least one number", bool).check("sizes", list(sizes))
    for size in sizes:
        require_integer("sizes", size, 1)
    require_integer("context", context, 1)
    require_integer("rows", rows, 1)
    return costs.verify_seconds(model, sizes, context, rows=rows)
