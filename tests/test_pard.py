"""PARD: chains and trees of one forward are those of a plain reference and of the authors' loop; answers stay plain.

git clone https://github.com/AMD-AGI/PARD /tmp/pard && PARD_REPOSITORY=/tmp/pard make test
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import zoo
from assistants import NEW_TOKENS, Spied, attached, generate
from drafters import noisy, pard_assistant
from hf_specdec import (
    AutoSpeculativeModelForCausalLM,
    CheckpointFormatError,
    DrafterMismatchError,
    InvalidConfigError,
    SpeculativeGenerationMixin,
    UnsupportedGenerationError,
    UnsupportedModelError,
    load_head,
)
from hf_specdec.drafters.pard import PardDrafter
from hf_specdec.trees.draft import Budget
from hf_specdec.verification.model import CACHE_FIELD
from models import prompts
from reference import path_to_root

pytestmark = pytest.mark.usefixtures("full_depth")

ORIGINAL = os.environ.get("PARD_REPOSITORY")
KINDS = ("llama", "gemma3_text", "gpt2", "qwen3_next")
"""Full attention, sliding windows, learned positions."""
MASK = zoo.VOCAB_SIZE - 1
CHAIN = {"method": "pard", "num_steps": 5}
TREE = {"method": "pard", "top_k": 3, "num_steps": 4, "num_draft_tokens": 11}


class SpiedPard(Spied, PardDrafter):
    """Keeps every draft with the texts that it was made for."""


def reference(assistant: Any, text: list[int], num_steps: int, mask: int = MASK) -> Tensor:
    """`[num_steps, V]` log-probabilities: one forward over the text and the masks, without a cache."""
    with torch.no_grad():
        ids = torch.tensor([[*text, *[mask] * (num_steps - 1)]])
        logits = assistant(input_ids=ids, use_cache=False).logits[0, -num_steps:]
    logits[:, mask] = -torch.inf
    log_probs: Tensor = logits.log_softmax(-1)
    return log_probs


# ------------------------------------------------------------------------------------------------- the drafts


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_those_of_the_reference(kind: str, batch_size: int, wandering: list[Any]) -> None:
    """Plain steps between them, so that rows of a batch have read from one to many tokens since the last draft."""
    model, assistant = attached("llama"), pard_assistant(kind, noise=0.1)
    drafter = model.add_drafter(SpiedPard(assistant))
    assert torch.equal(generate(model, batch_size), generate(model, batch_size, speculative=CHAIN))
    depths = set()
    for texts, draft in drafter.seen:
        depth = draft.tree.num_nodes - 1
        depths.add(depth)
        for row, text in enumerate(texts):
            if text is not None:
                wanted = reference(assistant, text, depth).max(-1)
                assert draft.tree.tokens[row, 0] == text[-1]
                assert draft.tree.tokens[row, 1:].tolist() == wanted.indices.tolist()
                assert draft.tree.parents.expand(len(texts), -1)[row].tolist() == list(range(-1, depth))
                assert draft.log_probs is not None
                torch.testing.assert_close(draft.log_probs[row, 1:], wanted.values, atol=2e-4, rtol=1e-4)
    assert depths == {1, 2, 3, 5}


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_the_likeliest_nodes_of_the_product(kind: str, batch_size: int) -> None:
    model, assistant = attached("gemma3_text"), pard_assistant(kind, noise=0.1)
    drafter = model.add_drafter(SpiedPard(assistant))
    assert torch.equal(generate(model, batch_size), generate(model, batch_size, speculative=TREE))
    for texts, draft in drafter.seen:
        draft.tree.validate()
        assert draft.tree.num_nodes == 11
        assert draft.log_probs is not None
        parents = draft.tree.parents.expand(len(texts), -1)
        for row, text in enumerate(texts):
            if text is None:
                continue
            best = reference(assistant, text, 4).topk(3, dim=-1)
            paths = [path for depth in range(1, 5) for path in itertools.product(range(3), repeat=depth)]
            scores = {
                tuple(int(best.indices[depth, rank]) for depth, rank in enumerate(path)):
                sum(float(best.values[depth, rank]) for depth, rank in enumerate(path))
                for path in paths
            }  # fmt: skip
            kept = []
            for node in range(1, 11):
                nodes = path_to_root(parents[row].tolist(), node)[1:]
                kept.append(tuple(draft.tree.tokens[row, nodes].tolist()))
                assert abs(float(draft.log_probs[row, nodes].sum()) - scores[kept[-1]]) < 1e-3
            assert len(set(kept)) == 10
            found, wanted = sorted(scores[path] for path in kept), sorted(scores.values())[-10:]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_one_forward_per_draft(batch_size: int) -> None:
    """The prompt, then in every step the new tokens of the row that has most of them, with the masks."""
    model, assistant, widths = attached("llama"), pard_assistant("llama", noise=0.02), list[int]()
    assistant.register_forward_pre_hook(
        lambda _model, _args, inputs: widths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    model.add_drafter(PardDrafter(assistant))
    widths.clear()  # of the probe
    generate(model, batch_size, speculative=CHAIN)
    steps = list(itertools.zip_longest(*model.last_speculation.accepted_per_step, fillvalue=0))
    assert widths[0] == prompts(batch_size)[0].shape[1]
    wanted = [1 + 4, *(max(column) + 4 for column in steps[:-1])]
    assert widths[1:] in (wanted, wanted[:-1])  # a last step that may emit one token is plain
    assert max(widths[1:]) > 1 + 4


def test_masks_never_enter_the_cache() -> None:
    """After any step the assistant's cache holds the text alone: as many tokens, with the keys of a plain forward."""
    model, assistant = attached("llama"), pard_assistant("llama", noise=0.05)
    drafter, sessions = PardDrafter(assistant), []
    start = drafter.start
    drafter.start = lambda *given: sessions.append(start(*given)) or sessions[0]  # type: ignore[method-assign, func-returns-value]
    model.add_drafter(drafter)
    ids = prompts(1)[0]
    text = generate(model, speculative=CHAIN)
    cache = sessions[0]._readers[0]._target.cache
    length = cache.lengths[0]
    assert ids.shape[1] < length < text.shape[1]
    wanted = DynamicCache(config=assistant.config)
    with torch.no_grad():
        assistant(input_ids=text[:, :length], **{CACHE_FIELD: wanted})
    for layer, expected in zip(cache.layers, wanted.layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, :length], expected.keys, atol=1e-4, rtol=1e-3)


def test_a_draft_can_be_repeated_without_new_text() -> None:
    """As after a step whose tree came from another drafter and that kept nothing in some rows."""
    model, assistant = attached("llama"), pard_assistant("llama")
    drafts = []

    class Twice(PardDrafter):
        def start(self, *given: Any) -> Any:
            session: Any = super().start(*given)
            propose = session.propose

            def again(budget: Budget) -> Any:
                drafts.append((propose(budget), propose(budget)))
                return drafts[-1][1]

            session.propose = again
            return session

    model.add_drafter(Twice(assistant))
    for config in (CHAIN, TREE):
        assert torch.equal(generate(model, 3), generate(model, 3, speculative=config))
    for first, second in drafts:
        assert torch.equal(first.tree.tokens, second.tree.tokens)
        torch.testing.assert_close(first.log_probs, second.log_probs, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
def test_the_mask_token_is_never_drafted() -> None:
    model, assistant = attached("llama"), pard_assistant("llama")
    with torch.no_grad():
        assistant.lm_head.weight[MASK] *= 100
        ids = prompts(1)[0]
        assert MASK in assistant(input_ids=ids).logits.argmax(-1)
    drafter = model.add_drafter(SpiedPard(assistant))
    plain = generate(model, 3)
    for config in (CHAIN, TREE, {**TREE, "top_k": zoo.VOCAB_SIZE, "num_draft_tokens": 400}):
        assert torch.equal(plain, generate(model, 3, speculative=config))
    assert max(draft.tree.num_nodes for _, draft in drafter.seen) == 400
    for _, draft in drafter.seen:
        assert MASK not in draft.tree.tokens[:, 1:]
        assert draft.log_probs is not None
        assert draft.log_probs.isfinite().all()


def test_tokens_that_the_target_does_not_know_are_never_drafted() -> None:
    """The mask may be one of them."""
    config = copy.deepcopy(zoo.build("llama").config)
    config.vocab_size, config.ptd_token_id = zoo.VOCAB_SIZE + 32, zoo.VOCAB_SIZE + 7
    assistant = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        assistant.lm_head.weight[zoo.VOCAB_SIZE :] *= 100
    model = attached("llama")
    drafter = model.add_drafter(SpiedPard(assistant))
    assert torch.equal(generate(model, 3), generate(model, 3, speculative="pard"))
    assert all(int(draft.tree.tokens.max()) < zoo.VOCAB_SIZE for _, draft in drafter.seen)


# ------------------------------------------------------------------------------------------------- the answers


# ------------------------------------------------------------------------------------------------- the authors' loop


@pytest.mark.slow
@pytest.mark.skipif(ORIGINAL is None, reason="PARD_REPOSITORY names no checkout of AMD-AGI/PARD")
def test_chains_are_those_of_the_authors(tmp_path: Path) -> None:
    """From their second draft on: the first is made before the target has emitted a token, as ours is not."""
    script = Path(__file__).parent / "engines" / "pard_chains.py"
    python = os.environ.get("PARD_PYTHON", sys.executable)
    done = subprocess.run([python, script, str(ORIGINAL), tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "chains.json").read_text())
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    model: Any = SpeculativeGenerationMixin.attach(target)
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    assert assistant.config.pard_token == found["mask"]
    drafter = model.add_drafter(SpiedPard(assistant))
    config = {"method": "pard", "num_steps": found["draft_k"]}
    for run in found["runs"]:
        read = [step["read"] for step in run["steps"]]
        prompt, text = [*read[0], *read[1][:-1]], list(itertools.chain(*read))
        assert run["steps"][0]["drafts"] == reference(assistant, read[0], 5, found["mask"]).argmax(-1).tolist()
        drafter.seen.clear()
        model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=min(len(text) - len(prompt), NEW_TOKENS), speculative=config,
        )  # fmt: skip
        assert len(drafter.seen) > 5
        assert max(map(len, read[1:])) > 1
        known = read[0]
        for ((seen,), draft), step in zip(drafter.seen, run["steps"][1:], strict=False):
            known = known + step["read"]
            assert seen == known
            assert draft.tree.tokens[0, 1:].tolist() == step["drafts"]


# ------------------------------------------------------------------------------------------------- fitting


def test_assistants_that_do_not_fit() -> None:
    model = attached("llama")
    with pytest.raises(DrafterMismatchError, match=r"names no mask token \(pard_token or ptd_token_id\)"):
        model.add_drafter(PardDrafter(noisy("llama")))
    for token in (96, -1, True, 1.5, "95", [95]):
        assistant = pard_assistant("llama")
        assistant.config.pard_token = token
        with pytest.raises(DrafterMismatchError, match="which is not one of the 96 ids that the model embeds"):
            model.add_drafter(PardDrafter(assistant))
    with pytest.raises(UnsupportedModelError, match=r"cannot draft in one forward.*position_ids.*draft_model"):
        model.add_drafter(PardDrafter(pard_assistant("bloom")))
    small = pard_assistant("llama")
    small.resize_token_embeddings(64)
    small.config.pard_token = 63
    large = noisy("llama")
    large.resize_token_embeddings(1089)
    with pytest.raises(DrafterMismatchError, match="1024 are missing: the assistant of 'pard' has another tokenizer"):
        SpeculativeGenerationMixin.attach(large).add_drafter(PardDrafter(small))
    for fields in ({"spd_type": "pard2"}, {"pard2": True}):
        assistant = pard_assistant("llama")
        for name, value in fields.items():
            setattr(assistant.config, name, value)
        with pytest.raises(UnsupportedModelError, match=r"is a PARD-2 assistant.*target_proj.*pickle.*draft_model"):
            model.add_drafter(PardDrafter(assistant))
    assert model.drafters == {}
    with pytest.raises(DrafterMismatchError, match=r"needs a PARD assistant model, .* First pass assistant_model="):
        generate(model, speculative="pard")


def test_an_assistant_that_has_changed_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask token is read in every call, and it is probed again."""
    model, assistant = attached("llama"), pard_assistant("llama")
    drafter = model.add_drafter(SpiedPard(assistant))
    assistant.config.pard_token = 7
    assert torch.equal(generate(model), generate(model, speculative=CHAIN))
    for texts, draft in drafter.seen:
        assert draft.tree.tokens[0, 1:].tolist() == reference(assistant, texts[0] or [], 5, mask=7).argmax(-1).tolist()
    monkeypatch.setattr(type(drafter.facts), "supports_trees", False)
    with pytest.raises(UnsupportedModelError, match="cannot draft in one forward"):
        drafter._check_trees()


# ------------------------------------------------------------------------------------------ assistant_model=


def method_of(model: Any) -> list[str]:
    """The methods that drafted in the last call."""
    stats = model.last_speculation
    return [*stats.control.get("queries", ()), stats.method]


@pytest.mark.slow
def test_the_assistant_of_a_call() -> None:
    """A mask token in its config chooses the method that the call leaves open."""
    model, assistant = attached("llama"), pard_assistant("llama", 0.02)
    plain = generate(model, 3)
    both = {"method": "hybrid", "methods": ["pard", "draft_model"]}
    for speculative, used in (
        ("pard", {"pard"}), (TREE, {"pard"}), ("auto", {"pard"}), ("hybrid", {"pard"}),
        ("draft_model", {"draft_model"}), (both, {"pard", "draft_model"}),
        ({"method": "auto", "methods": ["draft_model", "prompt_lookup"]}, {"draft_model"}),
    ):  # fmt: skip
        assert torch.equal(plain, generate(model, 3, speculative=speculative, assistant_model=assistant))
        assert {"pard", "draft_model"} & set(method_of(model)) == used, speculative
    made = model.__dict__["_speculation"].made
    first = made["pard"]
    generate(model, speculative="pard", assistant_model=assistant)
    generate(model, do_sample=True, speculative="pard", assistant_model=assistant)
    assert made["pard"] is first
    assert not first.sample
    assert model.drafters == {}
    other = noisy("llama")
    assert torch.equal(plain, generate(model, 3, speculative="auto", assistant_model=other))
    assert "draft_model" in method_of(model)
    with pytest.raises(DrafterMismatchError, match="names no mask token"):
        generate(model, speculative="pard", assistant_model=other)
    with pytest.raises(UnsupportedGenerationError, match=r"no effect.*'draft_model', 'pard', 'hybrid' or 'auto'"):
        generate(model, speculative="prompt_lookup", assistant_model=assistant)
    other.config.pard_token, other.config.spd_type = MASK, "pard2"
    assert torch.equal(plain, generate(model, 3, speculative="auto", assistant_model=other))
    assert "pard" not in method_of(model)
    with pytest.raises(UnsupportedModelError, match="is a PARD-2 assistant"):
        generate(model, speculative="pard", assistant_model=other)


# ------------------------------------------------------------------------------------------ load_drafter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pard_assistant("llama", noise=0.1).save_pretrained(tmp_path / "pard")
    return tmp_path / "pard"


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def test_loaded_from_a_directory(folder: Path, tmp_path: Path) -> None:
    model = attached("llama")
    drafter = model.load_drafter(folder)
    assert list(model.drafters) == ["pard"]
    assert drafter.assistant.dtype == torch.float32
    assert drafter.assistant.name_or_path == drafter.assistant.config.name_or_path == str(folder)
    assert not drafter.assistant.training
    assert torch.equal(generate(model, 3), generate(model, 3, speculative="pard"))
    assert model.last_speculation.num_drafted_tokens > 0
    half = model.load_drafter(folder.parent, subfolder="pard", name="half", dtype=torch.bfloat16, device="cpu")
    assert half.assistant.dtype == torch.bfloat16
    assert torch.equal(generate(model), generate(model, speculative="half"))
    edit(folder, pard_token=None, ptd_token_id=5)
    assert model.load_drafter(folder, name="other").mask_token == 5
    zoo.build("llama").save_pretrained(tmp_path / "target")
    both = AutoSpeculativeModelForCausalLM.from_pretrained(tmp_path / "target", drafter=folder, dtype=torch.float32)
    assert list(both.drafters) == ["pard"]
    assert torch.equal(generate(model), generate(both, speculative="auto"))


def test_refused_by_name(folder: Path) -> None:
    model = attached("llama")
    with pytest.raises(CheckpointFormatError, match=r"is a PARD assistant, a whole language model.*load_drafter"):
        load_head(folder)
    with pytest.raises(InvalidConfigError, match="which has no `hot_tokens`"):
        model.load_drafter(folder, hot_tokens=torch.tensor([1]))
    with pytest.raises(InvalidConfigError, match=r"`reading` is given, but .* is a PARD assistant"):
        model.load_drafter(folder, reading={"layer_offset": 0})
    edit(folder, attn_implementation="org/kernels")
    with pytest.raises(CheckpointFormatError, match="loads code from another repository"):
        model.load_drafter(folder)
    edit(folder, attn_implementation=None, model_type="unheard of")
    with pytest.raises(CheckpointFormatError, match=r"The PARD assistant .* cannot be loaded"):
        model.load_drafter(folder)
    edit(folder, model_type="llama", auto_map={"AutoModelForCausalLM": "remote.Code"})
    assert model.load_drafter(folder).method == "pard"  # transformers' own class; the code is not run
    for fields in ({"spd_type": "pard2"}, {"pard2": True, "pard_token": None}):
        edit(folder, **{"spd_type": None, **fields})
        for load in (model.load_drafter, load_head):
            with pytest.raises(CheckpointFormatError, match=r"is a PARD-2 assistant.*warp_model.bin.*draft_model"):
                load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pard_token": None}, "not a head in a known layout"),
        ({"pard_token": None, "ptd_token_id": 5, "parallel_drafting": True}, "is a whole model .*, not a head"),
        ({"architectures": ["PEagleDraftModel"]}, "not a head in a known layout"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True}, "not a head in a known layout"),
    ],
)
def test_other_checkpoints_are_refused_as_heads_are(fields: dict[str, Any], message: str, folder: Path) -> None:
    edit(folder, **fields)
    with pytest.raises(CheckpointFormatError, match=message):
        attached("llama").load_drafter(folder)


def test_weights_that_cannot_be_read(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointFormatError, match="cannot be read"):
        attached("llama").load_drafter(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointFormatError, match="There are no weights"):
        attached("llama").load_drafter(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**6}, "`num_hidden_layers` is 1000000, expected at most 512"),
        ({"num_hidden_layers": 500}, "its config describes"),
        ({"hidden_size": 2**40}, "`hidden_size` is"),
        ({"head_dim": 2**30}, "`head_dim` is"),
        ({"vocab_size": 2**30}, "its config describes"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10**400}}, "`rope_theta` is"),
        ({"intermediate_size": 8}, "missing or have wrong shapes: model.layers.0.mlp"),
        ({"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global"], 10**9]]}, "`attention_types` is"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is a quantised assistant"),
    ],
)
def test_a_config_is_not_believed(fields: dict[str, Any], message: str, folder: Path) -> None:
    edit(folder, **fields)
    with pytest.raises(CheckpointFormatError, match=message):
        attached("llama").load_drafter(folder)


def test_files_are_read_like_those_of_a_head(folder: Path, tmp_path: Path) -> None:
    """By our readers: from any file inside the directory, with all tensors, finite, and without running a pickle."""
    weights, bin_file = folder / "model.safetensors", folder / "pytorch_model.bin"
    model, tensors = attached("llama"), load_file(weights)

    def refused(message: str) -> None:
        with pytest.raises(CheckpointFormatError, match=message):
            model.load_drafter(folder, name="refused")

    outside = weights.rename(tmp_path / "outside.safetensors")
    weights.symlink_to(outside)
    refused("link to a file outside its directory")
    weights.unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "../outside.safetensors")}))
    refused("expected a weight file in its directory")
    index.unlink()
    bin_file.write_bytes(pickle.dumps(Running(str(tmp_path / "ran"))))
    refused("cannot be read as tensors")
    assert not (tmp_path / "ran").exists()
    torch.save(tensors, bin_file)
    drafter = model.load_drafter(folder)
    assert all(torch.equal(drafter.assistant.state_dict()[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(generate(model), generate(model, speculative="pard"))
    bin_file.unlink()
    save_file({name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name} | {
        "more": torch.zeros(10**5)}, weights)  # fmt: skip
    refused("tensors are missing or have wrong shapes")
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] * float("nan")}, weights)
    refused("not finite")


class Running:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)
