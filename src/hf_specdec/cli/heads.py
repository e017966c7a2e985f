"""The commands `hf-specdec inspect` and `hf-specdec convert`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from hf_specdec.checkpoints.sources import check_new_head
from hf_specdec.cli.inputs import check_places
from hf_specdec.cli.options import Json, check_writable_directory
from hf_specdec.cli.status import importing, working
from hf_specdec.errors import InvalidConfigError, printable

Source = Annotated[str, typer.Argument(metavar="HEAD", help="Directory or Hub id of a head in any supported layout.")]
Revision = Annotated[str | None, typer.Option(metavar="NAME", help="Branch, tag or commit on the Hub.")]
FormatName = Literal[
    "hf-specdec", "medusa", "eagle", "eagle3", "speculators", "speculators-mtp", "sglang", "dflash"
]  # fmt: skip


def inspect(
    head: Source,
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Show a head's layout, target, sizes and config; every tensor is read and checked."""
    check_places(head=head)
    with importing(shown=not as_json):
        from hf_specdec.checkpoints.hub import inspect_head

    with working("Reading the head", shown=not as_json):
        report = inspect_head(head, revision=revision)
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
        return
    draft = report.draft_vocabulary
    layers = ["2, L/2 and L-3 of L layers"] if report.layers_read is None else map(str, report.layers_read)
    rows = {
        "layout": f"{report.layout}  (written by {report.writers})",
        "head": f'{report.head}  (speculative="{report.method}")',
        "target": report.target or "not recorded",
        "parameters": f"{report.parameters:,} in {report.dtype}",
        "files": ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in report.files.items()),
        "vocabulary": str(report.vocabulary or "the target's") + (f" (draft vocabulary: {draft})" if draft else ""),
        "hidden states": ", ".join(layers) + ("  (-1: after the final norm)" if report.layers_read == [-1] else ""),
        "config": json.dumps(report.config),
    }
    if report.in_card:
        rows["also stored"] = f"{', '.join(report.in_card)}  (see its README.md)"
    if report.ambiguous:
        rows["readings"] = f"{', '.join(report.ambiguous)}: shown as documented, decided when loaded for a target"
    if report.needs_adapter:
        rows["adapter"] = "load the adapter of this directory into the target first"
    width = max(map(len, rows))
    for name, value in {"source": report.where, **rows}.items():  # whole lines, so that the config can be copied
        typer.echo(f"{typer.style(f'{name:{width}}', bold=True)}  {printable(value)}")


def convert(
    head: Source,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="New or empty directory to write to.")],
    format: Annotated[
        FormatName,
        typer.Option(
            metavar="LAYOUT", help=f"Layout to write: {', '.join(get_args(FormatName))}. vLLM reads speculators."
        ),
    ] = "hf-specdec",
    revision: Revision = None,
    target: Annotated[
        str | None, typer.Option(metavar="ID", help="Hub id of the target to store in the head's config.")
    ] = None,
    hot_tokens: Annotated[Path | None, typer.Option(help="FR-Spec list (freq_*.pt) of the tokens to draft.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Dtype of the weights.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the head in OUTPUT.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a head to the layout of hf-specdec or of another engine."""
    check_writable_directory(output, "OUTPUT")
    if Path(head).resolve() == output.resolve():
        raise InvalidConfigError(f"OUTPUT {output} is the directory of the head itself.", "Give another directory.")
    with _options_named():
        check_new_head(output, replace=force)
    check_places(head=head)
    with importing(shown=not as_json):
        import torch

        from hf_specdec.checkpoints.export import export_head, lost_settings
        from hf_specdec.checkpoints.hub import load_head

    with working("Reading the head", shown=not as_json):
        kind = None if dtype is None else getattr(torch, dtype)
        loaded = load_head(head, revision=revision, hot_tokens=hot_tokens, dtype=kind)
    if target is not None:
        loaded.config.base_model_name_or_path = target
    with _options_named():
        folder = export_head(loaded, output, format=format, replace=force)
    lost = lost_settings(loaded, format)
    if as_json:
        typer.echo(json.dumps({"source": loaded.layout, "layout": format, "output": str(folder), "not_stored": lost}))
        return
    typer.echo(f"{loaded.layout} -> {format}: {folder}", err=True)
    if lost:
        typer.echo(f"not stored, because {format} does not support it: {', '.join(lost)}", err=True)


@contextmanager
def _options_named() -> Iterator[None]:
    """Context manager that names the option `--force` in errors of its block, instead of Python's argument."""
    try:
        yield
    except InvalidConfigError as error:
        raise InvalidConfigError(str(error).replace("replace=True", "--force")) from error
