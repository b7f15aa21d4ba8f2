"""The compliance sheet states each fact with its source, lists missing facts, and compares with the right threshold."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from release_samples import facts_of, publishable, sha, variant_parts

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.release.publish import MergeRelease, ReleaseParts, VariantParts
from mergegate.tasks.release.publish.documents.card import (
    ModificationThreshold,
    compliance_sheet,
    flop_text,
    model_card,
)
from mergegate.tasks.release.publish.documents.facts import (
    DatasetFacts,
    DocumentFacts,
    DocumentLink,
    ParentCard,
    ParentFacts,
)
from mergegate.tasks.release.publish.settings import AboutRelease
from mergegate.tasks.release.publish.targets.directory import DirectoryTarget

ABOUT = {
    "supplier": {"name": "ACME <b>& Sons", "url": "https://acme.example", "contact": "ai@acme.example"},
    "intended_use": ["Answer questions | in chats."],
    "limits": ["It was *not* tested in French."],
}


def texts(parts: ReleaseParts | VariantParts, **about: object) -> dict[str, str]:
    """Return the text files of a release to a directory, by name."""
    target = DirectoryTarget.model_validate({"to": "directory", "path": Path("out"), "about": about})
    files = parts.files(target)
    return {file.name: file.read().decode(errors="replace") for file in files}


def parent(name: str, flop: float | None = None, **fields: object) -> ParentFacts:
    source = "publish.about" if flop else ""
    return ParentFacts(name, "parent", sha(name), training_compute=flop, training_compute_source=source, **fields)


@pytest.mark.parametrize(
    ("computes", "threshold"),
    [
        ([None], 1e23 / 3),
        ([None, None], 1e23 / 3),
        ([6e22], 2e22),
        ([6e25], 2e25),
        ([6e22, None], 2e22),  # smaller than the fallback for the other parent
        ([6e24, None], 1e23 / 3),  # larger than the fallback for the other parent
        ([6e24, 3e24, 9e24], 1e24),
    ],
)
def test_the_threshold_is_a_third_of_the_smallest_training_compute(
    computes: list[float | None], threshold: float
) -> None:
    parents = [parent(f"m{number}", flop) for number, flop in enumerate(computes)]
    chosen = ModificationThreshold.from_parents(parents)
    assert chosen.flop == pytest.approx(threshold)
    assert ("unknown" in chosen.reason) == (threshold == 1e23 / 3)
    assert ("publish.about" in chosen.reason) == (threshold != 1e23 / 3)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (3.3333e22, "3.3 · 10^22"), (9.96e3, "1.0 · 10^4"), (8.5e-15, "8.5 · 10^-15")]
)
def test_operations_are_rounded_to_two_digits(value: float, text: str) -> None:
    assert flop_text(value) == text


def test_a_release_contains_the_sheet_and_its_card_links_it(tmp_path: Path) -> None:
    files = texts(publishable(tmp_path).parts)
    sheet = files["COMPLIANCE.md"]
    assert sheet.startswith("# Compliance sheet of demo\n\n**This sheet is not legal advice.**")
    section = files["README.md"].partition("\n## Compliance\n\n")[2].partition("\n## ")[0].strip()
    assert "[COMPLIANCE.md](COMPLIANCE.md)" in section
    assert len(section.splitlines()) <= 8
    assert all('"COMPLIANCE.md"' in files[list_of_files] for list_of_files in ("bom.json", "provenance.json"))
    rows = [line for line in files["README.md"].splitlines() if "licenses/mit.txt" in line]
    assert rows
    assert set(rows) <= set(sheet.splitlines()), "the license table is that of the card"

    missing = sheet.partition("## Missing facts")[2].partition("## ")[0]
    for fact in ("Publisher:", "Intended use:", "Out of scope:", "Known limits:", "Evaluation:"):
        assert f"* {fact}" in missing
    both = "acme/general@main, ../models/local\\_one"
    assert f"* {both}: training compute, summary of the training content, copyright policy" in missing


def test_statements_are_shown_literally_and_every_file_is_the_same_on_every_machine(tmp_path: Path) -> None:
    files, second = (texts(publishable(tmp_path / name).parts, **ABOUT) for name in ("a", "b"))
    assert files == second
    assert not any(str(tmp_path) in text for text in files.values())
    sheet = files["COMPLIANCE.md"]
    assert "| name | ACME \\<b\\>\\& Sons | `publish.about` |" in sheet
    assert "* Answer questions \\| in chats." in sheet
    assert "* It was \\*not\\* tested in French." in sheet
    assert "**Out of scope** (`publish.about.out_of_scope`)\n\nNot stated by the publisher." in sheet
    assert "* Out of scope: set `publish.about.out_of_scope`." in sheet
    assert "* Known limits: set" not in sheet
    for name in ("COMPLIANCE.md", "provenance.json"):
        assert not re.search(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}", files[name])


def with_facts(document: DocumentFacts, **update: object) -> DocumentFacts:
    return document.model_copy(update={"facts": replace(document.facts, **update)})


def sheet_of(document: DocumentFacts, *parents: ParentFacts) -> str:
    return compliance_sheet(with_facts(document, parents=parents or document.facts.parents), ())


@pytest.fixture
def sample_facts(tmp_path: Path) -> DocumentFacts:
    return facts_of(tmp_path)


def test_links_energy_and_data_of_a_parent_have_their_source(sample_facts: DocumentFacts) -> None:
    own = parent(
        "acme/base", 3e22, hub_id="acme/base", license="apache-2.0", datasets=("acme/web_pages",),
        training_summaries=(DocumentLink("Summary](x)", "https://acme.example/s_1"),),
        copyright_policies=(DocumentLink("Policy", "https://acme.example/p"),), energy=1.5, emissions=700.0,
        emissions_source="codecarbon", cards=(ParentCard("acme/base", sha("card")),),
    )  # fmt: skip
    sheet = sheet_of(sample_facts, own)
    row = next(line for line in sheet.splitlines() if line.startswith("| [acme/base]"))
    assert "[Summary\\](x)](https://acme.example/s_1)" in row
    assert "[Policy](https://acme.example/p)" in row
    assert "3.0 · 10^22 (publish.about)" in row
    detail = next(line for line in sheet.splitlines() if line.startswith("* [acme/base]"))
    assert f"README.md, sha256 `{sha('card')}`" in detail
    assert "acme/web\\_pages" in detail
    assert "1.5 kWh" in detail
    assert "700 g CO2 equivalent (`co2_eq_emissions` in its card, source: codecarbon)" in detail
    assert "acme/base: " not in sheet.partition("## Missing facts")[2].replace(detail, "")


def test_checkpoints_that_share_a_card_have_one_row(sample_facts: DocumentFacts) -> None:
    card = (ParentCard("run", sha("card")),)
    checkpoints = [parent(f"run/checkpoint-{step}", license="mit", cards=card) for step in (100, 200, 300)]
    sheet = sheet_of(sample_facts, *checkpoints, parent("other", license="mit"))
    assert "| run/checkpoint-100 to run/checkpoint-300 (3 checkpoints) | parent | mit |" in sheet
    assert sheet.count(sha("card")) == 1
    assert sheet.count("checkpoint-200") == 0


def test_the_sheet_says_on_which_side_of_the_threshold_the_modification_is(sample_facts: DocumentFacts) -> None:
    bound = sample_facts.facts.modification
    small, large = parent("m", 6e22), parent("m", bound.flop)
    below, above = (sheet_of(sample_facts, each) for each in (small, large))
    reason = "2.0 · 10^22 (a third of 6.0 · 10^22 for m (publish.about))."
    assert f"at most {bound.formula} = {flop_text(bound.flop)} floating-point operations" in below
    assert f"which is below the indicative threshold of {reason}" in below
    assert "which is **above** the indicative threshold" in above
    summary = model_card(with_facts(sample_facts, parents=(small,)), ())
    assert "of the threshold (a third of 6.0 · 10^22 for m (publish.about))." in summary


def test_variants_name_the_release_of_the_merge_and_its_parents(tmp_path: Path) -> None:
    merge = MergeRelease("demo", "1.0", sha("sums"), "../demo/1.0", "acme/demo")
    files = texts(variant_parts(tmp_path, merge, "Q8_0", "Q4_0"))
    sheet = files["COMPLIANCE.md"]
    assert "Weights of the merge, rounded to fewer bits." in sheet
    assert f"release with the SHA256SUMS `{sha('sums')}`" in sheet
    assert "| ../models/local\\_one | parent | mit |" in sheet
    assert " · 2 models · " in sheet  # One for each variant.
    assert "[COMPLIANCE.md](COMPLIANCE.md)" in files["README.md"]


def test_calibration_texts_are_named_with_their_digest(sample_facts: DocumentFacts) -> None:
    data = (DatasetFacts("texts/a.jsonl", "calibration", sha("a")),)
    sheet = sheet_of(with_facts(sample_facts, datasets=data))
    assert "| texts that models read for it | texts/a.jsonl |" in sheet
    assert f"| texts/a.jsonl | calibration | unknown | local data | `{sha('a')[:16]}` |" in sheet


def test_training_compute_of_a_model_that_is_no_parent_is_refused() -> None:
    about = AboutRelease.model_validate({"training_compute": {"acme/bas": 1e22}})
    with pytest.raises(InvalidInput) as error:
        about.require_parents(["acme/base", "acme/tuned"])
    assert error.value.where == "publish.about.training_compute['acme/bas']"
    assert error.value.remedy == "did you mean 'acme/base'?"
    about.require_parents(["acme/bas"])
