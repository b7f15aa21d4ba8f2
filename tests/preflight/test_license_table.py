"""The license table is complete, unambiguous, and safe to override."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.preflight.licenses.table import SHIPPED, WEAK_KINDS, License, LicenseTable, load_table
from mergegate.tasks.preflight.settings import LicenseSettings

HUB = [
    line
    for line in Path(__file__).with_name("hub_licenses.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


@pytest.fixture(scope="module")
def table() -> LicenseTable:
    return load_table()


def _override(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "licences.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_table_holds_exactly_the_83_identifiers_of_the_hub_and_21_others(table: LicenseTable) -> None:
    assert len(HUB) == 83
    assert {key for key, entry in table.licenses.items() if entry.hub} == set(HUB)
    assert len(table.licenses) == 104


@pytest.mark.parametrize("identifier", HUB)
def test_every_hub_identifier_resolves_to_its_own_entry_with_a_source(table: LicenseTable, identifier: str) -> None:
    found = table.lookup(identifier)
    assert found.id == identifier
    assert found.source.strip()
    assert found.hub


@pytest.mark.parametrize("identifier", sorted(load_table().licenses))
def test_the_fields_of_an_entry_are_consistent(table: LicenseTable, identifier: str) -> None:
    entry = table.licenses[identifier]
    assert entry.source.strip()
    assert not (entry.cap and entry.commercial != "capped")
    assert not (entry.derivatives == "forbidden" and entry.sharing == "allowed")
    assert not entry.outer or entry.kind == "copyleft"
    assert not entry.never_under or (entry.kind in WEAK_KINDS and not entry.restrictive)
    assert entry.kind != "noncommercial" or entry.commercial == "forbidden"
    assert entry.kind != "rail" or entry.use_policy
    if entry.basis == "assumed" and entry.restrictive:
        assert entry.review, "nobody has read it: a person must"


def test_no_value_of_the_table_depends_on_how_yaml_reads_yes_and_no() -> None:
    class Yaml12(yaml.SafeLoader):
        """YAML loader that reads only true and false as booleans, as YAML 1.2 does."""

    Yaml12.yaml_implicit_resolvers = {
        letter: [entry for entry in entries if entry[0] != "tag:yaml.org,2002:bool"]
        for letter, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    text = SHIPPED.read_text(encoding="utf-8")
    words = {
        value for entry in yaml.load(text, Loader=Yaml12)["licenses"].values() for value in map(str, entry.values())
    }
    assert words.isdisjoint({"yes", "no", "on", "off", "y", "n", "Yes", "No"})


def test_every_review_in_the_table_has_a_reason(table: LicenseTable) -> None:
    asked = [entry for entry in table.licenses.values() if entry.review is not None]
    assert len(asked) == 31
    assert all(len(entry.review or "") > 10 for entry in asked)
    assert all(entry.review for entry in table.licenses.values() if entry.confidence == "low")


@pytest.mark.parametrize(
    ("license", "license_name", "expected"),
    [
        *((card, None, "apache-2.0") for card in ("apache-2.0", " Apache-2.0 ", "Apache 2.0")),
        *(("GPL-3.0-only", None, "gpl-3.0"), ("llama-3.1", None, "llama3.1")),
        *(("other", "qwen", "qwen"), ("other", "Qwen Research", "qwen-research")),
        *(("other", "deepseek_license", "deepseek"), ("unknown", "mrl-0.1", "mrl")),
        (None, "tongyi-qianwen-license-agreement", "tongyi-qianwen"),
        *(("other", None, "other"), ("other", "acme-terms", "other"), ("acme-terms", None, "other")),
        *((None, None, "unknown"), ("", None, "unknown"), ("  ", "  ", "unknown")),
        *((["mit"], None, "mit"), (["MIT", "mit"], None, "mit"), ([["mit"]], None, "mit"), ("mit", 7, "mit")),
        *((["mit", "apache-2.0"], None, "unknown"), ([], None, "unknown"), (["other"], "gemma", "gemma")),
        *(("apache-2.0", name, "apache-2.0") for name in ("apache-2.0", "Apache License, Version 2")),
        ("apache-2.0", "qwen-research", "unknown"),
        *((value, None, "unknown") for value in (2.0, False, {"name": "mit"})),
    ],
)
def test_a_card_is_looked_up_by_license_and_license_name(
    table: LicenseTable, license: object, license_name: object, expected: str
) -> None:
    assert table.lookup(license, license_name).id == expected


def test_every_alias_resolves_to_a_known_license(table: LicenseTable) -> None:
    assert len(table.aliases) == 16
    assert all(table.lookup("other", alias).id == target for alias, target in table.aliases.items())


def test_an_override_changes_the_named_fields_and_keeps_the_others(table: LicenseTable, tmp_path: Path) -> None:
    changed = load_table(_override(tmp_path, 'licenses:\n  qwen: {cap: "none: agreement 17"}\n'))
    assert changed.licenses["qwen"] == table.licenses["qwen"].model_copy(update={"cap": "none: agreement 17"})
    assert changed.licenses["mit"] == table.licenses["mit"]


def test_an_override_adds_a_license_and_its_alias(tmp_path: Path) -> None:
    text = "licenses:\n  acme: {kind: permissive, basis: primary, source: contract 17}\naliases: {acme-terms: acme}\n"
    found = load_table(_override(tmp_path, text)).lookup("other", "Acme Terms")
    assert found == License(id="acme", kind="permissive", basis="primary", source="contract 17")


def test_an_empty_override_changes_nothing(table: LicenseTable, tmp_path: Path) -> None:
    assert load_table(_override(tmp_path, "# nothing yet\n")) == table


@pytest.mark.parametrize(
    ("text", "where", "word"),
    [
        ("licenses: {mit: {comercial: allowed}}", "licenses.mit.comercial", "did you mean 'commercial'?"),
        ("licenses: {mit: {commercial: no}}", "licenses.mit.commercial", "YAML reads a bare yes or no"),
        ("licenses: {mit: {commercial: maybe}}", "licenses.mit.commercial", "'maybe'"),
        ("licenses: {mit: {text: 'true'}}", "licenses.mit.text", "'true'"),
        ("licenses: {acme: {kind: permissive, basis: primary}}", "licenses.acme.source", "nothing"),
        ("licenses: {mit: {outer: [gpl-3]}}", "licenses.mit.outer", "did you mean 'gpl-3.0'?"),
        ("licenses: {mit: {only_with: [lama2]}}", "licenses.mit.only_with", "did you mean 'llama2'?"),
        ("licenses: {mit: {use_policy: gema-pup}}", "licenses.mit.use_policy", "did you mean 'gemma-pup'?"),
        ("licenses: {mit: permissive}", "licenses.mit", "'permissive'"),
        ("licenses: {mit: {cap: a}, mit: {cap: b}}", "licences.yaml, line 1, column 27", "'mit' appears twice"),
        ("aliases: {1: mit}", "licences.yaml, line 1", "the key 1 is not text"),
        ("licenses: {}\n---\naliases: {}", "licences.yaml", "2 documents"),
        ("aliases: {acme: mitt}", "aliases.acme", "did you mean 'mit'?"),
        ("aliases: {gemma: mit}", "aliases.gemma", "not itself a license"),
        ("policies: {acme: 3}", "policies.acme", "3"), ("licences: {}", "licences", "did you mean 'licenses'?"),
        ("licenses: [mit]", "licenses", "list"), ("- mit", "licences.yaml", "list"),
        ("licenses: {mit", "licences.yaml", "not YAML"),
        ("licenses: {}\n---\nlicenses: {}", "licences.yaml", "documents"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_refused_with_its_location(tmp_path: Path, text: str, where: str, word: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load_table(_override(tmp_path, text))
    assert where in caught.value.where
    assert word in str(caught.value)


def test_a_missing_override_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        load_table(tmp_path / "absent.yaml")


def test_the_examples_of_the_documentation_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "check-licenses.md").read_text(encoding="utf-8")
    profile, dismissal, override = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    settings = LicenseSettings.model_validate(yaml.safe_load(profile)["checks"]["license"])
    assert len(settings.accepted) == 2
    dismissing = LicenseSettings.model_validate(yaml.safe_load(dismissal)["checks"]["license"])
    assert dismissing.unrelated["chat"].keys() == {"acme/chat"}
    changed = load_table(_override(tmp_path, override))
    assert changed.licenses["qwen"].commercial == "allowed"
    assert changed.lookup("other", "acme-terms").id == "acme-internal"
