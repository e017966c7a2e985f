"""The loop: prefill, then draft, verify, accept, commit until every row has ended.

Knows no drafter, rule or model by name. Before: `mixin.py` prepares the call. After: nobody; this is the output.
"""

from __future__ import annotations

import operator
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
from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import Drafter, Prompt
from hf_specdec.outputs import LayerOutputs
from hf_specdec.stats import SpeculationStats
from hf_specdec.target.cache import TreeCache
from hf_specdec.target.chain_cache import ChainCache
from hf_specdec.target.features import FeatureTap
from hf_specdec.target.masks import PromptPadding
from hf_specdec.target.model import text_config
from hf_specdec.target.target import Target
from hf_specdec.transcript import Transcript
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
    returns_cache: bool  # to the caller, or written back to the one handed in
    layer_outputs: dict[str, bool]  # hidden_states, attentions: whether to collect them


def speculate(call: Call, cache: TreeCache | ChainCache, transcript: Transcript) -> SpeculativeOutput:
    """Fill the transcript. Leaves the cache with every emitted token but the last, as plain generate does."""
    config = call.generation_config
    stats = SpeculationStats(method=call.drafter.method, accepted_per_step=[[] for _ in transcript.finished])
    layers = LayerOutputs(text_config(call.model), **call.layer_outputs)
    padding = PromptPadding.of(call.model_kwargs.get("attention_mask"))
    with stats.time("total"), ExitStack() as stack:
        read = call.drafter.feature_layers
        tap = stack.enter_context(FeatureTap(call.model, read)) if read else None
        wanted = {f"output_{name}": True for name, asked in call.layer_outputs.items() if asked}
        target = Target(call.model, cache, padding, tap, wanted)
        with stats.time("prefill"):
            prefill = target.prefill(call.input_ids, config, call.model_kwargs)
            roots = transcript.begin(prefill.logits[:, -1])
            layers.add_prompt(prefill)
        transcript.stream(call.streamer)
        stack.enter_context(call.model._optimize_model_for_decode())
        with stats.time("draft"):
            own = None if padding is None else padding.last(call.input_ids.shape[1])
            prompt = Prompt(call.input_ids, own, roots, prefill.features)
            session = call.drafter.start(call.model, prompt, call.config)
        del prefill, prompt
        while call.has_unfinished(all(transcript.finished)):
            with stats.time("draft"):
                # a last token needs no draft: the root alone says it
                tree = session.propose() if transcript.num_remaining > 1 else root_only(roots)
                if isinstance(cache, ChainCache):
                    tree = tree.first_chain()
                if transcript.in_step:
                    tree = tree.with_chains(transcript.padded_rows, transcript.pad_token_id)
            with stats.time("verify"):
                verification = target.verify(tree)
            with stats.time("accept"):
                before = list(transcript.num_generated)
                acceptance = call.rule(tree, verification.logits, transcript)
                roots = acceptance.next_token
                layers.add(verification, acceptance, cache.start)
            with stats.time("commit"):
                target.commit(tree, acceptance.nodes)
            transcript.stream(call.streamer)
            stats.num_target_forwards += 1
            for row, count in enumerate(map(operator.sub, transcript.num_generated, before)):
                if count:
                    stats.accepted_per_step[row].append(count)
                    stats.num_drafted_tokens += tree.num_nodes - 1
            if not all(transcript.finished):
                with stats.time("draft"):
                    session.observe(acceptance, verification)
        if call.returns_cache and isinstance(cache, TreeCache):  # rows over a chain cache are in step
            level(target, cache, transcript, call.input_ids.device)
        if call.streamer is not None:
            call.streamer.end()
    stats.num_generated_tokens = sum(transcript.num_generated)
    return SpeculativeOutput(
        sequences=transcript.sequences(),
        scores=tuple(transcript.scores) if config.output_scores else None,
        logits=tuple(transcript.logits) if config.output_logits else None,
        hidden_states=layers.hidden_states,
        attentions=layers.attentions,
        past_key_values=cache.hand_back(text_config(call.model)) if call.returns_cache else None,
        speculation=stats,
    )


def root_only(roots: Tensor) -> TokenTree:
    """A tree without drafts: verifying it is one step of plain decoding."""
    return TokenTree(roots[:, None], torch.full((1,), ROOT_PARENT, device=roots.device))


def level(target: Target, cache: TreeCache, transcript: Transcript, device: torch.device) -> None:
    """Bring the cache of ragged rows to one length: shorter rows go on with padding, as in plain generate."""
    width = max(map(len, transcript.new_tokens))
    missing = [
        [*tokens[-1:], *[transcript.pad_token_id] * (width - len(tokens) - 1)] if len(tokens) < width else []
        for tokens in transcript.new_tokens
    ]
    while longest := max(map(len, missing)):
        size = min(longest, max(cache.capacity - cache.start, 1))  # what fits without moving the cache
        chunks = [row[:size] for row in missing]
        padded = [[*row, *[transcript.pad_token_id] * (size - len(row))] for row in chunks]
        tokens = torch.tensor(padded, device=device)
        chain = TokenTree(tokens, torch.arange(ROOT_PARENT, size - 1, device=tokens.device))
        target.verify(chain)
        target.commit(chain, [range(len(row)) for row in chunks])
        missing = [row[size:] for row in missing]
