"""The commands about heads: `hf-specdec inspect | convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_specdec.checkpoints.export import export_head, lost_settings
from hf_specdec.checkpoints.hub import load_head
from hf_specdec.checkpoints.report import inspect_head
from hf_specdec.cli.options import writable_directory
from hf_specdec.errors import InvalidConfigError, printable

Source = Annotated[str, typer.Argument(metavar="HEAD", help="Directory or Hub id of a head in any layout.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]
FormatName = Literal["hf-specdec", "medusa", "eagle", "eagle3", "speculators", "speculators-mtp", "sglang"]


def inspect(
    head: Source,
    revision: Revision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Say what a head is: its layout, its target, its sizes; every tensor is read and checked."""
    report = inspect_head(head, revision=revision)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
        return
    draft = report.draft_vocabulary
    layers = ["2, L/2 and L-3 of a target of L"] if report.layers_read is None else map(str, report.layers_read)
    rows = {
        "layout": f"{report.layout}  (written by {report.writers})",
        "head": f'{report.head}  (speculative="{report.method}")',
        "target": report.target or "not named",
        "parameters": f"{report.parameters:,} in {report.dtype}",
        "files": ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in report.files.items()),
        "vocabulary": str(report.vocabulary or "that of the target")
        + (f", drafts over {draft} of it" if draft else ""),
        "hidden states": ", ".join(layers) + ("  (-1: behind the final norm)" if report.layers_read == [-1] else ""),
        "config": json.dumps(report.config),
    }
    table = Table(show_header=False, box=None)
    for name, value in {"where": report.where, **rows}.items():
        table.add_row(Text(name, style="bold"), Text(printable(value)))
    Console().print(table)


def convert(
    head: Source,
    output: Annotated[Path, typer.Argument(help="Directory to write; a new one, or an empty one.")],
    format: Annotated[FormatName, typer.Option(help="Layout to write.")] = "hf-specdec",
    revision: Revision = None,
    target: Annotated[str | None, typer.Option(help="Name of its target to write down, where it names none.")] = None,
    hot_tokens: Annotated[Path | None, typer.Option(help="FR-Spec list, freq_*.pt, to draft over.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Of the weights.")] = None,
    force: Annotated[bool, typer.Option(help="Put it in the place of the head that is in OUTPUT.")] = False,
) -> None:
    """Write a head in the layout of an engine, or any head in ours."""
    writable_directory(output, "OUTPUT")
    if Path(head).resolve() == output.resolve():
        raise InvalidConfigError(
            f"{output} is the head itself: it would be lost.", "Give another directory as OUTPUT."
        )
    loaded = load_head(
        head, revision=revision, hot_tokens=hot_tokens, dtype=None if dtype is None else getattr(torch, dtype)
    )
    if target is not None:
        loaded.config.base_model_name_or_path = target
    folder = export_head(loaded, output, format=format, replace=force)
    typer.echo(f"{loaded.layout} -> {format}: {folder}", err=True)
    lost = lost_settings(loaded, format)
    if lost:
        typer.echo(f"not stored, because {format} has no place for it: {', '.join(lost)}", err=True)
