"""Generate the reference page of the Python API from the signatures and docstrings of ``mergegate``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

_HEAD = """# Python API

Made by `mergegate schema --write docs` from the docstrings; a test fails if this page is out of date.
"""
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Example):$", re.MULTILINE)
_ITEM = re.compile(r"^(\w+): ", re.MULTILINE)
_ROLE = re.compile(r":\w+:`([^`]+)`")
# A field of a class in its source, with a comment on its line: 'n: int  # Number of paired documents.'
_FIELD = re.compile(r"^    ([a-z]\w*): (?:[^#\n]|#(?! ))+?(?:  # (.*))?$", re.MULTILINE)


def api_page() -> str:
    """Return the reference page as Markdown: functions, then results, then errors."""
    import mergegate

    members = {name: getattr(mergegate, name) for name in mergegate.__all__}
    functions = [members[name] for name in mergegate.__all__ if inspect.isfunction(members[name])]
    functions.sort(key=lambda function: function.__code__.co_firstlineno)  # as in the story of a release
    classes = [member for member in members.values() if inspect.isclass(member)]
    errors = [kind for kind in classes if issubclass(kind, Exception)]
    errors.sort(key=lambda kind: (len(kind.__mro__), kind.__name__))
    results = [kind for kind in classes if kind not in errors and kind is not mergegate.Profile]
    _, _, overview = (inspect.getdoc(inspect.getmodule(mergegate.run)) or "").partition("\n\n")
    lines = [_HEAD, *_prose(overview), "", "## Functions", ""]
    for function in functions:
        lines += _entry(function.__name__, function)
    lines += ["## Results", "", "All results are frozen.", ""]
    lines += ["### `mergegate.Profile`", "", "Settings of a release. See [the keys of a profile](profile.md).", ""]
    for kind in results:
        lines += _entry(kind.__name__, kind)
    lines += ["## Errors", "", "| error | base class | meaning |", "| --- | --- | --- |"]
    for error in errors:
        meaning = " ".join(_prose((inspect.getdoc(error) or "").partition("\n\n")[0]))
        lines.append(f"| `mergegate.{error.__name__}` | `{error.__bases__[0].__name__}` | {meaning} |")
    lines += [
        "",
        "The attributes `where`, `found`, `expected` and `remedy` of an error are the parts of its message.",
        "",
    ]
    return "\n".join(lines)


def _entry(name: str, member: Any) -> Iterator[str]:
    yield f"### `mergegate.{name}`"
    yield ""
    head, *parts = _SECTION.split(inspect.getdoc(member) or "")
    if inspect.isfunction(member):
        signature, parameters = inspect.signature(member), []
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
                parameters.append("*")
            default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
            parameters.append(f"{parameter.name}: {parameter.annotation}{default}")
        lines = "".join(f"    {parameter},\n" for parameter in parameters)
        yield from ("```python", f"mergegate.{name}(\n{lines}) -> {signature.return_annotation}", "```", "")
    yield from _prose(head)
    yield ""
    sections = dict(zip(parts[::2], map(inspect.cleandoc, parts[1::2]), strict=True))
    if inspect.isclass(member):
        yield from _members(member, dict(_items(sections.get("Attributes") or sections.get("Args", ""))))
    else:
        yield from ("| argument | meaning |", "| --- | --- |")
        yield from (f"| `{name}` | {_cell(words)} |" for name, words in _items(sections["Args"]))
        yield from ("", f"**Returns:** {_cell(sections['Returns'])}", "", "| error | cause |", "| --- | --- |")
        yield from (f"| `{name}` | {_cell(words)} |" for name, words in _items(sections["Raises"]))
        yield ""
    if example := sections.get("Example"):
        yield from ("```pycon", example.strip(), "```", "")


def _items(section: str) -> Iterator[tuple[str, str]]:
    """Yield each item of a section with its description."""
    _, *parts = _ITEM.split(section)
    yield from zip(parts[::2], parts[1::2], strict=True)


def _members(kind: type, descriptions: Mapping[str, str]) -> Iterator[str]:
    """Yield a table of the fields, properties and methods of a class.

    A field without a description in the docstring is described by the comment on its line.
    """
    described = {**{name: words for name, words in _FIELD.findall(inspect.getsource(kind)) if words}, **descriptions}
    rows = [(name, annotation, described.get(name, "")) for name, annotation in inspect.get_annotations(kind).items()]
    for name, member in vars(kind).items():
        words = inspect.getdoc(member) or ""
        if name.startswith("_") or not words:
            continue
        if isinstance(member, property) and member.fget:
            rows.append((name, inspect.signature(member.fget).return_annotation, words))
        elif inspect.isfunction(member):
            rows.append((f"{name}()", inspect.signature(member).return_annotation, words))
    yield from ("| member | type | meaning |", "| --- | --- | --- |")
    for name, annotation, words in rows:
        if name != "model_config":
            yield f"| `{name}` | `{_plain_type(annotation)}` | {_cell(words)} |"
    yield ""


def _plain_type(annotation: object) -> str:
    """Return an annotation without the metadata of ``Annotated``, for a table."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__forward_arg__", str(annotation))
    return re.sub(r"^Annotated\[(.+?), .*\]$", r"\1", text).replace("|", "\\|")


def _cell(text: str) -> str:
    return " ".join(line.strip() for line in _prose(text)).strip().replace("|", "\\|")


def _prose(text: str) -> list[str]:
    """Return lines of a docstring as Markdown: with code spans in place of roles and double backticks."""
    return _ROLE.sub(r"`\1`", text.strip()).replace("``", "`").splitlines()
