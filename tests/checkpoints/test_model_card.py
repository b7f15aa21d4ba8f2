"""Model cards: the license check reads every license that huggingface_hub reads, or it raises a doubt."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.tasks.models.checkpoints import read_card
from mergegate.tasks.preflight.licenses.resolve import CardSource, NotRead, lineage
from mergegate.tasks.preflight.licenses.table import load_table

TABLE = load_table()
LIMIT = 1 << 20


def read_by_the_library(path: Path) -> set[str]:
    """Return every license that one of the library's two readers finds."""
    licenses: set[str] = set()
    for read in (metadata_load, lambda file: ModelCard.load(file, ignore_metadata_errors=True).data.to_dict()):
        try:
            value = (read(path) or {}).get("license")
        except (ValueError, TypeError, yaml.YAMLError):
            continue
        licenses.update(map(str, value if isinstance(value, list) else [value] if value else []))
    return licenses


def license_in_force(content: bytes, name: str = "README.md") -> str:
    """Return the license of a model with this card next to the text of Apache 2.0."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        model.mkdir()
        (model / name).write_bytes(content)
        (model / "LICENSE").write_text((Path(__file__).parents[2] / "LICENSE").read_text())
        (found, *_) = lineage(CardSource(model), lambda entry, source: NotRead("no"), TABLE).models
        return found.license.id


def check_against_the_library(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "README.md"
        path.write_bytes(content)
        expected = read_by_the_library(path)
    if expected and expected != {"apache-2.0"}:
        assert license_in_force(content) != "apache-2.0"


BLANKS = st.text(alphabet=" \t\n\r\f\v\u00a0", max_size=4)
LICENSES = (
    *("license: cc-by-nc-4.0", "license: [cc-by-nc-4.0, mit]", "license: apache-2.0", "license : cc-by-nc-4.0"),
    *("'license': cc-by-nc-4.0", "? license\n: cc-by-nc-4.0", "license: >-\n  cc-by-nc-4.0", "license:\tcc-by-nc-4.0"),
    *("\tlicense: cc-by-nc-4.0", "  license: cc-by-nc-4.0", "License: cc-by-nc-4.0", "license: no", "license:"),
    *("x: &x {license: cc-by-nc-4.0}", "<<: *x", "{license: cc-by-nc-4.0}"),
)
OTHERS = (
    *("language: en", "tags: [a, b]", "tags:\n- a", "# a comment", "# Title", "---", "--- ", "--- # again", "..."),
    *("%YAML 1.1", "note: 'caf\u00e9 \u2028 \ufeff'", "note: '---'", "date: 2024-01-02", "<!-- comment -->"),
    *("Some text.", ""),
)
LINES = st.sampled_from([*LICENSES, *OTHERS])
FENCES = st.sampled_from(["---", "--- ", "---\t", " ---", "----", "+++", "```yaml", ""])
BREAKS = st.sampled_from(["\n", "\r\n", "\r", "\n\n"])
STARTS = st.sampled_from(["", "\ufeff", "\ufeff\ufeff", "\u200b", "<!-- x -->", "# Title\n", "\0"])


@st.composite
def cards(draw: st.DrawFn) -> bytes:
    """Draw a card whose front matter is valid, or off by a blank, a line break, a fence or a line."""
    end = draw(BREAKS)
    lines = [draw(FENCES), *draw(st.lists(LINES, max_size=5)), draw(FENCES), *draw(st.lists(LINES, max_size=3))]
    text = draw(STARTS) + draw(BLANKS) + end.join(lines) + draw(st.sampled_from(["", end]))
    return text.encode(draw(st.sampled_from(["utf-8"] * 6 + ["utf-16", "utf-8-sig", "utf-16-le"])))


@pytest.mark.story
@given(content=cards())
@settings(max_examples=300)
def test_a_license_that_the_library_reads_is_never_replaced_by_the_license_file(content: bytes) -> None:
    check_against_the_library(content)


CARD = b"---\nlicense: cc-by-nc-4.0\n---\n# Model\n"


UNREADABLE = [
    b"---\nnote: '" + b"x" * 2 * LIMIT + b"'\nlicense: cc-by-nc-4.0\n---\n",
    b"---\nnote: '" + b"x" * (LIMIT // 2) + b"'\nlicense: cc-by-nc-4.0\n---\n", b"\n" * 2 * LIMIT + CARD,
    b"---\na: '" + b"x" * (LIMIT - 12) + b"'\n---x\nlicense: cc-by-nc-4.0\n---\n",
    b"--- \nlicense: cc-by-nc-4.0\n---\n", b"---\nlicense: cc-by-nc-4.0\n", b"---\nlicense: cc-by-nc-4.0\n----\n",
    b"---\nlicense: cc-by-nc-4.0\nlicense: apache-2.0\n---\n", b"---\nLicense: cc-by-nc-4.0\n---\n",
    b"---\n\tlicense: cc-by-nc-4.0\n---\n", b"<!-- comment -->\n" + CARD, b"# Model\n\nText.\n\n" + CARD,
    b"---\nlanguage: en\n---\n\n" + CARD, CARD.decode().encode("utf-16"),
    *(b"---\n[\n---\n", b"---\nx: [\n", b"---\nlicense: \xff\n---\n"),
]  # fmt: skip
READABLE = [
    *(CARD, b"\n" + CARD, b"\n \t\n\r\n" + CARD, b"\xef\xbb\xbf" + CARD, b"\xef\xbb\xbf\n" + CARD),
    *(CARD.replace(b"\n", b"\r\n"), CARD.replace(b"\n", b"\r"), CARD.replace(b"# Model", b"caf\xe9")),
    *(b"\n" * 2000 + CARD, CARD + b"x" * 2 * LIMIT),
]
WITHOUT_FRONT_MATTER = [
    *(b"", b"# Model\n", b"---\nlanguage: en\n---\n# Model\n", b"---\n# nothing\n---\n"),
    *(b"-----\nModel\n-----\n", b"# Mod\xe8le\n", b"# Model\n\n---\n\nText after a rule.\n\n---\n"),
    b"# Model\n\n---\n\nText after a rule.\n\nlicense: see below\n",
]


@pytest.mark.parametrize("content", READABLE)
def test_front_matter_is_read_where_the_library_reads_it(content: bytes) -> None:
    assert license_in_force(content) == "cc-by-nc-4.0"


@pytest.mark.parametrize("content", UNREADABLE)
def test_a_partially_readable_card_is_a_doubt(content: bytes) -> None:
    assert license_in_force(content) in ("unknown", "other")


@pytest.mark.parametrize("content", WITHOUT_FRONT_MATTER)
def test_a_card_without_front_matter_leaves_the_license_file_in_force(content: bytes) -> None:
    assert license_in_force(content) == "apache-2.0"


@pytest.mark.parametrize("name", ["readme.md", "Readme.md", "README.MD"])
def test_the_name_of_the_card_may_be_in_any_letter_case(name: str) -> None:
    assert license_in_force(CARD, name) == "cc-by-nc-4.0"


def test_a_card_that_is_a_broken_link_is_a_doubt(tmp_path: Path) -> None:
    (tmp_path / "README.md").symlink_to("gone.md")
    assert read_card(tmp_path).problem == "README.md is a link to a file that does not exist"
