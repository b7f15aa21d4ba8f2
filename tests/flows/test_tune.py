"""``mergegate tune``: find the scale of a merge by the entropy of its predictions, without reference answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from demo_project import PROFILES, Project, make_project
from samples import sampled

from mergegate.flows.attempt import search
from mergegate.flows.candidates import TuningSize, has_searchable_scale
from mergegate.flows.preflight import pin_profile_evidence, pin_profile_sweep
from mergegate.flows.profile import Profile, load_profile, parse_profile
from mergegate.merge_core.errors import InvalidInput, MergegateError, Refused
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.models.checkpoints import resolve_parents

AVERAGE = {
    "merge_method": "task_arithmetic",
    "base_model": "demo/models/base",
    "models": [
        {"model": "demo/models/reverser", "parameters": {"weight": 0.5}},
        {"model": "demo/models/shifter", "parameters": {"weight": 0.5}},
    ],
    "dtype": "bfloat16",
}
SKILLS = {"copy": "base", "reverse": "reverser", "shift": "shifter"}
GUARDS = [
    {"task": f"demo/tasks/sweep/{task}.yaml", "guarded_by": parent, "max_drop": 3} for task, parent in SKILLS.items()
]
PLAIN = {
    "name": "plain",
    "recipe": AVERAGE,
    "evaluate": {"tasks": GUARDS},
    "publish": {"to": "directory", "path": "../releases/plain"},
}


def profile(recipe: dict[str, Any] | Path, **more: Any) -> Profile:
    return parse_profile({**PLAIN, "recipe": recipe, "root": PROFILES, **more}, "profile")


def tuned(of: Profile) -> Profile:
    return of.with_scale_search(TuningSize(trials=8, search=20, confirmation=40))


def scaled(value: Any, **more: Any) -> dict[str, Any]:
    return {**AVERAGE, "parameters": {"lambda": value}, **more}


@pytest.mark.parametrize(("recipe", "start"), [(AVERAGE, 1.0), (scaled(0.8), 0.8), (scaled(2), 2.0)])
def test_one_number_is_searched_around_what_is_written(recipe: dict[str, Any], start: float) -> None:
    found = tuned(profile(recipe, remedies=[{"lambda": 0.5}]))
    assert found.sweep is not None
    ((name, free),) = found.sweep.parameters.items()
    assert (name, free.type, free.start) == ("lambda", "log", start)
    assert free.low is not None
    assert free.high is not None
    assert free.low < start < free.high
    terms = [(term.task, term.measure) for term in found.sweep.objective]
    assert terms == [(f"demo/tasks/sweep/{task}.yaml", "entropy") for task in SKILLS]
    # At the written value, the recipe is the original one.
    before, after = (one.candidates()[0].recipe for one in (profile(scaled(start)), found))
    assert before.canonical() == after.canonical()
    assert found.remedies == ()


def test_a_prepared_profile_can_be_loaded_and_changed_and_names_the_same_models() -> None:
    prepared = profile(AVERAGE, remedies=[{"tune": "scale"}])
    assert prepared.scale_search is not None
    assert load_profile(prepared) == prepared
    assert prepared.with_recipe(scaled(0.5)).remedies == ()
    before = profile(Path("demo/recipes/ties.yaml"))
    recipes = [one.candidates()[0].recipe for one in (before, tuned(before))]
    places = [{(one.directory / str(ref)).resolve() for ref in one.references()} for one in recipes]  # type: ignore[operator]
    assert places[0] == places[1]
    assert all(place.is_dir() for place in places[0])


@pytest.mark.parametrize(
    ("recipe", "more", "words"),
    [
        ({**AVERAGE, "merge_method": "linear"}, {}, "linear, which does not have 'lambda'"),
        (scaled([0.5, 1.0]), {}, "one number above 0"), (scaled(0), {}, "one number above 0"),
        ({**scaled(1), "leave_out_beyond": 3}, {}, "search without leave_out_beyond"),
        ({**scaled(1), "router_repair": {"text": "demo/data/held-out.jsonl"}}, {}, "search without router_repair"),
        ({**scaled(1), "merge_method": "geometric_median"}, {}, "search without geometric_median"),
        (scaled(-1), {}, "one number above 0"), (scaled(True), {}, "one number above 0"),
        (scaled("much"), {}, "one number above 0"),
        (scaled(1, slices=[{"parameters": {"lambda": 2}}]), {}, "one number above 0"),
        (AVERAGE, {"evaluate": None, "perplexity": {"documents": "demo/data/held-out.jsonl"}}, "no tasks"),
        (
            scaled("$free"),
            {"sweep": {"parameters": {"free": {"low": 0, "high": 1, "start": 1}}, "objective": [{"task": "x"}]}},
            "a section 'sweep'",
        ),
        (
            AVERAGE,
            {"evaluate": {"tasks": GUARDS, "backend": "served", "server": {"url": "http://127.0.0.1:1"}}},
            "evaluates models in memory",
        ),
    ],
)  # fmt: skip
def test_what_has_no_one_scale_is_refused(recipe: dict[str, Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        tuned(profile(recipe, **more))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("recipe", "has"),
    [
        (yaml.safe_dump(AVERAGE), True), (yaml.safe_dump(scaled(0.8)), True),
        (yaml.safe_dump({**AVERAGE, "merge_method": "linear"}), False), (yaml.safe_dump(scaled([1, 2])), False),
        ("---\n".join([yaml.safe_dump(AVERAGE)] * 2), False), ("- no recipe", False), ("", False),
        ("merge_method: never heard of", False), ("{", False),
    ],
)  # fmt: skip
def test_a_refusal_suggests_tune_only_if_it_applies(recipe: str, has: bool) -> None:
    assert has_searchable_scale(recipe) is has


@pytest.mark.parametrize(
    ("remedies", "words"),
    [
        ([{"tune": "density"}], "only the scale can be tuned"),
        ([{"tune": "scale"}, {"lambda": 0.5}], "after all written remedies"),
        ([{"tune": "scale"}, {"tune": "scale"}], "once"), (["auto", {"tune": "scale"}], "'auto' must be the last one"),
        (["auto", {"density": 0.3}], "'auto' must be the last one"),
    ],
)  # fmt: skip
def test_the_position_of_the_remedy_is_checked(remedies: list[Any], words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        profile(AVERAGE, remedies=remedies)
    assert words in str(refused.value)


def test_the_gate_never_sees_what_the_remedy_searches_on(tmp_path: Path) -> None:
    """This holds from the first attempt on, when it is not yet known whether the search will run."""
    hashes = HashMemo(tmp_path / "hashes.db")
    plain, remedied = (
        profile(AVERAGE, remedies=remedies) for remedies in ([], [{"lambda": 0.5}, {"tune": "scale"}, "auto"])
    )
    assert remedied.scale_search is not None
    assert len(remedied.candidates()) == 2
    # All attempts share the error rate: both candidates, the searched scale, and three proposals.
    assert remedied.max_further_attempts == 1 + 3
    parents = resolve_parents(plain.candidates()[0].recipe)
    before, after = (pin_profile_evidence(one, parents, hashes).tasks for one in (plain, remedied))
    searched = pin_profile_sweep(remedied.scale_search, pin_profile_evidence(plain, parents, hashes), hashes)
    for whole, left in zip(before, after, strict=True):
        assert whole.only is None
        assert left.only is not None
        for name in ("search", "confirmation"):
            (task,) = (one for one in searched.select_tasks(name) if one.name == left.name)
            assert task.only is not None
            assert task.only != left.only


OVERRIDES: list[dict[str, Any]] = [
    {"num_fewshot": 0}, {"num_fewshot": 2}, {"system_instruction": "Answer with one word."},
    {"apply_chat_template": False}, {"apply_chat_template": True},
    {"apply_chat_template": True, "num_fewshot": 1, "fewshot_as_multiturn": False}, {"metric": "acc,none"},
    {"cluster_by": "prompt"}, {"documents": 30}, {"documents": "all"}, {"name": "renamed"},
    {"weight": 2.0, "limit": 20.0, "margin": 5.0},
]  # fmt: skip


@pytest.mark.parametrize("override", sampled(OVERRIDES, OVERRIDES[1:6:2]), ids=str)
def test_trials_read_the_same_prompts_as_the_gate(tmp_path: Path, override: dict[str, Any]) -> None:
    """Every profile that pins its evidence for a release pins it for a search, with the settings of its guards."""
    first, *others = GUARDS
    guarded = profile(AVERAGE, evaluate={"tasks": [{**first, **override}, *others]})
    hashes, parents = HashMemo(tmp_path / "hashes.db"), resolve_parents(guarded.candidates()[0].recipe)
    evidence = pin_profile_evidence(guarded, parents, hashes)
    searching = tuned(guarded)
    searched = pin_profile_sweep(searching, pin_profile_evidence(searching, parents, hashes), hashes)
    prompts = {task.in_lm_eval: task.prompt_settings for task in evidence.tasks}
    assert {task.name: task.prompt_settings for task in searched.tasks} == prompts


def test_missing_examples_that_a_guard_does_not_use_do_not_stop_a_search(tmp_path: Path) -> None:
    """A task with five examples has no examples under 'evaluate.data', and its guard sets their number to 0."""
    data = tmp_path / "data"
    data.mkdir()
    rows = [json.dumps({"prompt": f"{n} ", "answer": "x"}) + "\n" for n in range(90)]
    (data / "told_test.jsonl").write_text("".join(rows))
    (tmp_path / "told.yaml").write_text(
        "task: told\ndataset_path: org/told\ntest_split: test\nfewshot_split: train\nnum_fewshot: 5\n"
        "output_type: loglikelihood\ndoc_to_text: '{{prompt}}'\ndoc_to_target: '{{answer}}'\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    hashes = HashMemo(tmp_path / "hashes.db")
    task = {"task": str(tmp_path / "told.yaml"), "guarded_by": "base"}
    for count, accepted in ((0, True), (2, False)):
        guarded = profile(AVERAGE, evaluate={"data": str(data), "tasks": [{**task, "num_fewshot": count}]})
        parents = resolve_parents(guarded.candidates()[0].recipe)
        for pinned in (guarded, tuned(guarded)):
            if accepted:
                pin_profile_evidence(pinned, parents, hashes)
            else:
                with pytest.raises(InvalidInput, match="2 few-shot examples"):
                    pin_profile_evidence(pinned, parents, hashes)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> Project:
    project = make_project(tmp_path_factory.mktemp("tuned"))
    (project.root / "profiles/plain.yaml").write_text(yaml.safe_dump(PLAIN, sort_keys=False))
    return project


def exact(outcome: dict[str, Any]) -> dict[str, float]:
    """Return the exact match of the merge per task, in points."""
    (merge,) = (model for model in outcome["content"]["models"] if model["role"] == "merge")
    return {score["task"]: 100 * score["score"] for score in merge["scores"]["tasks"] if score["metric"] == "acc,none"}


@pytest.mark.proof
def test_a_plain_average_that_forgets_becomes_a_release_at_the_scale_that_is_found(project: Project) -> None:
    """Without any reference answer, the search finds the scale at which the simplest method keeps both skills."""
    refused = json.loads(project.mergegate("run", "profiles/plain.yaml", "--json").stdout)
    assert refused["status"] == "refused"
    assert "mergegate tune profiles/plain.yaml" in project.mergegate("run", "profiles/plain.yaml").stdout
    assert exact(refused)["reverse-many"] < 90

    done = project.mergegate("tune", "profiles/plain.yaml", "--release", "--json")
    released = json.loads(done.stdout)
    assert (done.exit_code, released["status"]) == (0, "released")
    winner = yaml.safe_load((project.home / "sweeps/plain-winner.yaml").read_text())
    assert 1.4 < winner["parameters"]["lambda"] < 2.1, "1.7 is best by right answers"
    assert min(exact(released).values()) > 98


@pytest.mark.parametrize("error", [InvalidInput("recipe", found="no layers"), Refused("merge", found="NaN")])
def test_a_search_that_cannot_run_leaves_the_verdicts_on_the_other_candidates(
    monkeypatch: pytest.MonkeyPatch, error: MergegateError
) -> None:
    def prepare(profile: Profile) -> None:
        raise error

    monkeypatch.setattr(search, "prepare_search", prepare)
    prepared = profile(AVERAGE, remedies=[{"tune": "scale"}])
    assert [*search.with_tuned_candidate([cast("Any", "written")], prepared, cast("Any", None))] == ["written"]


@pytest.mark.proof
def test_a_refused_average_is_tuned_in_the_same_run(project: Project) -> None:
    remedied = {
        **PLAIN,
        "name": "remedied",
        "remedies": [{"lambda": 0.5}, {"tune": "scale"}],
        "publish": {"to": "directory", "path": "../releases/remedied"},
    }
    (project.root / "profiles/remedied.yaml").write_text(yaml.safe_dump(remedied, sort_keys=False))
    assert "a search for the scale" in project.mergegate("run", "profiles/remedied.yaml", "--dry-run").stdout
    done = project.mergegate("run", "profiles/remedied.yaml", "--json")
    outcome = json.loads(done.stdout)
    assert (done.exit_code, outcome["status"]) == (0, "released"), done.output
    tried = [(one["change"], one["outcome"]) for one in outcome["content"]["attempts"]]
    assert [result for _, result in tried] == ["fail", "fail", "pass"]
    assert "which a search found" in tried[2][0]
    recipe = yaml.safe_load((project.root / "releases/remedied/latest/recipe.yaml").read_text())
    assert 1.4 < recipe["parameters"]["lambda"] < 2.1
    # The second run searches nothing and builds nothing.
    before = {stage: project.artifacts(stage) for stage in ("merge", "evaluate")}
    again = project.mergegate("run", "profiles/remedied.yaml")
    assert "nothing new" in again.stdout, again.output
    assert {stage: project.artifacts(stage) for stage in before} == before
