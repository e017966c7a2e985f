"""The history of a model's answers: which rows use which one, and what a call adds to it."""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import unpadded
from hf_specdec.drafters.history import AnswerHistory, history_keys
from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation.decode import Call
from hf_specdec.generation.state import state_of
from hf_specdec.verification.model import num_embedded_tokens


def answer_history(model: PreTrainedModel) -> AnswerHistory:
    """Return the history of the model's answers; create an empty one if it has none."""
    state = state_of(model)
    if state.history is None:
        state.history = AnswerHistory(vocab_size=num_embedded_tokens(model))
    return state.history


def check_names(config: SpeculativeConfig, num_prompts: int, num_rows: int) -> None:
    """Check that a list of names has one for each prompt, or one for each row.

    Args:
        config: Config of the call.
        num_prompts: Prompts of the call.
        num_rows: Rows of the call: several per prompt with `num_return_sequences`.

    Raises:
        InvalidConfigError: It has another length.
    """
    names = config.history
    if isinstance(names, tuple) and len(names) not in (num_prompts, num_rows):
        raise InvalidConfigError(
            f"`history` has {len(names)} names, but there are {num_prompts} prompts.", "Give one name for each prompt."
        )


def remember_answers(model: PreTrainedModel, call: Call, transcript: Transcript) -> None:
    """Add the answers of a call to the history that its config names; add nothing without one."""
    if call.config.history is None:
        return
    padding, width = call.target.padding, call.input_ids.shape[1]
    prompts = unpadded(call.input_ids, None if padding is None else padding.last(width))
    history, keys = answer_history(model), history_keys(call.config.history, prompts)
    for row, key in enumerate(keys):
        answer = transcript.new_tokens[row][: transcript.num_generated[row]]
        history.add(answer, key, prompts[row])
