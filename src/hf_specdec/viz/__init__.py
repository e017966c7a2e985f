"""Plots of draft trees, decoding steps, training runs and step costs; coloured text, live output and a race.

Plots and `step_through` need matplotlib (`pip install hf-specdec[notebooks]`). For functions that take a trace or one
of its steps, call `model.generate(..., speculative={"method": ..., "trace": True})`; the trace, a list of steps, is
then in `model.last_speculation.trace`.
"""

from hf_specdec.reporting.palette import save_plot
from hf_specdec.viz.live import LiveStreamer, Race, StepStreamer, race
from hf_specdec.viz.plots import plot_acceptance, plot_costs, plot_run, plot_timeline, plot_widths
from hf_specdec.viz.text import ColoredText, Piece, colored_text
from hf_specdec.viz.tree_plots import StepThrough, plot_step, plot_tree, step_through

__all__ = [
    "ColoredText",
    "LiveStreamer",
    "Piece",
    "Race",
    "StepStreamer",
    "StepThrough",
    "colored_text",
    "plot_acceptance",
    "plot_costs",
    "plot_run",
    "plot_step",
    "plot_timeline",
    "plot_tree",
    "plot_widths",
    "race",
    "save_plot",
    "step_through",
]
