"""Interface to the target that answers prompts for `distill`, and its implementation with a model in this process."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.cpu.quantized import packed_forms
from hf_specdec.heads.head import portable_name
from hf_specdec.transformers_private import model_name

SAMPLED_WEIGHTS = 4096
"""Maximum number of weights of a parameter in the hash; hashing four parameters takes about a millisecond."""


class Teacher(ABC):
    """Base class of teachers: targets whose answers become training data.

    Attributes:
        name: Name of the target stored with every row: a Hub id, or the last component of a local path.
        end_ids: Ids of the tokens that end an answer.
        lost: Number of dropped answers by reason.
    """

    name: str
    end_ids: Sequence[int]

    def __init__(self) -> None:
        self.lost: Counter[str] = Counter()

    @property
    def num_lost(self) -> int:
        """Number of dropped answers, for all reasons."""
        return self.lost.total()

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return values that identify the target; an interrupted `distill` resumes only if they are the same."""

    @abstractmethod
    def check(self, prompt: list[int]) -> None:
        """Check, before `distill` starts, that the target can answer and reads exactly the tokens of a prompt.

        Args:
            prompt: Token ids of a prompt to try.

        Raises:
            InvalidConfigError: The check failed.
        """

    @abstractmethod
    def generate(
        self, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int, label: str
    ) -> list[list[int] | None]:
        """Let the target answer prompts; an answer that does not end with an end token was cut.

        Args:
            prompts: Token ids of each prompt.
            temperature: Sampling temperature; 0 is greedy.
            max_new_tokens: Maximum length of an answer.
            label: Unique name of this call within the run, from which the random seeds are derived.

        Returns:
            Token ids of each prompt's answer with its end token; None if it was dropped, which `lost` counts.
        """

    def ended(self, answer: Sequence[int]) -> bool:
        """Return whether the answer ends with an end token; False for an empty one."""
        return bool(answer) and answer[-1] in self.end_ids


class ModelTeacher(Teacher):
    """Teacher that calls `generate()` of a model in this process, without top-k and top-p.

    Args:
        model: The target.
        batch_size: Rows per `generate()` call, taken from prompts sorted by length.
    """

    def __init__(self, model: PreTrainedModel, batch_size: int) -> None:
        super().__init__()
        self.model, self._batch_size = model, batch_size
        end = model.generation_config.eos_token_id
        self.end_ids = [] if end is None else [end] if isinstance(end, int) else list(end)
        name = model_name(model.config)
        self.name = portable_name(name) or Path(name).name

    def facts(self) -> dict[str, Any]:
        """Return the model's name, its dtype and a hash of some of its weights.

        The hash covers the first, middle and last parameter and the lm_head, except offloaded ones (meta tensors);
        see also `packed_forms`.
        """
        parameters = list(self.model.parameters())
        sampled = [parameters[0], parameters[len(parameters) // 2], parameters[-1]]
        lm_head = self.model.get_output_embeddings()
        if lm_head is not None:
            sampled += list(lm_head.parameters())[:1]
        weights = hashlib.sha256()
        for parameter in sampled:
            if not parameter.is_meta:
                flat = parameter.detach().flatten()
                some = flat[:: max(len(flat) // SAMPLED_WEIGHTS, 1)][:SAMPLED_WEIGHTS]
                weights.update(some.float().cpu().numpy().tobytes())
        facts = {"model": self.name, "dtype": str(self.model.dtype), "weights": weights.hexdigest()[:16]}
        return {**facts, **packed_forms(self.model)}

    def check(self, prompt: list[int]) -> None:
        """Do nothing: a local model needs no check."""

    def generate(
        self, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int, label: str
    ) -> list[list[int] | None]:
        """See `Teacher.generate`. The seed of every batch is derived from `label` and its place in the call.

        The caller's random state is kept.
        """
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        found: list[list[int] | None] = [None for _ in prompts]
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            with torch.random.fork_rng():
                torch.manual_seed(seed_of(f"{label}/{start}"))
                answers = self._continue([prompts[index] for index in chosen], temperature, max_new_tokens)
            for index, answer in zip(chosen, answers, strict=True):
                end = next((place + 1 for place, token in enumerate(answer) if token in self.end_ids), None)
                found[index] = answer[:end]
        return found

    def _continue(self, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        pad = self.end_ids[0] if self.end_ids else 0
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device="cpu")
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device="cpu")
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        output = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            **(sampling if temperature else {"do_sample": False}),
        )
        return output[:, width:].tolist()


def seed_of(label: str) -> int:
    """Derive a 56-bit seed from a label; equal labels give equal seeds in every process and on every machine."""
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:7], "big")
