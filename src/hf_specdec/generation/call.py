"""Check the prompt of a planned call, and create what the decoding loop needs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specdec.acceptance.transcript import Transcript
from hf_specdec.config import PER_PROMPT, SpeculativeConfig
from hf_specdec.drafters.base import Drafter
from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.generation import options
from hf_specdec.generation.assisted import Assistant
from hf_specdec.generation.decode import Call
from hf_specdec.generation.plan import Plan, Request, controller_of
from hf_specdec.transformers_private import has_unfinished, pad_token_id


def request_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request:
    """Return what the user asks for, given all arguments of `generate()`; an assistant is removed from `kwargs`.

    A `Request` is returned as it is: a model whose own `generate()` calls this one again passes it on.

    Raises:
        UnsupportedGenerationError: The prompt is text, a list, or a dict that was not unpacked, on which transformers
            fails without a reason.
    """
    if isinstance(kwargs["speculative"], Request):
        request: Request = kwargs["speculative"]
        return request
    prompt = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    if prompt is not None and not isinstance(prompt, Tensor):
        raise UnsupportedGenerationError(
            f"The prompt must be a tensor of token ids, got a {type(prompt).__name__}.",
            'Call generate(**tokenizer(text, return_tensors="pt"), ...).',
        )
    assistant = None if kwargs.get("assistant_model") is None else Assistant.taken_from(kwargs)
    return Request(kwargs["speculative"], assistant)


def prepare_call(
    model: PreTrainedModel, plan: Plan, input_ids: Tensor, logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, synced_gpus: bool,
    streamer: BaseStreamer | None, model_kwargs: dict[str, Any],
) -> tuple[Call, Transcript]:  # fmt: skip
    """Return the call and an empty transcript, given the arguments of transformers' decoding loop.

    Raises:
        UnsupportedGenerationError: Processors, prompt or options cannot be combined with speculation.
    """
    target = plan.target
    assert target is not None
    options.check_processors(logits_processor, plan.config)
    options.check_device(input_ids, model)
    options.check_prompt(input_ids, model_kwargs.get("inputs_embeds"))
    options.check_synced(synced_gpus, target.needs_replay)
    device, rows = input_ids.device, input_ids.shape[0]
    max_length = target.start + generation_config.max_length
    target.bounds = target.bounds.within(max_length)
    options.check_bounds(model, target.bounds, target.start or input_ids.shape[1], max_length)
    returns_dict = bool(generation_config.return_dict_in_generate)
    returns_cache = returns_dict or target.is_adopted
    transcript = Transcript(
        input_ids,
        logits_processor,
        stopping_criteria,
        max_length=generation_config.max_length,
        do_sample=generation_config.do_sample,
        # rows of different lengths would need a final forward that other ranks do not run
        lockstep=target.lockstep
        or bool(target.bounds.switches)
        or (synced_gpus and returns_cache)
        or options.in_lockstep(generation_config, logits_processor, stopping_criteria),
        keep_scores=returns_dict and bool(generation_config.output_scores),
        keep_logits=returns_dict and bool(generation_config.output_logits),
        pad_token_id=pad_token_id(generation_config),
    )
    target.text = transcript.sequences
    call = Call(
        target=target,
        drafter=plan.drafter,
        controller=controller_of(plan, model, rows, synced_gpus=synced_gpus),
        rule=plan.rule,
        config=plan.config,
        input_ids=input_ids,
        generation_config=generation_config,
        model_kwargs=model_kwargs,
        streamer=streamer,
        has_unfinished=lambda finished: has_unfinished(model, finished, synced_gpus, device),
        returns_cache=returns_cache,
        layer_outputs=plan.layer_outputs,
        forwards=plan.forwards,
    )
    return call, transcript


def check_token_ids(width: int, drafter: Drafter, config: SpeculativeConfig) -> None:
    """Refuse a prompt without token ids if a part of the drafter, or one history per prompt, reads the ids.

    Args:
        width: Columns of `input_ids`.
        drafter: Drafter of the call.
        config: Config of the call.

    Raises:
        UnsupportedGenerationError: The prompt is empty or given as embeddings only, but token ids are needed.
    """
    if width:
        return
    names = dict.fromkeys(part.method for part in drafter.parts if part.needs.token_ids)
    if names:
        raise UnsupportedGenerationError(
            f"Drafts of {', '.join(map(repr, names))} need the prompt's token ids, got none.",
            "Pass at least one token, e.g. the BOS token; with inputs_embeds pass input_ids as well, or use a method "
            'that needs none, such as "prompt_lookup".',
        )
    if config.history == PER_PROMPT:
        raise UnsupportedGenerationError(
            f"history={PER_PROMPT!r} finds a prompt's history by its token ids, got none.",
            "Pass input_ids, also with inputs_embeds, or give the history a name.",
        )
