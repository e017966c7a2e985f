"""Target that verifies a tree in one forward, with a static cache and a tree attention mask."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from hf_specdec.acceptance.accepted import Accepted
from hf_specdec.errors import UnsupportedGenerationError
from hf_specdec.transformers_private import can_prefill_with, prefill, updated_kwargs
from hf_specdec.trees.tree import ROOT_PARENT, TokenTree
from hf_specdec.verification.cache import ActiveRows, TreeCache, drop_order, layer_windows
from hf_specdec.verification.features import Features, PromptPadding
from hf_specdec.verification.masks import MaskLayout, Positions, TreeInputs, committed_slots
from hf_specdec.verification.model import cache_argument, execution_device, takes_positions, text_config
from hf_specdec.verification.recurrent_layer import recurring
from hf_specdec.verification.runners import Runner, attention_of
from hf_specdec.verification.step import Verified
from hf_specdec.verification.target import PREPARED_INPUTS, Target
from hf_specdec.verification.tree_attention import attending

logger = logging.getLogger(__name__)


class TreeTarget(Target):
    """Target for models whose layers hold plain keys and values, or recurrent states.

    The layers of some models accept only attention names that they know: then `uses_packed_attention` is False. A
    `runner`, a compiled or captured forward, is used instead of the model's own if it supports the inputs.
    """

    supports_trees, lockstep = True, False
    cache: TreeCache

    def __init__(
        self, model: PreTrainedModel, cache: TreeCache, outputs: Mapping[str, bool] = MappingProxyType({}), *,
        uses_packed_attention: bool = True, runner: Runner | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, outputs)
        self.cache, self._uses_packed, self.runner = cache, uses_packed_attention, runner
        self._logged_unused = False  # whether it was logged that the runner is not used
        self._cache_argument, self._takes_positions = cache_argument(model), takes_positions(model)
        self._mask_layout = MaskLayout.of(text_config(model))

    def adopt(self, cache: Cache) -> None:
        """Copy the tokens of a transformers cache, see `TreeCache.adopt`."""
        self.cache.adopt(cache)
        self.is_adopted = True

    def prefill(self, *inputs: Any, **options: Any) -> Verified:
        """See `Target`."""
        self.cache.begin_prompt(layer_windows(text_config(self.model)))
        return super().prefill(*inputs, **options)

    def _read_prompt(
        self, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> tuple[Any, list[torch.Tensor]]:
        """See `Target`; the runner reads the prompt if it can, with the inputs that the model prepares."""
        runner, seen = self.runner, list[torch.Tensor]()
        positions = model_kwargs.get("position_ids")
        can_read = (
            runner is not None
            and bool(runner.reads_prompts)
            and can_prefill_with(self.model)
            and not self.bounds.switches
            and model_kwargs.get("inputs_embeds") is None
            and positions is not None
            and positions.dim() == 2
            and self._can_use(runner, 1, 0)
        )
        if self.is_exact and not self.width and not can_read:
            raise UnsupportedGenerationError(
                f"exact=True needs prompts that a program of {type(self.model).__name__} can read, with one position "
                "per token and no other inputs.",
                "Drop `exact`.",
            )
        if runner is None or not can_read or (runner.reads_prompts == "slowly" and not self.is_exact):
            return super()._read_prompt(input_ids, generation_config, model_kwargs)
        self.cache.begin_prompt([None] * len(self.cache.layers))

        def read(**inputs: Any) -> CausalLMOutputWithPast:
            found = {name for name, value in inputs.items() if isinstance(value, torch.Tensor | dict)}
            if found - PREPARED_INPUTS or "position_ids" not in found:
                reason = f"inputs that the model prepares: {', '.join(sorted(found))}"
                if self.is_exact:
                    raise UnsupportedGenerationError(
                        f"exact=True needs a program, which does not take {reason}.", "Drop `exact`."
                    )
                self._note_unused(reason)
                self.cache.begin_prompt(layer_windows(text_config(self.model)))
                return self.model(**inputs)
            seen.append(inputs["position_ids"])
            kept = inputs.get("logits_to_keep", 0)
            logits, states = runner.read(
                inputs["input_ids"], inputs["position_ids"], self.cache, self.padding, self._mask_layout,
                all_logits=isinstance(kept, int) and kept == 0,
            )  # fmt: skip
            if self._tap is not None:
                self._tap.keep(states)
            return CausalLMOutputWithPast(logits=logits, past_key_values=self.cache)

        return prefill(self.model, input_ids, generation_config, model_kwargs, read), seen

    def commit(self, tree: TokenTree, acceptance: Accepted) -> None:
        """Keep one path per row, in place."""
        active, nodes = self.cache.active, acceptance.nodes
        self.cache.commit(nodes if active is None else [nodes[row] for row in active.rows])

    def keep_rows(self, active: Sequence[int]) -> None:
        """See `Target`; the last rows of the cache move to the places of those left out."""
        cache, before = self.cache, self.cache.active
        held = range(self.num_rows) if before is None else before.rows
        count = len(active) if self.runner is None else min(self.runner.num_rows(len(active)), len(held))
        if count >= len(held) or any(isinstance(value, torch.Tensor) for value in self._inputs.values()):
            return
        fillers = [row for row in held if row not in active][: count - len(active)]
        wanted = {*active, *fillers}
        order = drop_order(len(held), [place for place, row in enumerate(held) if row in wanted])
        rows = tuple([held[place] for place in order])
        index = torch.tensor(rows, dtype=torch.long, device=execution_device(self.model))
        padding = None if self.padding is None else self.padding.of_rows(index)
        num_rows = len(held) if before is None else before.num_rows
        cache.keep_rows(ActiveRows(rows, num_rows, index, padding, self.positions.of_rows(index)), order)

    def _row_lengths(self) -> Mapping[int, int]:
        active = self.cache.active
        return super()._row_lengths() if active is None else dict(zip(active.rows, self.cache.lengths, strict=True))

    @property
    def active_share(self) -> float:
        """See `Target`."""
        active = self.cache.active
        return 1.0 if active is None else len(active.rows) / active.num_rows

    def _features(self) -> Features | None:
        features, active = super()._features(), self.cache.active
        if features is None or active is None:
            return features
        return Features({layer: active.in_batch(states) for layer, states in features.states.items()})

    def rollback(self, num_nodes: int) -> None:
        """See `Target`."""
        self.cache.rollback()

    def committed(self, layer: int, last: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys and values `[R, H, S, D]` of a layer at the committed slots, and bool `[R, S]`, True for tokens.

        R are the rows that the cache holds. With `last`, only the last slots of each row count, and earlier slots that
        no row needs are left out.
        """
        cache, held = self.cache, self.cache.layers[layer]
        first = 0 if last is None else max(min(cache.lengths) - last, 0)
        lengths = cache.lengths_on(execution_device(self.model), len(cache.lengths))
        padding = self.padding if cache.active is None else cache.active.padding
        valid = committed_slots(lengths, cache.start, padding)
        if last is not None:
            valid &= torch.arange(cache.start, device=lengths.device) >= lengths[:, None] - last
        keys, values = (states[:, :, first : cache.start] for states in (held.keys, held.values))
        return keys, values, valid[:, first:]

    def root_positions(self) -> torch.Tensor:
        """Return the positions `[R, 1]` of the roots that follow the committed text, see `committed`."""
        cache = self.cache
        lengths = cache.lengths_on(execution_device(self.model), len(cache.lengths))
        positions = self.positions if cache.active is None else cache.active.positions
        return positions.of_nodes(torch.zeros_like(lengths[:1, None]), lengths)

    def close(self) -> None:
        """See `Target`."""
        if self.runner is not None:
            self.runner.release(self.cache)

    def equalize_row_lengths(self, new_tokens: Sequence[Sequence[int]], pad_token_id: int) -> None:
        """See `Target`."""
        width, cache = max(map(len, new_tokens)), self.cache
        missing = [
            [*tokens[-1:], *[pad_token_id] * (width - len(tokens) - 1)] if len(tokens) < width else []
            for tokens in new_tokens
        ]
        while longest := max(map(len, missing)):
            size = longest
            if cache.buffers:
                size = min(longest, max(cache.capacity - cache.start, 1))  # fits without reallocating the cache
            chunks = [row[:size] for row in missing]
            padded = [[*row, *[pad_token_id] * (size - len(row))] for row in chunks]
            tokens = torch.tensor(padded, dtype=torch.long, device=execution_device(self.model))
            nodes = torch.arange(size, device=tokens.device)
            counts = torch.tensor([len(row) for row in chunks], dtype=torch.long, device=tokens.device)[:, None]
            if self._highest is not None:  # the last position of the longest row, whose last token enters no cache
                last = max(cache.lengths) - self.positions.num_slots + int(self.positions.last.max())
                self._highest = last + 1 - size
            # nodes beyond a row's chunk are on no path: as a longer chain they could exceed the model's positions
            self.verify(TokenTree(tokens, torch.where(nodes < counts, nodes + ROOT_PARENT, ROOT_PARENT)))
            cache.commit([range(len(row)) for row in chunks])
            missing = [row[size:] for row in missing]

    def _run(self, tree: TokenTree, known: int = 0) -> Any:
        at_switch = self.cache.start in self.bounds.switches and not self.cache.states
        if self.text is not None and at_switch and not self.is_draft_view:
            return self._step_plainly(self.text())
        active = self.cache.active
        if active is None:
            return self._forward(tree, known, self.padding, self.positions)
        outputs = self._forward(tree.of_rows(active.index), known, active.padding, active.positions)
        return CausalLMOutputWithPast(logits=active.in_batch(outputs.logits))

    def _step_plainly(self, text: torch.Tensor) -> Any:
        """Make the step of plain `generate()` after the text `[B, L]`: the model may read all of it again (Phi-3)."""
        num_new = text.shape[1] - self._prompt_length
        inputs = updated_kwargs(self.model, {}, dict(self._prompt_kwargs), num_new)
        inputs = self.model.prepare_inputs_for_generation(text, next_sequence_length=1, **inputs)
        committed = self.cache.start
        self.cache.begin_prompt(layer_windows(text_config(self.model)))
        outputs = self.model(**inputs, **self._outputs, return_dict=True)
        self._check_written(committed + 1, outputs)
        self.cache.begin_prompt([None] * len(self.cache.layers))
        if self._tap is not None:
            self._tap.keep_last()
        hidden, attentions = self._layers(outputs)
        return CausalLMOutputWithPast(
            logits=outputs.logits[:, -1:],
            hidden_states=None if hidden is None else tuple(states[..., -1:, :] for states in hidden),
            attentions=None if attentions is None else tuple(weights[:, :, -1:] for weights in attentions),
        )

    def _forward(self, tree: TokenTree, known: int, padding: PromptPadding | None, positions: Positions) -> Any:
        """Run the model over nodes of the rows that the cache holds, see `_run`."""
        cache, tokens = self.cache, tree.tokens[:, known:]
        lengths = cache.lengths_on(tree.tokens.device, len(tree.tokens))
        all_seen = tree.num_nodes == 1 and padding is None and len(set(cache.lengths)) <= 1
        highest = (self._whole or self)._highest  # None if no bound is ahead
        ceiling = None if highest is None else highest + tree.depth_bound
        layout, dtype = self._mask_layout, self.model.dtype
        inputs = TreeInputs(
            tree, lengths, cache.start, padding, positions, layout, dtype, all_seen, ceiling, self.width,
            bool(cache.states),
        )  # fmt: skip
        if self.runner is not None and self._can_use(self.runner, tree.num_nodes, known):
            logits, states = self.runner.verify(inputs, cache, known)
            if self._tap is not None:
                self._tap.clear()  # the runner may have called the model, and with it the tap's hooks
                self._tap.keep(states)
            return CausalLMOutputWithPast(logits=logits)
        masks, node_positions = inputs.masks_and_positions(known)
        context = attention_of(masks, inputs, known=known)
        where = {"position_ids": node_positions} if self._takes_positions else {}
        with (
            attending(context if self._uses_packed else None),
            recurring(self.model, cache, context.branches),
        ):
            outputs = self.model(
                input_ids=tokens,
                attention_mask=context.argument(),
                **where,
                use_cache=True,
                return_dict=True,
                **{self._cache_argument: cache},
                **self._step_inputs(tokens),
            )
        self._check_written(cache.start + tree.num_nodes)
        return outputs

    def _can_use(self, runner: Runner, num_nodes: int, known: int) -> bool:
        """Return whether the runner supports this forward; if not, log why, once (not for drafting forwards)."""
        if (known and not runner.grows) or self.is_draft_view:
            return False
        layers = frozenset[int]() if self._tap is None else self._tap.layers
        obstacles = {
            "additional model inputs": self._inputs,
            "outputs of every layer": self._outputs,
            "several sections of position ids": self.positions.last.dim() > 1,
            "autocast": torch.is_autocast_enabled(execution_device(self.model).type),
            "hidden states that it does not return": layers - runner.layers,
            "another call's cache, or too wide a tree": not runner.can_run(num_nodes, self.cache),
        }
        found = ", ".join(name for name, present in obstacles.items() if present)
        if found:
            self._note_unused(found)
        return not found

    def _note_unused(self, reason: str) -> None:
        if not self._logged_unused:
            name = type(self.model).__name__
            logger.info("The compiled or captured forward of %s is not used (%s).", name, reason)
            self._logged_unused = True
