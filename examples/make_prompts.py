"""Prompts to distil the shipped heads from: tasks of many kinds, put together from word lists and passages.

    python examples/make_prompts.py PASSAGES.jsonl OUTPUT.jsonl [SEED]

PASSAGES: rows `source, prompt`; what stands in quotes in those of the source `wiki-passage` is taken as a text to
summarise and to ask about. Another SEED makes another draw. Nothing here comes from a benchmark.
"""

import json
import random
import sys
from pathlib import Path

FORMS = ["a short story", "a friendly email", "a blog post", "a poem", "a dialogue", "a product description",
         "a diary entry", "a speech", "a news article", "a list of ten tips", "a formal letter",
         "a review"]  # fmt: skip
TOPICS = ["a lost dog that finds its way home", "learning to cook", "a rainy day in the city",
          "the first day at work",
          "saving water at home", "a journey by train", "growing tomatoes", "an old bicycle",
          "moving to a new country",
          "a night in the mountains", "friendship between neighbours", "learning a musical instrument",
          "a power cut in winter", "a library that never closes", "running a small bakery", "fear of flying",
          "the sea in autumn", "a broken phone", "teaching children to read", "an unexpected guest",
          "a market in the morning", "losing a job", "a letter that arrives too late", "walking to school",
          "the last summer before university", "planting trees", "working from home", "a visit to a museum",
          "getting enough sleep", "a recipe from grandmother", "the history of chess", "a storm at sea",
          "making friends in a new town", "healthy breakfasts", "a trip to the moon", "an honest mistake",
          "public transport", "a cat that does not like music", "saving money", "camping with children"]  # fmt: skip
CONCEPTS = ["photosynthesis", "inflation", "plate tectonics", "natural selection", "supply and demand", "gravity",
            "machine learning", "the water cycle", "democracy", "electric current", "vaccines", "black holes",
            "compound interest", "the French Revolution", "recursion in programming", "the greenhouse effect",
            "the immune system", "public key cryptography", "the Renaissance", "probability", "hash tables",
            "the scientific method", "sound waves", "nuclear fusion", "the stock market", "enzymes", "algorithms",
            "the industrial revolution", "antibiotics", "the solar system", "relativity", "climate change",
            "the cell membrane", "object-oriented programming", "opportunity cost", "the Cold War", "metaphors",
            "the nervous system", "blockchain", "friction", "human rights", "the carbon cycle", "sorting algorithms",
            "tectonic faults", "the Roman Empire", "genetic inheritance", "monopolies", "acids and bases",
            "the theory of evolution", "databases", "the Enlightenment", "magnetism", "osmosis", "tides",
            "neural networks", "impressionism", "standard deviation", "the food chain", "ecosystems",
            "interest rates"]  # fmt: skip
PAIRS = [("trains", "planes"), ("Python", "Java"), ("mitosis", "meiosis"), ("novels", "films"), ("cats", "dogs"),
         ("wind power", "solar power"), ("a virus", "a bacterium"), ("city life", "country life"),
         ("comets", "asteroids"), ("renting", "buying a house"), ("weather", "climate"), ("lists", "tuples"),
         ("tea", "coffee"), ("speed", "velocity"), ("capitalism", "socialism"), ("running", "swimming"),
         ("email", "letters"), ("frogs", "toads"), ("a theory", "a law"), ("a stack", "a queue"), ("gas", "liquid"),
         ("fiction", "non-fiction"), ("butter", "margarine"), ("HTTP", "HTTPS"), ("a loan", "a grant"),
         ("saving", "investing"), ("plants", "animals"), ("a king", "a president")]  # fmt: skip
ROLES = ["a doctor", "a travel guide", "a famous chef", "a detective", "a history teacher", "a pirate", "a robot",
         "a football coach", "a medieval knight", "a software engineer", "a gardener", "a judge"]  # fmt: skip
CODE = ["reverses a string", "checks whether a number is prime", "counts the words of a text file",
        "sorts a list of dictionaries by a key", "computes the n-th Fibonacci number", "finds duplicates in a list",
        "merges two sorted lists", "validates an email address", "converts Celsius to Fahrenheit",
        "finds the longest word in a sentence", "computes the factorial of a number", "removes vowels from a string",
        "checks whether a word is a palindrome", "reads a CSV file and sums a column", "rolls two dice",
        "finds the largest number in a list", "flattens a nested list", "counts the letters of a string",
        "prints a multiplication table", "computes the average of a list", "swaps two variables",
        "searches a sorted list by bisection", "counts the lines of a file", "computes the area of a circle",
        "removes duplicates from a string", "generates a random password", "computes the greatest common divisor",
        "converts a number to binary", "sorts words by their length", "sums the digits of a number",
        "checks whether two words are anagrams", "implements a stack", "plays rock, paper, scissors"]  # fmt: skip
WHO = ["wrote Romeo and Juliet", "painted the Mona Lisa", "invented the telephone", "discovered penicillin",
       "was the first person on the moon", "built the Eiffel Tower", "composed the Four Seasons", "wrote the Odyssey",
       "discovered gravity", "invented the light bulb", "was the first president of the United States",
       "founded Microsoft", "wrote Don Quixote", "led the civil rights movement", "plays the lead in Titanic",
       "sang Thriller", "won the world cup in 1998", "wrote the national anthem", "is the author of Moby Dick",
       "directed Jurassic Park", "invented the steam engine", "discovered radium", "wrote the first novel",
       "sings the song Yesterday", "invented basketball", "was the first woman in space",
       "wrote Pride and Prejudice", "signed the declaration of independence", "is the voice of Darth Vader",
       "was the king of France during the revolution", "painted the Starry Night", "discovered America",
       "founded the Red Cross", "invented the airplane", "played James Bond first", "elects the pope",
       "won the most grand slams in tennis", "wrote War and Peace", "is the god of thunder"]  # fmt: skip
WHEN = ["did the second world war end", "was the first iPhone released", "did Rome fall", "was the Magna Carta signed",
        "did the Berlin wall come down", "was the printing press invented", "did the Titanic sink",
        "does winter begin in Australia", "was the United Nations founded", "did the American civil war start",
        "was the internet invented", "did women get the right to vote", "was DNA discovered",
        "did the last ice age end", "was the first world cup played", "was the Eiffel Tower built",
        "did slavery end in the United States", "was the first car made", "does daylight saving time begin",
        "did the French Revolution begin", "was penicillin discovered", "is the best time to plant tomatoes",
        "did humans first land on the moon", "was the great wall of China built", "did Mozart die",
        "do cherry trees bloom in Japan", "was the European Union founded"]  # fmt: skip
WHERE = ["is the Great Barrier Reef", "does the Nile begin", "was paper invented", "is Mount Kilimanjaro",
         "do penguins live", "is the Louvre", "does chocolate come from", "was Albert Einstein born",
         "is the Sahara desert", "does the Danube end", "are the Great Lakes", "was pizza invented",
         "is the pancreas in the body", "do red blood cells come from", "is Machu Picchu", "did the Vikings come from",
         "is the largest desert", "are the Olympic games held", "does rubber come from", "is Stonehenge",
         "did the first humans live", "is the Mariana Trench", "does the Amazon end", "is the thyroid gland",
         "do sea turtles lay their eggs", "was the first university", "is most of the fresh water on earth",
         "does coffee grow", "did jazz begin", "are the Alps"]  # fmt: skip
WHAT = ["is the capital of Australia", "is the largest planet", "does the liver do", "is the boiling point of water",
        "is the longest river in Africa", "causes earthquakes", "is the currency of Japan", "does DNA stand for",
        "is the fastest animal on land", "are the three states of matter", "is the smallest country in the world",
        "do bees make honey from", "is the speed of light", "are the primary colours", "is the meaning of democracy",
        "type of energy is stored in food", "is the most spoken language in the world", "does a barometer measure",
        "is the chemical symbol of gold", "is the difference between a crocodile and an alligator",
        "is the function of the kidneys", "happens when water freezes", "is the largest organ of the body",
        "does a conductor do", "is the highest mountain in Europe", "are the rules of chess", "does CPU stand for",
        "is the role of the senate", "causes the seasons", "is the national animal of Scotland", "is a haiku",
        "do whales eat", "is the population of India", "makes bread rise", "is the theme of Hamlet",
        "is the most common blood type", "does a black belt mean", "is the difference between sex and gender",
        "was the first video game", "is the unit of force"]  # fmt: skip
SUBJECTS = ["Die Regierung", "Der Bürgermeister", "Die Polizei", "Ein Sprecher des Unternehmens", "Der Verein",
            "Die Stadt", "Der Präsident", "Eine junge Frau", "Die Gewerkschaft", "Der Minister", "Die Forscher",
            "Viele Menschen", "Die Schule", "Das Krankenhaus", "Die Bank", "Der Trainer", "Mein Nachbar",
            "Die Partei", "Das Gericht", "Der Künstler", "Die Familie", "Ein Arzt aus Hamburg", "Die Universität",
            "Der Hersteller", "Die Europäische Union", "Das Museum", "Die Feuerwehr"]  # fmt: skip
VERBS = ["hat am Montag {o} angekündigt", "will im kommenden Jahr {o} prüfen", "hat gestern {o} vorgestellt",
         "spricht seit Wochen über {o}", "lehnt {o} ab", "wartet noch immer auf {o}", "freut sich über {o}",
         "muss bis zum Ende des Monats {o} bezahlen", "kann {o} nicht erklären",
         "hat nach langen Verhandlungen {o} unterschrieben", "hat im Fernsehen {o} verteidigt",
         "möchte {o} so bald wie möglich sehen", "hatte {o} schon im Sommer erwartet",
         "hat am Ende {o} bekommen", "wusste nichts über {o}", "bereitet seit einem Jahr {o} vor"]  # fmt: skip
OBJECTS = ["den neuen Plan", "die höheren Preise", "einen Vertrag mit China", "den Bau der Brücke", "die Reform",
           "das Ergebnis der Wahl", "eine Erhöhung der Löhne", "die Folgen des Unfalls", "ein neues Gesetz",
           "den Umzug nach Berlin", "die Kosten der Krise", "das Spiel gegen Frankreich", "die neue Ausstellung",
           "einen Bericht über das Klima", "das alte Haus am Fluss", "den Streit um die Steuern", "mehr Polizisten",
           "die Rückkehr der Touristen", "eine Lösung für das Problem", "den Anschlag vom Wochenende",
           "das Buch eines Journalisten", "die Schulden der Gemeinde", "neue Medikamente"]  # fmt: skip
ENDS = ["", ", sagte er der Zeitung", ", obwohl die Kritik daran wächst", ", weil das Geld fehlt",
        ", wie am Dienstag bekannt wurde", " und hofft auf Hilfe aus Europa",
        ", um Arbeitsplätze zu sichern"]  # fmt: skip


def passages(path: Path) -> list[str]:
    """The quoted texts of the wiki-passage rows."""
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["source"] == "wiki-passage" and row["prompt"].count('"') >= 2:
            found.append(row["prompt"].split('"', 1)[1].rsplit('"', 1)[0])
    return [text for text in dict.fromkeys(found) if len(text) > 200]


def main() -> None:
    texts = passages(Path(sys.argv[1]))
    draw = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    prompts: list[tuple[str, str]] = []

    def add(kind: str, candidates: list[str], count: int) -> None:
        prompts.extend((kind, text) for text in draw.sample(candidates, min(count, len(candidates))))

    add("writing", [f"Write {form} about {topic}." for form in FORMS for topic in TOPICS], 130)
    add(
        "explaining",
        [
            f"{how} {what}{end}"
            for what in CONCEPTS
            for how, end in (
                ("Explain", " in simple terms."),
                ("What is", " and why does it matter?"),
                ("Give an example of", "."),
                ("Describe the main ideas behind", " and how they are related to everyday life."),
            )
        ],
        90,
    )
    add(
        "comparing",
        [
            text
            for a, b in PAIRS
            for text in (
                f"What is the difference between {a} and {b}?",
                f"Compare {a} and {b}. Which is better, and why?",
            )
        ],
        32,
    )
    add(
        "roleplay",
        [
            f"You are {role}. {task}"
            for role in ROLES
            for task in (
                "Introduce yourself.",
                "Tell me about your day.",
                "Give me advice for a difficult decision.",
                "What do you think about modern technology?",
            )
        ],
        40,
    )
    add(
        "coding",
        [
            f"{how} that {what}."
            for what in CODE
            for how in ("Write a Python function", "Write a C++ program", "Show me JavaScript code")
        ],
        50,
    )
    questions = [
        f"{word} {rest}?"
        for word, rests in (("Who", WHO), ("When", WHEN), ("Where", WHERE), ("What", WHAT))
        for rest in rests
    ]
    add("question", questions + [question.lower().rstrip("?") for question in questions], 130)
    german = [f"{s} {v.format(o=o)}{e}." for s in SUBJECTS for v in VERBS for o in OBJECTS for e in ENDS]
    add("translation", [f"Translate German to English: {text}" for text in german], 130)
    for index, text in enumerate(texts):
        others = draw.sample(texts, 3)
        shown = [[text], [text, others[0], others[1]], [text, *draw.sample(texts, 5)]][index % 3]
        add("summary", [f"Summarize: {' '.join(shown)}"], 1)
        question = draw.choice(questions)
        long = "\n".join([*others[: index % 3 + 1], text])
        subject = " ".join(text.split()[1:3])
        add(
            "rag",
            [
                f"{long}\n\nAnswer the question: what does the text say about {subject}?",
                f"Answer the question based on the given information.\n\n{long}\n\nQuestion: {question}",
            ],
            1,
        )
    draw.shuffle(prompts)
    with Path(sys.argv[2]).open("w") as output:
        for source, prompt in prompts:
            output.write(json.dumps({"source": source, "prompt": prompt}) + "\n")


if __name__ == "__main__":
    main()
