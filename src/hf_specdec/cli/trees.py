"""`hf-specdec tree`: the static tree of a head that pays most on this device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hf_specdec import viz
from hf_specdec.checkpoints.hub import load_head
from hf_specdec.cli.options import Json, Model, Precision, need_package, writable_directory, writable_file
from hf_specdec.cli.runs import Data, conversations_of, target_of, tell, training_package
from hf_specdec.errors import InvalidConfigError
from hf_specdec.generation.loading import load_config


def tree(
    drafter: Annotated[str, typer.Option(help="Path or Hub id of the head.")],
    data: Data,
    output: Annotated[Path, typer.Option(help="Where to write the head with its tree; may be the head's directory.")],
    model: Model = None,
    num_nodes: Annotated[int | None, typer.Option(min=2, help="Size, root included; default: the fastest.")] = None,
    max_nodes: Annotated[int, typer.Option(min=2, help="Largest size to choose from.")] = 64,
    num_steps: Annotated[int, typer.Option(min=1, help="Deepest level.")] = 5,
    top_k: Annotated[int, typer.Option(min=1, help="Candidates measured per node.")] = 10,
    limit: Annotated[int, typer.Option(min=1, help="Conversations to calibrate on.")] = 200,
    plot: Annotated[Path | None, typer.Option(help="Draw the tree into this file.")] = None,
    dtype: Precision = "bfloat16",
    as_json: Json = False,
) -> None:
    """Find the static tree that pays most for a head on this device."""
    writable_directory(output, "--output")
    writable_file(plot, "--plot")
    if plot is not None:
        need_package("matplotlib", "--plot", "training")
    head = load_head(drafter)
    if (output / "config.json").exists() and output.resolve() != Path(drafter).resolve():
        raise InvalidConfigError(
            f"--output {output} holds another head, it is not the directory of this head.",
            "Give a new one, or the head's.",
        )
    head.check_sizes(load_config(model).get_text_config(decoder=True))
    talks = conversations_of(data, model, 2048)[:limit]
    target, _ = target_of(model, dtype)
    head = head.to(target.device, target.dtype)
    found = training_package().search_tree(
        target, head, talks, num_nodes=num_nodes, max_nodes=max_nodes, num_steps=num_steps, top_k=top_k
    )
    head.save_pretrained(output)
    if plot is not None:
        viz.save_plot(viz.plot_tree(found.choices, found.acceptance), plot)
    if not as_json:
        table = Table("nodes", "expected tau", "verify ms")
        for size, seconds in found.verify_seconds.items():
            table.add_row(str(size), f"{found.expected_tau[size]:.2f}", f"{1e3 * seconds:.1f}")
        if found.verify_seconds:
            Console().print(table)
    tau, choices = found.expected_tau[found.num_nodes], [list(path) for path in found.choices]
    tell({"output": str(output), "num_nodes": found.num_nodes, "expected_tau": tau, "tree": choices}, as_json)
