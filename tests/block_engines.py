"""Compare block heads that their authors' classes saved with ours: block logits, chains, trees, and whole answers.

The files come from the scripts in `tests/engines`, see `test_engines.py`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_specdec import Budget, DFlashHead, SpeculativeGenerationMixin, load_head
from hf_specdec.drafters.dflash import BlockOutputs, DFlashDrafter, grow_block
from hf_specdec.heads.stages import stages_of
from hf_specdec.trees.growth import reachable
from hf_specdec.verification.cache import TreeCache

Tensors = dict[str, Tensor]
PYTHON = os.environ.get("SPECULATORS_PYTHON")


def run_script(name: str, *arguments: Path) -> None:
    """Run a script of `tests/engines` with the Python that has speculators."""
    script = Path(__file__).parent / "engines" / name
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(PYTHON), script, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


class Block:
    """A head with a cache, which drafts behind a growing context without the rest of the package.

    Args:
        head: The head.
        embedding, lm_head: Of the target.
    """

    def __init__(self, head: DFlashHead, embedding: Any, lm_head: Any) -> None:
        self.head = head
        self._embedding = embedding
        self._lm_head = lm_head if head.shares_lm_head else None
        self._cache: TreeCache = head.new_cache(64)
        self._length = self._next = 0  # tokens, and the position of the next one

    def append(self, features: Tensor, places: list[int] | None = None) -> None:
        """Append the features `[1, T, n * D]` of committed tokens, at the next positions or others."""
        count = features.shape[1]
        positions = torch.tensor([places or range(self._next, self._next + count)])
        self._next = int(positions[0, -1]) + 1
        fused = self.head.fuse(features)
        self._context = fused[:, -1]
        for layer, states in enumerate(self.head.context_states(fused, positions)):
            self._cache.update(*states, layer)
        self._length += count
        self._cache.commit([range(count)])

    def outputs(self, root: int, size: int | None = None) -> BlockOutputs:
        """Return the outputs of a block behind a root; `size` slots, by default as many as in training."""
        config, size = self.head.config, size or self.head.config.block_size
        tokens = torch.full((1, size), config.mask_token_id)
        tokens[0, 0] = root
        positions = self._next + torch.arange(size)[None]
        distance = torch.arange(size)[:, None] - torch.arange(size)
        masks = []
        for window in self.head.layer_windows:
            causal = config.causal if window is None else config.sliding_causal
            block = distance >= 0 if causal else torch.ones(size, size, dtype=torch.bool)
            seen = torch.ones(size, self._length, dtype=torch.bool)
            if window is not None and config.window_from_anchor:
                seen = seen & (torch.arange(self._length) >= self._length - window)
            elif window is not None:
                seen = self._length + torch.arange(size)[:, None] - torch.arange(self._length) < window
                block = block & (distance.abs() < window)
            masks.append(torch.cat([seen, block], dim=-1)[None, None])

        def embed(tokens: Tensor) -> Tensor:
            embedding = self.head.embed_tokens if config.own_embedding else self._embedding
            embedded: Tensor = embedding(tokens) * (config.input_embedding_scale or 1.0)
            return embedded

        slots = self.head.read(embed(tokens), positions, self._cache, masks)
        self._cache.rollback()
        stages = stages_of(self.head, self._lm_head)
        return BlockOutputs(self.head, stages, torch.tensor([root]), slots, embed, self._context)


def corrected(outputs: BlockOutputs, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the logits `[D, Vd]` of a chain with a Markov head's corrections, and its tokens `[D]`.

    Args:
        outputs: Of a block.
        previous: `[D]` the token before each predicted one; None for the root and the likeliest tokens.
    """
    token, state, rows, chain = outputs.roots[:, None], outputs.start(), [], []
    for depth in range(outputs.hidden.shape[1]):
        if previous is not None:
            token = previous[depth].view(1, 1)
        logits = outputs.logits[:, depth]
        if outputs.head.config.num_candidates:
            level = outputs.children(token, state, depth, outputs.head.config.num_candidates)
            rows.append(level.log_probs[0, 0])
            token = level.tokens[:, :, 0]
            chain.append(token[0, 0])
            continue
        if outputs.head.config.markov_rank:
            hidden = outputs.hidden[:, depth, None]
            correction, state = outputs.head.markov_head(token, hidden, state, outputs.embedding)
            if depth or outputs.head.config.markov_head_type != "domino":
                logits = logits + correction[:, 0]
        rows.append(logits[0])
        best = logits.argmax(-1)
        hot = outputs.head.hot_token_ids
        token = (best if hot is None else hot[best])[:, None]
        chain.append(token[0, 0])
    return torch.stack(rows), torch.stack(chain)


def close(actual: Tensor, expected: Tensor) -> None:
    """Assert equality up to float32 rounding, relative to the size of the logits."""
    torch.testing.assert_close(
        actual, expected, atol=1e-5 * max(1.0, float(expected.abs().amax()) if expected.numel() else 0.0), rtol=1e-5
    )


def compare_drafts(folder: Path, target: Any, whole_context: bool = False) -> int:
    """Compare the first two drafts and the answers of every head in a folder; return the number of heads.

    Args:
        folder: Heads, and a `.safetensors` file with the authors' results for each.
        target: The target, attached.
        whole_context: Whether the features of the second draft are those of all tokens, not only the new ones.
    """
    count = 0
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            continue
        head, stored = load_head(path), load_file(path.with_suffix(".safetensors"))
        assert isinstance(head, DFlashHead)
        if "shift" in stored and bool(stored["shift"]):  # an option of JetSpec's drafter, which no file names
            head.config.sample_from_anchor = True
        head.check_sizes(target.config)
        block = Block(head.float(), target.get_input_embeddings(), target.get_output_embeddings())
        block.append(stored["features"])
        _compare_draft(block, int(stored["root"]), stored, "")
        features = stored["features_2"]
        block.append(features[:, stored["features"].shape[1] :] if whole_context else features)
        _compare_draft(block, int(stored["kept"][-1]), stored, "_2")
        _compare_answer(head, target, stored)
        count += 1
    return count


def _compare_draft(block: Block, root: int, stored: Tensors, which: str) -> None:
    outputs, expected = block.outputs(root), stored["logits" + which][0]
    logits, chain = corrected(outputs)
    close(logits[: len(expected)], expected)
    assert chain[: len(expected)].tolist() == stored["chain" + which][0].tolist()
    if "base_logits" + which in stored:
        close(outputs.logits[0], stored["base_logits" + which][0])
    if "confidence" + which in stored:
        previous = torch.cat([outputs.roots, chain[:-1]])
        close(block.head.confidence(outputs.hidden[0], previous), stored["confidence" + which][0])
    for name in stored if not which else ():
        if name.startswith("tree_") and name.endswith("_parents"):
            _, width, budget, _ = name.split("_")
            shape = reachable(Budget(int(budget), len(expected), int(width)))
            tree = grow_block(outputs, shape).tree
            assert tree.tokens[0].tolist() == stored[f"tree_{width}_{budget}_tokens"].tolist()
            assert tree.parents.expand(tree.tokens.shape)[0].tolist() == stored[name].tolist()


def _compare_answer(head: DFlashHead, target: Any, stored: Tensors) -> None:
    """Compare greedy answers and the accepted tokens of every step with the authors' loop, which drafts chains."""
    if "lengths" not in stored:
        return
    prompt, lengths = stored["input_ids"], stored["lengths"].tolist()
    new = stored["generated"].shape[1] - prompt.shape[1]
    target.add_drafter(DFlashDrafter(head), "block")
    generated = target.generate(
        prompt, max_new_tokens=new, do_sample=False,
        speculative={"method": "block", "top_k": 1, "tree": "dynamic", "adaptive": False, "trace": True},
    )  # fmt: skip
    assert generated.tolist() == stored["generated"].tolist()
    kept = [len(step.rows[0].emitted) for step in target.last_speculation.trace]
    assert kept[:-1] == lengths[: len(kept) - 1]  # the authors may emit more tokens than asked for in the last step


def compare_speculators(folder: Path, target: Any) -> int:
    """Compare block logits behind several anchors with the training forward of speculators; count heads."""
    count = 0
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            continue
        head, stored = load_head(path), load_file(path.with_suffix(".safetensors"))
        assert isinstance(head, DFlashHead)
        for row, anchor in enumerate(stored["anchors"].tolist()):
            block = Block(head.float(), target.get_input_embeddings(), target.get_output_embeddings())
            block.append(stored["features"][:, :anchor])
            outputs = block.outputs(int(stored["input_ids"][0, anchor]))
            first = 0 if head.config.sample_from_anchor else 1
            close(outputs.slots[0], stored["hidden"][row])
            base = stored.get("base_logits", stored["logits"])
            close(outputs.logits[0], base[row, first:])
            previous = stored["previous"][row, first:] if "previous" in stored else None
            close(corrected(outputs, previous)[0], stored["logits"][row, first:])
            if "confidence" in stored:
                tokens = torch.zeros(len(outputs.hidden[0]), dtype=torch.long) if previous is None else previous
                close(head.confidence(outputs.hidden[0], tokens), stored["confidence"][row, first:])
        count += 1
    return count


def attached(target: Any) -> Any:
    """Return the target with `generate(speculative=...)`."""
    return SpeculativeGenerationMixin.attach(target.eval())
