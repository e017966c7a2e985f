"""Command line: `python -m hf_specdec`."""

from hf_specdec.cli import main

main()
