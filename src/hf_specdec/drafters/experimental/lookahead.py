"""Lookahead decoding: a window of guesses generates n-grams, and those that start with the last token are drafted.

Experimental because it gains less than n-grams of the text alone: 1.25x the speed of plain decoding on average over 12
questions, and slower on 3 of them (0.86x on the worst); `prompt_lookup` is at 1.67x (docs/benchmarks/history.md).

Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"
(https://arxiv.org/abs/2402.02057). The window has levels and columns of tokens that the model corrects in every step
(Jacobi iteration). It is verified as branches of the tree: in the paper, the token in level l and column i attends
to columns 0 to i of level 0 and to column i of levels 1 to l, which is a path from the root.
Differences: branches with equal prefixes share nodes; branches of the window can be accepted like any other draft; and
n-grams of the text itself are stored as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import NamedTuple

import torch
from torch import Tensor

from hf_specdec.config import SpeculativeConfig
from hf_specdec.drafters.base import SIZES, DraftContext, Drafter, DraftSession, DraftTarget
from hf_specdec.drafters.registry import register
from hf_specdec.errors import InvalidConfigError
from hf_specdec.host_sync import read, upload
from hf_specdec.trees.draft import Budget, Draft
from hf_specdec.trees.growth import PrefixTree
from hf_specdec.trees.tree import TokenTree, stack_trees
from hf_specdec.validation import require_integer
from hf_specdec.verification.step import Step

WINDOW_CHILDREN = 2
"""Children per node that the window needs: the next column of level 0, and level 1 of the same column."""


@register("lookahead")
class LookaheadDrafter(Drafter):
    """Drafts n-grams of the text and of a window of guesses. Works with any model; nothing is kept between calls.

    Experimental (1.25x, but slower on some questions, see docs/methods/experimental.md). Config fields:
    `num_draft_tokens` (default: enough for window and n-grams, 30), `num_steps` (default: depth of window and n-grams,
    6) and `top_k` (children per node, 2 of them for the window; default: `guesses + 2`). Drafted n-grams precede the
    window in the tree. The window has as many columns as fit together with one n-gram. It is left out if not even one
    column fits, `top_k` is less than 3 or the model cannot verify trees; then n-grams come from the text alone. `tree`
    is rejected.

    Args:
        window: Columns of the window; W in the paper.
        ngram: Tokens of an n-gram, including the token after which it is drafted; N in the paper.
        guesses: Maximum number of n-grams stored per token and drafted per step; G in the paper.
        reads_prompt: Also store n-grams of prompt and answer.

    Raises:
        InvalidConfigError: A size is not an integer or is too small (minimum 1; 2 for `ngram`).
    """

    accepts = SIZES
    tree_from = "its window and n-grams"

    def __init__(self, *, window: int = 5, ngram: int = 4, guesses: int = 5, reads_prompt: bool = True) -> None:
        for name, value, least in (("window", window, 1), ("ngram", ngram, 2), ("guesses", guesses, 1)):
            require_integer(name, value, least)
        self.window, self.ngram, self.guesses, self.reads_prompt = window, ngram, guesses, reads_prompt

    def __repr__(self) -> str:
        return f"LookaheadDrafter(window={self.window}, ngram={self.ngram}, guesses={self.guesses})"

    def limits(self, config: SpeculativeConfig) -> Budget:
        """Return the size of a tree that holds the window and the drafted n-grams."""
        length = self.ngram - 1
        everything = WindowShape(self.window, self.ngram)
        limits = Budget(
            config.num_draft_tokens or 1 + everything.num_nodes + self.guesses * length,
            config.num_steps or max(length, everything.depth),
            config.top_k or self.guesses + WINDOW_CHILDREN,
        )
        if not self.reads_prompt and self.window_within(limits) is None:
            least = WindowShape(1, self.ngram)
            raise InvalidConfigError(
                f"A window needs at least {1 + least.num_nodes + length} nodes, {max(length, least.depth)} steps and "
                f"top_k {WINDOW_CHILDREN + 1}, got {limits}.",
                "Increase these settings, or use LookaheadDrafter(reads_prompt=True).",
            )
        return limits

    def window_within(self, limits: Budget) -> WindowShape | None:
        """Return the largest window that fits together with one drafted n-gram; None if none fits."""
        shapes = (WindowShape(columns, self.ngram) for columns in range(self.window, 0, -1))
        return next((shape for shape in shapes if shape.fits(limits)), None)

    def start(self, target: DraftTarget, context: DraftContext, config: SpeculativeConfig) -> DraftSession:
        """Start a session; its windows are initialized with the last tokens of each row's prompt."""
        limits = self.limits(config)
        return _LookaheadSession(self, context, self.window_within(limits if target.supports_trees else limits.chain))


class WindowShape(NamedTuple):
    """Sizes of a window. It starts as level 0 alone; each step adds a level and removes a column until it is full."""

    columns: int  # W, of the full window
    ngram: int  # N; the full window has N - 1 levels

    @property
    def first_width(self) -> int:
        """Columns of a new window, which has one level; it loses a column for each level that is added."""
        return self.columns + self.ngram - 2

    @property
    def num_nodes(self) -> int:
        """Largest number of nodes that the window adds to the tree, while it grows or when it is full."""
        return max(levels * (self.columns + self.ngram - 1 - levels) for levels in range(1, self.ngram)) - 1

    @property
    def depth(self) -> int:
        """Depth of the deepest node (last level, last column); the same in every step."""
        return self.columns + self.ngram - 3

    def fits(self, budget: Budget) -> bool:
        """Return whether the window and one drafted n-gram fit in a budget."""
        return (
            budget.num_nodes >= 1 + self.num_nodes + self.ngram - 1
            and budget.num_steps >= self.depth
            and budget.top_k > WINDOW_CHILDREN
        )


class LookaheadRow:
    """Text, n-grams and window of one row, at first the prompt and the root; no window without a shape.

    Attributes:
        levels: `[levels][columns]` tokens of the window, which the model corrects in every step; column 0 of level 0
            stands for the root. The last tokens of the prompt, repeated as often as needed, are its first level.
        cells: Nodes of the window's last level in the last tree, one per column.
    """

    def __init__(self, drafter: LookaheadDrafter, text: list[int], shape: WindowShape | None) -> None:
        self._ngram, self._guesses, self._reads = drafter.ngram, drafter.guesses, drafter.reads_prompt
        self._after: dict[int, dict[tuple[int, ...], None]] = {}  # n-grams by first token, the oldest first
        self._tail: list[int] = []  # last tokens of the text: n-grams may start there
        self.cells = list[int]()
        self.levels: list[list[int]] = []
        if shape is not None:
            first = text[:-1][-shape.first_width :] or text
            self.levels = [list(islice(cycle(first), shape.first_width))]
        self.read(text)

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text and, unless the drafter ignores the text, store the new n-grams."""
        if not tokens:
            return
        self.root = tokens[-1]
        if self._reads:
            text, size = [*self._tail, *tokens], self._ngram
            self.store(tuple(text[begin : begin + size]) for begin in range(len(text) - size + 1))
            self._tail = text[max(len(text) - size + 1, 0) :]

    def store(self, ngrams: Iterable[tuple[int, ...]]) -> None:
        """Store n-grams; with each first token, only the latest `guesses` are kept."""
        for first, *rest in ngrams:
            kept = self._after.setdefault(first, {})
            kept.pop(tuple(rest), None)
            kept[tuple(rest)] = None
            if len(kept) > self._guesses:
                kept.pop(next(iter(kept)))

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return the stored continuations of a token, latest first."""
        return list(reversed(self._after.get(token, {})))

    def tree(self, budget: Budget, shape: WindowShape | None) -> PrefixTree:
        """Build a tree of the latest n-grams after the root and, if a shape is given, the window; update `cells`."""
        tree, self.cells = PrefixTree(self.root), []
        kept = budget.num_nodes - (shape.num_nodes if shape else 0)
        width = budget.top_k - (WINDOW_CHILDREN if shape else 0)
        for ngram in self.after(self.root)[:width]:
            tree.add(ngram[: budget.num_steps], kept)
        if shape:
            first, *below = self.levels
            nodes = [0]
            for token in first[1:]:
                nodes.append(tree.add([token], budget.num_nodes, nodes[-1]))
            for column, node in enumerate(nodes):
                self.cells.append(tree.add([level[column] for level in below], budget.num_nodes, node))
        return tree

    def advance(self, best: Sequence[int]) -> None:
        """Advance the window by one token and store the n-grams that this completes, none while it is growing.

        `best` are the model's choices after the last level, one per column.

        Example: two levels [., 2] and [3, 4] after root 1, with choices [5, 6], give 1-3-5 and 2-4-6, and the levels
        [., 4] and [5, 6].
        """
        if len(self.levels) < self._ngram - 1:
            self.levels = [level[1:] for level in (*self.levels, list(best))]
            return
        self.levels[0][0] = self.root
        self.store(zip(*self.levels, best, strict=True))
        self.levels = [*self.levels[1:], list(best)]


class _LookaheadSession(DraftSession):
    def __init__(self, drafter: LookaheadDrafter, context: DraftContext, shape: WindowShape | None) -> None:
        self._device, self._shape = context.roots.device, shape
        self._rows = [LookaheadRow(drafter, text, shape) for text in context.texts()]
        self._window_tree: tuple[TokenTree, Tensor] | None = None  # the last tree with a window, and its cells [B, C]

    def propose(self, budget: Budget) -> Draft:
        shape = self._shape if self._shape and self._shape.fits(budget) else None
        grown = [row.tree(budget, shape) for row in self._rows]
        tree = stack_trees([(row.tokens, row.parents) for row in grown], self._device)
        self._window_tree = None
        if shape:
            width = max(len(row.cells) for row in self._rows)
            cells = [[*row.cells, *[0] * (width - len(row.cells))] for row in self._rows]
            self._window_tree = tree, upload(cells, torch.long, self._device)
        return Draft(tree)

    def observe(self, step: Step) -> None:
        tree, emitted = step.draft.tree, step.acceptance.emitted
        if self._window_tree is not None and tree.tokens.shape == self._window_tree[0].tokens.shape:
            drafted, cells = self._window_tree
            own = ((tree.tokens == drafted.tokens) & (tree.parents == drafted.parents)).all(-1, keepdim=True)
            logits = step.verification.logits
            rows = torch.arange(len(cells), device=logits.device)[:, None]
            best = logits[rows, cells.to(logits.device)].argmax(-1).to(own.device)
            choices, verified = read(best, own)
            for row, chosen, (same,), tokens in zip(self._rows, choices, verified, emitted, strict=True):
                if same and tokens:  # in other rows, another tree was verified, or nothing was kept
                    row.advance(chosen[: len(row.cells)])
        self._window_tree = None
        for row, tokens in zip(self._rows, emitted, strict=True):
            row.read(tokens)
