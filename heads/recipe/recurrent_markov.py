"""Make the Markov head of a block head recurrent: type `rnn` and a higher rank instead of `vanilla`.

    python heads/recipe/recurrent_markov.py HEAD NEW --rank 64

A `vanilla` head corrects the logits for the previous token alone; an `rnn` head also for the slot's output and for the
tokens before. The new head drafts the same at first. The numbers of the old one pass through a tanh, so they are
scaled down and their output weights up. The added numbers read principal components of the target's embeddings and the
slot's output; their output weights start at 0. Train NEW with `hf-specdec train dflash --initial-head NEW`.
"""

import argparse
from pathlib import Path

import torch

from hf_specdec.generation import loading
from hf_specdec.heads.dflash import DFlashConfig, DFlashHead

LARGEST = 0.25
"""Size of the old numbers before the tanh (99 of 100 are smaller), whose error is then below 2 %."""
GAIN = 0.5
"""Standard deviation of the added numbers before the tanh from each of their inputs."""


def with_recurrent_markov(head, embeddings, rank):
    """Return a head in float32 whose Markov head is recurrent.

    Args:
        head: `DFlashHead` with a `vanilla` Markov head of a rank below `rank`.
        embeddings: `[V, D]` the target's token embeddings.
        rank: The new rank.
    """
    config, old_rank = head.config.to_dict(), head.config.markov_rank
    new = DFlashHead(DFlashConfig(**{**config, "markov_rank": rank, "markov_head_type": "rnn"})).float()
    kept = {name: weight for name, weight in head.state_dict().items() if not name.startswith("markov_head.")}
    new.load_state_dict(kept, strict=False)
    old, markov, added = head.markov_head, new.markov_head, rank - old_rank
    old_embeddings = old.markov_w1.weight.float()
    sample = old_embeddings.flatten()[:: max(old_embeddings.numel() // 1_000_000, 1)]
    scale = LARGEST / sample.abs().quantile(0.99)
    centred = embeddings.float() - embeddings.float().mean(0)
    components = centred @ torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :added]
    markov.markov_w1.weight.copy_(torch.cat([scale * old_embeddings, components / components.std(0)], dim=1))
    markov.markov_w2.weight.zero_()[:, :old_rank] = old.markov_w2.weight / scale
    size = config["hidden_size"]
    slot_gain = GAIN / size**0.5 / float(head.norm.weight.float().square().mean().sqrt())
    markov.joint_proj.bias.zero_()
    _, candidate, output = markov.joint_proj.weight.zero_().chunk(3)  # inputs: state, embedding, the slot's output
    output[:old_rank, rank : rank + old_rank] = torch.eye(old_rank)
    output[old_rank:, rank + old_rank : 2 * rank] = torch.randn(added, added) * GAIN / added**0.5
    output[old_rank:, 2 * rank :] = torch.randn(added, size) * slot_gain
    candidate[:, rank + old_rank : 2 * rank] = torch.randn(rank, added) * GAIN / added**0.5
    candidate[:, 2 * rank :] = torch.randn(rank, size) * slot_gain
    return new


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", help="the head's target; default: the packaged model")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    head = DFlashHead.from_pretrained(options.head)
    if head.config.markov_head_type != "vanilla" or not 0 < head.config.markov_rank < options.rank:
        parser.error(f"the head must have a vanilla Markov head of a rank below {options.rank}")
    if options.output.exists():
        parser.error(f"{options.output} exists")
    model, _ = loading.load_model(options.model, None, torch.bfloat16)
    torch.manual_seed(options.seed)
    new = with_recurrent_markov(head, model.get_input_embeddings().weight, options.rank)
    new.save_pretrained(options.output)
    print(f"{options.output}: {sum(weight.numel() for weight in new.parameters()) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
