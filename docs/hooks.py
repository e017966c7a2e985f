"""Of the site: links that leave `docs/` lead to the repository, where the files are."""


def on_page_markdown(markdown, page, config, **_):
    """Rewrite the links of a page that climb out of `docs/`: as many `../` as the page lies deep, and one more."""
    out = "](" + "../" * (page.file.src_uri.count("/") + 1)
    return markdown.replace(out, f"]({config.repo_url.rstrip('/')}/blob/main/")
