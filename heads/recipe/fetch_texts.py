"""Extract free texts for prompts from two books packaged by Debian, paragraph by paragraph.

    python heads/recipe/fetch_texts.py texts.jsonl

Needs `apt-get` and `dpkg-deb` (Debian or Ubuntu); nothing is installed. Rows have `source, licence, language, page,
text`, in the order of the book, so that consecutive rows belong together.
"""

import json
import re
import subprocess
import sys
import tarfile
import tempfile
from html.parser import HTMLParser
from pathlib import Path

BOOKS = [  # package, licence, directory of its pages by language
    ("debian-handbook", "GPL-2+ or CC BY-SA 3.0", {
        language: f"usr/share/doc/debian-handbook/html/{folder}/"
        for language, folder in (("en", "en-US"), ("de", "de-DE"), ("fr", "fr-FR"))
    }),
    ("anarchism", "GPL-2", {"en": "usr/share/doc/anarchism/html/"}),
]  # fmt: skip
MIN_CHARACTERS = 60
"""Shorter paragraphs are dropped."""


class Paragraphs(HTMLParser):
    """Collects the text of paragraphs, without preformatted text and tables."""

    def __init__(self):
        super().__init__()
        self.found, self._open, self._skipped = [], None, 0

    def handle_starttag(self, tag, attrs):
        """Open a paragraph, or start skipping."""
        if tag in ("pre", "script", "style", "table"):
            self._skipped += 1
        elif tag == "p" or (tag == "div" and ("class", "para") in attrs):  # DocBook paragraphs are <div class="para">
            self._close()
            self._open = []

    def handle_endtag(self, tag):
        """Close a paragraph, or stop skipping."""
        if tag in ("pre", "script", "style", "table"):
            self._skipped -= 1
        elif tag in ("p", "div", "body"):
            self._close()

    def handle_data(self, data):
        """Add text to the open paragraph."""
        if self._open is not None and not self._skipped:
            self._open.append(data)

    def _close(self):
        if self._open is not None:
            text = re.sub(r"\s+", " ", "".join(self._open)).strip()
            if len(text) >= MIN_CHARACTERS:
                self.found.append(text)
        self._open = None


def paragraphs_of(html):
    parser = Paragraphs()
    parser.feed(html)
    parser.close()
    return parser.found


def main():
    rows, seen = [], set()
    for package, licence, places in BOOKS:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
            (deb,) = Path(folder).glob("*.deb")
            with (
                subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as unpacked,
                tarfile.open(fileobj=unpacked.stdout, mode="r|") as members,
            ):
                for member in members:
                    name = member.name.removeprefix("./")
                    language = next((lang for lang, place in places.items() if name.startswith(place)), None)
                    if language is None or not member.isfile() or not name.endswith(".html"):
                        continue
                    html = members.extractfile(member).read().decode(errors="replace")
                    for text in paragraphs_of(html):
                        if text not in seen:
                            seen.add(text)
                            rows.append({"source": package, "licence": licence, "language": language,
                                         "page": Path(name).stem, "text": text})  # fmt: skip
    with Path(sys.argv[1]).open("w") as output:
        for row in rows:
            output.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{len(rows)} paragraphs")


if __name__ == "__main__":
    main()
