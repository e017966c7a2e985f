"""The command `hf-specdec`. Errors that the user can correct are printed as one line on stderr, with exit code 2.

Torch and transformers take seconds to import: a command imports them after its options are parsed and checked.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import typer
from safetensors import SafetensorError

from hf_specdec.atomic import TORCH_WRITER
from hf_specdec.cli import bench, doctor, generate, heads, train
from hf_specdec.cli.help import PAGES, Command, Group, epilog_of, in_words
from hf_specdec.errors import SpeculativeDecodingError

app = typer.Typer(
    cls=Group, help="Lossless speculative decoding for Hugging Face transformers.",
    epilog=f"[bold]Start with[/bold] hf-specdec demo. Examples: hf-specdec COMMAND --help\n\nDocs: {PAGES}tutorial.md",
    pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"hf-specdec {importlib.metadata.version('hf-specdec')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Lossless speculative decoding for Hugging Face transformers."""


GENERATE, MEASURE, TRAIN, HEADS = "Generate", "Measure", "Train heads", "Find and convert heads"

for _name, _command, _panel, _page, _examples in (
    ("demo", generate.demo, GENERATE, "tutorial.md",
     ("hf-specdec demo", "hf-specdec demo --model org/model --drafter org/head")),
    ("generate", generate.generate, GENERATE, "choosing.md", (
        "hf-specdec generate 'Why is the sky blue?'", "hf-specdec generate --interactive --model org/model",
        "cat question.txt | hf-specdec generate - --json",
    )),
    ("doctor", doctor.doctor, MEASURE, "choosing.md",
     ("hf-specdec doctor org/model", "hf-specdec doctor org/model --drafter org/head")),
    ("bench", bench.bench, MEASURE, "performance.md", (
        "hf-specdec bench --methods prompt_lookup,auto",
        "hf-specdec bench --prompts questions.jsonl --methods plain,transformers_prompt_lookup,auto,auto+inductor",
    )),
    ("env", doctor.env, MEASURE, "faq.md", ("hf-specdec env",)),
    ("distill", train.distill_data, TRAIN, "training.md", (
        "hf-specdec distill --model org/model --prompts prompts.jsonl --output data --temperature 0",
        "hf-specdec distill --model org/model --prompts prompts.jsonl --output data --server http://localhost:8000/v1",
    )),
    ("tree", heads.tree, TRAIN, "training.md",
     ("hf-specdec tree --model org/model --drafter head --data data --output head",)),
    ("train", train.train, TRAIN, "", ()),
    ("find", heads.find, HEADS, "heads.md", ("hf-specdec find meta-llama/Llama-3.1-8B-Instruct", "hf-specdec find")),
    ("inspect", heads.inspect, HEADS, "heads.md", ("hf-specdec inspect org/head",)),
    ("convert", heads.convert, HEADS, "heads.md", ("hf-specdec convert head out --format speculators",)),
):  # fmt: skip
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name, rich_help_panel=_panel)
    else:
        app.command(_name, cls=Command, epilog=epilog_of(_examples, _page), rich_help_panel=_panel)(_command)


INTERRUPTED = 130
"""Exit code after Ctrl-C, as of programs that the shell ends by SIGINT."""


def main() -> None:
    """Run the command that `sys.argv` names and exit; entry point of the console script `hf-specdec`."""
    try:
        code = app(prog_name="hf-specdec", standalone_mode=False) or 0
        if code == INTERRUPTED:  # typer catches a KeyboardInterrupt and returns this
            raise KeyboardInterrupt
        sys.exit(code)
    except SpeculativeDecodingError as error:
        _fail(str(error))
    except PermissionError as error:
        name = error.filename or "A file"
        _fail(f"{name} cannot be read or written: permission denied. Change its permissions or give another.")
    except (OSError, SafetensorError) as error:
        _fail(f"A file could not be read or written: {error}")
    except RuntimeError as error:
        if TORCH_WRITER not in str(error):
            raise
        _fail(f"A file could not be written: {error}")
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("\nhf-specdec: interrupted.", err=True)
        sys.exit(INTERRUPTED)
    except typer.TyperException as error:
        _fail(in_words(error))


def _fail(message: str) -> None:
    """Print an error message as one line on stderr and exit with code 2; an empty message is not printed."""
    if message.strip():
        typer.echo(f"hf-specdec: {' '.join(message.split())}", err=True)
    sys.exit(2)
