"""Recipes: the peer's dialect is read, and what the peer ignores is refused with place and suggestion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from merge_core import CheckpointRef, load_recipe, resolve_local
from merge_core.errors import InvalidInput
from merge_core.recipe.reference import parse_reference

TIES = """
merge_method: ties
base_model: org/base@v1
models:
  - model: org/base@v1
  - model: local/math+adapters/one@main
    parameters: {weight: 0.5, density: [1, 0.7, 0.1]}
  - model: org/code
    parameters:
      density: 0.5
      weight: [{filter: mlp, value: 0.5}, {value: 0}]
parameters: {normalize: true, int8_mask: true}
dtype: float16
"""


def test_references_come_in_order_with_revision_and_adapter() -> None:
    recipe = load_recipe(TIES)
    assert [str(ref) for ref in recipe.references()] == ["org/base@v1", "local/math+adapters/one@main", "org/code"]
    assert recipe.references()[1] == CheckpointRef("local/math", None, "adapters/one@main")
    assert recipe.base == CheckpointRef("org/base", "v1")
    assert recipe.summary() == "ties of 2 over base"


def test_a_base_that_is_not_among_the_models_comes_last() -> None:
    recipe = load_recipe("merge_method: task_arithmetic\nbase_model: b\nmodels: [{model: a}]\nparameters: {weight: 1}")
    assert [ref.path for ref in recipe.references()] == ["a", "b"]


def test_slices_are_read() -> None:
    recipe = load_recipe(
        "merge_method: passthrough\nslices:\n"
        "  - sources: [{model: a, layer_range: [0, 24]}]\n  - sources: [{model: b, layer_range: [8, 32]}]\n"
    )
    assert [cut.sources[0].layers for cut in recipe.modules[0].slices] == [(0, 24), (8, 32)]


def test_comments_and_spelling_of_numbers_do_not_change_the_canonical_form() -> None:
    one = load_recipe(TIES).canonical()
    other = load_recipe("# comment\n" + TIES.replace("weight: 0.5, density", "weight: 5.0e-1, density")).canonical()
    assert json.dumps(one) == json.dumps(other)
    assert json.dumps(one) != json.dumps(load_recipe(TIES.replace("0.7", "0.6")).canonical())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("merge_method: ties", "merge_method: dare-ties"), "did you mean 'dare_ties'"),
        (("density: 0.5", "densty: 0.5"), r"models\[2\].parameters.densty.*\n.*\n.*did you mean 'density'"),
        (("dtype: float16", "dtype: bfloat61"), "did you mean 'bfloat16'"),
        (("dtype: float16", "dtyp: float16"), "did you mean 'dtype'"),
        (("base_model: org/base@v1\n", ""), "base_model"),
        (("- model: org/code", "- model: local/math+adapters/one@main"), "twice"),
        (("filter: mlp, value", "filtre: mlp, value"), "did you mean 'filter'"),
        (("normalize: true", "densty: 1"), "did you mean 'density'"),
        (("dtype: float16", "dtype: float16\ndtype: float32"), "written twice"),
        (("dtype: float16", "weight: 1"), "belongs under 'parameters'"),
        (("- model: org/code", "- model: org/code\n    weight: 1"), "unknown key 'weight'"),
        (("weight: [{filter: mlp, value: 0.5}, {value: 0}]", ""), "weight: not set for org/code"),
        (("models:", "models: []\nslices:"), "exactly one"),
        (("  - model: org/code", "  - modle: org/code"), "did you mean 'model'"),
        (("dtype: float16", "dtype: [float16"), "line"),
        (("dtype: float16", "dtype: 2024-13-45"), "dtype: '2024-13-45'"),
        (("dtype: float16", "dtype: !!int ''"), "not YAML"),
    ],
)
def test_what_the_peer_ignores_or_finds_late_is_refused_at_once(change: tuple[str, str], said: str) -> None:
    text = TIES.replace(*change)
    assert text != TIES
    with pytest.raises(InvalidInput, match=said) as caught:
        load_recipe(text, where="r.yaml")
    assert str(caught.value).startswith("r.yaml")


@pytest.mark.parametrize("layer_range", ["[0, -1]", "[3, 1]", "[0]", "[0, 1.5]", "4"])
def test_a_backward_layer_range_is_refused(layer_range: str) -> None:
    with pytest.raises(InvalidInput, match="layer_range"):
        load_recipe(f"merge_method: passthrough\nslices: [{{sources: [{{model: a, layer_range: {layer_range}}}]}}]")


def test_slices_without_a_single_layer_are_refused() -> None:
    empty = "{sources: [{model: a, layer_range: [0, 0]}]}, {sources: [{model: b, layer_range: [3, 3]}]}"
    with pytest.raises(InvalidInput, match="every layer_range is empty"):
        load_recipe(f"merge_method: passthrough\nslices: [{empty}]")


def test_slices_of_unequal_length_are_refused() -> None:
    sources = "[{model: a, layer_range: [0, 2]}, {model: b, layer_range: [0, 3]}]"
    with pytest.raises(InvalidInput, match="as many layers"):
        load_recipe(f"merge_method: slerp\nslices: [{{sources: {sources}}}]\nparameters: {{t: 0.5}}")


def test_where_all_documents_have_names_the_result_is_the_one_that_no_other_needs() -> None:
    text = """
name: last
merge_method: linear
models: [{model: first, parameters: {weight: 1}}, {model: c, parameters: {weight: 1}}]
---
name: first
merge_method: linear
models: [{model: a, parameters: {weight: 1}}, {model: b, parameters: {weight: 1}}]
"""
    recipe = load_recipe(text)
    assert recipe.name == "last"
    assert [str(ref) for ref in recipe.references()] == ["a", "b", "c"]


def test_documents_that_need_each_other_come_in_the_order_of_computing() -> None:
    def text(name: str, models: str) -> str:
        return f"{name}merge_method: linear\nmodels: {models}\nparameters: {{weight: 1}}\n"

    recipe = load_recipe(
        "---\n".join(
            [
                text("", "[{model: second}, {model: x}]"),
                text("name: second\n", "[{model: first}, {model: y}]"),
                text("name: first\n", "[{model: x}, {model: z}]"),
            ]
        )
    )
    assert [step.name for step in recipe.steps] == ["first", "second"]
    assert sorted(str(ref) for ref in recipe.references()) == ["x", "y", "z"]
    with pytest.raises(InvalidInput, match="needs itself"):
        load_recipe(
            "---\n".join(
                [text("", "[{model: p}]"), text("name: p\n", "[{model: q}]"), text("name: q\n", "[{model: p}]")]
            )
        )


def test_a_model_is_sought_beside_the_recipe_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("recipes/m", "cwd/m", "cwd/n"):
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd")
    beside = tmp_path / "recipes"
    assert resolve_local(CheckpointRef("m"), beside) == tmp_path / "recipes/m"
    assert resolve_local(CheckpointRef("n"), beside) == tmp_path / "cwd/n"
    assert resolve_local(CheckpointRef("org/name"), beside) is None
    with pytest.raises(InvalidInput, match="no such directory"):
        resolve_local(CheckpointRef("./typo"), beside)


@pytest.mark.parametrize("text", ["", "a+b+c", "a@b@c", "@x", "a@", "a+", 3, None, {"path": "x"}])
def test_a_reference_with_a_missing_or_surplus_part_is_refused(text: object) -> None:
    with pytest.raises(InvalidInput):
        parse_reference(text, "here")


def test_a_path_with_at_or_plus_can_be_written_as_a_mapping() -> None:
    ref = parse_reference({"model": {"path": "a@b+c", "revision": "r"}, "lora": {"path": "l"}}, "here")
    assert ref == CheckpointRef("a@b+c", "r", "l")
