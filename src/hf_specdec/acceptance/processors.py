"""Facts about transformers' logits processors: which read the text, which depend on the row or on other rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList, PrefixConstrainedLogitsProcessor, RepetitionPenaltyLogitsProcessor

from hf_specdec.transformers_private import allowed_tokens_of

TEXT_INDEPENDENT = frozenset({
    "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper",
    "TypicalLogitsWarper",
})  # fmt: skip
"""transformers' processors that depend on the scores alone and never read values from the device."""


ROWWISE_PROCESSORS = frozenset({
    *TEXT_INDEPENDENT, "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor", "PrefixConstrainedLogitsProcessor",
    "RepetitionPenaltyLogitsProcessor", "SequenceBiasLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "TopHLogitsWarper", "WatermarkLogitsProcessor",
})  # fmt: skip
"""transformers' processors that depend only on the text of one row and keep no state: rows may differ in length, and
prefixes may be evaluated and discarded."""


def is_rowwise(processors: Iterable[object]) -> bool:
    """Return whether every processor is one of `ROWWISE_PROCESSORS`, in transformers' own implementation."""
    return all(
        type(processor).__name__ in ROWWISE_PROCESSORS and type(processor).__module__.startswith("transformers.")
        for processor in processors
    )


def ignores_text(processor: object) -> bool:
    """Return whether a processor is one of `TEXT_INDEPENDENT`, which depend on the scores alone."""
    return type(processor).__name__ in TEXT_INDEPENDENT and type(processor).__module__.startswith("transformers.")


def of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """Return the processors for calls with this row alone: those that depend on the row's index get a copy for it."""

    def restricted(processor: Any) -> Any:
        if type(processor) is PrefixConstrainedLogitsProcessor:
            allowed = allowed_tokens_of(processor)
            return PrefixConstrainedLogitsProcessor(lambda _row, ids: allowed(row, ids), num_beams=1)
        if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
            return RepetitionPenaltyLogitsProcessor(processor.penalty, processor.prompt_ignore_length[row : row + 1])
        return processor

    return LogitsProcessorList(map(restricted, processors))
