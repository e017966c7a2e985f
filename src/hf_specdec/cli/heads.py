"""The commands `hf-specdec find`, `inspect`, `convert` and `tree`: draft heads on the Hub, on disk and their trees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from rich.console import Console
from rich.table import Table

from hf_specdec.checkpoints.sources import check_new_head, overwritten
from hf_specdec.cli.parameters import (
    Data,
    Json,
    ModelOption,
    RoundActivations,
    TrainingPrecision,
    check_picture,
    check_places,
    check_writable_directory,
)
from hf_specdec.cli.status import importing, working
from hf_specdec.errors import InvalidConfigError, listed, printable
from hf_specdec.generation.packaged import HUB_ID, SHIPPED_HEAD
from hf_specdec.validation import MAX_NODES, MAX_STEPS, MAX_TOP_K

SHIPPED_NAMES = {"eagle": SHIPPED_HEAD.name, "dflash": "smollm2-135m-instruct-dflash",
                 "medusa": "smollm2-135m-instruct-medusa"}  # fmt: skip
"""Directories of the shipped heads, by method."""

HeadArgument = Annotated[
    str, typer.Argument(metavar="HEAD", help="Directory or Hub id of a head in any supported layout.")
]
Revision = Annotated[str | None, typer.Option(metavar="NAME", help="Branch, tag or commit on the Hub.")]
FormatName = Literal["hf-specdec", "medusa", "eagle", "eagle3", "speculators", "speculators-mtp", "sglang", "dflash"]


def shipped_heads() -> dict[str, str]:
    """Return the paths of the heads for the packaged model in the repository, by method; {} without a clone."""
    places = {method: SHIPPED_HEAD.with_name(name) for method, name in SHIPPED_NAMES.items()}
    return {method: str(place) for method, place in places.items() if place.is_dir()}


def find(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id of the model, such as org/name.")] = HUB_ID,
    as_json: Json = False,
) -> None:
    """Find published draft heads for a model on the Hub; for the packaged model, show where the shipped heads are."""
    if model == HUB_ID:
        shipped = shipped_heads()
        if as_json:
            rows = [{"path": place, "method": method} for method, place in shipped.items()]
            typer.echo(json.dumps({"model": HUB_ID, "heads": rows}))
        elif shipped:
            width = max(map(len, shipped))
            lines = "\n".join(f"  {method:{width}}  {place}" for method, place in shipped.items())
            use = f"Use one: hf-specdec generate --method {next(iter(shipped))} 'Why is the sky blue?'"
            typer.echo(f"Heads for {HUB_ID}, by method:\n{lines}\n{use}")
        else:
            clone = "git clone --depth 1 https://github.com/hf-specdec/hf-specdec"
            typer.echo(f"Heads for {HUB_ID} are in the repository:\n  {clone}")
        return
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
            method = head.method if head.is_read else f"{head.method}, which is not supported"
            table.add_row(head.repo_id, method, f"{head.downloads:,}")
        console = Console()
        console.print(table)
        console.print(
            f"Names only: `hf-specdec inspect {heads[0].repo_id}` reads the files, and load_drafter() checks whether "
            "a head fits the model.", markup=False, highlight=False,
        )  # fmt: skip
    else:
        typer.echo(f"No heads for {model} were found by name. Train one: hf-specdec train --help")


def inspect(head: HeadArgument, revision: Revision = None, as_json: Json = False) -> None:
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
    head: HeadArgument,
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
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_ID", help="The target, for a head that uses its lm_head over a draft vocabulary."
        ),
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
    check_places(model, head=head)
    with importing(shown=not as_json):
        import torch

        from hf_specdec.checkpoints.export import export_head, lost_settings
        from hf_specdec.checkpoints.hub import load_head
        from hf_specdec.generation.loading import load_target

    with working("Reading the head", shown=not as_json):
        kind = None if dtype is None else getattr(torch, dtype)
        loaded = load_head(head, revision=revision, hot_tokens=hot_tokens, dtype=kind)
    if target is not None:
        loaded.config.base_model_name_or_path = target
    target_model = None
    if model is not None:
        with working("Loading the model", shown=not as_json):
            target_model = load_target(model, "auto")[0]
    with _options_named():
        folder = export_head(loaded, output, format=format, replace=force, target=target_model)
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


def tree(
    drafter: Annotated[str, typer.Option(metavar="HEAD", help="Path or Hub id of the head.")],
    data: Data,
    output: Annotated[Path, typer.Option(help="Directory for the head with its tree; may be the head's own.")],
    model: ModelOption = None,
    num_nodes: Annotated[
        int | None, typer.Option(min=2, max=MAX_NODES, help="Size of the tree, root included. Default: the fastest.")
    ] = None,
    max_nodes: Annotated[int, typer.Option(min=2, max=MAX_NODES, help="Largest tree to consider.")] = 64,
    num_steps: Annotated[int, typer.Option(min=1, max=MAX_STEPS, help="Maximum depth of the tree.")] = 5,
    top_k: Annotated[int, typer.Option(min=1, max=MAX_TOP_K, help="Children considered per node.")] = 10,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of conversations to measure on.")] = 200,
    plot: Annotated[Path | None, typer.Option(help="Write a plot of the tree to this file. Needs matplotlib.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing --plot file.")] = False,
    dtype: TrainingPrecision = "bfloat16",
    round_activations: RoundActivations = False,
    as_json: Json = False,
) -> None:
    """Find the fastest static tree for a head on this device and store it in the head's config."""
    check_writable_directory(output, "--output")
    lost = [] if output.resolve() == Path(drafter).resolve() else overwritten(output)
    if lost:
        raise InvalidConfigError(
            f"--output {output} already holds {listed(lost)}, which would be overwritten.",
            "Give a new directory, or the head's own.",
        )
    check_picture(plot, "training", force=force)
    check_places(model, drafter, data, round_activations=round_activations)
    with importing(shown=not as_json):
        from hf_specdec import training, viz
        from hf_specdec.checkpoints.hub import load_head
        from hf_specdec.cli.training_run import load_conversations, load_training_target, print_result
        from hf_specdec.generation.loading import load_config

    with working("Reading the head", shown=not as_json):
        head = load_head(drafter)
    head.check_sizes(load_config(model).get_text_config(decoder=True))
    conversations = load_conversations(data, model, 2048)[:limit]
    target, _ = load_training_target(model, dtype, shown=not as_json, round_activations=round_activations)
    head = head.to(target.device, target.dtype)
    with working("Measuring acceptance and the time of verification", shown=not as_json):
        search = training.search_tree(
            target, head, conversations, num_nodes=num_nodes, max_nodes=max_nodes, num_steps=num_steps, top_k=top_k
        )
    head.save_pretrained(output)
    if plot is not None:
        viz.save_plot(viz.plot_tree(search.choices, search.acceptance), plot)
    if search.verify_seconds and not as_json:
        table = Table("nodes", "expected tau", "verify ms")
        for size, seconds in search.verify_seconds.items():
            table.add_row(str(size), f"{search.expected_tau[size]:.2f}", f"{1e3 * seconds:.1f}")
        Console().print(table)
    tau, choices = search.expected_tau[search.num_nodes], [list(path) for path in search.choices]
    print_result({"output": str(output), "num_nodes": search.num_nodes, "expected_tau": tau, "tree": choices}, as_json)
