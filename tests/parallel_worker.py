"""Two processes: `torchrun --nproc_per_node 2 tests/parallel_worker.py KIND MODEL_DIRECTORY`, from test_wrappers.py.

*tensor*: the model's weights are sharded over both (`tp_plan="auto"`), each must take the same decisions and give
plain's ids. *synced*: each has the whole model and answers of its own length; both must run as many target forwards.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import zoo
from drafters import random_head
from hf_specdec import SpeculativeGenerationMixin
from hf_specdec.drafters.eagle import EagleDrafter
from models import prompts
from reference import OracleDrafter


def main(kind: str, path: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model: Any = AutoModelForCausalLM.from_pretrained(path, **({"tp_plan": "auto"} if kind == "tensor" else {}))
    whole: Any = AutoModelForCausalLM.from_pretrained(path)
    for each in (model, whole):
        each.generation_config.eos_token_id, each.generation_config.pad_token_id = None, 0
    SpeculativeGenerationMixin.attach(model)
    model.add_drafter(EagleDrafter(random_head(model, draft_vocab_size=32)))
    for batch_size in (1, 3):
        ids, mask = prompts(batch_size)
        new_tokens = 24 if kind == "tensor" else 8 + 12 * dist.get_rank()
        options = {"attention_mask": mask, "max_new_tokens": new_tokens, "do_sample": False}
        plain = whole.generate(ids, synced_gpus=False, **options)
        if kind == "tensor":
            assert torch.equal(plain, model.generate(ids, **options))
        model.add_drafter(OracleDrafter(plain[:, ids.shape[1] :], "sometimes", zoo.VOCAB_SIZE))
        for method in ("oracle", "prompt_lookup", "eagle"):
            ours = model.generate(ids, speculative=method, synced_gpus=kind == "synced", **options)
            assert torch.equal(plain, ours), (method, batch_size)
            forwards = torch.tensor([model.last_speculation.num_target_forwards])
            gathered = [torch.zeros_like(forwards) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, forwards)
            assert len({int(count) for count in gathered}) == 1, gathered
    dist.destroy_process_group()
    print("rank done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
