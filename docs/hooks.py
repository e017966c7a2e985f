"""Of the site: links that leave `docs/` lead to the repository, where the files are."""


def on_page_markdown(markdown, config, **_):
    """Rewrite `](../PATH` to the repository's page of PATH."""
    return markdown.replace("](../", f"]({config.repo_url.rstrip('/')}/blob/main/")
