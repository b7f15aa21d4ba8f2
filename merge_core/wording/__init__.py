"""Format and parse quantities for users (``units``), and report details of the work in progress (``details``)."""

from mergegate.merge_core.wording.details import detail, detail_listener, has_detail_listener
from mergegate.merge_core.wording.units import (
    format_bytes,
    format_count,
    format_duration,
    format_roughly,
    format_short_time,
    parse_bytes,
    parse_duration,
)
