"""Parse untrusted bytes into plain typed values, or raise :class:`~merge_core.errors.InvalidInput`.

mergegate reads every untrusted file (checkpoint, recipe, profile, task, card, results, release) with this package. The
module ``files`` opens only plain files inside their directory, up to a size limit. ``json_text`` and ``yaml_text``
limit depth, number of values, digits and aliases, and turn every exception that a parser raises for hostile input into
InvalidInput. Comments next to the limits say how much legitimate files need. ``settings`` supports settings that
pydantic reads.
"""

from mergegate.merge_core.parsing.files import (
    MAX_CODE_BYTES,
    MAX_DATA_BYTES,
    LocalPath,
    check_entries,
    check_zip_directory,
    open_buffered,
    open_plain,
    parse_path,
    plain_file,
    read_plain,
    read_text,
)
from mergegate.merge_core.parsing.json_text import (
    JsonBounds,
    line_location,
    parse_json,
    parse_json_object,
    parse_line,
    parsing_errors,
    read_json,
    read_lines,
    require_printable,
    unique_keys,
)
from mergegate.merge_core.parsing.settings import (
    SelectedBy,
    collect_settings,
    describe_kind,
    expectation,
    format_value,
    join_expectations,
    with_overrides,
)
from mergegate.merge_core.parsing.yaml_text import (
    MAX_YAML_BYTES,
    StrictLoader,
    flow_yaml,
    parse_yaml,
    read_yaml,
    read_yaml_mapping,
)
