"""The edge: bytes of a stranger to plain typed values, or to :class:`~merge_core.errors.InvalidInput`. Nothing else.

Every file that somebody else may have written (checkpoint, recipe, profile, task, card, results, release) comes in
through here: opened as a plain file inside its directory (``files``), read up to a bound, parsed with bounds on depth,
count, digits and aliases (``json_text``, ``yaml_text``). Whatever a parser lets out at a hostile input is turned into
InvalidInput in one place (``edge``). Numbers beside the bounds say what honest files need.
"""

from mergegate.merge_core.parsing.edge import MAX_DIGITS, edge, printable, typed
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
from mergegate.merge_core.parsing.json_text import (
    JsonBounds,
    line_place,
    parse_json,
    parse_json_object,
    parse_line,
    read_json,
    read_lines,
)
from mergegate.merge_core.parsing.local_path import LocalPath, parse_path
from mergegate.merge_core.parsing.overrides import with_overrides
from mergegate.merge_core.parsing.wording import as_written, expectation, kind_of, one_of_several
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
    "as_written",
    "check_entries",
    "edge",
    "expectation",
    "flow_yaml",
    "is_special",
    "kind_of",
    "line_place",
    "one_of_several",
    "open_buffered",
    "open_plain",
    "parse_json",
    "parse_json_object",
    "parse_line",
    "parse_path",
    "parse_yaml",
    "plain_file",
    "printable",
    "read_json",
    "read_lines",
    "read_plain",
    "read_text",
    "read_yaml",
    "read_yaml_mapping",
    "typed",
    "with_overrides",
]
