"""Docstrings, comments, help, errors, reports and docs read like those of well-kept projects."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
from prose import DOCS, KINDS, LIMIT, Sentence, rate, read

PROJECT = Path(__file__).resolve().parent.parent


@cache
def sentences(root: str) -> tuple[Sentence, ...]:
    files = sorted((PROJECT / root).rglob("*")) if (PROJECT / root).is_dir() else [PROJECT / root]
    return tuple(sentence for file in files if file.is_file() for sentence in read(file))


def require_idiomatic(texts: list[Sentence]) -> None:
    matches = [f"{one.file.relative_to(PROJECT)}:{one.line}: {one.matches}: {one.text}" for one in texts if one.matches]
    assert rate(texts) <= LIMIT, "\n".join(matches)


@pytest.mark.story
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", ["mergegate", "flows", "tasks", "merge_core"])
def test_texts_are_idiomatic(layer: str, kind: str) -> None:
    require_idiomatic([sentence for sentence in sentences(layer) if sentence.kind == kind])


@pytest.mark.story
@pytest.mark.parametrize(
    "package", ["release/report", "quality/judge", "release/publish", "release/explain", "preflight"]
)
def test_texts_of_a_release_are_idiomatic(package: str) -> None:
    texts = [sentence for sentence in sentences(f"tasks/{package}") if sentence.kind == "text"]
    assert texts, "the test reads no sentence"
    require_idiomatic(texts)


@pytest.mark.story
@pytest.mark.parametrize("root", DOCS)
def test_docs_are_idiomatic(root: str) -> None:
    texts = [sentence for sentence in sentences(root) if sentence.kind in ("docs", "comment")]
    assert texts, f"{root}: the test reads no sentence"
    require_idiomatic(texts)


@pytest.mark.story
def test_docs_of_one_kind_are_idiomatic_together() -> None:
    require_idiomatic([sentence for root in DOCS for sentence in sentences(root) if sentence.kind == "docs"])


LITERAL = (
    "What is asked of whom meanwhile: keys, the store, files.",
    "To be called before anything is done that a look must not do.",
    "Of several tasks that is asked of their mean.",
    "Nights that nobody carried out.",
    "which is no model of this merge",
)
PLAIN = (
    "Return the digest of all files.",
    "Log cache keys, file reads and subprocesses.",
    "Raise InvalidInput if a tensor contains NaN, and return None if the path is None.",
    "Size of the first random sample per task or group. Default: 500.",
)


@pytest.mark.parametrize("text", [*LITERAL, *PLAIN])
def test_only_a_literal_translation_is_found(text: str) -> None:
    assert bool(Sentence("docstring", Path("x.py"), 1, text).matches) == (text in LITERAL)


def test_every_kind_of_file_is_read(tmp_path: Path) -> None:
    literal = LITERAL[2]
    for name, content in {
        "page.md": f"# Title\n\n| a | b |\n|---|---|\n| x | {literal} |\n",
        "page.html": f"<style>p {{}}</style><p>{{% if x %}}{literal}{{% endif %}}</p>",
        "card.md.j2": f"# {{{{ name }}}}\n\n{{% if x %}}\n{literal}\n{{% endif %}}\n",
        "book.ipynb": json.dumps({"cells": [{"cell_type": "markdown", "source": [literal]}]}),
        "settings.yaml": f"key: 1  # {literal}\n",
        "module.py": f"print('{literal}')\n",
    }.items():
        file = tmp_path / name
        file.write_text(content)
        assert [one.text for one in read(file) if one.matches] == [literal], name
