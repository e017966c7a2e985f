"""Pictures: what one step drafted, what a generation did, what a head has learned, what a machine's steps cost.

They need matplotlib (`pip install hf-specdec[notebooks]`), but for coloured text. What a generation did is told by
`model.generate(..., speculative={"method": ..., "trace": True})` in `model.last_speculation.trace`.
"""

from hf_specdec.reporting.palette import save_plot
from hf_specdec.viz.runs import plot_costs, plot_run
from hf_specdec.viz.steps import plot_acceptance, plot_timeline, plot_widths
from hf_specdec.viz.text import ColoredText, colored_text
from hf_specdec.viz.trees import plot_step, plot_tree

__all__ = [
    "ColoredText",
    "colored_text",
    "plot_acceptance",
    "plot_costs",
    "plot_run",
    "plot_step",
    "plot_timeline",
    "plot_tree",
    "plot_widths",
    "save_plot",
]
