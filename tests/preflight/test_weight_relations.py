"""Undeclared ancestors: a parent whose weights are related to a known model that no card names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors.numpy import save_file

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.store.manifest import stage_key
from mergegate.tasks.models.checkpoints.pin import ResolvedCheckpoint
from mergegate.tasks.preflight.licenses import IndexedModel, KnownModels, add_to_index, read_index, read_known_models
from mergegate.tasks.preflight.licenses import check as license_check
from mergegate.tasks.preflight.licenses import weight_relations as fingerprints
from mergegate.tasks.preflight.licenses.check import Declared, check_licenses, compare_weights, read_licenses
from mergegate.tasks.preflight.licenses.table import load_table
from mergegate.tasks.preflight.settings import LicenseSettings

TABLE = load_table()
Weights = Mapping[str, NDArray[np.float32]]


def random_weights(seed: int, base: Weights | None = None, change: float = 0.05) -> dict[str, NDArray[np.float32]]:
    """Return the weights of a model, or of a fine-tune of ``base``."""
    rng = np.random.default_rng(seed)
    names = [f"model.layers.{layer}.{kind}.weight" for layer in range(4) for kind in ("q", "up", "down")]
    weights = {name: rng.standard_normal((24, 24)).astype(np.float32) for name in names}
    return {name: base[name] + change * array for name, array in weights.items()} if base else weights


BASE, OTHER = random_weights(1), random_weights(2)
TUNED = random_weights(3, BASE)


def save_model(
    directory: Path, weights: Weights, license: str = "mit", base_model: str = "", *, is_base: bool = False
) -> ResolvedCheckpoint:
    directory.mkdir(parents=True)
    lines = [f"license: {license}"] + ([f"base_model: {base_model}"] if base_model else [])
    (directory / "README.md").write_text("\n".join(["---", *lines, "---", ""]))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(dict(weights), directory / "model.safetensors")
    return ResolvedCheckpoint(name=directory.name, ref=f"../{directory.name}", directory=directory, is_base=is_base)


def index_model(
    tmp_path: Path, name: str, weights: Weights, license: str = "cc-by-nc-4.0", **ancestors: str
) -> IndexedModel:
    """Return the entry of a known model. ``ancestors`` are the licenses of models of the same organization."""
    model = save_model(tmp_path / "known" / name.replace("/", "--"), weights)
    fingerprint = fingerprints.fingerprint_model(model, 1024)
    above = tuple(fingerprints.IndexedAncestor(name=f"acme/{key}", license=value) for key, value in ancestors.items())
    found = {"ancestors": above, "digest": fingerprint.digest, "samples": fingerprint.to_json()}
    return IndexedModel(name=name, license=license, **found)


def compared(
    *parents: ResolvedCheckpoint, index: tuple[IndexedModel, ...] = (), settings: LicenseSettings | None = None
) -> Declared:
    declared = read_licenses(parents, TABLE)
    return compare_weights(declared, parents, KnownModels(index), settings or LicenseSettings(), TABLE)


def verdict_of(declared: Declared) -> license_check.LicenseVerdict:
    verdict = check_licenses.work(declared, LicenseSettings().use("mix"), TABLE, {})
    assert type(verdict).model_validate_json(verdict.model_dump_json()) == verdict
    return verdict


def relations(declared: Declared) -> list[tuple[str, str, str]]:
    return [(item.parent, item.model, item.kind) for item in declared.undeclared]


def test_a_hidden_fine_tune_is_bound_by_the_license_of_its_ancestor(tmp_path: Path) -> None:
    secret = index_model(tmp_path, "acme/secret", BASE)
    declared = compared(save_model(tmp_path / "chat", TUNED), index=(secret,))
    assert relations(declared) == [("chat", "acme/secret", "fine-tune")]
    assert declared.undeclared[0].distance == pytest.approx(0.05, rel=0.1)
    verdict = verdict_of(declared)
    assert verdict.combination.status == "blocked"
    assert [(ancestor.name, ancestor.license) for ancestor in verdict.ancestors] == [("acme/secret", "cc-by-nc-4.0")]
    refusal = str(verdict.refusal())
    assert "cc-by-nc-4.0 (of acme/secret) forbids commercial use" in refusal
    assert "chat declares mit, but its weights are within 5" in refusal
    (warning,) = verdict.warnings()
    assert warning.severity == "warn"
    assert "unrelated: {chat: {acme/secret: 'YOUR NAME: YOUR REASON'}}" in warning.remedy


def test_a_permissive_ancestor_only_leads_to_a_warning_and_a_credit(tmp_path: Path) -> None:
    known = index_model(tmp_path, "acme/open", BASE, "cc-by-4.0")
    verdict = verdict_of(compared(save_model(tmp_path / "chat", BASE), index=(known,)))
    assert verdict.refusal() is None
    assert [warning.severity for warning in verdict.warnings()] == ["warn"]
    assert verdict.result == "cc-by-4.0"
    assert any("acme/open" in item.text for item in verdict.combination.obligations)


def test_the_ancestors_of_the_known_model_bind_too(tmp_path: Path) -> None:
    known = index_model(tmp_path, "acme/chat", BASE, "mit", base="cc-by-nc-4.0")
    verdict = verdict_of(compared(save_model(tmp_path / "copy", BASE), index=(known,)))
    assert [ancestor.name for ancestor in verdict.ancestors] == ["acme/base", "acme/chat"]
    assert verdict.combination.status == "blocked"


@pytest.mark.parametrize("base_model", ["acme/secret", "Acme/Secret", "https://huggingface.co/acme/secret"])
def test_a_declared_ancestor_is_no_finding(tmp_path: Path, base_model: str) -> None:
    secret = index_model(tmp_path, "acme/secret", BASE)
    parent = save_model(tmp_path / "chat", TUNED, base_model=base_model)
    assert compared(parent, index=(secret,)) == read_licenses([parent], TABLE)


def test_an_unrelated_model_and_the_same_model_under_its_own_license_are_no_finding(tmp_path: Path) -> None:
    secret, known = index_model(tmp_path, "acme/secret", OTHER), index_model(tmp_path, "acme/open", BASE, "mit")
    assert compared(save_model(tmp_path / "chat", TUNED), index=(secret,)).undeclared == ()
    assert compared(save_model(tmp_path / "open", BASE), index=(known,)).undeclared == ()


@pytest.mark.parametrize(("known", "license", "name"), [("secret", "cc-by-nc-4.0", "secret"), ("open", "mit", "tuned")])
def test_the_name_of_a_local_directory_or_the_same_license_is_no_declaration(
    tmp_path: Path, known: str, license: str, name: str
) -> None:
    model = index_model(tmp_path, f"acme/{known}", BASE, license)
    assert relations(compared(save_model(tmp_path / name, TUNED), index=(model,)))


def test_a_sibling_is_explained_by_the_declared_base(tmp_path: Path) -> None:
    sibling = index_model(tmp_path, "acme/sibling", random_weights(4, BASE), base="mit")
    parent = save_model(tmp_path / "chat", TUNED, base_model="acme/base")
    assert compared(parent, index=(sibling,)).undeclared == ()
    base = index_model(tmp_path, "acme/base", BASE, "mit")
    assert compared(parent, index=(sibling, base)).undeclared == ()


def test_a_model_that_is_nearer_than_the_declared_base_is_a_finding(tmp_path: Path) -> None:
    """The card names the base, but the weights are those of a fine-tune that the card does not name."""
    middle = random_weights(4, BASE, change=0.1)
    known = index_model(tmp_path, "acme/middle", middle, base="mit")
    base = index_model(tmp_path, "acme/base", BASE, "mit")
    parent = save_model(tmp_path / "chat", random_weights(5, middle, change=0.02), base_model="acme/base")
    assert relations(compared(parent, index=(base, known))) == [("chat", "acme/middle", "fine-tune")]


@pytest.mark.parametrize("card", ["neither", "newer", "older", "both", "base of the recipe"])
@pytest.mark.parametrize("count", [2, 4])
def test_other_parents_never_hide_a_known_model(tmp_path: Path, card: str, count: int) -> None:
    """Checkpoints of one run are nearer to each other than to the model that the run started from."""
    secret, weights, run = index_model(tmp_path, "acme/secret", BASE), dict(BASE), []
    for step in range(count):
        weights = random_weights(10 + step, weights, change=0.2 if not step else 0.02)
        named = {"newer": f"../{step - 1}", "older": f"../{step + 1}", "both": f"../{(step + 1) % count}"}.get(card, "")
        is_base = card == "base of the recipe" and not step
        run.append(save_model(tmp_path / str(step), weights, "apache-2.0", named, is_base=is_base))
    found = relations(compared(*run, index=(secret,)))
    assert found == [(str(step), "acme/secret", "fine-tune") for step in range(count)]


def test_a_parent_that_both_declare_tells_which_ancestor_is_nearer(tmp_path: Path) -> None:
    base, tuned = save_model(tmp_path / "base", BASE), random_weights(4, BASE)
    known = index_model(tmp_path, "acme/tuned", tuned, "cc-by-nc-4.0")
    known = known.model_copy(update={"ancestors": (fingerprints.IndexedAncestor(name="base", license="mit"),)})
    sibling = save_model(tmp_path / "sibling", TUNED, base_model="../base")
    descendant = save_model(tmp_path / "descendant", random_weights(5, tuned, change=0.02), base_model="../base")
    found = relations(compared(base, sibling, descendant, index=(known,)))
    assert found == [("descendant", "acme/tuned", "fine-tune")]


def test_a_descendant_of_the_parent_is_no_finding(tmp_path: Path) -> None:
    """The original is not derived from its fine-tunes. It is recognized by its weights under its own name."""
    tuned = index_model(tmp_path, "acme/tuned", TUNED, base="mit")
    original = index_model(tmp_path, "acme/base", BASE, "mit")
    assert compared(save_model(tmp_path / "base", BASE), index=(tuned, original)).undeclared == ()


def test_parents_that_are_related_without_a_declaration_are_a_warning(tmp_path: Path) -> None:
    one = save_model(tmp_path / "one", BASE, "mit")
    two = save_model(tmp_path / "two", TUNED, "apache-2.0")
    declared = compared(one, two)
    assert relations(declared) == [("one", "two", "fine-tune")]
    verdict = verdict_of(declared)
    assert (verdict.refusal(), verdict.ancestors) == (None, ())
    assert "neither card names the other model or a common base" in verdict.warnings()[0].found


@pytest.mark.parametrize("case", ["card", "common base", "base of the recipe", "same license", "unrelated"])
def test_declared_and_harmless_relations_of_parents_are_no_finding(tmp_path: Path, case: str) -> None:
    base_model = {"card": "../two", "common base": "gone/base"}.get(case, "")
    one = save_model(tmp_path / "one", BASE, "mit", base_model)
    two = save_model(
        tmp_path / "two", OTHER if case == "unrelated" else TUNED, "mit" if case == "same license" else "apache-2.0",
        base_model if case == "common base" else "", is_base=case == "base of the recipe",
    )  # fmt: skip
    assert compared(one, two).undeclared == ()


def test_weights_are_not_read_without_an_index(tmp_path: Path) -> None:
    parent = save_model(tmp_path / "chat", BASE)

    def read_weights(parent: ResolvedCheckpoint) -> None:
        raise AssertionError("weights were read")

    declared = read_licenses([parent], TABLE)
    assert compare_weights(declared, [parent], KnownModels((), read_weights), LicenseSettings(), TABLE) is declared


def test_without_a_finding_the_key_is_that_of_the_cards(tmp_path: Path) -> None:
    parent = save_model(tmp_path / "chat", TUNED)
    keys = {
        stage_key("licenses", check_licenses.version, {"declared": compared(parent, index=index)})
        for index in ((), (index_model(tmp_path, "acme/unrelated", OTHER),))
    }
    of_cards = {"declared": {"families": read_licenses([parent], TABLE).families}}
    assert keys == {stage_key("licenses", check_licenses.version, of_cards)}
    found = compared(parent, index=(index_model(tmp_path, "acme/secret", BASE),))
    assert stage_key("licenses", check_licenses.version, {"declared": found}) not in keys


def test_a_user_can_dismiss_a_relation(tmp_path: Path) -> None:
    secret = index_model(tmp_path, "acme/secret", BASE)
    parent = save_model(tmp_path / "chat", TUNED)
    settings = LicenseSettings(unrelated={"chat": {"acme/secret": "alice: the same seed, other data"}})
    verdict = verdict_of(compared(parent, index=(secret,), settings=settings))
    assert (verdict.refusal(), verdict.warnings(), verdict.ancestors) == (None, (), ())
    assert [item.dismissed for item in verdict.undeclared] == ["alice: the same seed, other data"]
    for_other = LicenseSettings(unrelated={"math": {"acme/secret": "alice: the same seed, other data"}})
    assert verdict_of(compared(parent, index=(secret,), settings=for_other)).refusal() is not None


def test_a_dismissal_names_who_and_why() -> None:
    with pytest.raises(ValidationError, match="who: why"):
        LicenseSettings(unrelated={"chat": {"acme/secret": "no"}})


def test_a_license_that_the_table_lacks_needs_a_review(tmp_path: Path) -> None:
    known = index_model(tmp_path, "acme/secret", BASE, "acme-internal")
    verdict = verdict_of(compared(save_model(tmp_path / "chat", TUNED), index=(known,)))
    assert verdict.combination.status == "review"


def test_an_index_replaces_a_model_of_the_same_name(tmp_path: Path) -> None:
    path = tmp_path / "state" / "fingerprints.jsonl"
    first, second = index_model(tmp_path, "acme/one", BASE), index_model(tmp_path, "acme/two", OTHER)
    for model in (first, second, first.model_copy(update={"license": "mit"})):
        add_to_index(path, model)
    licenses = [(model.name, model.license) for model in read_index(path)]
    assert licenses == [("acme/two", "cc-by-nc-4.0"), ("acme/one", "mit")]
    # Concatenated files are an index. The last line about a name counts.
    path.write_text(path.read_text() + "\n" + first.model_dump_json() + "\n")
    assert {model.license for model in read_index(path)} == {"cc-by-nc-4.0"}
    assert [model.name for model in read_known_models(tmp_path / "none.jsonl", path).index] == ["acme/two", "acme/one"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line[:-40], "not JSON"), (lambda line: "[]", "not a fingerprint"),
        (lambda line: line.replace('"format":1', '"format":2'), "format"),
        (lambda line: line.replace('"license":"cc-by-nc-4.0",', ""), "license"),
        (lambda line: line.replace('"values":"', '"values":"AAAA'), "not a fingerprint"),
        (lambda line: line.replace('"values":"', '"values":"*'), "not a fingerprint"),
        (lambda line: line.replace('"layers":4', '"layers":"x"'), "not a fingerprint"),
        (lambda line: line.replace('.weight",24', '.weight",25'), "do not have the recorded digest"),
    ],
)  # fmt: skip
def test_a_damaged_line_of_an_index_is_named(tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "fingerprints.jsonl"
    add_to_index(path, index_model(tmp_path, "acme/good", OTHER))
    with path.open("a") as file:
        file.write(change(index_model(tmp_path, "acme/secret", BASE).model_dump_json()) + "\n")
    with pytest.raises(InvalidInput, match=message) as raised:
        read_index(path)
    assert raised.value.where == f"{path}: line 2"
    assert "'mergegate fingerprint'" in str(raised.value)


def test_a_missing_index_of_a_profile_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"gone\.jsonl"):
        read_known_models(tmp_path / "none.jsonl", tmp_path / "gone.jsonl")
