"""The command line: every command is a row here. A user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated

import transformers
import typer
from safetensors import SafetensorError

from hf_specdec.cli import bench, distilling, generation, heads, training, trees
from hf_specdec.errors import SpeculativeDecodingError

app = typer.Typer(
    help="Lossless speculative decoding for Hugging Face transformers.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hf-specdec {importlib.metadata.version('hf-specdec')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """Lossless speculative decoding for Hugging Face transformers."""


for _command in (
    generation.demo, generation.generate, bench.bench, heads.inspect, heads.convert, distilling.distill, trees.tree,
):  # fmt: skip
    app.command()(_command)
app.add_typer(training.train, name="train")


def main() -> None:
    """Entry point of the console script."""
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
        if WRITER not in str(error):
            raise
        _fail(f"A file could not be written: {error}")
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except typer.TyperException as error:
        _fail(str(error))


WRITER = "inline_container.cc"
"""torch's archive writer, in the text of its errors: they have no class of their own."""


def _fail(message: str) -> None:
    """One line; none where the help has been shown already."""
    if message.strip():
        typer.echo(f"hf-specdec: {' '.join(message.split())}", err=True)
    sys.exit(2)
