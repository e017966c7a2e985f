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

SHIPPED_NAMES = {"eagle": SHIPPED_HEAD.name, "dflash": "smollm2-135m-instruct-dflash",
                 "medusa": "smollm2-135m-instruct-medusa"}  # fmt: skip
"""Directories of the shipped heads, by method."""

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

        from hf_specdec.checkpoints.hub import find_heads

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


def shipped_heads() -> dict[str, str]:
    """Return the paths of the heads for the packaged model in the repository, by method; {} without a clone."""
    places = {method: SHIPPED_HEAD.with_name(name) for method, name in SHIPPED_NAMES.items()}
    return {method: str(place) for method, place in places.items() if place.is_dir()}


def _ours(as_json: bool) -> None:
    """Print where the heads for the packaged model are."""
    heads = shipped_heads()
    if as_json:
        rows = [{"path": place, "method": method} for method, place in heads.items()]
        typer.echo(json.dumps({"model": HUB_ID, "heads": rows}))
    elif heads:
        width = max(map(len, heads))
        lines = "\n".join(f"  {method:{width}}  {place}" for method, place in heads.items())
        typer.echo(f"Heads for {HUB_ID}, by method:\n{lines}\nUse one: hf-specdec generate --method "
                   f"{next(iter(heads))} 'Why is the sky blue?'")  # fmt: skip
    else:
        typer.echo(f"Heads for {HUB_ID} are in the repository:\n  git clone --depth 1 {REPOSITORY}")
