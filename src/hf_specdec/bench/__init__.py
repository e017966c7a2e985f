"""Benchmark decoding methods against plain `generate()`: prompt files, timed calls, machine load and reports."""

from hf_specdec.bench.diagnosis import verify_seconds
from hf_specdec.bench.machine import environment
from hf_specdec.bench.methods import PEERS, check_methods
from hf_specdec.bench.questions import MT_BENCH, Question, read_questions
from hf_specdec.bench.summary import percentile, plot, summarise, warnings_of
from hf_specdec.bench.timing import External, Measurement, Reply, measure

__all__ = [
    "MT_BENCH",
    "PEERS",
    "External",
    "Measurement",
    "Question",
    "Reply",
    "check_methods",
    "environment",
    "measure",
    "percentile",
    "plot",
    "read_questions",
    "summarise",
    "verify_seconds",
    "warnings_of",
]
