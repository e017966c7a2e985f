"""A user of the Hub, in a process of its own: `HF_ENDPOINT` is read when huggingface_hub is imported.

    HF_ENDPOINT=http://127.0.0.1:PORT HF_HOME=CACHE python hub_client.py online|offline

Prints a JSON object: what came of every attempt, by name; an error is "Class: text".
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_specdec import AutoSpeculativeModelForCausalLM, EagleHead, SpeculativeGenerationMixin, load_head
from hf_specdec.checkpoints.hub import inspect_head

TOKEN = "hf_secret"

Attempts = dict[str, Callable[[], Any]]


def total(head: Any) -> float:
    return float(sum(tensor.double().abs().sum() for tensor in head.state_dict().values()))


def push() -> Any:
    head = load_head("org/eagle")
    head.config.tau = {"all": 2.5}
    address = head.push_to_hub("org/mine", token=TOKEN, commit_message="first")
    again = load_head("org/mine")
    assert total(again) == total(head)
    assert type(AutoModel.from_pretrained("org/mine")) is EagleHead
    assert AutoConfig.from_pretrained("org/mine").tau == {"all": 2.5}
    return [type(address).__name__, again.layout]


def push_in_shards() -> Any:
    head = load_head("org/eagle")
    head.push_to_hub("org/sharded", token=TOKEN, max_shard_size="8KB")
    assert total(load_head("org/sharded")) == total(head)
    return list(inspect_head("org/sharded").files)


def push_while_saving() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        load_head("org/eagle").save_pretrained(Path(folder) / "named", push_to_hub=True, token=TOKEN)
        return load_head("me/named").layout


def push_again() -> Any:
    """The card that the repository has stays."""
    load_head("org/eagle").push_to_hub("org/carded", token=TOKEN)
    return load_head("org/carded").layout


def custom_generate() -> Any:
    model = AutoModelForCausalLM.from_pretrained("org/target", dtype=torch.float32)
    ids = torch.arange(5, 12)[None]
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False}
    plain = model.generate(ids, **arguments)
    drafted = model.generate(ids, **arguments, custom_generate="org/mine", trust_remote_code=True)
    assert torch.equal(plain, drafted)
    assert model.last_speculation.num_drafted_tokens > 0
    return list(model.drafters)


def by_commit() -> Any:
    sha = HfApi().model_info("org/eagle", revision="doubled").sha
    return total(load_head("org/eagle", revision=sha)) == total(load_head("org/eagle", revision="doubled"))


def together() -> Any:
    model = AutoSpeculativeModelForCausalLM.from_pretrained("org/eagle", dtype=torch.float32)
    assert isinstance(model, SpeculativeGenerationMixin)
    return list(model.drafters)


ONLINE: Attempts = {
    "by id": lambda: load_head("org/eagle").layout,
    "pickled": lambda: load_head("org/published").layout,
    "by branch": lambda: round(total(load_head("org/eagle", revision="doubled")) / total(load_head("org/eagle")), 3),
    "by commit": by_commit,
    "no such branch": lambda: load_head("org/eagle", revision="nowhere"),
    "private": lambda: load_head("org/private"),
    "private, with a token": lambda: load_head("org/private", token=TOKEN).layout,
    "no such repository": lambda: load_head("org/nothing"),
    "no weights": lambda: load_head("org/no-weights"),
    "no config": lambda: load_head("org/no-config"),
    "a shard is missing": lambda: load_head("org/no-shard"),
    "breaks off": lambda: load_head("org/breaks-off"),
    "wrong hash": lambda: load_head("org/wrong-hash"),
    "push": push,
    "push in shards": push_in_shards,
    "push while saving": push_while_saving,
    "push again": push_again,
    "push without a token": lambda: load_head("org/eagle").push_to_hub("org/mine", token=False),
    "custom_generate": custom_generate,
    "target and head": together,
    "a head without its target": lambda: AutoSpeculativeModelForCausalLM.from_pretrained("org/orphan"),
}
OFFLINE: Attempts = {
    "by id": lambda: load_head("org/eagle").layout,
    "pickled": lambda: load_head("org/published").layout,
    "never loaded": lambda: load_head("org/nothing"),
}


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    outcomes = {}
    for name, attempt in (ONLINE if sys.argv[1] == "online" else OFFLINE).items():
        try:
            outcomes[name] = attempt()
        except Exception as error:  # the outcome is what the tests look at
            outcomes[name] = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps(outcomes))


if __name__ == "__main__":
    main()
