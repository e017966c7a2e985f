"""Plain words: no mannerism of `MANNERISMS` in docstrings, comments, messages, help texts or pages.

A line is allowed with `words: allow` in a comment on it (in Markdown `<!-- words: allow -->`).
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
ALLOW = "words: allow"

MANNERISMS = {
    r"\bwhere (there|it|one|that|nothing|none|nobody|no|they|he|she|this|he|who)\b": '"if" or "when"',
    r"\bof (its|their|his|our) own\b": '"its own", or leave it out',
    r"\bbesides\b": '"also" or "except"',
    r"\b(in|of|for|over|with|behind|after) so many\b|\bas many .* as they are\b": "name the number",
    r"\b(is|are|was|were|be|been) told\b|\btells? (what|how|which|whether|of)\b": '"gives", "returns", "contains"',
    r"\b(nobody|somebody|anybody|everybody|whoever)\b": "name the subject",
    r"\banew\b": '"again"',
    r"\bin the place of\b": '"instead of"',
    r"\b(seldom|dear|dearer|henceforth|hitherto|forthwith)\b": '"rarely", "expensive", ...',
    r"\bcomes? to (be|need|nothing)\b": "say it directly",
    r"\bis none of\b|\bare none of\b": '"is not one of"',
    r"\bof (a|the) same\b.*\bas (was|is|were)\b": "say it directly",
    r"\bmade of it\b|\bgone on with\b|\bgo(es)? on with\b": '"continue"',
    r"^(Of|Whose|By whom|What|That|Which) [a-z' ]+\.$": "a genitive fragment or a relative clause is no description",
    r"\bfor ever\b": '"forever", or name the limit',
    r"\bworth a thought\b|\bto speak of\b|\bin any case\b": "say it directly",
    r"\bCalled by:": "headers of callers go stale",
}


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, comments and strings with a space of a Python file, line by line."""
    text = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "COMMENT":
            yield token.start[0], token.string.lstrip("# ")
        elif kind in ("STRING", "FSTRING_MIDDLE") and " " in token.string:
            for number, line in enumerate(token.string.splitlines()):
                yield token.start[0] + number, line.strip().strip("\"'").removeprefix('r"""').strip("\"'")
    ast.parse(text)


def page_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page, or of the text cells of a notebook, that are not code."""
    fenced, text = False, path.read_text()
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`", "`code`", line)


def faults(lines: Iterator[tuple[int, str]], path: Path) -> list[str]:
    raw = path.read_text().splitlines()
    return [
        f"{path.relative_to(ROOT)}:{number}: {found[0]!r}: write {instead}"
        for number, line in lines
        for pattern, instead in MANNERISMS.items()
        if (found := re.search(pattern, line, flags=0 if pattern.startswith("^") else re.IGNORECASE))
        and (path.suffix == ".ipynb" or ALLOW not in raw[number - 1])
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "hf_specdec")))
def test_the_source_is_in_plain_words(path: Path) -> None:
    found = faults(prose_of(path), path)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_pages_are_in_plain_words(path: Path) -> None:
    found = faults(page_of(path), path)
    assert not found, "\n".join(found)


def test_mannerisms_are_found_and_lines_can_be_allowed(tmp_path: Path) -> None:
    path = ROOT / "tests" / "test_words.py"
    lines = ["Of the model.", "None where there is none.", "A drafter of its own."]
    assert len(faults(iter([(1, line) for line in lines]), path)) == 3
    allowed = next(number for number, line in enumerate(path.read_text().splitlines(), 1) if ALLOW in line)
    assert not faults(iter([(allowed, "None where there is none.")]), path)
