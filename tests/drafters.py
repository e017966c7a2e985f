"""Every way to draft, a row each: matrix, fuzzers, zoo, wrappers and the simulated device take their drafters here.

A new method is a row here, and is tested everywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import zoo
from hf_specdec import (
    DFlashConfig,
    DFlashHead,
    DrafterMismatchError,
    Eagle3Config,
    Eagle3Head,
    EagleConfig,
    EagleHead,
    MedusaConfig,
    MedusaHeads,
    MtpConfig,
    MtpHead,
)
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.dflash import DFlashDrafter
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.drafters.eagle import EagleDrafter
from hf_specdec.drafters.experimental.early_exit import EarlyExitDrafter
from hf_specdec.drafters.gemma4_assistant import TARGETS, Gemma4AssistantDrafter
from hf_specdec.drafters.hybrid import HybridDrafter
from hf_specdec.drafters.medusa import MedusaDrafter
from hf_specdec.drafters.mtp import MtpDrafter
from hf_specdec.drafters.pard import PardDrafter
from hf_specdec.drafters.prompt_lookup import PromptLookupDrafter
from hf_specdec.drafters.token_recycling import TokenRecyclingDrafter
from hf_specdec.trees.draft import PLAIN_STEP, Budget
from hf_specdec.verification.model import execution_device, find_backbone, text_config
from hf_specdec.verification.step import Step
from reference import OracleDrafter

EagleFamily = EagleHead | Eagle3Head | MtpHead

CHOICES = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
"""A small static tree."""


def random_head(model: Any, seed: int = 0, version: int | str = 1, **fields: Any) -> EagleFamily:
    """Weights that decide: ten times what a head starts with."""
    torch.manual_seed(seed)
    head: EagleFamily
    if version == 3:
        head = Eagle3Head(Eagle3Config.for_target(model.config, **fields))
    elif version == "mtp":
        head = MtpHead(MtpConfig.for_target(model.config, **fields))
    else:
        head = EagleHead(EagleConfig.for_target(model.config, **{"bias": True, "draft_vocab_size": None, **fields}))
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
            elif version == "mtp":  # norms that do something
                parameter.add_(0.5 * torch.rand_like(parameter))
    if head.config.draft_vocab_size:
        ids = torch.randperm(zoo.VOCAB_SIZE)[: head.config.draft_vocab_size].sort().values
        head.set_hot_token_ids(ids)
    return head


def random_module(model: Any, seed: int = 0, **fields: Any) -> MtpHead:
    """An MTP module whose weights and norms decide."""
    head = random_head(model, seed, "mtp", **fields)
    assert isinstance(head, MtpHead)
    return head


def random_block(model: Any, seed: int = 0, **fields: Any) -> DFlashHead:
    """A block head whose weights and norms decide."""
    torch.manual_seed(seed)
    base = {"block_size": 5, "mask_token_id": zoo.VOCAB_SIZE - 1, "aux_hidden_state_layer_ids": [1, 2], "head_dim": 8}
    head = DFlashHead(DFlashConfig.for_target(model.config, **{**base, **fields}))
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if any(part in name for part in ("_codebook", "base_kernel", "_embedding", "slot_bias")):
                parameter.copy_(torch.randn_like(parameter))
            elif parameter.dim() > 1:
                parameter.mul_(4 if name.startswith("lilicorr") else 10)
            else:
                parameter.add_(0.5 * torch.rand_like(parameter))
    if head.config.draft_vocab_size:
        head.set_hot_token_ids(torch.randperm(zoo.VOCAB_SIZE)[: head.config.draft_vocab_size].sort().values)
    return head


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 6}
"""Convolutions and a candidate selector."""
LILICORR = {"lilicorr_candidate_topk": 4, "lilicorr_hidden_size": 16, "lilicorr_num_heads": 2,
            "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": 8, "lilicorr_logit_scale": 6.0}  # fmt: skip
"""A small transformer over the candidates."""
DOMINO = {"markov_rank": 5, "markov_head_type": "domino", "gru_hidden_dim": 6}
"""A GRU over the tokens drafted so far."""


def random_heads(model: Any, seed: int = 0, **fields: Any) -> MedusaHeads:
    """Heads whose blocks are not the identity."""
    torch.manual_seed(seed)
    heads = MedusaHeads(MedusaConfig.for_target(model.config, **fields))
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    if heads.config.draft_vocab_size:
        heads.set_hot_token_ids(torch.randperm(zoo.VOCAB_SIZE)[: heads.config.draft_vocab_size].sort().values)
    return heads


def noisy(name: str, noise: float = 0.2, seed: int = 0) -> Any:
    """A tiny model with other weights, which says now and then what the one of the zoo says."""
    config = copy.deepcopy(zoo.build(name).config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(zoo.build(name).state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


def assistant_for(model: Any, seed: int) -> Any:
    """A noisy Llama next to a model of any kind."""
    return noisy("llama", seed=seed).to(device=execution_device(model), dtype=torch.float32)


def pard_assistant(name: str, noise: float = 0.2, seed: int = 0) -> Any:
    """A noisy tiny model whose last token is its mask."""
    model = noisy(name, noise, seed)
    model.config.pard_token = zoo.VOCAB_SIZE - 1
    return model


def pard_assistant_for(model: Any, seed: int) -> Any:
    """A noisy Llama with a mask token next to a model of any kind."""
    return pard_assistant("llama", seed=seed).to(device=execution_device(model), dtype=torch.float32)


@contextmanager
def assistants_of_gemma4() -> Iterator[None]:
    """Let all layers of a Gemma 4 share, as in an assistant: transformers 5.23 refuses that, 5.17 and 5.24 do not."""
    with ExitStack() as stack:
        for config in (transformers.Gemma4TextConfig, transformers.Gemma4UnifiedTextConfig):
            modes = getattr(config, "kv_sharing_modes", None)
            if isinstance(modes, property):
                shared = property(
                    lambda self, modes=modes: (
                        ["reuse"] * self.num_hidden_layers
                        if self.num_kv_shared_layers == self.num_hidden_layers
                        else modes.fget(self)
                    )
                )
                stack.enter_context(patch.object(config, "kv_sharing_modes", shared))
        yield


def gemma4_assistant(model: Any, seed: int = 0, *, sparse: bool = False, unified: bool = False, **fields: Any) -> Any:
    """A random assistant of three layers for a Gemma 4, which answers as the target does now and then.

    Raises:
        DrafterMismatchError: The model is no Gemma 4.
    """
    target, names = text_config(model), ("vocab_size", "head_dim", "sliding_window", "max_position_embeddings")
    if target.model_type not in TARGETS:
        raise DrafterMismatchError("Only a Gemma 4 has an assistant.")
    shapes = {name: value for name, value in target.to_dict().items() if name in names}
    full: Any = find_backbone(model)[1][-1]
    text = {
        **shapes, "global_head_dim": full.self_attn.head_dim, "model_type": target.model_type, "hidden_size": 16,
        "intermediate_size": 32, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "enable_moe_block": False, "use_double_wide_mlp": False, "num_kv_shared_layers": 3,
    }  # fmt: skip
    kind = "gemma4_unified_assistant" if unified else "gemma4_assistant"
    config = CONFIG_MAPPING[kind](
        text_config=text, backbone_hidden_size=target.hidden_size, use_ordered_embeddings=sparse, num_centroids=12,
        centroid_intermediate_top_k=4, **fields,
    )  # fmt: skip
    torch.manual_seed(seed)
    with assistants_of_gemma4():
        assistant = zoo.decisive(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    if sparse:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(target.vocab_size))
    return assistant.to(execution_device(model))


@dataclass(frozen=True)
class Row:
    """One way to draft for a tiny model."""

    name: str
    method: str  # what `speculative=` calls it
    make: Callable[[Any, Tensor, int], Drafter] | None = None  # of a model, its answers [B, T], a seed; None: nothing
    fields: dict[str, Any] = field(default_factory=dict)  # of the config

    @property
    def knows_answers(self) -> bool:
        """Whether its drafter is made of the right answers, and so for every call anew."""
        return self.method == "oracle"

    def add(self, model: Any, answers: Tensor | None = None, seed: int = 0) -> dict[str, Any]:
        """Register its drafter where it needs one and the model has none of its name; the config to call it with.

        Raises:
            DrafterMismatchError: The model has nothing to draft with, no lm_head say.
        """
        if self.make is not None and (self.knows_answers or self.method not in model.drafters):
            model.add_drafter(self.make(model, torch.empty(0, 0) if answers is None else answers, seed), self.method)
        return {"method": self.method, **self.fields}


def oracle(pattern: str) -> Callable[[Any, Tensor, int], Drafter]:
    """Maker of a drafter that is right always, never or sometimes."""
    return lambda _model, answers, seed: OracleDrafter(answers, pattern, zoo.VOCAB_SIZE, seed)


ROWS: tuple[Row, ...] = (
    Row("never", "oracle", oracle("never")),
    Row("always", "oracle", oracle("always")),
    Row("sometimes", "oracle", oracle("sometimes")),
    Row("prompt_lookup", "prompt_lookup"),
    Row("token_recycling", "token_recycling"),
    Row("last_logits", "last_logits"),
    Row("lookahead", "lookahead"),
    Row("early_exit", "early_exit", lambda _model, _answers, _seed: EarlyExitDrafter()),
    Row("eagle", "eagle", lambda model, _answers, seed: EagleDrafter(random_head(model, seed))),
    Row("eagle_static", "eagle", lambda model, _answers, seed: EagleDrafter(random_head(model, seed)),
        {"tree": CHOICES}),
    Row("eagle3", "eagle3",
        lambda model, _answers, seed: EagleDrafter(random_head(model, seed, version=3, norm_before_fc=True))),
    Row("peagle", "peagle", lambda model, _answers, seed: EagleDrafter(
        random_head(model, seed, version=3, mask_token_id=zoo.VOCAB_SIZE - 1, own_embedding=True))),
    Row("draft_model", "draft_model",
        lambda model, _answers, seed: DraftModelDrafter(assistant_for(model, seed)), {"top_k": 2, "num_steps": 3}),
    Row("pard", "pard",
        lambda model, _answers, seed: PardDrafter(pard_assistant_for(model, seed)), {"top_k": 2, "num_steps": 4}),
    Row("mtp", "mtp", lambda model, _answers, seed: MtpDrafter(random_module(model, seed))),
    Row("dflash", "dflash", lambda model, _answers, seed: DFlashDrafter(random_block(model, seed))),
    Row("dspark", "dspark", lambda model, _answers, seed: DFlashDrafter(
        random_block(model, seed, sample_from_anchor=True, causal=True, markov_rank=4, markov_head_type="rnn",
                     confidence_head=True, confidence_with_markov=True), confidence_threshold=0.3)),
    Row("dflash2", "dflash2",
        lambda model, _answers, seed: DFlashDrafter(random_block(model, seed, **DFLASH2)), {"num_draft_tokens": 12}),
    Row("lilicorr", "lilicorr",
        lambda model, _answers, seed: DFlashDrafter(random_block(model, seed, **LILICORR)), {"num_draft_tokens": 12}),
    Row("domino", "domino", lambda model, _answers, seed: DFlashDrafter(random_block(model, seed, **DOMINO))),
    Row("medusa", "medusa", lambda model, _answers, seed: MedusaDrafter(random_heads(model, seed))),
    Row("hybrid", "hybrid",
        lambda model, _answers, seed: HybridDrafter({
            "prompt_lookup": PromptLookupDrafter(), "token_recycling": TokenRecyclingDrafter(),
            "eagle": EagleDrafter(random_head(model, seed)),
        }),
        {"adaptive": False, "num_draft_tokens": 12}),
)  # fmt: skip

BY_NAME = {row.name: row for row in ROWS}

GEMMA4 = Row(
    "gemma4_assistant",
    "gemma4_assistant",
    lambda model, _answers, seed: Gemma4AssistantDrafter(gemma4_assistant(model, seed, sparse=True)),
)
"""A drafter for Gemma 4 only: adding it to any other model raises an error."""

UNWALKED = ("eagle_static", "peagle", "mtp", "early_exit", "dspark", "dflash2", "lilicorr", "domino", "pard")
WALKED = (*(row for row in ROWS if row.name not in UNWALKED), GEMMA4)
"""Those that the suite tries on every architecture: the others share the session of one of them, or probe every model
anew when they are added. `make models` tries all."""


class Wandering:
    """A controller that never asks for the same twice in a row, and seldom for all there may be."""

    seen: list[tuple[Budget, Step]]
    step_costs = None

    def __init__(self, limits: Budget) -> None:
        self.limits, self.count, self.seen = limits, 0, []
        everything = Wandering.all
        everything.append(self)

    all: list[Wandering] = []  # noqa: RUF012  (emptied by every test)

    def next(self) -> Budget:
        self.count += 1
        wanted = (PLAIN_STEP, Budget(3, 2, 1), PLAIN_STEP, self.limits, Budget(5, 3, 2), Budget(2, 1, 1))
        self.budget = wanted[self.count % len(wanted)].within(self.limits)
        return self.budget

    def observe(self, step: Step) -> None:
        seconds = step.seconds
        assert min(seconds.draft, seconds.verify, seconds.rest) >= 0
        self.seen.append((self.budget, step))

    def report(self) -> dict[str, Any]:
        return {"controller": "wandering", "steps": self.count}
