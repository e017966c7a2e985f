"""Compare trees over pairs of candidates with the greedy path through the same pairs: tokens per forward.

    python benchmarks/lattice.py --prompts benchmarks/unseen_prompts.jsonl

No DFlash2 head for SmolLM2 is published. The pairs are made from the shipped block head: its logits without
corrections give 16 candidates per depth, and its Markov head's correction for the token above the scores of pairs.
Greedy, batch size 1, the mean over questions of tokens per target forward, which needs no idle machine.
"""

import argparse
import statistics
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table

from hf_specdec import DFlashHead, bench, load_head
from hf_specdec.drafters.dflash import DFlashDrafter
from hf_specdec.generation import loading

CANDIDATES = 16


class OfEveryToken(DFlashHead):
    """A block head over the whole vocabulary, which never drafts the tokens outside of `kept`."""

    def score(self, hidden, lm_head=None):
        return super().score(hidden, lm_head) + self.unseen


def with_pairs(source):
    """Return a head with the shipped head's layers, and a candidate selector from its Markov head."""
    kept, rank, vocabulary = source.hot_token_ids, source.config.markov_rank, source.config.vocab_size
    config = type(source.config).from_dict({
        **source.config.to_dict(), "draft_vocab_size": None, "markov_rank": 0, "selector_rank": rank,
        "selector_top_k": CANDIDATES,
    })  # fmt: skip
    head = OfEveryToken(config).to(source.dtype)
    missing = head.load_state_dict(source.state_dict(), strict=False).missing_keys
    assert all(name.startswith("candidate_selector.") for name in missing), missing
    selector = head.candidate_selector
    with torch.no_grad():
        selector.predecessor_codebook.copy_(source.markov_head.markov_w1.weight)
        selector.successor_codebook[kept] = source.markov_head.markov_w2.weight
    selector.hidden_projection = Ones(rank)  # this Markov head does not read the block's output
    head.register_buffer("unseen", torch.full((vocabulary,), -1e4, dtype=source.dtype), persistent=False)
    head.unseen[kept] = 0.0
    return head


class Ones(torch.nn.Module):
    """Ones of a size in place of a projection."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, hidden):
        return torch.ones_like(hidden[..., :1]).expand(*hidden.shape[:-1], self.size)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-category", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32])
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    shipped = Path(__file__).parents[1] / "heads" / "smollm2-135m-instruct-dflash"
    model, tokenizer = loading.load_model(None, loading.default_head(None), torch.bfloat16)
    source = load_head(shipped)
    model.add_drafter(DFlashDrafter(with_pairs(source)), "pairs")
    model.add_drafter(DFlashDrafter(source), "markov")
    chain = {"method": "pairs", "top_k": 1}
    configs = {"greedy path through the pairs": chain}
    for method, name in (("pairs", "tree over the pairs"), ("markov", "tree of the Markov head")):
        configs |= {f"{name}, {nodes} nodes": {"method": method, "top_k": CANDIDATES, "num_draft_tokens": nodes}
                    for nodes in options.nodes}  # fmt: skip
    taus = {name: [] for name in configs}
    for question in bench.read_questions(options.prompts, per_category=options.per_category):
        inputs = loading.encode(tokenizer, question.turns[0], model.device)
        for name, config in configs.items():
            config = {"tree": "dynamic", "adaptive": False, **config}
            model.generate(**inputs, max_new_tokens=options.max_new_tokens, do_sample=False, speculative=config)
            taus[name].append(model.last_speculation.mean_accepted_length)
    table = Table("draft", "tokens per forward", "of the path's")
    base = statistics.mean(taus["greedy path through the pairs"])
    for name, values in taus.items():
        table.add_row(name, f"{statistics.mean(values):.3f}", f"{statistics.mean(values) / base:.2f}")
    Console().print(f"{len(taus[name])} questions, {options.max_new_tokens} tokens each", table)


if __name__ == "__main__":
    main()
