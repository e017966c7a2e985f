"""Reduce the rank of the recurrent Markov head of a block head, to make its file smaller; train it again afterwards.

    python heads/recipe/narrow_markov.py HEAD NEW --rank 32

The table of token embeddings has rank x vocabulary numbers, most of a Markov head. Kept are the output numbers from
which the corrections of random tokens and slots can be predicted best, and the state numbers that the others depend on
most. The embeddings are projected so that the kept gates change least.
"""

import argparse
from pathlib import Path

import torch

from hf_specdec.heads.dflash import DFlashConfig, DFlashHead

SAMPLES, COMMON = 20_000, 2_000
"""Pairs of tokens in the sample, and the number of most frequent draft tokens from which they are drawn."""
RIDGE = 1e-6


def sample(head):
    """Return output numbers `[2N, r]` of the Markov head after one and two random tokens, and its states `[N, r]`."""
    markov, size = head.markov_head, head.config.hidden_size
    known = torch.arange(head.config.vocab_size) if head.hot_token_ids is None else head.hot_token_ids
    state, outputs, states = markov.start(SAMPLES), [], []
    for _ in range(2):
        tokens = known[torch.randint(min(len(known), COMMON), (SAMPLES,))]
        numbers, state = markov.mix(tokens, torch.randn(SAMPLES, size) * head.norm.weight, state)
        outputs.append(numbers)
        states.append(state)
    return torch.cat(outputs), states[0]


def best_outputs(outputs, weight, rank):
    """Choose `rank` output numbers, one by one; return them and the weights `[Vd, rank]` of the best prediction."""
    moments, products = outputs.T @ outputs / len(outputs), weight.T @ weight
    chosen = []
    for _ in range(rank):
        gains = {}
        for candidate in set(range(len(moments))) - set(chosen):
            some = [*chosen, candidate]
            square = moments[some][:, some] + RIDGE * torch.eye(len(some))
            gains[candidate] = torch.trace(products @ moments[:, some] @ torch.linalg.solve(square, moments[some]))
        chosen.append(max(gains, key=gains.get))
    square = moments[chosen][:, chosen] + RIDGE * torch.eye(rank)
    return chosen, weight @ torch.linalg.solve(square, moments[chosen]).T


def with_rank(head, rank):
    """Return a head in float32 with a recurrent Markov head of a lower rank."""
    old, wide = head.markov_head, head.config.markov_rank
    gates, embeddings = old.joint_proj.weight, old.markov_w1.weight
    outputs, states = sample(head)
    chosen, output_weight = best_outputs(outputs, old.markov_w2.weight, rank)
    kept = ((gates[:, :wide].norm(dim=0)) * states.std(0)).topk(rank).indices.sort().values.tolist()
    rows = [*kept, *(wide + number for number in kept), *(2 * wide + number for number in chosen)]
    known = embeddings if head.hot_token_ids is None else embeddings[head.hot_token_ids]
    factor = torch.linalg.cholesky(known.T @ known / len(known) + RIDGE * torch.eye(wide))
    left, values, right = torch.linalg.svd(gates[rows, wide : 2 * wide] @ factor, full_matrices=False)
    projection = right[:rank] @ torch.linalg.inv(factor)
    new = DFlashHead(DFlashConfig(**{**head.config.to_dict(), "markov_rank": rank})).float()
    same = {name: weight for name, weight in head.state_dict().items() if not name.startswith("markov_head.")}
    new.load_state_dict(same, strict=False)
    markov = new.markov_head
    markov.markov_w1.weight.copy_(embeddings @ projection.T)
    markov.markov_w2.weight.copy_(output_weight)
    parts = gates[rows][:, kept], left[:, :rank] * values[:rank], gates[rows, 2 * wide :]
    markov.joint_proj.weight.copy_(torch.cat(parts, dim=1))
    markov.joint_proj.bias.copy_(old.joint_proj.bias[rows])
    return new


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    head = DFlashHead.from_pretrained(options.head, dtype=torch.float32)
    if head.config.markov_head_type != "rnn" or not 0 < options.rank < head.config.markov_rank:
        parser.error(f"the head must have a recurrent Markov head of a rank above {options.rank}, and that above 0")
    if options.output.exists():
        parser.error(f"{options.output} exists")
    torch.manual_seed(options.seed)
    new = with_rank(head, options.rank)
    new.save_pretrained(options.output)
    print(f"{options.output}: {sum(weight.numel() for weight in new.parameters()) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
