"""Make the prompts for the shipped heads: tasks of many kinds, built from word lists and free texts.

    python heads/recipe/fetch_texts.py texts.jsonl
    python heads/recipe/make_prompts.py prompts.jsonl --texts texts.jsonl --avoid spec_bench_dev.jsonl

The word lists are in `prompt_lists.json`. `--texts` (repeatable) is a file with rows of `text` and `language`, or the
output of `hf-specdec distill`, whose answers are used as texts. `--add` includes existing prompts (rows of `prompt`)
unchanged. `--kinds programs` makes programming tasks, which are not among the default kinds.
Output rows have `source`, followed by the origin of the text if the prompt has one (`summary/anarchism`),
and `turns`; `--turns 2` adds a second turn to suitable conversations. `--seed`
changes the random selection. `--avoid` is a file of benchmark questions: prompts that equal a question, or share eight
consecutive words with one, are left out and counted.
"""

import argparse
import json
import random
import re
from collections import Counter
from pathlib import Path

from hf_specdec.training.data import read_rows

LISTS = json.loads(Path(__file__).with_name("prompt_lists.json").read_text())
SHARED_WORDS = 8  # consecutive words shared with a benchmark that exclude a prompt
MIN_CHARACTERS = 600  # shorter answers are not used as texts
TRANSLATE = {"de": "German", "fr": "French"}


class Maker:
    """Draws prompts of every kind, without duplicates.

    Args:
        draw: Source of randomness.
        texts: Paragraphs by language and source, in the order of the text.
    """

    def __init__(self, draw, texts):
        self.draw, self.texts, self.found = draw, texts, {}

    def add(self, source, candidates, count, follow_ups=()):
        """Add up to `count` new candidates, with a second turn if `follow_ups` are given.

        Candidates are prompts, or pairs of a prompt and the origin of its text.
        """
        origins = dict(each if isinstance(each, tuple) else (each, None) for each in candidates)
        fresh = [text for text in origins if text not in self.found]
        for text in self.draw.sample(fresh, min(count, len(fresh))):
            turns = [text]
            if follow_ups:
                turns.append(self.draw.choice(follow_ups).replace("{tone}", self.pick("tones")))
            self.found[text] = (f"{source}/{origins[text]}" if origins[text] else source, turns)

    def pick(self, name):
        """Draw an entry of a word list."""
        return self.draw.choice(LISTS[name])

    # ------------------------------------------------------------------------------------------- without a text

    def conversations(self, scale, later):
        """Add tasks and questions; with `later`, only those with a second turn."""
        lists, follow = LISTS, LISTS["follow_ups"] if later else {}
        explain = ("Explain {x} in simple terms.", "What is {x}, and why does it matter?", "Give an example of {x}.",
                   "Describe the main ideas behind {x} and how they are related to everyday life.",
                   "Write a short lecture about {x}.")  # fmt: skip
        code = (
            "Write a Python function that {x}.",
            "Write a C++ program that {x}.",
            "Show me JavaScript code that {x}.",
        )
        listing = ("Give me a list of {x}.", "List ten {x}, with one sentence about each.", "What are {x}?")
        every = {
            "writing": (300, [f"Write {form} about {topic}." for form in lists["forms"] for topic in lists["topics"]]),
            "explaining": (250, [f.format(x=x) for x in lists["concepts"] for f in explain]),
            "comparing": (60, [f.format(a, b) for a, b in lists["pairs"] for f in (
                "What is the difference between {} and {}?", "Compare {} and {}. Which is better, and why?",
                "When would you choose {} rather than {}?")]),
            "roleplay": (90, [f"You are {role}. {task}" for role in lists["roles"] for task in lists["role_tasks"]]),
            "coding": (120, [f.format(x=x) for x in lists["code"] for f in code]),
            "listing": (100, [f.format(x=x) for x in lists["things_to_list"] for f in listing]),
            "math": (450, [self.sum_in_words(text) for text in lists["math"] for _ in range(60)]),
        }  # fmt: skip
        for source, (count, candidates) in every.items():
            if not later or source in follow:
                self.add(source, candidates, round(scale * count), follow.get(source, ()))

    def questions(self, scale):
        """Add short factual questions, half of them without capital and question mark."""
        questions = [f"{word} {rest}" for word in ("who", "when", "where", "what") for rest in LISTS[word]]
        for kind, forms in (("countries", "country_questions"), ("works", "work_questions"),
                            ("films", "film_questions"), ("body", "body_questions")):  # fmt: skip
            questions += [form.replace("{x}", thing) for thing in LISTS[kind] for form in LISTS[forms]]
        typed = [text if place % 2 else f"{text[0].upper()}{text[1:]}?" for place, text in enumerate(questions)]
        self.add("question", typed, round(700 * scale))

    def sum_in_words(self, text):
        """Fill names and numbers into a word problem."""
        names, goods = self.draw.sample(LISTS["names"], 2), self.pick("goods")
        numbers = {"a": self.draw.randint(12, 60), "b": self.draw.randint(3, 25), "c": self.draw.randint(2, 9),
                   "c2": self.draw.randint(2, 8), "d": 10 * self.draw.randint(20, 40),
                   "e": 10 * self.draw.randint(12, 60), "p": 5 * self.draw.randint(2, 12)}  # fmt: skip
        return text.format(n1=names[0], n2=names[1], g=goods, **numbers)

    def programs(self, scale):
        """Add programming tasks in several languages, for a model that writes code."""
        prompts = [
            form.format(l=language, x=task)
            for task in LISTS["programs"] for language in LISTS["languages"] for form in LISTS["program_forms"]
        ]  # fmt: skip
        self.add("coding", prompts, round(1200 * scale))

    # ------------------------------------------------------------------------------------------- with a text

    def translations(self, scale):
        """Add translations of sentences from books and word lists, in both directions, and rewriting tasks."""
        german = LISTS["german"]
        built = [
            f"{self.draw.choice(german['subjects'])} {verb.format(o=o)}{self.draw.choice(german['ends'])}."
            for verb in german["verbs"] for o in german["objects"] for _ in range(4)
        ]  # fmt: skip
        into = [f"Translate German to English: {text}" for text in built]
        self.add("translation", into, round(500 * scale))
        for language, name in TRANSLATE.items():
            texts = self.sentences(language)
            count = round({"de": 1000, "fr": 250}[language] * scale)
            self.add("translation", [
                (f"Translate {name} to English: {text}", origin) for text, origin in texts
            ], count)  # fmt: skip
        texts = self.sentences("en")
        for name, count in (("German", 350), ("French", 150), ("Spanish", 100)):
            self.add("translation", [
                (f"Translate English to {name}: {text}", origin) for text, origin in texts
            ], round(count * scale))  # fmt: skip
        self.add("rewriting", [
            (f"{self.draw.choice(('Rewrite this sentence', 'Say this', 'Put this'))} {self.pick('tones')}: {text}",
             origin)
            for text, origin in texts
        ], round(300 * scale))  # fmt: skip

    def readings(self, scale):
        """Add summaries, questions and extraction tasks about passages of one paragraph to a few pages."""
        longest = (900, 1800, 3600, 6000)
        passages = self.in_turn({
            origin: [passage(texts, place, longest[place % 4]) for place in range(len(texts))]
            for origin, texts in self.texts.get("en", {}).items()
        })  # fmt: skip
        summaries = (
            "Summarize: {x}", "Summarize: {x}", "Summarize: {x}",
            "Summarize the following text in two sentences:\n\n{x}",
            "{x}\n\nWhat are the main points of this text?", "Give this text a title: {x}",
        )  # fmt: skip
        prompts = [(self.draw.choice(summaries).replace("{x}", text), origin) for text, origin in passages]
        self.add("summary", prompts, round(900 * scale))
        prompts = []
        for text, origin in passages[::-1]:
            words = re.findall(r"[A-Za-z][a-z]{5,}", text)
            if not words:
                continue
            subject = self.draw.choice(words).lower()
            question = self.draw.choice((
                f"what does the text say about {subject}?", f"why is {subject} important here?",
                f"who or what is {subject}?", f"{self.draw.choice(LISTS['questions_of_reading'])}",
            ))  # fmt: skip
            prompts.append((self.draw.choice((
                f"{text}\n\nAnswer the question: {question}", f"Given the text below, {question}\n\n{text}",
                f"Context: {text}\n\nQuestion: {question}\nAnswer:",
            )), origin))  # fmt: skip
        self.add("rag", prompts, round(1000 * scale))
        short = [(text, origin) for text, origin in passages if len(text) < 1000]
        forms = ("Extract the names and terms from this text as a list: {x}", "Which facts does this text state? {x}",
                 "Write three questions that this text answers: {x}")  # fmt: skip
        prompts = [(self.draw.choice(forms).replace("{x}", text), origin) for text, origin in short]
        self.add("extraction", prompts, round(150 * scale))

    def sentences(self, language):
        """Return sentences of a language with their origins, alternating between these."""
        origins = self.texts.get(language, {})
        return self.in_turn({
            origin: [one for text in texts for one in sentences(text)] for origin, texts in origins.items()
        })  # fmt: skip

    def in_turn(self, origins):
        """Alternate between origins in random order, until the shortest is used up, so that none dominates."""
        drawn = [
            [(text, origin) for text in self.draw.sample(texts, len(texts))]
            for origin, texts in origins.items() if texts
        ]  # fmt: skip
        return [pair for pairs in zip(*drawn, strict=False) for pair in pairs]


def passage(texts, place, longest):
    """Join consecutive paragraphs, up to `longest` characters."""
    taken, begin = "", place
    while place < len(texts) and len(taken) + len(texts[place]) < longest:
        taken, place = f"{taken} {texts[place]}".strip(), place + 1
    return taken or texts[begin][:longest]


def sentences(text):
    """Return the sentences of a text that make sense on their own."""
    found = re.split(r"(?<=[.!?]) +(?=[A-ZÄÖÜÉÀ])", text)
    return [one for one in found if 50 <= len(one) <= 240 and not re.search(r"[/_<>{}|=\\]|--", one)]


def read_texts(places):
    """Return paragraphs by language and source; from conversations, the answers, which are English."""
    texts = {}
    for row in (row for place in places for _, row in read_rows(place)):
        if "messages" in row:
            answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
            found = [re.sub(r"\s+", " ", text) for text in answers if len(text) > MIN_CHARACTERS]
            texts.setdefault("en", {}).setdefault("answers", []).extend(found)
        else:
            texts.setdefault(row["language"], {}).setdefault(row["source"], []).append(row["text"])
    return texts


def words_of(text):
    return re.findall(r"\w+", text.lower())


class Benchmarks:
    """Benchmark questions, which must not occur in training data."""

    def __init__(self, paths):
        self.runs, self.whole = set(), set()
        for path in paths:
            for line in path.read_text().splitlines():
                for turn in json.loads(line)["turns"]:
                    words = words_of(turn)
                    self.whole.add(tuple(words))
                    self.runs |= {tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1)}

    def overlap(self, text):
        """Return whether a prompt equals a question or shares `SHARED_WORDS` consecutive words with one."""
        words = words_of(text)
        runs = (tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1))
        return tuple(words) in self.whole or any(run in self.runs for run in runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--texts", action="append", default=[])
    parser.add_argument("--add", type=Path, action="append", default=[])
    parser.add_argument("--avoid", type=Path, action="append", default=[])
    parser.add_argument("--kinds", nargs="*", default=["conversations", "questions", "translations", "readings"])
    parser.add_argument("--turns", type=int, choices=[1, 2], default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the number of prompts of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    maker, benchmarks = Maker(random.Random(options.seed), read_texts(options.texts)), Benchmarks(options.avoid)
    for path in options.add:
        for row in map(json.loads, path.read_text().splitlines()):
            maker.found[row["prompt"]] = (row.get("source", path.stem), [row["prompt"]])
    if "conversations" in options.kinds:
        maker.conversations(options.scale, options.turns == 2)
    for kind in ("questions", "translations", "readings", "programs"):
        if kind in options.kinds:
            getattr(maker, kind)(options.scale)
    rows = list(maker.found.values())
    kept = [row for row in rows if not any(benchmarks.overlap(turn) for turn in row[1])]
    maker.draw.shuffle(kept)
    with options.output.open("w") as output:
        for source, turns in kept:
            output.write(json.dumps({"source": source, "turns": turns}, ensure_ascii=False) + "\n")
    counts = Counter(source for source, _ in kept).most_common()
    print(f"{len(kept)} prompts, {len(rows) - len(kept)} left out because they overlap a benchmark")
    print(", ".join(f"{count} {source}" for source, count in counts))


if __name__ == "__main__":
    main()
