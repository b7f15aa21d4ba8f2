"""Recipes follow mergekit's dialect, keys that mergekit ignores cause warnings, and one report lists all errors."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegate.merge_core import CheckpointRef, load_recipe, resolve_local
from mergegate.merge_core.errors import Finding, InvalidFile, InvalidInput, findings_of
from mergegate.merge_core.recipe.reference import parse_reference

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


def test_a_base_that_is_not_listed_under_models_is_the_last_reference() -> None:
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
        (("dtype: float16", "dtype: bfloat61"), "did you mean 'bfloat16'"),
        (("base_model: org/base@v1\n", ""), "base_model"),
        (("- model: org/code", "- model: local/math+adapters/one@main"), "twice"),
        (("dtype: float16", "dtype: float16\ndtype: float32"), "appears twice"),
        (("weight: [{filter: mlp, value: 0.5}, {value: 0}]", ""), "weight: not set for org/code"),
        (("models:", "slices: [{}]\nmodels:"), "exactly one"),
        (("  - model: org/code", "  - modle: org/code"), "did you mean 'model'"),
        (("dtype: float16", "dtype: [float16"), "line"),
        (("dtype: float16", "dtype: 2024-13-45"), "dtype: '2024-13-45'"),
        (("dtype: float16", "dtype: !!int ''"), "not YAML"),
    ],
)
def test_invalid_content_is_refused_with_location_and_suggestion(change: tuple[str, str], said: str) -> None:
    text = TIES.replace(*change)
    assert text != TIES
    with pytest.raises(InvalidInput, match=said) as caught:
        load_recipe(text, location="r.yaml")
    assert str(caught.value).startswith("r.yaml")


@pytest.mark.parametrize(
    ("change", "where", "remedy"),
    [
        (("filter: mlp", "filter: mlp, filtre: x"), "models[2].parameters.weight[0].filtre", "did you mean 'filter'?"),
        (("normalize: true", "densty: 1"), "parameters.densty", "did you mean 'density'?"),
        (("dtype: float16", "normalize: 1"), "normalize", "remove it, because 'parameters' also sets it"),
        (("dtype: float16", "lamda: 1"), "lamda", "did you mean 'lambda'? It belongs under 'parameters'"),
        (("- model: org/code", "- model: org/code\n    lambda: 1"), "models[2].lambda", "top-level 'parameters'"),
        (("- model: org/code", "- model: org/code\n    dtype: x"), "models[2].dtype", "top level of the recipe"),
        (("- model: org/code", "- model: org/code\n    note: x"), "models[2].note", "remove it"),
        (("models:", "models:\n  - {model: {model: {path: a, tag: x}}, parameters: {weight: 1}}"), "tag", "remove it"),
        (("dtype: float16", "tokenizer: {tokens: {x: {sorce: 1}}}"), "tokenizer.tokens.x.sorce", "'source'?"),
        (("dtype: float16", "experts: [a]"), "experts", "remove it, or remove the models"),
    ],
)
def test_content_that_mergekit_ignores_causes_a_warning_with_a_remedy(
    change: tuple[str, str], where: str, remedy: str
) -> None:
    recipe = load_recipe(TIES.replace(*change), location="r.yaml")
    (finding,) = recipe.findings
    assert finding.severity == "warn"
    assert finding.where.startswith("r.yaml: ")
    assert finding.where.endswith(where)
    assert remedy in finding.remedy


@pytest.mark.parametrize("layer_range", ["[0, -1]", "[3, 1]", "[0]", "[0, 1.5]", "4"])
def test_a_backward_layer_range_is_refused(layer_range: str) -> None:
    with pytest.raises(InvalidInput, match="layer_range"):
        load_recipe(f"merge_method: passthrough\nslices: [{{sources: [{{model: a, layer_range: {layer_range}}}]}}]")


@pytest.mark.parametrize("digits", [10, 4300, 4301, 100_000])
@pytest.mark.parametrize("digit", "09")
def test_a_layer_number_with_too_many_digits_is_refused(digit: str, digits: int) -> None:
    for layer_range in (f'["{digit * digits}", 4]', f'[0, "{digit * digits}"]'):
        with pytest.raises(InvalidInput, match="layer_range"):
            load_recipe(f"merge_method: passthrough\nslices: [{{sources: [{{model: a, layer_range: {layer_range}}}]}}]")


@pytest.mark.parametrize(
    ("slices", "words"),
    [
        ("{sources: [{model: a, layer_range: [0, 0]}]}, {sources: [{model: b, layer_range: [3, 3]}]}", "is empty"),
        ("{sources: [{model: a, layer_range: [0, 2]}, {model: b, layer_range: [0, 3]}]}", "same number of layers"),
    ],
)
def test_slices_without_a_layer_or_of_unequal_length_are_refused(slices: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        load_recipe(f"merge_method: slerp\nslices: [{slices}]\nparameters: {{t: 0.5}}")


def linear_document(models: str, name: str = "") -> str:
    return f"{f'name: {name}' if name else ''}\nmerge_method: linear\nmodels: {models}\nparameters: {{weight: 1}}\n"


PATHS = ("../../victim", "/victim", "a/b", "a/", ".", "..")


@pytest.mark.parametrize("name", [*PATHS, "a\0b", "\0", "n" * 201, "\N{SNOWMAN}" * 67, "\ud800", "a\udfff"])
@pytest.mark.parametrize("form", ["linear", "mixture"])
def test_a_name_that_cannot_be_a_directory_is_refused(name: str, form: str) -> None:
    content: dict[str, Any] = {"merge_method": "linear", "models": [{"model": "a"}], "parameters": {"weight": 1}}
    if form == "mixture":
        content = {"base_model": "a", "experts": [{"source_model": "a"}, {"source_model": "b"}], "gate_mode": "random"}
    assert not any(finding.severity == "block" for finding in findings(content))
    (fault,) = [finding for finding in findings({**content, "name": name}) if finding.severity == "block"]
    assert fault.where == "r: name"
    assert all((fault.found, fault.expected, fault.remedy))


@pytest.mark.parametrize("name", ["...", ".a", "a b", "n" * 200, "\N{SNOWMAN}" * 66, "a\\b"])
def test_any_other_text_is_a_name(name: str) -> None:
    content = {"merge_method": "linear", "models": [{"model": "a"}], "parameters": {"weight": 1}}
    assert load_recipe({**content, "name": name}).name == name


def test_documents_are_sorted_by_their_dependencies() -> None:
    documents = [linear_document("[{model: second}, {model: x}]", "last")]
    documents += [linear_document("[{model: first}, {model: y}]", "second")]
    documents += [linear_document("[{model: x}, {model: z}]", "first")]
    recipe = load_recipe("---\n".join(documents))
    assert recipe.name == "last"
    assert [step.name for step in recipe.steps] == ["first", "second"]
    assert sorted(str(ref) for ref in recipe.references()) == ["x", "y", "z"]
    circle = [linear_document("[{model: p}]")]
    circle += [linear_document("[{model: q}]", "p"), linear_document("[{model: p}]", "q")]
    with pytest.raises(InvalidInput, match="needs its own result"):
        load_recipe("---\n".join(circle))


def test_a_model_is_first_searched_in_the_directory_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# A valid recipe and independent errors. Each maps the location of the expected finding to the change that causes it.
GOOD: Mapping[str, Any] = {
    "merge_method": "ties",
    "base_model": "org/base",
    "models": [{"model": f"org/m{number}", "parameters": {"weight": 1, "density": 0.5}} for number in range(8)],
    "parameters": {"lambda": 1},
    "dtype": "float16",
    "tokenizer": {"source": "union", "tokens": {"<|x|>": {"source": "org/m0"}}, "pad_to_multiple_of": 64},
}
Plant = Callable[[dict[str, Any]], object]
FAULTS: Mapping[str, Plant] = {
    "dtype": lambda r: r.update(dtype="bfloat61"),
    "out_dtype": lambda r: r.update(out_dtype="int7"),
    "chat_template": lambda r: r.update(chat_template=3),
    "align_experts": lambda r: r.update(align_experts="yes"),
    "leave_out_beyond": lambda r: r.update(leave_out_beyond=0.5),
    "statistics": lambda r: r.update(statistics={"documents": 5}),
    "rank": lambda r: r.update(rank=4),
    "merge_method": lambda r: r.update(merge_method="tie"),
    "base_model": lambda r: r.update(base_model=3),
    "parameters.lambda": lambda r: r["parameters"].update({"lambda": "much"}),
    "tokenizer.source": lambda r: r["tokenizer"].update(source="model:org/m0"),
    "tokenizer.pad_to_multiple_of": lambda r: r["tokenizer"].update(pad_to_multiple_of=-1),
    "tokenizer.tokens.<|y|>.force": lambda r: r["tokenizer"]["tokens"].update({"<|y|>": {"force": True}}),
    "tokenizer.tokens.<|z|>.source": lambda r: r["tokenizer"]["tokens"].update({"<|z|>": {"source": "a+b+c"}}),
    "models[0].parameters.weight": lambda r: r["models"][0]["parameters"].update(weight="heavy"),
    "models[1].parameters.density": lambda r: r["models"][1]["parameters"].update(density=2),
    "models[2].model": lambda r: r["models"][2].update(model="a+b+c"),
    "models: weight": lambda r: r["models"][3]["parameters"].pop("weight"),
    "models[4].text": lambda r: r["models"][4].update(text="x.txt"),
    "models[5]": lambda r: r["models"][5].pop("model"),
    "models[6].parameters": lambda r: r["models"][6].update(parameters=[1]),
    "models[8]": lambda r: r["models"].append("org/m8"),
    # Warnings
    "dype": lambda r: r.update(dype="float32"),
    "weight": lambda r: r.update(weight=1),
    "parameters.select_topk": lambda r: r["parameters"].update(select_topk=0.1),
    "models[0].parameters.densty": lambda r: r["models"][0]["parameters"].update(densty=0.1),
    "models[1].parameters.normalize": lambda r: r["models"][1]["parameters"].update(normalize=True),
    "models[3].revision": lambda r: r["models"][3].update(revision="v1"),
    "models[4].parameters.weight[0]": lambda r: r["models"][4]["parameters"].update(
        weight=[{"value": 1}, {"value": 2, "filter": "mlp"}]
    ),
    "tokenizer.sourse": lambda r: r["tokenizer"].update(sourse="base"),
    "name": lambda r: r.update(name=3),
}


def findings(content: Any) -> tuple[Finding, ...]:
    """Return everything that is reported for a recipe, even if it cannot be loaded."""
    try:
        return load_recipe(content, "r").all_findings
    except InvalidInput as error:
        return findings_of(error)


def places(reported: tuple[Finding, ...]) -> list[str]:
    return sorted(finding.where.removeprefix("r: ") for finding in reported)


def test_the_good_recipe_has_no_findings() -> None:
    assert findings(dict(GOOD)) == ()


@settings(max_examples=30)
@given(st.lists(st.sampled_from(sorted(FAULTS)), unique=True, min_size=1), st.randoms(use_true_random=False))
def test_one_error_reports_all_faults_in_any_order(planted: list[str], random: Any) -> None:
    recipe = copy.deepcopy(dict(GOOD))
    for place in sorted(planted, key=lambda place: place != "models[8]"):
        FAULTS[place](recipe)
    keys = list(recipe)
    random.shuffle(keys)
    content = {key: recipe[key] for key in keys}
    assert places(findings(content)) == sorted(planted)
    assert places(findings(yaml.safe_dump(content, sort_keys=False))) == sorted(planted)


def test_the_message_lists_every_fault_and_warning_and_can_be_pickled() -> None:
    recipe = copy.deepcopy(dict(GOOD))
    for plant in FAULTS.values():
        plant(recipe)
    with pytest.raises(InvalidFile) as caught:
        load_recipe(recipe, "r")
    text = str(caught.value)
    assert re.match(r"r: \d+ problems and \d+ warnings\n", text)
    assert all(f"\n  {place}: " in text.replace("warning: ", "") for place in FAULTS)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.findings) == (text, caught.value.findings)


def test_one_error_reports_the_faults_of_all_documents_and_mixtures() -> None:
    expert = {"source_model": "a", "positive_prompts": [""], "noise_scale": -1, "nois": 1}
    mixture = {"gate_mode": "hiden", "experts": [expert, {"positive_prompts": "x"}], "experts_per_token": 0}
    reported = places(findings(yaml.safe_dump_all([{"dtype": "x", "merge_method": "nothing"}, mixture])))
    first, second = "r (document 1)", "r (document 2)"
    mine = ["", ": dtype", ": merge_method"]
    theirs = ["", ": gate_mode", ": experts[1]", ": experts_per_token"]
    theirs += [f": experts[0].{key}" for key in ("positive_prompts", "noise_scale", "nois")]
    assert reported == sorted([*(first + key for key in mine), *(second + key for key in theirs)])


@pytest.mark.parametrize("key", ["models", "slices", "modules", "base_model", "parameters", "dtype", "tokenizer"])
def test_a_null_value_counts_as_absent(key: str) -> None:
    recipe = {**GOOD, "base_model": "org/base"}
    absent = {name: value for name, value in recipe.items() if name != key}
    if key in ("models", "base_model"):
        assert places(findings({**recipe, key: None})) == places(findings(absent)) == ["r"]
    else:
        assert load_recipe({**recipe, key: None}).canonical() == load_recipe(absent).canonical()


@pytest.mark.parametrize("extra", [{"tokenizer": {}}, {"tokenizer": {"tokens": None}}, {"tokenizer_source": "union"}])
def test_an_empty_tokenizer_block_is_a_union(extra: dict[str, Any]) -> None:
    plain = {key: value for key, value in GOOD.items() if key != "tokenizer"}
    recipe, union = load_recipe({**plain, **extra}), load_recipe({**plain, "tokenizer": {"source": "union"}})
    assert recipe.canonical() == union.canonical()


# Apply remedies literally.
def apply_remedy(recipe: dict[str, Any], finding: Finding) -> None:
    """Apply the remedy of a finding to the recipe."""
    *path, last = re.findall(r"[^.\[\]]+|\[\d+\]", finding.where.removeprefix("r: ").replace(": ", "."))
    holder: Any = recipe
    for step in path:
        holder = holder[int(step[1:-1])] if step.startswith("[") else holder[step]
    key: Any = int(last[1:-1]) if last.startswith("[") else last
    remedy = finding.remedy
    is_name = "unknown key" in finding.found or "does not read" in finding.found
    if near := re.match(r"did you mean '(.+?)'\?( It belongs under 'parameters')?", remedy):
        target = holder.setdefault("parameters", {}) if near[2] else holder
        if is_name:
            target[near[1]] = holder.pop(key)
        else:
            holder[key] = near[1]
    elif remedy.startswith("remove it") or "remove the key" in remedy:
        holder.pop(key)
    elif remedy == "move it under 'parameters'":
        holder.setdefault("parameters", {})[key] = holder.pop(key)
    elif remedy == "move it under the top-level 'parameters'" or remedy == "move it to the top-level 'parameters'":
        recipe.setdefault("parameters", {})[key] = holder.pop(key)
    elif remedy == "move it to the top level of the recipe":
        recipe[key] = holder.pop(key)
    elif remedy == "move it to the end of the list":
        holder.append(holder.pop(key))
    elif written := re.match(r"write '(- )?(\w+): (.+)'$", remedy):
        if written[1]:
            holder[key] = {written[2]: written[3]}
        else:
            del holder[key]
            holder[written[2]] = written[3]
    elif written := re.match(r"write '(.+)'$", remedy):
        holder[key] = written[1]
    elif example := re.search(r"for example (\w+): (.+)$", remedy):
        model = finding.found.removeprefix("not set for ")
        entry = next((one for one in recipe["models"] if one["model"] == model), recipe)
        entry.setdefault("parameters", {})[example[1]] = float(example[2])
    elif remedy.startswith("add 'base_model: MODEL'"):
        recipe["base_model"] = "org/base"
    elif "set gate_mode: random" in remedy:
        recipe["gate_mode"] = "random"
        for expert in recipe["experts"]:
            expert.pop("positive_prompts", None)
    elif counted := re.match(r"set (\w+): (\d+)$", remedy):
        recipe[counted[1]] = int(counted[2])
    else:
        raise AssertionError(f"no rule for the remedy {remedy!r}")


MIXTURE: Mapping[str, Any] = {
    "base_model": "base",
    "experts": [{"source_model": name, "positive_prompts": [name]} for name in ("a", "b")],
}
# Either there is no remedy, or the author has to choose a value or a model.
UNREMEDIED = (
    *("out_dtype", "leave_out_beyond", "align_experts", "rank", "base_model", "parameters.lambda"),
    *("tokenizer.pad_to_multiple_of", "tokenizer.tokens.<|y|>.force", "tokenizer.tokens.<|z|>.source"),
    *("models[0].parameters.weight", "models[1].parameters.density", "models[2].model", "models[5]"),
    *("models[6].parameters", "models[8]"),
)
REMEDIED: Mapping[str, tuple[Mapping[str, Any], Plant]] = {
    **{place: (GOOD, plant) for place, plant in FAULTS.items() if place not in UNREMEDIED},
    "a word as the tokenizer": (GOOD, lambda r: r.update(tokenizer="union")),
    "a typo of a parameter at the top": (GOOD, lambda r: r.update(densty=0.5)),
    "a parameter at the top that is set": (GOOD, lambda r: r.update({"lambda": 0.5})),
    "a shared parameter beside a model": (GOOD, lambda r: r["models"][0].update(normalize=True)),
    "a top-level key beside a model": (GOOD, lambda r: r["models"][0].update(out_dtype="float16")),
    "a top-level key under parameters": (GOOD, lambda r: r["parameters"].update(out_dtype="float16")),
    "no base": (GOOD, lambda r: r.pop("base_model")),
    "a base with a weight": (GOOD, lambda r: r["models"].append({"model": "org/base", "parameters": {"weight": 1}})),
    "the method moe": (MIXTURE, lambda r: r.update(merge_method="moe")),
    "prompts without text": (MIXTURE, lambda r: r["experts"][0].update(positive_prompts=[""])),
    "no prompts": (MIXTURE, lambda r: r["experts"][0].pop("positive_prompts")),
    "a gate mode with a typo": (MIXTURE, lambda r: r.update(gate_mode="hiden")),
    "more experts per token than there are": (MIXTURE, lambda r: r.update(experts_per_token=3)),
    "no value for the gate mode": (MIXTURE, lambda r: r.update(gate_mode=None)),
}


@pytest.mark.parametrize("fault", REMEDIED)
def test_applying_the_remedy_fixes_the_fault(fault: str) -> None:
    good, plant = REMEDIED[fault]
    recipe = copy.deepcopy(dict(good))
    plant(recipe)
    reported = findings(recipe)
    assert reported
    for finding in reported:
        apply_remedy(recipe, finding)
    assert findings(recipe) == ()


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        (r"E:\models\a", "/mnt/e/models/a"), ("c:/models/a", "/mnt/c/models/a"), (r"models\a", "write models/a"),
        (r".\models\a", "write ./models/a"), (r"\\server\share\a", "mount the share"),
    ],
)  # fmt: skip
def test_a_windows_path_is_recognized_unless_a_directory_has_its_name(tmp_path: Path, path: str, remedy: str) -> None:
    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / r"a\b").mkdir()
    with pytest.raises(InvalidInput, match="a Windows path") as caught:
        resolve_local(parse_reference(path, "r"), tmp_path)
    assert remedy in caught.value.remedy
    if written := re.match(r"write (\S+)$", caught.value.remedy):
        assert resolve_local(parse_reference(written[1], "r"), tmp_path) == tmp_path / "models" / "a"
    assert resolve_local(CheckpointRef(r"a\b"), tmp_path) == tmp_path / r"a\b"
