"""Parse untrusted bytes into plain typed values, or raise :class:`~merge_core.errors.InvalidInput`.

mergegate reads every untrusted file (checkpoint, recipe, profile, task, card, results, release) with this package. The
module ``files`` opens only plain files inside their directory, up to a size limit. ``json_text`` and ``yaml_text``
limit depth, number of values, digits and aliases. ``input_errors`` turns every exception that a parser raises for
hostile input into InvalidInput. Comments next to the limits say how much legitimate files need. ``extensions`` selects
the class of a setting that other packages may extend.
"""

from mergegate.merge_core.parsing.extensions import SelectedBy, collect_settings
from mergegate.merge_core.parsing.files import (
    MAX_CODE_BYTES,
    MAX_DATA_BYTES,
    LocalPath,
    check_entries,
    open_buffered,
    open_plain,
    parse_path,
    plain_file,
    read_plain,
    read_text,
)
from mergegate.merge_core.parsing.input_errors import parsing_errors, require_printable
from mergegate.merge_core.parsing.json_text import (
    JsonBounds,
    line_location,
    parse_json,
    parse_json_object,
    parse_line,
    read_json,
    read_lines,
    unique_keys,
)
from mergegate.merge_core.parsing.overrides import with_overrides
from mergegate.merge_core.parsing.wording import describe_kind, expectation, format_value, join_expectations
from mergegate.merge_core.parsing.yaml_text import (
    MAX_YAML_BYTES,
    StrictLoader,
    flow_yaml,
    parse_yaml,
    read_yaml,
    read_yaml_mapping,
)
from mergegate.merge_core.parsing.zip_directory import check_zip_directory
