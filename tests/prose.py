"""Count unidiomatic sentences in docstrings, comments, help texts, errors, other texts of the program, and docs.

The patterns below are turns of phrase that well-kept projects hardly use: 5 to 20 of 1,000 docstring sentences in
Prefect, httpx, huggingface_hub, PEFT, Optuna and Dask match one of them. A match is a hint, not a verdict: rewrite the
sentence instead of dodging the pattern.

Run ``python tests/prose.py tasks/quality/gate docs/how-to README.md`` to list the matches below some paths, or without
arguments for a table of all packages and the docs.

The kind ``text`` is every other string of at least four words in the product (lines that a run prints, sentences of
reports, cards and explanations), and what a reader sees of an HTML template. The kind ``docs`` is every Markdown file
and notebook.
"""

from __future__ import annotations

import ast
import html
import io
import json
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIMIT = 15  # matches per 1,000 sentences
KINDS = ("docstring", "comment", "help", "error", "text", "docs")
LAYERS = ("flows", "tasks", "merge_core", "benchmarks", "tests")
DOCS = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", ".github", "docs", "dev"),
    *("profiles", "Makefile", ".ci", "prefect.yaml", "schedules.yaml", "pyproject.toml", "mkdocs.yml", "containers"),
)

_OF = "a an the all each every one several two what which it its this that those these such them"
PATTERNS = {
    "opening": re.compile(
        r"^(What|Which|Who|Whoever|Whatever|Whose|Nobody|Somebody|Nothing|All that|That which|Those|Such|To be|As it"
        r"|As \w+ed|So (many|much|that)|By (what|which|whom)|For what|From what|In what|Of \w+,|Told|Asked|Said"
        rf"|Of ({_OF.replace(' ', '|')}|\w+s))\b"
    ),
    "nobody": re.compile(
        r"\b(nobody|somebody|everybody|whoever|whatever|whomever|wherever|whichever|a stranger|strangers?)\b", re.I
    ),
    "is no": re.compile(
        r"(?<!there )\b(is|are|was|were|be|as) no\b(?! longer| more than| one\b)|\bnot any ?more\b"  # Not: is None
    ),
    "those that": re.compile(
        r"\b(those that|all that|that which|that what|such that is|one that|ones that|(all|much|of|to|for|by|with|from"
        r"|on|in) what|of which|what (is|was|it|a|the|they|one))\b",
        re.I,
    ),
    "words": re.compile(
        r"\b(anew|beside|beforehand|to be had|thereby|lies? (in|at|beside|there)|lay in"
        r"|stands? (in|at|there|for what)|(is|are|was) (told|said|asked)|says? so|(asked|said|told) of|told otherwise"
        r"|otherwise than|meanwhile|comes? to|all the same|afresh|therein|thereof|(?<!-)alike)\b",
        re.I,
    ),
    "inversion": re.compile(
        r"\b(so (many|much) (of|a|an|as|to)|(is|are) not there|is there\b(?! a| an)|that there (is|are)"
        r"|there (is|are) (of|to be)|where (there|it|they) (is|are|has|have) (none|no|not|one)|in (its|their) order"
        r"|in (its|their) turn|a (night|voice|yes|no|place|person)\b"
        r"|what (can|could|may|must|would|should|has|have|had|does|do|did))\b",
        re.I,
    ),
}


class Sentence(NamedTuple):
    """One sentence that a person reads."""

    kind: str
    file: Path
    line: int
    text: str

    @property
    def matches(self) -> list[str]:
        """Names of the patterns that it matches."""
        return [name for name, pattern in PATTERNS.items() if pattern.search(self.text)]


_ENTRY = re.compile(r"^\s+(\*{0,2}\w+)( \([^)]*\))?: (.*)")
_SECTION = re.compile(r"^\s*(Args|Returns|Raises|Yields|Attributes|Example|Examples|Note):\s*$")


def sentences(text: str) -> Iterator[str]:
    """Split prose into sentences, without code, field names and headings."""
    text = re.sub(r"``[^`]*``|`[^`]*`", "X", text)
    paragraphs: list[str] = []
    is_code = False
    for line in text.splitlines():
        if line.strip().startswith(">>>") or re.match(r"^\s*(\||```|\.\. )", line):
            paragraphs.append("")
            continue
        is_code = is_code and (not line.strip() or line.startswith("    "))
        is_code = is_code or (bool(paragraphs) and paragraphs[-1].endswith("::"))
        if is_code and line.startswith("    "):
            continue
        entry = _ENTRY.match(line)
        if _SECTION.match(line) or not line.strip():
            paragraphs.append("")
        elif entry:
            paragraphs.append(entry[3])
        elif re.match(r"^\s*([-*]|\d+\.) ", line):
            paragraphs.append(re.sub(r"^\s*([-*]|\d+\.) ", "", line))
        elif paragraphs and paragraphs[-1]:
            paragraphs[-1] += " " + line.strip()
        else:
            paragraphs.append(line.strip())
    for paragraph in paragraphs:
        for sentence in re.split(r"(?<=[.!?:;])\s+(?=[A-Z\"'`(X])|(?<=[;:])\s+", paragraph.strip()):
            if len(re.findall(r"[A-Za-z]{2,}", sentence)) >= 2:
                yield sentence.strip()


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the string constants directly in an expression, f-strings joined."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    elif isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
        yield node.lineno, "".join(map(str, parts))
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.BinOp):
        yield from _texts(node.left)
        yield from _texts(node.right)


ERRORS = {"InvalidInput", "Refused", "CannotDecide", "ChangedInput", "DiskUnavailable", "OutOfTime", "MachineFailed"}
ERRORS |= {"LostArtifact", "Finding", "Conflict", "MissingDependency", "fault", "warn", "warning", "announce"}
HELP = {"Option", "Argument", "Field", "command", "Typer", "option", "argument"}


def read(file: Path) -> Iterator[Sentence]:
    """Read every sentence of a Python file, a template, a Markdown file or a notebook."""
    if file.suffix == ".py" and file.name != "sample_text.py":  # The sample text is data, which no user reads.
        yield from _read_python(file)
    elif file.suffix == ".html":
        yield from (Sentence("text", file, 1, one) for one in sentences(_visible(file.read_text())))
    elif file.suffix == ".j2":  # Markdown with values and blocks of Jinja
        text = file.read_text()
        expressions = re.findall(r"\{[{%].*?[%}]\}", text, re.DOTALL)
        quoted = [part for code in expressions for part in re.findall(r'"(.+?)"', code)]
        text = re.sub(r"\{%.*?%\}|\{#.*?#\}", "", text, flags=re.DOTALL)
        text = re.sub(r"\{\{.*?\}\}", "X", text, flags=re.DOTALL)
        yield from (Sentence("text", file, 1, one) for part in (text, *quoted) for one in sentences(part))
    elif file.suffix == ".md":
        yield from _read_markdown(file, file.read_text())
    elif file.suffix == ".ipynb":
        cells = json.loads(file.read_text())["cells"]
        for cell in (cell for cell in cells if cell["cell_type"] == "markdown"):
            yield from _read_markdown(file, "".join(cell["source"]))
    elif file.suffix in (".yaml", ".yml", ".toml") or file.name in ("Makefile", "run", "install"):
        lines = (re.search(r"(?:^|\s)##? (.*)", line) for line in file.read_text().splitlines())
        blocks = "\n".join(line[1] if line else "" for line in lines)
        yield from (Sentence("comment", file, 1, one) for one in sentences(blocks))


def _read_python(file: Path) -> Iterator[Sentence]:
    source = file.read_text()
    tree = ast.parse(source)
    counted: set[int] = set()  # nodes that belong to another kind than "text"
    for node in ast.walk(tree):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and (text := ast.get_docstring(node)):
            counted.add(id(node.body[0].value))
            yield from (Sentence("docstring", file, node.body[0].lineno, one) for one in sentences(text))
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            arguments = [*node.args, *(word.value for word in node.keywords)]
            if name in ERRORS or name.endswith("Error"):
                counted.update(id(part) for argument in arguments for part in ast.walk(argument))
                for argument in arguments:
                    for line, text in _texts(argument):
                        yield from (Sentence("error", file, line, one) for one in sentences(text))
            if name in HELP:
                words = [word.value for word in node.keywords if word.arg in ("help", "description", "epilog")]
                counted.update(id(part) for argument in arguments for part in ast.walk(argument))
                for argument in [*node.args, *words]:
                    for line, text in _texts(argument):
                        if " " in text:
                            yield from (Sentence("help", file, line, one) for one in sentences(text))
            if name in ("compile", "execute", "text"):  # regular expressions and SQL
                counted.update(id(part) for argument in arguments for part in ast.walk(argument))
        if isinstance(node, ast.JoinedStr):
            counted.update(id(part) for part in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in counted:
            for line, text in _texts(node):
                if len(re.findall(r"\b[A-Za-z]{2,}\b", text)) >= 4 and " " in text:
                    yield from (Sentence("text", file, line, one) for one in sentences(_visible(text)))
    yield from _comments(file, source)


def _visible(text: str) -> str:
    """Return what a reader sees of a template."""
    text = re.sub(r"(?s)<(style|script)\b.*?</\1>|\{#.*?#\}|<!--.*?-->", "\n\n", text)
    text = re.sub(r"(?s)\{\{.*?\}\}", "X", text)
    text = re.sub(r"(?s)\{%.*?%\}", " ", text)
    text = re.sub(r"</?(b|i|em|strong|code|a|span|abbr|time|small|sub|sup)\b[^<>]*>", "", text)
    return html.unescape(re.sub(r"</?[a-z][^<>]*>", "\n\n", text))


def _read_markdown(file: Path, text: str) -> Iterator[Sentence]:
    lines: list[str] = []
    is_code = False
    for line in text.splitlines():
        if re.match(r"^\s*(```|~~~)", line):
            is_code = not is_code
            lines.append("")
        elif is_code or re.match(r"^\s*\|[-:| ]+\|?\s*$", line):
            lines.append("")
        elif line.lstrip().startswith("|"):
            for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
                lines += ["", cell.strip()]
            lines.append("")
        else:
            lines.append(re.sub(r"^\s*(#+|>|!!! \w+|\[.*?\]:.*$)\s*", "", line).strip() if line.strip() else "")
            if line.startswith("#"):
                lines.append("")
    prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(lines))
    prose = re.sub(r"[*_]{1,2}(?=\S)([^*_\n]+)(?<=\S)[*_]{1,2}", r"\1", prose)
    for one in sentences(html.unescape(re.sub(r"(?s)<!--.*?-->|</?[a-z][^<>]*>", " ", prose))):
        found = re.search(r"\s+".join(map(re.escape, one.split()[:3])), text)
        yield Sentence("docs", file, text.count("\n", 0, found.start()) + 1 if found else 1, one)


def _comments(file: Path, source: str) -> Iterator[Sentence]:
    comment: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:|pragma|mypy:|!)", token.string):
            text = token.string.lstrip("# ").strip()
            if comment and token.start[0] == last + 1:
                comment.append(text)
            else:
                yield from (Sentence("comment", file, begin, one) for one in sentences(" ".join(comment)))
                comment, begin = [text], token.start[0]
            last = token.start[0]
    yield from (Sentence("comment", file, begin, one) for one in sentences(" ".join(comment)))


def rate(found: list[Sentence]) -> float:
    """Return the matches per 1,000 sentences."""
    return 1000 * sum(bool(one.matches) for one in found) / max(len(found), 1)


def main(paths: list[str]) -> None:
    """Print the matches below the paths, or a table of all packages."""
    roots = [Path(path) for path in paths]
    if not roots:
        roots = [room for layer in LAYERS[:3] for room in sorted(Path(layer).iterdir())]
        roots += [Path(name) for name in (*LAYERS[3:], "mergegate/__init__.py", *DOCS)]
    total: dict[str, list[Sentence]] = defaultdict(list)
    for root in roots:
        kinds: dict[str, list[Sentence]] = defaultdict(list)
        for file in filter(Path.is_file, sorted(root.rglob("*")) if root.is_dir() else [root]):
            for sentence in read(file):
                kinds[sentence.kind].append(sentence)
        for kind in KINDS:
            total[kind] += kinds[kind]
        if paths:
            for kind in KINDS:
                for one in kinds[kind]:
                    if one.matches:
                        print(f"{one.file}:{one.line}: {kind} [{', '.join(one.matches)}] {one.text[:200]}")
        if any(kinds.values()):
            print(f"{root!s:30}", _rates(kinds))
    print("total", _rates(total))


def _rates(kinds: dict[str, list[Sentence]]) -> str:
    return "  ".join(f"{kind} {rate(kinds[kind]):3.0f}/1000 of {len(kinds[kind]):4}" for kind in KINDS if kinds[kind])


if __name__ == "__main__":
    main(sys.argv[1:])
