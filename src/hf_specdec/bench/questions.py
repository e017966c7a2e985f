"""Read prompt files in the EAGLE / Spec-Bench schema (`question_id, category, turns`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_specdec.errors import InvalidConfigError
from hf_specdec.records import QUESTION_ROW, Fields, read_records

MT_BENCH = frozenset({"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"})
"""Categories that Spec-Bench took from MT-bench; they are read as the single category `mt_bench`."""


@dataclass(frozen=True, slots=True)
class Question:
    """Entry of a prompt file: the messages of a user in one conversation, with an id and a category.

    Args:
        question_id: Id, unique in the file.
        category: Group in which results are summarised.
        turns: Messages of the user, in order.
    """

    question_id: str
    category: str
    turns: tuple[str, ...]


def read_questions(path: str | Path, *, limit: int | None = None, per_category: int | None = None) -> list[Question]:
    """Read a prompt file; return its questions round-robin: the first of each category, the second of each, ...

    Args:
        path: JSON lines with `question_id`, `category`, `turns`.
        limit: Maximum number of questions; the first ones in that order are kept.
        per_category: Maximum number of questions per category, spread evenly over the file.

    Raises:
        InvalidConfigError: The file cannot be read or holds no questions, or a line is not a question.
    """
    questions = [_question(row, f"{path}, line {number}") for number, row in read_records(Path(path))]
    if not questions:
        raise InvalidConfigError(f"{path} holds no questions.", f"Expected JSON lines such as {QUESTION_ROW}.")
    return chosen(questions, limit=limit, per_category=per_category)


def chosen(questions: Sequence[Question], *, limit: int | None, per_category: int | None) -> list[Question]:
    """Return questions round-robin by category; `limit` and `per_category` as for `read_questions`."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    for category, rows in by_category.items():
        # spread evenly over the file, to include all categories that mt_bench combines
        wanted = min(per_category or len(rows), len(rows))
        by_category[category] = [rows[i * len(rows) // wanted] for i in range(wanted)]
    rounds = max(map(len, by_category.values()), default=0)
    mixed = [rows[i] for i in range(rounds) for rows in by_category.values() if i < len(rows)]
    return mixed[:limit]


def _question(row: Fields, place: str) -> Question:
    """Parse one line of a prompt file."""
    try:
        if not isinstance(row["category"], str):
            raise TypeError("its category is not a string")
        category = "mt_bench" if row["category"] in MT_BENCH else row["category"]
        turns = row["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise TypeError("its turns are not a list of non-empty strings")
        for text in (category, *turns):
            text.encode()
        return Question(str(row["question_id"]), category, tuple(turns))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidConfigError(
            f"{place} is not a question: {missing}.", f"Expected a line such as {QUESTION_ROW}."
        ) from error
