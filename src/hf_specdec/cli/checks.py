"""The commands `hf-specdec env` and `hf-specdec doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_specdec.cli.inputs import check_places
from hf_specdec.cli.options import Head, Json, NewTokens, Precision
from hf_specdec.cli.status import importing


def env(as_json: Json = False) -> None:
    """Show versions, devices and supported features, for a bug report."""
    with importing(shown=not as_json):
        from hf_specdec.cli.machine import show_environment

    show_environment(as_json=as_json)


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Path or Hub id of the model. Default: the packaged SmolLM2-135M-Instruct."
        ),
    ] = None,
    drafter: Head = None,
    max_new_tokens: NewTokens = 64,
    dtype: Precision = "auto",
    as_json: Json = False,
) -> None:
    """Check whether a model can verify several drafts in one forward, time its forwards, find the fastest method.

    Drafts that are verified in one forward are a tree. The methods are
    compared on three prompts; hf-specdec bench compares them on yours.
    """
    check_places(model, drafter)
    with importing(shown=not as_json):
        from hf_specdec.cli.machine import diagnose_model

    diagnose_model(model, drafter, dtype, max_new_tokens=max_new_tokens, as_json=as_json)
