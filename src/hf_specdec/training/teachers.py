"""What answers while a model is distilled: the model in this process, or a server that runs it (`servers.py`)."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_specdec.heads.base import portable_name


class Teacher(ABC):
    """A target that continues token lists.

    Attributes:
        name: Of the target, for the rows: a Hub id, or the last part of a path of this machine.
        end_ids: Tokens that end an answer.
        lost: Answers that were given up, by reason.
    """

    name: str
    end_ids: Sequence[int]

    def __init__(self) -> None:
        self.lost: Counter[str] = Counter()

    @property
    def num_lost(self) -> int:
        """Answers that were given up because they were malformed or their token ids are not certain."""
        return self.lost.total()

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What answers depend on, besides the prompts; a dataset is made by one target."""

    @abstractmethod
    def check(self, prompt: list[int]) -> None:
        """See that the target can be asked, and reads what its tokenizer writes; before any work.

        Args:
            prompt: One of those that are to come.

        Raises:
            InvalidConfigError: It cannot, or does not.
        """

    @abstractmethod
    def generate(
        self, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int, label: str
    ) -> list[list[int] | None]:
        """Continue token lists; what comes back ends with an end token, or was cut.

        Args:
            prompts: Token ids.
            temperature: 0 is greedy.
            max_new_tokens: At most.
            label: Names this call within the whole work; it decides the draws.

        Returns:
            An answer per prompt; None if it was given up, which `lost` counts.
        """

    def ended(self, answer: Sequence[int]) -> bool:
        """Whether the target came to an end by itself."""
        return bool(answer) and answer[-1] in self.end_ids


class ModelTeacher(Teacher):
    """A model of this process: plain `generate()`, with no top-k or top-p, in batches of similar length.

    Args:
        model: The target, attached or not.
        batch_size: Rows per `generate()` call.
    """

    def __init__(self, model: PreTrainedModel, batch_size: int) -> None:
        super().__init__()
        self.model, self._batch_size = model, batch_size
        self.end_ids = _ids(model.generation_config.eos_token_id)
        name = model.config._name_or_path
        self.name = portable_name(name) or Path(name).name

    def facts(self) -> dict[str, Any]:
        """Name, precision and a hash of some weights."""
        weights = next(self.model.parameters()).detach().flatten()[:4096].float().cpu()
        return {
            "model": self.name,
            "dtype": str(self.model.dtype),
            "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16],
        }

    def check(self, prompt: list[int]) -> None:
        """A model that is here can be asked."""

    def generate(
        self, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int, label: str
    ) -> list[list[int] | None]:
        """See `Teacher.generate`. Every batch is seeded by its place in the work."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        said: list[list[int] | None] = [None for _ in prompts]
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            with torch.random.fork_rng():
                torch.manual_seed(seed_of(f"{label}/{start}"))
                answers = self._continue([prompts[index] for index in chosen], temperature, max_new_tokens)
            for index, answer in zip(chosen, answers, strict=True):
                said[index] = answer
        return said

    def _continue(self, prompts: Sequence[list[int]], temperature: float, max_new_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        pad = self.end_ids[0] if self.end_ids else 0
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device="cpu")
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device="cpu")
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        output = self.model.generate(
            input_ids=ids.to(self.model.device), attention_mask=mask.to(self.model.device),
            max_new_tokens=max_new_tokens, pad_token_id=pad, **(how if temperature else {"do_sample": False}),
        )  # fmt: skip
        answers = output[:, width:].tolist()
        ends = [next((i + 1 for i, token in enumerate(answer) if token in self.end_ids), None) for answer in answers]
        return [answer[:end] for answer, end in zip(answers, ends, strict=True)]


def seed_of(label: str) -> int:
    """A seed of 56 bits that follows from a name.

    Example: the same label gives the same seed in every process and on every machine.
    """
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:7], "big")


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
