"""For the site: the notebooks become pages, and links that leave `docs/` lead to the repository."""

import re
from pathlib import Path

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files, config):
    """Add `notebooks/*.ipynb`, which are outside of `docs/`."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File(f"notebooks/{path.name}", str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown, page, config, **_):
    """Rewrite links of a page that leave `docs/`: `../` as often as the page lies deep, and once more.

    Links to notebooks lead to their pages, all others to the repository.
    """
    depth = page.file.src_uri.count("/")
    out = "](" + "../" * (depth + 1)
    markdown = re.sub(
        re.escape(out) + r"notebooks/(\w+\.ipynb)\)", lambda found: f"]({'../' * depth}notebooks/{found[1]})", markdown
    )
    return markdown.replace(out, f"]({config.repo_url.rstrip('/')}/blob/main/")


def on_page_content(html, page, config, **_):
    """Rewrite the relative links of a notebook: to pages of the site, or to the repository."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    html = re.sub(r'href="(\d\w+)\.ipynb"', r'href="../\1/"', html)
    html = re.sub(r'href="\.\./docs/([\w/-]+)\.md(#[\w-]+)?"', r'href="../../\1/\2"', html)
    return re.sub(r'href="\.\./(?!\.\.|\d)([^"]+)"', rf'href="{config.repo_url.rstrip("/")}/blob/main/\1"', html)
