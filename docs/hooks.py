"""For the site: notebooks, README, changelog and CONTRIBUTING.md become pages, the command line's help becomes one,
GitHub's alerts become boxes, and links that leave `docs/` lead to the repository.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the site that are files of the repository's root, where their links begin with `docs/`."""

ALERT = re.compile(r"^> \[!(NOTE|TIP|WARNING)\]\n((?:>.*\n)+)", flags=re.MULTILINE)
"""One of GitHub's alerts, which Material calls an admonition."""


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files, config):
    """Add `notebooks/*.ipynb` and `ROOT_PAGES`, which are outside of `docs/`."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File(f"notebooks/{path.name}", str(ROOT), config.site_dir, config.use_directory_urls))
    for name, source in ROOT_PAGES.items():
        file = File.generated(config, name, abs_src_path=str(ROOT / source))
        file.edit_uri = f"../{source}"
        files.append(file)
    return files


COMMANDS = ("demo", "generate", "doctor", "bench", "env", "distill", "tree", "train eagle", "train dflash",
            "train medusa", "find", "inspect", "convert")  # fmt: skip
"""The commands, in the order of `hf-specdec --help`."""


def help_of(command):
    """Return the help of a command, wrapped at 100 columns."""
    # click wraps at 80 columns in wider terminals, too, unless it is given another limit
    code = "import sys; from hf_specdec.cli import app; app(sys.argv[1:], 'hf-specdec', max_content_width=100)"
    words = [sys.executable, "-c", code, *command.split(), "--help"]
    options = {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env={**os.environ, **options}, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def on_page_markdown(markdown, page, config, **_):
    """Insert the command line's help, and rewrite links of a page that leave `docs/`.

    Such links have `../` as often as the page lies deep, and once more. Links to notebooks lead to their pages, all
    others to the repository.
    """
    if "<!-- commands -->" in markdown:
        parts = [f"## hf-specdec {command}\n\n```text\n{help_of(command)}\n```\n" for command in COMMANDS]
        markdown = markdown.replace("<!-- commands -->", "\n".join(parts))
    if page.file.src_uri in ROOT_PAGES:
        markdown = re.sub(r"\]\((?!https?://|#|docs/)", "](../", markdown).replace("](docs/", "](")
        markdown = re.sub(r'(src|srcset)="docs/', r'\1="', markdown)
    markdown = ALERT.sub(_admonition, markdown)
    depth = page.file.src_uri.count("/")
    out = "](" + "../" * (depth + 1)
    markdown = re.sub(
        re.escape(out) + r"notebooks/(\w+\.ipynb)\)", lambda found: f"]({'../' * depth}notebooks/{found[1]})", markdown
    )
    for name, source in ROOT_PAGES.items():
        markdown = markdown.replace(f"{out}{source})", f"]({'../' * depth}{name})")
    return markdown.replace(out, f"]({config.repo_url.rstrip('/')}/blob/main/")


def _admonition(found):
    lines = (re.sub("^> ?", "    ", line) for line in found[2].splitlines())
    return f"!!! {found[1].lower()}\n\n" + "\n".join(lines) + "\n"


def on_page_content(html, page, config, **_):
    """Point a notebook's relative links to the site or the repository, and its edit link to the notebook."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    page.edit_url = page.edit_url.replace("/docs/notebooks/", "/notebooks/")
    html = re.sub(r'href="(\d\w+)\.ipynb"', r'href="../\1/"', html)
    html = re.sub(r'href="\.\./docs/([\w/-]+)\.md(#[\w-]+)?"', r'href="../../\1/\2"', html)
    return re.sub(r'href="\.\./(?!\.\.|\d)([^"]+)"', rf'href="{config.repo_url.rstrip("/")}/blob/main/\1"', html)
