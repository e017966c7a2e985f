"""The command `hf-specdec`. Errors that the user can correct are printed as one line on stderr, with exit code 2."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from typing import Annotated

import transformers
import typer
from safetensors import SafetensorError

from hf_specdec.cli import bench, block_training, distilling, generation, heads, machine, published, training, trees
from hf_specdec.cli.layout import Command
from hf_specdec.errors import SpeculativeDecodingError

app = typer.Typer(
    help="Lossless speculative decoding for Hugging Face transformers.",
    no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
)  # fmt: skip


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"hf-specdec {importlib.metadata.version('hf-specdec')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Lossless speculative decoding for Hugging Face transformers."""


GENERATE, MEASURE, TRAIN, HEADS = "Generate", "Measure", "Train heads", "Find and convert heads"

COMMANDS: list[tuple[Callable[..., None], str, list[str]]] = [
    (generation.demo, GENERATE, ["hf-specdec demo", "hf-specdec demo --model org/model --drafter org/head"]),
    (generation.generate, GENERATE, [
        "hf-specdec generate 'Why is the sky blue?'", "hf-specdec generate --interactive --model org/model",
        "cat question.txt | hf-specdec generate - --json",
    ]),
    (machine.doctor, MEASURE, ["hf-specdec doctor org/model", "hf-specdec doctor org/model --drafter org/head"]),
    (bench.bench, MEASURE, [
        "hf-specdec bench --prompts questions.jsonl --methods plain,transformers_prompt_lookup,auto,auto+inductor",
    ]),
    (machine.env, MEASURE, ["hf-specdec env"]),
    (distilling.distill, TRAIN, [
        "hf-specdec distill --model org/model --prompts prompts.jsonl --output data --temperature 0",
        "hf-specdec distill --model org/model --prompts prompts.jsonl --output data --server http://localhost:8000/v1",
    ]),
    (trees.tree, TRAIN, ["hf-specdec tree --model org/model --drafter head --data data --output head"]),
    (published.find, HEADS, ["hf-specdec find meta-llama/Llama-3.1-8B-Instruct", "hf-specdec find"]),
    (heads.inspect, HEADS, ["hf-specdec inspect org/head"]),
    (heads.convert, HEADS, ["hf-specdec convert head out --format speculators"]),
]  # fmt: skip
"""Function, panel in the help and examples of each command; `train`, which has subcommands, is added below."""

for _command, _panel, _examples in COMMANDS:
    _lines = "\n\n".join(f"  {example}" for example in _examples)
    app.command(cls=Command, rich_help_panel=_panel, epilog=f"[bold]Examples[/bold]\n\n{_lines}")(_command)
training.train.command(
    cls=Command, epilog=training.EXAMPLE.replace("KIND", "dflash") + " --draft-vocab-size 8192 --markov-rank 32"
)(block_training.dflash)
app.add_typer(training.train, name="train", rich_help_panel=TRAIN)


def main() -> None:
    """Run the command that `sys.argv` names and exit; entry point of the console script `hf-specdec`."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except SpeculativeDecodingError as error:
        _fail(str(error))
    except typer.BadParameter as error:
        _fail(error.format_message())
    except (OSError, SafetensorError) as error:
        _fail(f"A file could not be read or written: {error}")
    except RuntimeError as error:
        if TORCH_WRITER not in str(error):
            raise
        _fail(f"A file could not be written: {error}")
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except typer.TyperException as error:
        _fail(str(error))


TORCH_WRITER = "inline_container.cc"
"""C++ file that torch names in the RuntimeErrors that it raises if a checkpoint cannot be written."""


def _fail(message: str) -> None:
    """Print an error message as one line on stderr and exit with code 2; an empty message is not printed."""
    if message.strip():
        typer.echo(f"hf-specdec: {' '.join(message.split())}", err=True)
    sys.exit(2)
