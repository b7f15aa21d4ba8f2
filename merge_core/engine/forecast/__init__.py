"""Forecast the memory, disk space and time that a merge will need on this machine."""

from mergegate.merge_core.engine.forecast.forecast import (
    Duration,
    Needs,
    Rates,
    duration,
    estimate_needs,
    input_files,
    peak_memory,
)
from mergegate.merge_core.engine.forecast.probe import (
    load_rates,
    machine_key,
    measure_bus,
    measure_machine,
    measure_products_on,
    save_rates,
)
