"""The edge: bytes of a stranger to plain typed values, or to :class:`~merge_core.errors.InvalidInput`. Nothing else.

Every file that somebody else may have written (checkpoint, recipe, profile, task, card, results, release) comes in
through here: opened as a plain file inside its directory (``files``), read up to a bound, parsed with bounds on depth,
count, digits and aliases (``json_text``, ``yaml_text``). Whatever a parser lets out at a hostile input is turned into
InvalidInput in one place (``edge``). Numbers beside the bounds say what honest files need.
"""

from mergegate.merge_core.parsing.files import (
    MAX_CODE_BYTES,
    MAX_DATA_BYTES,
    check_entries,
    is_special,
    open_buffered,
    open_plain,
    plain_file,
    read_plain,
    read_text,
)
from mergegate.merge_core.parsing.input_errors import MAX_DIGITS, parsing_errors, require_printable, require_type
from mergegate.merge_core.parsing.json_text import (
    JsonBounds,
    line_location,
    parse_json,
    parse_json_object,
    parse_line,
    read_json,
    read_lines,
)
from mergegate.merge_core.parsing.local_path import LocalPath, parse_path
from mergegate.merge_core.parsing.overrides import with_overrides
from mergegate.merge_core.parsing.wording import describe_kind, expectation, format_value, join_expectations
from mergegate.merge_core.parsing.yaml_flow import flow_yaml
from mergegate.merge_core.parsing.yaml_text import (
    MAX_YAML_BYTES,
    StrictLoader,
    parse_yaml,
    read_yaml,
    read_yaml_mapping,
)

__all__ = [
    "MAX_CODE_BYTES",
    "MAX_DATA_BYTES",
    "MAX_DIGITS",
    "MAX_YAML_BYTES",
    "JsonBounds",
    "LocalPath",
    "StrictLoader",
    "check_entries",
    "describe_kind",
    "expectation",
    "flow_yaml",
    "format_value",
    "is_special",
    "join_expectations",
    "line_location",
    "open_buffered",
    "open_plain",
    "parse_json",
    "parse_json_object",
    "parse_line",
    "parse_path",
    "parse_yaml",
    "parsing_errors",
    "plain_file",
    "read_json",
    "read_lines",
    "read_plain",
    "read_text",
    "read_yaml",
    "read_yaml_mapping",
    "require_printable",
    "require_type",
    "with_overrides",
]
