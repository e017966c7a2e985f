"""The command `hf-specdec find`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hf_specdec.cli.options import Json
from hf_specdec.cli.status import working
from hf_specdec.generation.packaged import HUB_ID, SHIPPED_HEAD

REPOSITORY = "https://github.com/hf-specdec/hf-specdec"


def find(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id of the model, such as org/name.")] = HUB_ID,
    as_json: Json = False,
) -> None:
    """Find published draft heads for a model on the Hub; for the packaged model, show where the shipped heads are."""
    if model == HUB_ID:
        return _ours(as_json)
    with working("Searching the Hub", shown=not as_json):
        from huggingface_hub.utils import logging

        from hf_specdec.checkpoints.published import find_heads

        logging.set_verbosity_error()  # no warning on each new try
        heads = find_heads(model)
    if as_json:
        typer.echo(json.dumps({"model": model, "heads": [asdict(head) for head in heads]}))
    elif heads:
        table = Table("repository", "probably", "downloads", box=None)
        for head in heads:
            table.add_row(head.repo_id, head.method, f"{head.downloads:,}")
        console = Console()
        console.print(table)
        console.print(
            f"Names only: `hf-specdec inspect {heads[0].repo_id}` reads the files, and load_drafter() checks whether "
            "a head fits the model.", markup=False, highlight=False,
        )  # fmt: skip
    else:
        typer.echo(f"No heads for {model} were found by name. Train one: hf-specdec train --help")


def _ours(as_json: bool) -> None:
    """Print where the heads for the packaged model are."""
    folder = SHIPPED_HEAD.parent
    heads = sorted(str(path) for path in folder.glob("smollm2-*")) if folder.is_dir() else []
    if as_json:
        typer.echo(json.dumps({"model": HUB_ID, "heads": [{"path": head} for head in heads]}))
    elif heads:
        typer.echo(f"Heads for {HUB_ID}:\n" + "\n".join(f"  {head}" for head in heads))
    else:
        typer.echo(f"Heads for {HUB_ID} are in the repository:\n  git clone --depth 1 {REPOSITORY}")
