"""`python -m hf_specdec`: the command line."""

from hf_specdec.cli import main

main()
