"""How things are said to people: quantities (``units``), and what happens while something works (``details``)."""

from mergegate.merge_core.wording.details import detail, heard_by, wants_details, without_secrets
from mergegate.merge_core.wording.units import (
    format_bytes,
    format_duration,
    format_roughly,
    format_short_time,
    parse_bytes,
    parse_duration,
)

__all__ = [
    "detail",
    "format_bytes",
    "format_duration",
    "format_roughly",
    "format_short_time",
    "heard_by",
    "parse_bytes",
    "parse_duration",
    "wants_details",
    "without_secrets",
]
