"""What a plan will take on this machine, before it starts: bytes, memory, disk and time."""

from merge_core.forecast.forecast import (
    Duration,
    Needs,
    Rates,
    duration,
    input_files,
    needs_of,
    peak_memory,
)
from merge_core.forecast.probe import measure_bus, measure_machine, place_of, recall, remember

__all__ = [
    "Duration",
    "Needs",
    "Rates",
    "duration",
    "input_files",
    "measure_bus",
    "measure_machine",
    "needs_of",
    "peak_memory",
    "place_of",
    "recall",
    "remember",
]
