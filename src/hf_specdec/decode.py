"""The loop: prefill, then draft, verify, accept, commit until every row has ended.

Knows no drafter, rule or model by name. Before: `mixin.py` prepares the call. After: nobody; this is the output.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_specdec.accept import AcceptanceRule
from hf_specdec.cache import TreeCache
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import Drafter, Prompt
from hf_specdec.masks import PromptPadding
from hf_specdec.sampling import Transcript
from hf_specdec.stats import SpeculationStats
from hf_specdec.target import FeatureTap, Target, text_config
from hf_specdec.tree import ROOT_PARENT, TokenTree


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """transformers' output of `generate()`, and what speculation did."""

    speculation: SpeculationStats | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One `generate()` call as transformers prepared it."""

    model: PreTrainedModel
    drafter: Drafter
    config: SpeculativeConfig
    rule: AcceptanceRule
    input_ids: Tensor  # [B, P]
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any]
    streamer: BaseStreamer | None
    has_unfinished: Callable[[bool], bool]  # transformers' test, which also keeps ranks in step


def speculate(call: Call, cache: TreeCache, transcript: Transcript) -> SpeculationStats:
    """Fill the transcript. Leaves the cache with every emitted token but the last, as plain generate does."""
    stats = SpeculationStats(method=call.drafter.method, accepted_per_step=[[] for _ in transcript.finished])
    pad_token_id = padding_token(call.generation_config)
    padding = PromptPadding.of(call.model_kwargs.get("attention_mask"))
    with stats.time("total"), ExitStack() as stack:
        tap = stack.enter_context(FeatureTap(call.model)) if call.drafter.needs_features else None
        target = Target(call.model, cache, padding, tap)
        with stats.time("prefill"):
            prefill = target.prefill(call.input_ids, call.generation_config, call.model_kwargs)
            roots = transcript.begin(prefill.logits[:, -1])
        transcript.stream(call.streamer, pad_token_id)
        stack.enter_context(call.model._optimize_model_for_decode())
        with stats.time("draft"):
            prompt = Prompt(call.input_ids, padding, roots, prefill.hidden, cache.capacity)
            session = call.drafter.start(call.model, prompt, call.config)
        del prefill, prompt
        while call.has_unfinished(all(transcript.finished)):
            with stats.time("draft"):
                # a last token needs no draft: the root alone says it
                tree = session.propose() if transcript.num_remaining > 1 else root_only(roots)
            with stats.time("verify"):
                verification = target.verify(tree)
            with stats.time("accept"):
                active = [not finished for finished in transcript.finished]
                acceptance = call.rule(tree, verification.logits, transcript)
                roots = acceptance.next_token
            with stats.time("commit"):
                cache.commit(acceptance.nodes)
            transcript.stream(call.streamer, pad_token_id)
            stats.num_target_forwards += 1
            stats.num_drafted_tokens += sum(active) * (tree.num_nodes - 1)
            for row, count in enumerate(acceptance.counts):
                if count:
                    stats.accepted_per_step[row].append(count)
            if not all(transcript.finished):
                with stats.time("draft"):
                    session.observe(acceptance, verification)
        if call.streamer is not None:
            call.streamer.end()
    stats.num_generated_tokens = sum(map(len, transcript.new_tokens))
    return stats


def root_only(roots: Tensor) -> TokenTree:
    """A tree without drafts: verifying it is one step of plain decoding."""
    return TokenTree(roots[:, None], torch.full((1,), ROOT_PARENT, device=roots.device))


def padding_token(generation_config: GenerationConfig) -> int:
    """The id that fills finished rows."""
    pad = generation_config._pad_token_tensor
    return 0 if pad is None else int(pad)


def output(
    call: Call, cache: TreeCache, transcript: Transcript, stats: SpeculationStats
) -> SpeculativeOutput | Tensor:
    """What `generate()` returns: the sequences, or transformers' output class with the parts that were asked for."""
    config = call.generation_config
    sequences = transcript.sequences(padding_token(config))
    if not config.return_dict_in_generate:
        return sequences
    one_row = len(transcript.finished) == 1
    return SpeculativeOutput(
        sequences=sequences,
        scores=tuple(transcript.scores[0]) if config.output_scores else None,
        logits=tuple(transcript.logits[0]) if config.output_logits else None,
        # rows of different lengths have no common dynamic cache
        past_key_values=cache.to_dynamic(text_config(call.model)) if one_row else None,
        speculation=stats,
    )
