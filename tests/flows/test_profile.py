"""Profiles are strict and typed, and their errors help the user fix them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from samples import sampled

from mergegate.flows.preflight import pin_profile_evidence
from mergegate.flows.profile import Profile, load_profile, parse_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.models.checkpoints.pin import resolve_parents

PROFILES = sorted((Path(__file__).resolve().parents[2] / "profiles").glob("*.yaml"))

GOOD: dict[str, object] = {
    "name": "demo",
    "recipe": "recipe.yaml",
    "perplexity": {"documents": "held-out.jsonl"},
    "evaluate": {"tasks": [{"task": "mmlu", "guarded_by": "general", "max_drop": 2}]},
    "publish": {"to": "directory", "path": "out"},
}


@pytest.mark.parametrize("file", sampled(PROFILES, PROFILES[::4]), ids=lambda file: file.stem)
def test_every_shipped_profile_is_valid_and_what_it_names_is_there(file: Path, tmp_path: Path) -> None:
    if file.stem == "demo-training-run":  # A script writes its checkpoints.
        shutil.copytree(file.parent / "demo/models/base", tmp_path / "runs/demo/checkpoint-25")
        (tmp_path / "profiles").mkdir()
        (tmp_path / "profiles/demo").symlink_to(file.parent / "demo")
        file = Path(shutil.copy(file, tmp_path / "profiles"))
    profile = load_profile(file)
    evidence = pin_profile_evidence(
        profile, resolve_parents(profile.candidates()[0].recipe), HashMemo(tmp_path / "memo.sqlite")
    )
    is_embedding = "embeddings" in file.stem  # Embedding models have two topics, and no perplexity.
    assert len(evidence.tasks) == len({guard.task for guard in evidence.guards}) == (2 if is_embedding else 3)
    assert (evidence.documents is None) == is_embedding


def test_it_is_read_once_as_long_as_neither_it_nor_its_recipes_change(tmp_path: Path) -> None:
    file, recipe = tmp_path / "profile.yaml", tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "remedies": ["recipe.yaml"]}))
    recipe.write_text("merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}]\n")
    first = load_profile(file)
    assert "linear" in first.candidates()[0].text
    assert load_profile(file) is first
    recipe.write_text("merge_method: nearswap\nmodels: [{model: a}]\nbase_model: b\nparameters: {t: 0.5}\n")
    second = load_profile(file)
    assert "nearswap" in second.candidates()[0].text
    assert load_profile(file) is second
    recipe.unlink()
    with pytest.raises(InvalidInput, match="recipe"):
        load_profile(file).candidates()


def test_defaults_are_those_of_a_careful_publisher() -> None:
    profile = parse_profile(GOOD, "profile.yaml")
    assert profile.evaluate is not None
    assert profile.perplexity is not None
    assert profile.evaluate.on_inconclusive == "block"
    assert profile.checks.license.purpose == "commercial"
    assert profile.checks.license.visibility == "public"
    assert profile.perplexity.limits.max_increase == 0.05


GGUF = {"format": "gguf", "types": ["Q8_0"]}


def guards(**guard: object) -> dict[str, object]:
    return {"evaluate": {"tasks": [{"task": "m", "guarded_by": "g", **guard}]}}


@pytest.mark.parametrize(
    ("change", "place", "words"),
    [
        ({"perplexity": {"documents": "d", "max_incraese": "5%"}}, "perplexity.max_incraese", "'max_increase'"),
        (guards(maxdrop=2), "tasks[0].maxdrop", "'max_drop'"),
        ({"checks": {"licence": {}}}, "checks.licence", "did you mean 'license'?"),
        ({"checks": {"license": {"purpos": "x"}}}, "checks.license.purpos", "did you mean 'purpose'?"),
        ({"publish": {"to": "directory", "paht": "x", "path": "y"}}, "publish.paht", "did you mean 'path'?"),
        ({"variants": [{**GGUF, "sufix": "X"}]}, "variants[0].sufix", "'suffix'"),
        ({"name": "../up"}, "name", ""),
        (
            {"variants": [{**GGUF, "guards": [{"task": "m"}, {"task": "m", "max_drop": 90}]}]},
            "variants[0]",
            "m is listed twice",
        ),
        (
            {"variants": [{**GGUF, "suffix": "A"}, {**GGUF, "types": ["Q4_0"], "suffix": "a"}]},
            "profile.yaml",
            "at '…-a'",
        ),
        (
            {"publish": {"to": "directory", "path": "out", "about": {"training_compute": {"../models/base": "much"}}}},
            "profile.yaml: publish.about.training_compute['../models/base']",  # a key that is not a word is quoted
            "",
        ),
    ],
)
def test_a_fault_is_an_error_with_its_place_and_a_suggestion(change: dict[str, object], place: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_profile({**GOOD, **change}, "profile.yaml")
    assert place in caught.value.where
    assert words in str(caught.value)


def test_a_profile_whose_guards_are_all_advisory_is_refused() -> None:
    advisory = {"tasks": [{"task": "m", "guarded_by": "g", "advisory": True}]}
    with pytest.raises(InvalidInput, match="all guards of evaluate are advisory"):
        parse_profile({**GOOD, "evaluate": advisory, "perplexity": None}, "profile.yaml")
    parse_profile({**GOOD, "evaluate": advisory}, "profile.yaml")


def test_paths_are_relative_to_the_file_and_a_recipe_may_stand_inline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "p.yaml").write_text(yaml.safe_dump(GOOD))
    monkeypatch.chdir(tmp_path)
    assert load_profile(Path("profiles/p.yaml")).root == tmp_path / "profiles"
    recipe = {"merge_method": "linear", "models": [{"model": "a/b", "parameters": {"weight": 1}}]}
    (inline,) = parse_profile({**GOOD, "recipe": recipe, "root": str(tmp_path)}, "profile.yaml").candidates()
    assert [str(ref) for ref in inline.recipe.references()] == ["a/b"]
    assert inline.recipe.directory == tmp_path
    assert yaml.safe_load(inline.text) == recipe


def test_a_profile_survives_the_way_through_prefect_as_json() -> None:
    profile = parse_profile(GOOD, "profile.yaml")
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


def test_a_key_that_an_anchor_gives_may_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "profile.yaml").write_text(
        "name: demo\nrecipe: recipe.yaml\npublish: {to: directory, path: out}\n"
        "evaluate:\n  tasks:\n"
        "    - &mmlu {task: mmlu, guarded_by: general, max_drop: 2}\n"
        "    - {<<: *mmlu, task: gsm8k}\n"
    )
    evaluate = load_profile(tmp_path / "profile.yaml").evaluate
    assert evaluate is not None
    assert [task.task for task in evaluate.tasks] == ["mmlu", "gsm8k"]


EXAMPLES = sorted((PROFILES[0].parent / "examples").glob("*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_of_a_real_family_means_something(file: Path) -> None:
    profile = load_profile(file)
    assert profile.headline().startswith(profile.name)
    models = {
        ref.rpartition("/")[2] for one in profile.candidates() for ref in re.findall(r"[\w.-]+/[\w.-]+", one.text)
    }
    assert profile.evaluate is not None
    assert {guard.guarded_by for guard in profile.evaluate.tasks} <= models
    assert {file.stem for file in EXAMPLES} == {"gemma", "llama", "mistral", "qwen"}


@pytest.mark.parametrize(
    ("said", "written", "proposed"),
    [((), 0, 0), ("auto", 0, 3), (["auto"], 0, 3), ([{"density": 0.3}, "auto"], 1, 3), ([{"density": 0.3}], 1, 0)],
)
def test_what_a_refusal_proposes_is_tried_after_what_is_written(said: object, written: int, proposed: int) -> None:
    models = [{"model": "./m", "parameters": {"weight": 1, "density": 0.5}}]
    recipe = {"merge_method": "ties", "base_model": "./b", "models": models}
    profile = parse_profile({**GOOD, "recipe": recipe, "remedies": said}, "profile.yaml")
    assert (len(profile.candidates()) - 1, profile.max_proposed_remedies) == (written, proposed)
    choices = [profile.with_remedies(choice).max_proposed_remedies for choice in ("written", "auto", None)]
    assert choices == [0, 3, proposed]
    assert len(profile.with_remedies("auto").candidates()) - 1 == written
