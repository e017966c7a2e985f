"""The command `hf-specdec`. Errors that the user can correct are printed as one line on stderr, with exit code 2.

Torch and transformers take seconds to import: a command imports them after its options are parsed and checked.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from safetensors import SafetensorError

from hf_specdec.atomic import TORCH_WRITER
from hf_specdec.cli.layout import PAGES, Command, Group, epilog_of
from hf_specdec.cli.mistakes import in_words
from hf_specdec.errors import SpeculativeDecodingError


@dataclass(frozen=True, slots=True)
class Entry:
    """What the help of `hf-specdec` shows of a command, and where the command is."""

    place: str  # module in this package and name of the function, or of the `Typer` if it has subcommands
    panel: str
    page: str  # of `docs/`
    summary: str  # first line of its docstring
    examples: tuple[str, ...] = ()


GENERATE, MEASURE, TRAIN, HEADS = "Generate", "Measure", "Train heads", "Find and convert heads"

COMMANDS = {
    "demo": Entry(
        "generation.demo", GENERATE, "tutorial.md",
        "Compare plain and speculative decoding on one prompt: speed, tokens per forward (tau), equal token ids.",
        ("hf-specdec demo", "hf-specdec demo --model org/model --drafter org/head"),
    ),
    "generate": Entry(
        "generation.generate", GENERATE, "choosing.md", "Answer a prompt and stream the answer, or chat.", (
        "hf-specdec generate 'Why is the sky blue?'", "hf-specdec generate --interactive --model org/model",
        "cat question.txt | hf-specdec generate - --json",
    )),
    "doctor": Entry(
        "checks.doctor", MEASURE, "choosing.md",
        "Check whether a model can verify several drafts in one forward, time its forwards, find the fastest method.",
        ("hf-specdec doctor org/model", "hf-specdec doctor org/model --drafter org/head"),
    ),
    "bench": Entry(
        "bench.bench", MEASURE, "performance.md",
        "Measure methods against plain generate(), interleaved per question.", (
        "hf-specdec bench --methods prompt_lookup,auto",
        "hf-specdec bench --prompts questions.jsonl --methods plain,transformers_prompt_lookup,auto,auto+inductor",
    )),
    "env": Entry(
        "checks.env", MEASURE, "troubleshooting.md",
        "Show versions, devices and supported features, for a bug report.",
        ("hf-specdec env",),
    ),
    "distill": Entry(
        "distilling.distill", TRAIN, "training.md", "Generate training data: let the target model answer prompts.", (
        "hf-specdec distill --model org/model --prompts prompts.jsonl --output data --temperature 0",
        "hf-specdec distill --model org/model --prompts prompts.jsonl --output data --server http://localhost:8000/v1",
    )),
    "tree": Entry(
        "trees.tree", TRAIN, "training.md",
        "Find the fastest static tree for a head on this device and store it in the head's config.",
        ("hf-specdec tree --model org/model --drafter head --data data --output head",),
    ),
    "train": Entry(
        "training_group.train", TRAIN, "training.md", "Train a draft head for a model on the model's own answers."
    ),
    "find": Entry(
        "published.find", HEADS, "heads.md",
        "Find published draft heads for a model on the Hub; for the packaged model, show where the shipped heads are.",
        ("hf-specdec find meta-llama/Llama-3.1-8B-Instruct", "hf-specdec find"),
    ),
    "inspect": Entry(
        "heads.inspect", HEADS, "heads.md",
        "Show a head's layout, target, sizes and config; every tensor is read and checked.",
        ("hf-specdec inspect org/head",),
    ),
    "convert": Entry(
        "heads.convert", HEADS, "heads.md", "Convert a head to the layout of hf-specdec or of another engine.",
        ("hf-specdec convert head out --format speculators",),
    ),
}  # fmt: skip


class Commands(Group):
    """The commands of `COMMANDS`; one that is used is imported, the others are only listed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name of the command that the arguments begin with, the command, and the other arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else load(name), rest


def load(name: str) -> Any:
    """Import a command, and return it as typer runs it."""
    entry = COMMANDS[name]
    module, _, attribute = entry.place.partition(".")
    found: Any = getattr(importlib.import_module(f"hf_specdec.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(name, cls=Command, epilog=epilog_of(entry.examples, entry.page))(found)
    return typer.main.get_command(alone)


app = typer.Typer(
    cls=Commands, help="Lossless speculative decoding for Hugging Face transformers.",
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


for _name, _entry in COMMANDS.items():
    app.command(_name, help=_entry.summary, rich_help_panel=_entry.panel)(lambda: None)


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
