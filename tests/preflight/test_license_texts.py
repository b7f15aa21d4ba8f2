"""The shipped license texts, and how they identify a model's license file: with certainty or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegate.tasks.preflight.licenses import CardSource, identify_license, license_texts, load_table
from mergegate.tasks.preflight.licenses.resolve import NotRead, lineage
from mergegate.tasks.preflight.licenses.table import SHIPPED, License, license_by_link

TABLE = load_table()
TEXTS = SHIPPED.parent / "texts"
SHIPPED_TEXTS = {file.name.removesuffix(".txt"): file for file in TEXTS.glob("*.txt")}
MIT = SHIPPED_TEXTS["mit"].read_text()
MIT_LICENSE = TABLE.licenses["mit"]
GEMMA = SHIPPED_TEXTS["gemma"].read_text()

# Licenses whose text is not available offline or does not exist. A release under one of them lists the missing text as
# an open obligation.
WITHOUT_TEXT = """
apple-amlr baichuan bsd cc chatglm databricks-open-model-license deepfloyd-if-license
fair-noncommercial-research-license gfdl gpl grok2-community h-research hunyuan-community intel-research internlm
jamba-open-model-license lfm1.0 lgpl llama3 mnpl mrl openmdw-1.1 openrail openrail++ opt-175b other qwen-research
tongyi-qianwen-research unknown yi-license
"""


def test_every_license_has_its_text_but_those_that_are_known_to_lack_one() -> None:
    without = {key for key, entry in TABLE.licenses.items() if not license_texts(entry)}
    assert without == set(WITHOUT_TEXT.split())
    assert len(TABLE.licenses) - len(without) == 74


def test_every_shipped_text_belongs_to_a_license_and_all_of_them_are_small() -> None:
    assert set(SHIPPED_TEXTS) <= set(TABLE.licenses)
    assert sum(file.stat().st_size for file in SHIPPED_TEXTS.values()) < 3_000_000


def test_a_license_that_stands_on_another_is_shipped_with_it() -> None:
    assert list(license_texts(TABLE.licenses["lgpl-3.0"])) == ["lgpl-3.0", "gpl-3.0"]


@pytest.mark.parametrize("identifier", sorted(SHIPPED_TEXTS))
def test_every_shipped_text_is_recognized_with_any_wrapping_and_case(identifier: str) -> None:
    text = SHIPPED_TEXTS[identifier].read_text(encoding="utf-8")
    assert identify_license(text, TABLE) == TABLE.licenses[identifier]
    indented = "\r\n".join(f"   {line.rstrip()}  " for line in text.upper().replace("\n", "\n\n").splitlines())
    assert identify_license(f"\ufeff{indented}", TABLE) == TABLE.licenses[identifier]


@pytest.mark.parametrize("identifier", sorted(SHIPPED_TEXTS))
def test_an_additional_condition_makes_a_permissive_text_unknown(identifier: str) -> None:
    text = SHIPPED_TEXTS[identifier].read_text(encoding="utf-8")
    for changed in (f"{text}\nThe model must not be used by competitors.\n", f"Not for sale.\n\n{text}"):
        found = identify_license(changed, TABLE)
        # A title identifies only agreements with restrictions, even if the text contains more.
        assert found is None or (found.id == identifier and found.titles and found.restrictive)


@given(place=st.integers(0, 150), word=st.sampled_from(["not", "non-commercial", "never", "except"]))
def test_an_additional_word_makes_the_terms_unknown(place: int, word: str) -> None:
    words = MIT.split()
    changed = [*words[:place], word, *words[place:]]
    assert identify_license(" ".join(changed), TABLE) is None


@pytest.mark.parametrize(
    ("head", "license"),
    [
        ("MIT License\n\nCopyright (c) 2024 Acme\n\n", MIT_LICENSE),
        ("The MIT License (MIT)\n\nCopyright © 2023-2024 The Acme Authors. All rights reserved.\n\n", MIT_LICENSE),
        ("# MIT License\n\nCopyright 2024 Acme, Inc.\n\n", MIT_LICENSE),
        ("SPDX-License-Identifier: MIT\n", MIT_LICENSE), ("MIT\n(c) 2024 Acme\n\n", MIT_LICENSE),
        ("Copyright (c) 2024 Acme. For research use only.\n\n", None),
        ("Copyright 2024 Acme, commercial licences on request\n\n", None), ("This is not the MIT License\n\n", None),
    ],
)  # fmt: skip
def test_title_and_copyright_do_not_matter_but_a_condition_in_them_does(head: str, license: License | None) -> None:
    assert identify_license(head + MIT, TABLE) == license


def test_the_appendix_of_apache_may_be_filled_in_or_missing() -> None:
    text = SHIPPED_TEXTS["apache-2.0"].read_text()
    filled = text.replace("[yyyy] [name of copyright owner]", "2024 Acme")
    assert filled != text
    terms, _, _ = text.partition("APPENDIX")
    assert identify_license(filled, TABLE) == identify_license(terms, TABLE) == TABLE.licenses["apache-2.0"]
    assert identify_license(f"{terms}\nCommons Clause: you may not sell it.", TABLE) is None


def test_a_bsd_text_may_name_any_owner() -> None:
    text = SHIPPED_TEXTS["bsd-3-clause"].read_text()
    named = text.replace("Neither the name of the ORGANIZATION nor", "Neither the name of Acme, Inc. nor")
    assert named != text
    assert identify_license(named, TABLE) == TABLE.licenses["bsd-3-clause"]


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("LLAMA 3.1 COMMUNITY LICENSE AGREEMENT", "llama3.1"),
        ("**Llama 3.3 Community License Agreement**", "llama3.3"),
        ("META LLAMA 3 COMMUNITY LICENSE AGREEMENT", "llama3"), ("Gemma Terms of Use", "gemma"),
        ("# Qwen LICENSE AGREEMENT", "qwen"), ("Qwen RESEARCH LICENSE AGREEMENT", "qwen-research"),
        ("Mistral AI Research License", "mrl"), ("LLAMA 5 COMMUNITY LICENSE AGREEMENT", None),
        ("Our model is better than the Gemma Terms of Use", None),
    ],
)  # fmt: skip
def test_another_edition_of_an_agreement_is_recognized_by_its_title(title: str, expected: str | None) -> None:
    edition = f"{title}\nRelease Date: May 1, 2026\n\n{'These terms are of another edition. ' * 60}"
    found = identify_license(edition, TABLE)
    assert (found.id if found else None) == expected


def test_a_file_that_only_names_an_agreement_is_not_its_text() -> None:
    assert identify_license("Gemma Terms of Use\nsee https://ai.google.dev/gemma/terms", TABLE) is None


def test_every_title_and_link_belongs_to_one_license() -> None:
    titles = [title.lower() for entry in TABLE.licenses.values() for title in entry.titles]
    links = [link for entry in TABLE.licenses.values() for link in entry.links]
    assert len(titles) == len(set(titles)) == 18
    assert all(license_by_link(link, TABLE) is not None for link in links)
    assert license_by_link("http://ai.google.dev/gemma/terms/", TABLE) == TABLE.licenses["gemma"]
    assert license_by_link("https://ai.google.dev/gemma/terms2", TABLE) is None
    assert license_by_link("LICENSE", TABLE) is None


# ---------------------------------------------------------------- card and file together


def _read(tmp_path: Path, card: str, **files: str) -> tuple[str, str | None]:
    """Return the license of a model with this card and these files, and the license of the file that contradicts it."""
    (tmp_path / "README.md").write_text(card)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (model,) = lineage(CardSource(tmp_path), lambda entry, place: NotRead(""), TABLE).models
    return model.license.id, model.contradicted.id if model.contradicted else None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        *((f"license: {word}", ("gemma", None)) for word in ("other", "unknown", "gemma")),
        ("license: other\nlicense_name: acme-terms", ("gemma", None)), ("tags: [a]", ("gemma", None)),
        ("license: apache-2.0", ("apache-2.0", "gemma")), ("license: other\nlicense_name: qwen", ("qwen", "gemma")),
        ("license: [mit, apache-2.0]", ("unknown", None)),  # It is unclear which one applies.
        ("license: 3.0", ("unknown", None)),
        ("license: acme-terms", ("other", None)),  # The card names a license, but not that of the file.
    ],
)  # fmt: skip
def test_the_file_decides_without_a_declaration_and_contradicts_a_different_one(
    tmp_path: Path, fields: str, expected: tuple[str, str | None]
) -> None:
    assert _read(tmp_path, f"---\n{fields}\n---\n", LICENSE=GEMMA) == expected


def test_the_file_decides_without_a_card_but_not_next_to_a_broken_one(tmp_path: Path) -> None:
    assert _read(tmp_path, "# A model\n", LICENSE=MIT) == ("mit", None)
    assert _read(tmp_path, "---\nlicense: [cc-by-nc\n---\n", LICENSE=MIT) == ("unknown", None)


@pytest.mark.parametrize(
    ("family", "member", "expected"),
    [
        ("gpl", "gpl-3.0", ("gpl-3.0", None)), ("bsd", "bsd-2-clause", ("bsd-2-clause", None)),
        ("cc", "cc-by-nc-4.0", ("cc-by-nc-4.0", None)),
        ("openrail", "creativeml-openrail-m", ("creativeml-openrail-m", None)), ("bsd", "gpl-3.0", ("bsd", "gpl-3.0")),
        ("lgpl", "gpl-3.0", ("lgpl", None)),  # Unknown stays unknown.
    ],
)  # fmt: skip
def test_the_file_says_which_of_a_family_of_licenses_is_meant(
    tmp_path: Path, family: str, member: str, expected: tuple[str, str | None]
) -> None:
    text = SHIPPED_TEXTS[member].read_text(encoding="utf-8")
    assert _read(tmp_path, f"---\nlicense: {family}\n---\n", LICENSE=text) == expected


@pytest.mark.parametrize(
    ("license", "files"),
    [
        ("other", {"LICENSE": MIT, "COPYING": GEMMA}), ("other", {"LICENSE": "Our own terms."}),
        ("mit", {"LICENSE": "Our own terms."}),
    ],
)  # fmt: skip
def test_several_license_files_and_an_unknown_file_do_not_decide(
    tmp_path: Path, license: str, files: dict[str, str]
) -> None:
    assert _read(tmp_path, f"---\nlicense: {license}\n---\n", **files) == (license, None)


def test_a_known_link_decides_without_a_card_or_file(tmp_path: Path) -> None:
    card = "---\nlicense: other\nlicense_link: https://ai.google.dev/gemma/terms\n---\n"
    assert _read(tmp_path, card) == ("gemma", None)
    assert _read(tmp_path, card, LICENSE=SHIPPED_TEXTS["qwen"].read_text()) == ("qwen", None)
