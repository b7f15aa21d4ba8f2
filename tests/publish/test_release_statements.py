"""What a release says about its weights and its base models is what was found, in every file and for ``verify``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from release_samples import COMMIT, content, facts_of, license_verdict, parents, publishable, write_release

from mergegate.merge_core import load_recipe
from mergegate.merge_core.errors import Refused
from mergegate.tasks.merge import WeightComparison
from mergegate.tasks.merge.weight_comparison import CopiedTensors
from mergegate.tasks.models.checkpoints import parse_card
from mergegate.tasks.models.checkpoints.pin import PinnedAdapter
from mergegate.tasks.release.publish.documents.card import escape, model_card
from mergegate.tasks.release.publish.documents.card_metadata import card_metadata, check_card, contributing_references
from mergegate.tasks.release.publish.releases import check_release
from mergegate.tasks.release.publish.targets.directory import DirectoryRelease

NAMES = ("acme/general@main", "../models/local_one")
COPIED = {"parent": 1, "further_parents": (), "tensors": 3, "parameters": 10, "identical": True}
COUNTS = {"tensors": 12, "parameters": 1000, "new": 9, "new_parameters": 990, "reshaped": 0}
MIXED = WeightComparison.model_validate({**COUNTS, "copied": [COPIED]})


@st.composite
def comparisons(draw: st.DrawFn) -> WeightComparison:
    tensors = draw(st.integers(1, 400))
    counts = draw(st.lists(st.integers(0, tensors), min_size=2, max_size=2))
    new = draw(st.integers(0, tensors - max(counts)))
    is_old = draw(st.booleans())
    further = st.none() if is_old else st.sampled_from([(), (0,), (1,)])
    copied = [
        {"parent": index, "further_parents": draw(further), "tensors": count, "parameters": 10 * count,
         "identical": draw(st.booleans())}
        for index, count in enumerate(counts)
        if count
    ]  # fmt: skip
    whole = tuple(index for index, count in enumerate(counts) if count == tensors)
    sizes = {"tensors": tensors, "parameters": 10 * tensors, "new": new, "new_parameters": 10 * new}
    more = {"reshaped": draw(st.integers(0, new)), "copied": copied, "copy_of": whole if draw(st.booleans()) else ()}
    return WeightComparison.model_validate({**sizes, **more})


@settings(max_examples=30)
@given(comparisons())
def test_every_card_states_what_was_found_and_is_read_by_the_hub(
    tmp_path_factory: pytest.TempPathFactory, compared: WeightComparison
) -> None:
    root = tmp_path_factory.getbasetemp() / "statements"
    both, verdict = parents(root), license_verdict("apache-2.0", "mit")
    metadata = card_metadata(content(), both, verdict.combination)
    text = compared.sentences([escape(parent.ref) for parent in both])
    card = model_card(facts_of(root, {"weights": compared}, metadata=metadata, license=verdict), ("LICENSE",))
    check_card(card, metadata, ("LICENSE",))
    assert text in card
    assert ("is a copy" in text) == bool(compared.copy_of)
    if not compared.copy_of:
        assert ("new: " in text) == (compared.new > 0)
        for each in compared.copied:
            assert f"{each.tensors} of {compared.tensors} (" in text
            assert escape(both[each.parent].ref) in text


@pytest.fixture
def released(tmp_path: Path, home: Path) -> Path:
    return write_release(publishable(tmp_path / "sample").parts._replace(weights=MIXED), tmp_path)


def test_the_statement_is_the_same_in_all_files(released: Path) -> None:
    statement = MIXED.sentences(NAMES)
    assert "3 of 12 (1.0 % of the parameters) are copied unchanged from ../models/local_one." in statement
    assert statement.endswith("The other 9 are new: none is equal to a tensor of these models.")
    assert statement in (released / "MODIFICATIONS").read_text()
    assert MIXED.sentences([escape(name) for name in NAMES]) in (released / "README.md").read_text()
    predicate = json.loads((released / "provenance.json").read_text())["predicate"]
    assert WeightComparison.model_validate(predicate["mergegate_weights"]) == MIXED
    assert check_release(DirectoryRelease(released)).files > 5


@pytest.mark.parametrize("file", ["README.md", "MODIFICATIONS", "provenance.json"])
def test_verify_refuses_a_statement_that_was_changed_in_one_file(released: Path, file: str) -> None:
    text = (released / file).read_text()
    changed = text.replace('"new": 9', '"new": 12') if file == "provenance.json" else text.replace("3 of 12", "0 of 12")
    assert changed != text
    (released / file).write_text(changed)
    with pytest.raises(Refused) as refusal:
        check_release(DirectoryRelease(released))
    named = "README.md" if file == "provenance.json" else file
    assert f"{named}: its statement of changes is not that of provenance.json" in str(refusal.value)


def test_verify_notices_a_change_of_any_number_and_of_no_word(released: Path) -> None:
    for file, names in (("README.md", [escape(name) for name in NAMES]), ("MODIFICATIONS", NAMES)):
        text, statement = (released / file).read_text(), MIXED.sentences(names)
        for change in (statement.upper(), statement.replace("is equal", "gleicht"), f"Seit heute: {statement}"):
            (released / file).write_text(text.replace(statement, change.replace(names[1].upper(), names[1])))
            with pytest.raises(Refused) as refusal:
                check_release(DirectoryRelease(released))
            assert "statement of changes" not in str(refusal.value)  # only the checksums differ
        for number in re.finditer(r"\d+(\.\d+)?", statement):
            for other in ("", f"1{number[0]}", f"{number[0]}.5"):
                change = statement[: number.start()] + other + statement[number.end() :]
                (released / file).write_text(text.replace(statement, change))
                with pytest.raises(Refused, match=f"{file}: its statement of changes is not that of provenance"):
                    check_release(DirectoryRelease(released))
        (released / file).write_text(text)
    check_release(DirectoryRelease(released))


@settings(max_examples=40)
@given(comparisons())
def test_the_figures_are_the_numbers_and_names_in_the_sentences(compared: WeightComparison) -> None:
    names = ("acme/one", "acme/two")
    text = re.findall(r"acme/one|acme/two|\d+(?:,\d+)*(?:\.\d+)?", compared.sentences(names))
    assert text == list(compared.figures(names))
    old = tuple(CopiedTensors(parent=index, tensors=1, parameters=1, identical=True) for index in range(6))
    for many in (old, (old[0].model_copy(update={"further_parents": (1, 2, 3, 4, 5)}),)):
        shared = compared.model_copy(update={"copied": many, "copy_of": ()})
        assert shared.figures("abcdef")[4] == "6"
        assert "each of 6 models" in shared.sentences("abcdef")


@pytest.mark.parametrize("value", ["x", {}, {**MIXED.model_dump(), "copied": [], "copy_of": [7]}])
def test_verify_refuses_a_comparison_that_cannot_be_read(released: Path, value: Any) -> None:
    path = released / "provenance.json"
    statement = json.loads(path.read_text())
    statement["predicate"]["mergegate_weights"] = value
    path.write_text(json.dumps(statement))
    with pytest.raises(Refused, match="mergegate_weights is not a comparison with its parents"):
        check_release(DirectoryRelease(released))


def test_a_release_without_a_comparison_claims_nothing_and_is_verified(tmp_path: Path, home: Path) -> None:
    """This is also the form of the provenance of earlier versions."""
    release = write_release(publishable(tmp_path / "sample").parts, tmp_path)
    assert "are new" not in (release / "README.md").read_text()
    assert "mergegate_weights" not in (release / "provenance.json").read_text()
    check_release(DirectoryRelease(release))


def test_base_models_are_those_whose_weights_contribute(tmp_path: Path) -> None:
    hub, local = parents(tmp_path)
    step = hub.model_copy(update={"ref": "acme/run@step2"})
    donor = hub.model_copy(update={"ref": "acme/tokenizer"})
    lora = PinnedAdapter(ref="acme/lora@v1", directory=tmp_path, revision=COMMIT, files=())
    tuned = hub.model_copy(update={"ref": "acme/general+acme/lora@v1", "adapter": lora})
    cases = [
        ((hub, local), {}, (["acme/general"], "merge")),  # one of two is local
        ((local,), {}, (None, None)),
        ((hub,), {}, (["acme/general"], "merge")),  # a stack of one model
        ((hub, step, step), {}, (["acme/general", "acme/run"], "merge")),  # checkpoints of one repository
        ((hub, donor), {"unused_refs": {"acme/tokenizer"}}, (["acme/general"], "merge")),
        ((tuned, local), {}, (["acme/general", "acme/lora"], "merge")),
        ((tuned,), {"is_adapter": True}, (["acme/general"], "adapter")),
    ]
    for models, options, expected in cases:
        metadata = card_metadata(content(), models, license_verdict("mit").combination, **options)
        assert (metadata.get("base_model"), metadata.get("base_model_relation")) == expected
        assert not {"new_version", "datasets"} & set(metadata)


LINEAR = "merge_method: linear\nmodels: [{model: x/a}, {model: x/b}]\nparameters: {weight: 1}\n"
RECIPES = {
    "merge_method: ties\nbase_model: x/base\nmodels: [{model: x/a}]\nparameters: {weight: 1, density: 1}\n"
    "tokenizer_source: x/words\n": {"x/base", "x/a"},
    LINEAR: {"x/a", "x/b"},
    LINEAR.replace("x/a", "one") + "---\nname: one\nmerge_method: task_arithmetic\nbase_model: x/base\n"
    "models: [{model: x/a}]\nparameters: {weight: 1}\n": {"x/base", "x/a", "x/b"},
    "base_model: x/base\ngate_mode: random\nexperts: [{source_model: x/a}, {source_model: x/b}]\n": {
        *("x/base", "x/a", "x/b")
    },
}


@pytest.mark.parametrize(("recipe", "expected"), RECIPES.items())
def test_a_model_that_only_provides_the_tokenizer_does_not_contribute(recipe: str, expected: set[str]) -> None:
    assert contributing_references(load_recipe(recipe)) == expected


def test_the_relation_must_fit_the_base_models(tmp_path: Path) -> None:
    metadata = card_metadata(content(), parents(tmp_path), license_verdict("mit").combination)
    for change in ({"base_model_relation": "copy"}, {"base_model": []}):
        broken = {**metadata, **change}
        card = f"---\n{json.dumps(broken)}\n---\n# demo\n"
        assert parse_card(card.encode()).fields == broken
        with pytest.raises(Refused, match="base_model_relation"):
            check_card(card, broken, ("LICENSE",))
