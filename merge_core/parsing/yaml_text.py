"""YAML, read strictly and with bounds: what people write, and what strangers write to look like it.

YAML lets a key stand twice in a mapping, and the later one wins in silence. Here that is an error, in everything that
people write: recipes, profiles, licence tables, task definitions. Values are those that JSON has too: a date stays the
text that it is, and sets, bytes and pairs are refused. The text is first read as a stream of events, which takes no
more memory however deep it nests, and which tells how much the aliases would add, written out.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mergegate.merge_core.errors import FindingLog, InvalidInput
from mergegate.merge_core.parsing.files import read_text
from mergegate.merge_core.parsing.input_errors import MAX_DIGITS, parsing_errors, require_printable

# A recipe with a filter for every tensor of a large model takes 200 kB.
MAX_YAML_BYTES = 1 << 19
_MAX_DEPTH = 50
_MAX_DOCUMENTS = 256
# What aliases add when they are written out, in characters; a value counts for 16. What is read here is printed, hashed
# and stored as JSON, which has no aliases: 400 bytes of them can stand for gigabytes.
_MAX_ADDED_BY_ALIASES = 2 << 20

# libyaml, where PyYAML was built with it: ten times as fast, and the same language.
if TYPE_CHECKING:
    _SafeLoader = yaml.SafeLoader
else:
    _SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_TAG = "tag:yaml.org,2002:"
_AS_TEXT = "text: put it in quotes"
_PLAIN = tuple(f"{_TAG}{name}" for name in ("null", "bool", "str", "seq", "map"))


class StrictLoader(_SafeLoader):
    """Plain data only, and a mapping may name a key only once.

    ``text_keys``: whether keys must be text. A bare ``on``, ``no`` or ``1`` is not.
    """

    text_keys = True

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.key_faults: list[_KeyFault] = []  # reported together, when the whole text has been read

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == f"{_TAG}merge":
                continue  # `<<: *anchor` may give defaults that are then overwritten.
            key = self.construct_object(key_node, deep=True)
            if self.text_keys and not isinstance(key, str):
                self.key_faults.append(_KeyFault(f"the key {key!r} is not text", key_node.start_mark, _AS_TEXT))
                continue
            if not isinstance(key, Hashable):
                continue  # The super class says so.
            if key in seen:
                self.key_faults.append(_KeyFault(f"{key!r} is written twice", key_node.start_mark, "every key once"))
            seen.add(key)
        return super().construct_mapping(node, deep)

    def number(self, node: yaml.ScalarNode) -> Any:
        """A number of few digits: Python neither prints long ones nor makes floats of them."""
        if len(node.value) > MAX_DIGITS:
            found = f"a number of {len(node.value)} digits"
            self.key_faults.append(_KeyFault(found, node.start_mark, f"at most {MAX_DIGITS} digits"))
            return 0
        return yaml.SafeLoader.yaml_constructors[node.tag](self, node)


# Sets, pairs, bytes and dates are no plain values; an explicit tag of theirs is refused, and what looks like a date is
# text, as in JSON.
StrictLoader.yaml_constructors = {
    None: yaml.SafeLoader.yaml_constructors[None],
    **{tag: yaml.SafeLoader.yaml_constructors[tag] for tag in _PLAIN},
    f"{_TAG}int": StrictLoader.number,
    f"{_TAG}float": StrictLoader.number,
}
StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag != f"{_TAG}timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


# What PyYAML says to programmers.
_IN_WORDS = {
    "found character that cannot start any token": "a character that nothing begins with; blanks, not tabs, indent it",
    "mapping values are not allowed in this context": "a ':' where none can stand; look at how the lines are indented",
    "did not find expected node content": "nothing where a value should stand; a bracket may not be closed",
    "did not find expected key": "no key where one should stand; look at how the lines are indented",
    "could not find expected ':'": "a key without ':'",
    "found unknown escape character": "a backslash in double quotes; write a path with '/', or in single quotes",
}


class _KeyFault(yaml.MarkedYAMLError):
    """Valid YAML that is not accepted."""

    def __init__(self, problem: str, mark: yaml.Mark, expected: str) -> None:
        super().__init__(problem=problem, problem_mark=mark)
        self.expected = expected


def read_yaml(path: Path, expected: str, *, remedy: str = "", loader: type[StrictLoader] = StrictLoader) -> list[Any]:
    """The documents of a YAML file, empty ones left out.

    Args:
        path: UTF-8 text.
        expected: What it should be, for messages: ``a recipe in YAML``.
        remedy: What to do when it cannot be read.
        loader: A loader with further tags.

    Raises:
        InvalidInput: It cannot be read, is not YAML, has a key twice in a mapping, or is beyond the bounds; with line
            and column.
    """
    text = read_text(path, MAX_YAML_BYTES, expected=expected, remedy=remedy)
    return parse_yaml(text, str(path), expected, loader=loader)


def read_yaml_mapping(
    path: Path, expected: str, *, remedy: str = "", loader: type[StrictLoader] = StrictLoader
) -> dict[str, Any]:
    """The mapping in a YAML file of one document; empty if the file is. Arguments are those of :func:`read_yaml`.

    Raises:
        InvalidInput: As :func:`read_yaml`, or there are several documents, or something else than a mapping.
    """
    documents = read_yaml(path, expected, remedy=remedy, loader=loader) or [{}]
    if len(documents) > 1 or not isinstance(documents[0], dict):
        found = f"{len(documents)} documents" if len(documents) > 1 else f"a {type(documents[0]).__name__}"
        raise InvalidInput(str(path), found=found, expected=f"{expected}: one mapping")
    return documents[0]


def parse_yaml(
    text: str, where: str, expected: str = "a YAML mapping", *, loader: type[StrictLoader] = StrictLoader
) -> list[Any]:
    """The documents of a YAML text, empty ones left out.

    Args:
        text: The text.
        where: What messages call it.
        expected: As for :func:`read_yaml`, and ``loader``.

    Raises:
        InvalidInput: Not YAML, a key twice in a mapping, or beyond the bounds; with line and column.
    """
    if len(text) > MAX_YAML_BYTES:
        raise InvalidInput(
            where, found=f"{len(text)} characters", expected=f"at most {MAX_YAML_BYTES}", remedy="split the file"
        )
    with parsing_errors(where, "not YAML", expected=expected):
        try:
            _check_bounds(text, where, loader)
            # The loader makes plain values only, as safe_load does.
            documents, faults = _loaded(text, loader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            place = f"{where}, {_line(mark)}" if mark else where
            problem = _IN_WORDS.get(str(error.problem), str(error.problem))
            raise InvalidInput(place, found=f"not YAML: {problem}", expected=expected) from None
        log = FindingLog()
        for fault in sorted(faults, key=lambda fault: fault.problem_mark.index if fault.problem_mark else 0):
            log.fault(f"{where}, {_line(fault.problem_mark)}", found=str(fault.problem), expected=fault.expected)
        log.raise_faults(where)
        if "\\" in text:  # escapes are the only way for half a character into a text
            require_printable(documents, where)
        return documents


def _loaded(text: str, loader: type[StrictLoader]) -> tuple[list[Any], list[_KeyFault]]:
    """Return the documents that are not empty, and what is valid YAML but not accepted."""
    reader, documents = loader(text), []
    try:
        while reader.check_data():  # type: ignore[no-untyped-call]  # of PyYAML's stubs
            documents.append(reader.get_data())
    finally:
        reader.dispose()
    return [document for document in documents if document is not None], reader.key_faults


def _line(mark: yaml.Mark | None) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else "at its end"


def _check_bounds(text: str, where: str, loader: type[StrictLoader]) -> None:
    """Raise InvalidInput if a text nests too deeply, or its aliases stand for too much, before it is loaded."""
    added = 0  # by aliases, in the whole text
    sizes: list[int] = [0]  # of the collections that are open, the outermost first
    names: list[str | None] = []  # their anchors
    anchors: dict[str, int] = {}
    documents = 0
    for event in yaml.parse(text, Loader=loader):
        size = 0
        if isinstance(event, yaml.DocumentStartEvent):
            anchors, documents = {}, documents + 1
            if documents > _MAX_DOCUMENTS:
                raise InvalidInput(where, found=f"over {_MAX_DOCUMENTS} documents", expected="fewer in one file")
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in names:
                raise InvalidInput(where, found=f"*{event.anchor:.40}, inside itself", expected="values with an end")
            size = anchors.get(str(event.anchor), 0)  # the parser reports one that is not there
            added += size
            if added > _MAX_ADDED_BY_ALIASES:
                raise InvalidInput(
                    where,
                    found="over 2 MB added by its aliases",
                    expected="less",
                    remedy="write fewer aliases (&name, *name), or split the file",
                )
        elif isinstance(event, yaml.ScalarEvent):
            size = 16 + len(event.value)
            if event.anchor is not None:
                anchors[event.anchor] = size
        elif isinstance(event, yaml.CollectionStartEvent):
            sizes.append(16)
            names.append(event.anchor)
            if len(names) > _MAX_DEPTH:
                raise InvalidInput(where, found=f"over {_MAX_DEPTH} levels", expected="fewer levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            size, name = sizes.pop(), names.pop()
            if name is not None:
                anchors[name] = size
        sizes[-1] += size
