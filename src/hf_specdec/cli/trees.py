"""The command `hf-specdec tree`, which finds the fastest static tree for a head on this device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hf_specdec.checkpoints.sources import overwritten
from hf_specdec.cli.inputs import check_places
from hf_specdec.cli.options import (
    Json,
    Model,
    TrainingPrecision,
    check_picture,
    check_writable_directory,
)
from hf_specdec.cli.status import importing, working
from hf_specdec.cli.training_options import Data
from hf_specdec.errors import InvalidConfigError, listed
from hf_specdec.validation import MAX_NODES, MAX_STEPS, MAX_TOP_K


def tree(
    drafter: Annotated[str, typer.Option(metavar="HEAD", help="Path or Hub id of the head.")],
    data: Data,
    output: Annotated[Path, typer.Option(help="Directory for the head with its tree; may be the head's own.")],
    model: Model = None,
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
    check_places(model, drafter, data)
    with importing(shown=not as_json):
        from hf_specdec import training, viz
        from hf_specdec.checkpoints.hub import load_head
        from hf_specdec.cli.runs import load_conversations, load_training_target, print_result
        from hf_specdec.generation.loading import load_config

    with working("Reading the head", shown=not as_json):
        head = load_head(drafter)
    head.check_sizes(load_config(model).get_text_config(decoder=True))
    conversations = load_conversations(data, model, 2048)[:limit]
    target, _ = load_training_target(model, dtype, shown=not as_json)
    head = head.to(target.device, target.dtype)
    with working("Measuring acceptance and the time of verification", shown=not as_json):
        search = training.search_tree(
            target, head, conversations, num_nodes=num_nodes, max_nodes=max_nodes, num_steps=num_steps, top_k=top_k
        )
    head.save_pretrained(output)
    if plot is not None:
        viz.save_plot(viz.plot_tree(search.choices, search.acceptance), plot)
    if not as_json:
        table = Table("nodes", "expected tau", "verify ms")
        for size, seconds in search.verify_seconds.items():
            table.add_row(str(size), f"{search.expected_tau[size]:.2f}", f"{1e3 * seconds:.1f}")
        if search.verify_seconds:
            Console().print(table)
    tau, choices = search.expected_tau[search.num_nodes], [list(path) for path in search.choices]
    print_result({"output": str(output), "num_nodes": search.num_nodes, "expected_tau": tau, "tree": choices}, as_json)
