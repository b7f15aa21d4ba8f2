"""Parse YAML strictly and with limits, whether it comes from users or from untrusted sources.

YAML allows a mapping to contain the same key twice, and the last one silently wins. Here, a duplicate key is an error.
Only values that JSON also has are accepted: a date stays text, and sets, bytes and pairs are rejected. Before loading a
text, mergegate reads it as a stream of events, which needs constant memory at any depth and shows how far its aliases
expand.

:func:`flow_yaml` writes plain data as one line that users can paste into a file and mergegate reads back unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mergegate.merge_core.errors import FindingLog, InvalidInput
from mergegate.merge_core.parsing.files import read_text
from mergegate.merge_core.parsing.json_text import MAX_DIGITS, parsing_errors, require_printable

# A recipe with a filter for every tensor of a large model takes 200 kB.
MAX_YAML_BYTES = 1 << 19
_MAX_DEPTH = 50
_MAX_DOCUMENTS = 256
# Limit for the expansion of aliases, in characters; each value adds 16. Parsed data are printed, hashed and stored as
# JSON, which has no aliases, and 400 bytes of aliases can expand to gigabytes.
_MAX_ADDED_BY_ALIASES = 2 << 20

# The libyaml loader, if PyYAML was built with it, reads the same language ten times as fast.
if TYPE_CHECKING:
    _SafeLoader = yaml.SafeLoader
else:
    _SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_TAG = "tag:yaml.org,2002:"
_AS_TEXT = "text, in quotes"
_PLAIN = tuple(f"{_TAG}{name}" for name in ("null", "bool", "str", "seq", "map"))


class StrictLoader(_SafeLoader):
    """Loader of plain data that rejects duplicate keys.

    With ``text_keys``, all keys must be text. The keys ``on``, ``no`` and ``1`` without quotes are not text.
    """

    text_keys = True

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.key_faults: list[_KeyFault] = []  # Reported together at the end of the text.
        self._flat_nodes: set[yaml.MappingNode] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Check the keys of a mapping, then replace each ``<<`` by the entries of the mappings that it refers to.

        Own keys override merged ones, and earlier mappings in a list override later ones, as YAML specifies. PyYAML
        6.0.4 does not always follow these rules. It calls this method again for a mapping that is already flat, which
        may then contain a key and the value that it overrides.
        """
        if node in self._flat_nodes:
            return
        self._flat_nodes.add(node)
        self._check_keys(node)
        own: list[tuple[yaml.Node, yaml.Node]] = []
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for key_node, value_node in node.value:
            if key_node.tag != f"{_TAG}merge":
                own.append((key_node, value_node))
                continue
            mappings = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for mapping in reversed(mappings):  # Of two entries with one key, the last counts.
                if not isinstance(mapping, yaml.MappingNode):
                    raise yaml.constructor.ConstructorError(
                        problem="'<<' needs a mapping or a list of mappings", problem_mark=mapping.start_mark
                    )
                self.flatten_mapping(mapping)
                merged += mapping.value
        node.value = merged + own

    def _check_keys(self, node: yaml.MappingNode) -> None:
        keys: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == f"{_TAG}merge":
                continue  # `<<: *anchor` may provide defaults that later keys override.
            key = self.construct_object(key_node, deep=True)
            if self.text_keys and not isinstance(key, str):
                self.key_faults.append(_KeyFault(f"the key {key!r} is not text", key_node.start_mark, _AS_TEXT))
                continue
            if not isinstance(key, Hashable):
                continue  # The superclass reports it.
            if key in keys:
                self.key_faults.append(
                    _KeyFault(f"the key {key!r} appears twice", key_node.start_mark, "each key once")
                )
            keys.add(key)

    def number(self, node: yaml.ScalarNode) -> Any:
        """Construct a number, or record a fault if it is too long for Python to print or convert to a float."""
        if len(node.value) > MAX_DIGITS:
            problem = f"a number of {len(node.value)} digits"
            self.key_faults.append(_KeyFault(problem, node.start_mark, f"at most {MAX_DIGITS} digits"))
            return 0
        return yaml.SafeLoader.yaml_constructors[node.tag](self, node)


# Sets, pairs, bytes and dates are not plain values. Their explicit tags are rejected, and a value that looks like a
# date is text, as in JSON.
StrictLoader.yaml_constructors = {
    None: yaml.SafeLoader.yaml_constructors[None],
    **{tag: yaml.SafeLoader.yaml_constructors[tag] for tag in _PLAIN},
    f"{_TAG}int": StrictLoader.number,
    f"{_TAG}float": StrictLoader.number,
}
StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_TAG}timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


# Explanations of PyYAML's messages for users.
_EXPLANATIONS = {
    "found character that cannot start any token": "a character that starts no value; indent with spaces, not tabs",
    "mapping values are not allowed in this context": "an unexpected ':'; check the indentation",
    "did not find expected node content": "a missing value; check for an unclosed bracket",
    "did not find expected key": "a missing key; check the indentation",
    "could not find expected ':'": "a key without ':'",
    "found unknown escape character": "a backslash in double quotes; write paths with '/' or in single quotes",
}


class _KeyFault(yaml.MarkedYAMLError):
    """Fault in a key or number of valid YAML that mergegate does not accept."""

    def __init__(self, problem: str, mark: yaml.Mark, expected: str) -> None:
        super().__init__(problem=problem, problem_mark=mark)
        self.expected = expected


def read_yaml(path: Path, expected: str, *, remedy: str = "", loader: type[StrictLoader] = StrictLoader) -> list[Any]:
    """Return the documents in a YAML file, like :func:`parse_yaml`.

    Error messages show ``expected``, such as ``a recipe in YAML``, and ``remedy`` if the file cannot be read.
    """
    text = read_text(path, MAX_YAML_BYTES, expected=expected, remedy=remedy)
    return parse_yaml(text, str(path), expected, loader=loader)


def read_yaml_mapping(
    path: Path, expected: str, *, remedy: str = "", loader: type[StrictLoader] = StrictLoader
) -> dict[str, Any]:
    """Return the mapping in a YAML file with one document, or an empty mapping for an empty file."""
    documents = read_yaml(path, expected, remedy=remedy, loader=loader) or [{}]
    if len(documents) > 1 or not isinstance(documents[0], dict):
        found = f"{len(documents)} documents" if len(documents) > 1 else f"a {type(documents[0]).__name__}"
        raise InvalidInput(str(path), found=found, expected=f"{expected}: one mapping")
    return documents[0]


def parse_yaml(
    text: str, location: str, expected: str = "a YAML mapping", *, loader: type[StrictLoader] = StrictLoader
) -> list[Any]:
    """Return the documents in a YAML text, without empty ones.

    Error messages show the name of the text, ``location``, and its ``expected`` content.

    Raises:
        InvalidInput: The text is not YAML, contains a duplicate key, or exceeds the limits. The message gives the line
            and column.
    """
    if len(text) > MAX_YAML_BYTES:
        raise InvalidInput(
            location, found=f"{len(text)} characters", expected=f"at most {MAX_YAML_BYTES}", remedy="split the file"
        )
    with parsing_errors(location, "not YAML", expected=expected):
        try:
            _check_bounds(text, location, loader)
            # The loader constructs only plain values, like safe_load.
            reader, documents = loader(text), []
            try:
                while reader.check_data():  # type: ignore[no-untyped-call]  # PyYAML's stubs are incomplete.
                    documents.append(reader.get_data())
            finally:
                reader.dispose()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            position = f"{location}, {_line(mark)}" if mark else location
            problem = _EXPLANATIONS.get(str(error.problem), str(error.problem))
            raise InvalidInput(position, found=f"not YAML: {problem}", expected=expected) from None
        log = FindingLog()
        for fault in sorted(reader.key_faults, key=lambda fault: fault.problem_mark.index if fault.problem_mark else 0):
            log.fault(f"{location}, {_line(fault.problem_mark)}", found=str(fault.problem), expected=fault.expected)
        log.raise_faults(location)
        if "\\" in text:  # Text can only contain a surrogate as an escape.
            require_printable(documents, location)
        return [document for document in documents if document is not None]


def _line(mark: yaml.Mark | None) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else "at its end"


def _check_bounds(text: str, location: str, loader: type[StrictLoader]) -> None:
    """Raise InvalidInput if a text nests too deeply or its aliases expand too far. Call this before loading it."""
    added = 0  # Characters added by all aliases so far.
    sizes: list[int] = [0]  # Sizes of the open collections, outermost first.
    names: list[str | None] = []  # Anchors of the open collections.
    anchors: dict[str, int] = {}
    documents = 0
    for event in yaml.parse(text, Loader=loader):
        size = 0
        if isinstance(event, yaml.DocumentStartEvent):
            anchors, documents = {}, documents + 1
            if documents > _MAX_DOCUMENTS:
                raise InvalidInput(location, found=f"over {_MAX_DOCUMENTS} documents", expected="fewer documents")
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in names:
                raise InvalidInput(
                    location, found=f"the alias *{event.anchor:.40} contains itself", expected="no circular aliases"
                )
            size = anchors.get(str(event.anchor), 0)  # The parser reports an unknown anchor.
            added += size
            if added > _MAX_ADDED_BY_ALIASES:
                raise InvalidInput(
                    location,
                    found="its aliases expand to over 2 MB",
                    expected="at most 2 MB",
                    remedy="use fewer aliases (&name, *name), or split the file",
                )
        elif isinstance(event, yaml.ScalarEvent):
            size = 16 + len(event.value)
            if event.anchor is not None:
                anchors[event.anchor] = size
        elif isinstance(event, yaml.CollectionStartEvent):
            sizes.append(16)
            names.append(event.anchor)
            if len(names) > _MAX_DEPTH:
                raise InvalidInput(location, found=f"over {_MAX_DEPTH} levels", expected="fewer levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            size, name = sizes.pop(), names.pop()
            if name is not None:
                anchors[name] = size
        sizes[-1] += size


class _FlowDumper(yaml.SafeDumper):
    """Dumper that quotes only when necessary, with double quotes so that line breaks are escaped."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # An alias such as '&id001' would confuse readers of the line.

    def choose_scalar_style(self) -> str:
        style: str = super().choose_scalar_style()
        return '"' if style == "'" else style


# PyYAML reads such a value as text, but readers of YAML 1.2, such as editors, read it as a number. Quotes make it text
# for both.
_FlowDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?|\.\d)\d*[eE][-+]?\d+$"), list("-+.0123456789")
)


def flow_yaml(value: object) -> str:
    """Return plain data as one line of YAML in flow style, for example ``{a: [1, 2]}``.

    The line can be pasted inside brackets or braces: strings that would be misread there are quoted.
    """
    text = yaml.dump(
        [value], Dumper=_FlowDumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=math.inf
    )
    return text.strip()[1:-1]
