"""What speculative decoding does, without speed, on a plain transformers model: read it from top to bottom.

    python examples/reference.py MODEL "The cat sat on the mat. The dog sat on the mat. The"

A *tree* of guesses is drafted below the last token (the *root*); one forward of the model verifies all of it; an
acceptance rule keeps the longest path that the model agrees with; the cache keeps that path's entries. The answer is
the model's own: token by token if greedy, in distribution if sampled. The test suite compares it with the package.
Expected output: the answer, and `40 tokens in ... forwards`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel


@dataclass
class Tree:
    """Guesses below the root. Node 0 is the root; parents come before their children."""

    tokens: list[int]  # token of each node
    parents: list[int] = field(default_factory=lambda: [-1])  # index of each node's parent; -1 for the root
    # distribution [V] from which the children of a node were drawn, without replacement; no entry: not drawn
    draft_probs: dict[int, Tensor] = field(default_factory=dict)

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to a node."""
        return [*(self.path(self.parents[node]) if node else []), node]

    def add(self, parent: int, token: int) -> int:
        """Add a child, unless there is one with this token, and return its node."""
        for child in self.children(parent):
            if self.tokens[child] == token:
                return child
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1


def draft_by_lookup(text: list[int], ngram: int = 2, length: int = 5, most: int = 3) -> Tree:
    """Guess that the text goes on as it did where its last tokens occurred before; the latest places come first."""
    tree = Tree([text[-1]])
    places = [end for end in range(len(text) - 1, ngram - 1, -1) if text[end - ngram : end] == text[-ngram:]]
    for place in places[:most]:
        node = 0
        for token in text[place : place + length]:
            node = tree.add(node, token)
    return tree


def draft_by_model(model: PreTrainedModel, text: list[int], temperature: float, widths: tuple[int, ...]) -> Tree:
    """Draw guesses from a smaller model: `widths[d]` children for every node at depth d."""
    tree, level = Tree([text[-1]]), [0]
    for width in widths:
        expanded, level = level, []
        for node in expanded:
            guessed = [tree.tokens[index] for index in tree.path(node)[1:]]
            logits = model(input_ids=torch.tensor([text + guessed])).logits[0, -1]
            tree.draft_probs[node] = distribution(logits, temperature)
            drawn = torch.multinomial(tree.draft_probs[node], width, replacement=False)
            level += [tree.add(node, token) for token in drawn.tolist()]
    return tree


def verify(model: PreTrainedModel, tree: Tree, cache: DynamicCache) -> Tensor:
    """Run the whole tree through the model in one forward; return the logits `[N, V]` after each node.

    A node sees the text and the nodes on its path; its position is the one that it would have in the text.
    """
    length, paths = cache.get_seq_length(), [tree.path(node) for node in range(len(tree.tokens))]
    visible = torch.zeros(1, 1, len(paths), length + len(paths), dtype=torch.bool)
    visible[..., :length] = True
    for node, path in enumerate(paths):
        visible[0, 0, node, [length + index for index in path]] = True
    positions = torch.tensor([[length + len(path) - 1 for path in paths]])
    tokens = torch.tensor([tree.tokens])
    return model(tokens, visible, positions, cache).logits[0]


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """The probabilities `[V]` of the next token; greedy decoding (0) is certain of the likeliest."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    return (logits.float() / temperature).softmax(-1)


def accept(tree: Tree, logits: Tensor, temperature: float) -> tuple[list[int], int]:
    """Walk down from the root; return the nodes on the way, and the token after the last one.

    A child x drawn from q (1 for a guess that was not drawn) is accepted with probability min(1, p(x) / q(x)). Else p,
    the model's distribution, becomes the positive part of p - q, normalised, for the next child; after the last one
    the token is drawn from it. Together this is a draw from p: SpecInfer, https://arxiv.org/abs/2305.09781.
    """
    path = [0]
    while True:
        target, drawn_from = distribution(logits[path[-1]], temperature), tree.draft_probs.get(path[-1])
        for child in tree.children(path[-1]):
            token = tree.tokens[child]
            draft = torch.nn.functional.one_hot(torch.tensor(token), len(target)).float()
            if drawn_from is not None:
                draft = drawn_from / drawn_from.sum()
                drawn_from = drawn_from.index_fill(0, torch.tensor(token), 0)  # drawn without replacement
            if torch.rand(()) * draft[token] < target[token]:
                path.append(child)
                break
            left = (target - draft).clamp(min=0)
            target = left / left.sum() if left.sum() > 0 else target
        else:
            return path, int(torch.multinomial(target, 1))


def commit(cache: DynamicCache, length: int, path: list[int]) -> None:
    """Keep the entries of the text, `length` of them, and those of the path."""
    kept = torch.tensor([*range(length), *(length + node for node in path)])
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]


@torch.no_grad()
def generate(
    model: PreTrainedModel, prompt: list[int], count: int, draft: Callable[[list[int]], Tree], temperature: float = 0.0
) -> tuple[list[int], list[int]]:
    """Return `count` new tokens, and how many of them each forward gave; `draft` gets the text so far."""
    cache = DynamicCache()
    logits = model(torch.tensor([prompt]), None, None, cache).logits[0, -1]
    text, emitted = [*prompt, int(torch.multinomial(distribution(logits, temperature), 1))], [1]
    while len(text) < len(prompt) + count:
        tree, length = draft(text), len(text) - 1  # the root is in the text, but not yet in the cache
        path, token = accept(tree, verify(model, tree, cache), temperature)
        commit(cache, length, path)
        text += [*(tree.tokens[node] for node in path[1:]), token]
        emitted.append(len(path))
    return text[len(prompt) : len(prompt) + count], emitted


def main() -> None:
    model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
    tokens, emitted = generate(model, tokenizer(sys.argv[2]).input_ids, 40, draft_by_lookup)
    print(tokenizer.decode(tokens))
    print(f"{len(tokens)} tokens in {len(emitted)} forwards")


if __name__ == "__main__":
    main()
