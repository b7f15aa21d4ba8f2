"""lm-eval's result files yield the scores that lm-eval computed, and inconsistent files are refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from garbage import OTHER_VALUES, values_in, with_value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_eval_runs import UNWRITTEN, prepare, run_lm_eval
from samples import sampled
from scoring_runs import mean_of, model_in, pin, score, write_task
from tiny_models import make_model, words, write_choices, write_jsonl

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality.evaluation.results.contract import (
    TaskResults,
    precision_differences,
    require_same_conditions,
)
from mergegate.tasks.quality.evaluation.results.files import find_results, read_task
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.scoring.metrics import choose_metrics, metrics_by_leaf


def first_match(name: str, pattern: str) -> dict[str, Any]:
    return {"name": name, "filter": [{"function": "regex", "regex_pattern": pattern}, {"function": "take_first"}]}


@pytest.fixture(scope="module")
def definitions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write two choice tasks, one with a second metric that is not a mean, and a free-form task with two filters."""
    folder = tmp_path_factory.mktemp("tasks")
    letters = write_choices(folder)
    letters.write_text(letters.read_text() + "  - {metric: f1, higher_is_better: true}\n")
    rows = [{"word": word, "ending": word[-1]} for word in words(20, seed=3)]
    config: dict[str, Any] = {"output_type": "generate_until", "doc_to_text": "{{word}}", "doc_to_target": "{{ending}}"}
    config |= {"generation_kwargs": {"until": ["."], "max_gen_toks": 4}, "metric_list": [mean_of("exact_match")]}
    filters = [first_match("first-letter", "^(.)"), first_match("any-letter", "([a-h])")]
    endings = write_task(folder, "endings", rows, **config, filter_list=filters)
    return {"letters": letters, "numbers": write_choices(folder, 25, name="numbers"), "endings": endings}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, definitions: dict[str, Path]) -> Path:
    """Return lm-eval's results for the models ``one`` and ``other`` on a group of two tasks and one more task."""
    root = tmp_path_factory.mktemp("lm-eval")
    scratch = root / "scratch"
    folder = prepare(list(definitions.values()), scratch)
    (folder / "both.yaml").write_text("group: both\ntask: [letters, numbers]\n")
    for seed, name in enumerate(("one", "other")):
        make_model(root / "models" / name, seed=seed)
        run_lm_eval(root / name, root / "models" / name, list(definitions.values()), scratch, tasks=["both", "endings"])
    return root


@pytest.fixture
def copied(tmp_path: Path, written: Path) -> Path:
    """Copy the results of ``one``, for a test to damage."""
    return Path(shutil.copytree(written / "one", tmp_path / "one"))


def read(place: Path, task: str) -> TaskResults:
    return read_task(find_results(place), task)


def the(place: Path, pattern: str) -> Path:
    (path,) = place.rglob(pattern)
    return path


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("task", sampled(["letters", "numbers", "endings"], ["letters"]))
@pytest.mark.parametrize("model", sampled(["one", "other"], ["one"]))
def test_result_files_give_the_scores_of_the_stage(
    written: Path, definitions: dict[str, Path], task: str, model: str
) -> None:
    found = sorted(read(written / model, task).outcomes)
    ours = sorted(score(model_in(written / "models" / model), pin(definitions[task])))
    unload_models()
    # A likelihood is the exp of a float32 near -10. Its last digit (1e-6) depends on the kernel, which depends on the
    # processor and on memory alignment, and lm-eval's command runs in another process.
    assert [one._replace(outcome=0.0) for one in found] == [one._replace(outcome=0.0, **UNWRITTEN) for one in ours]
    assert [one.outcome for one in found] == pytest.approx([one.outcome for one in ours], rel=1e-5)
    marks = [outcome for outcome in found if outcome.metric != "prob,none"]
    assert len({outcome.outcome for outcome in marks}) == 2  # mixed outcomes


def test_each_filter_is_a_metric_and_metrics_other_than_means_are_left_out(written: Path) -> None:
    reported = json.loads(the(written / "one", "results_*.json").read_text())["results"]["letters"]
    assert {"acc,none", "f1,none"} < reported.keys()
    found = metrics_by_leaf(read(written / "one", "letters").outcomes)
    assert found == {"letters": {"acc,none": True, "prob,none": True}}  # the second is ours, from the likelihoods
    endings = read(written / "one", "endings").outcomes
    assert {outcome.metric for outcome in endings} == {"exact_match,first-letter", "exact_match,any-letter"}
    assert len(endings) == 2 * 20


def test_a_group_is_all_documents_of_the_tasks_below_it(written: Path) -> None:
    apart = [outcome for task in ("letters", "numbers") for outcome in read(written / "one", task).outcomes]
    assert list(read(written / "one", "both").outcomes) == apart
    assert len({(outcome.task, outcome.doc_id) for outcome in apart}) == 40 + 25
    assert len(apart) == 2 * (40 + 25)  # correct or not, and the probability of the correct choice


@pytest.mark.parametrize("task", ["both", "letters", "endings"])
def test_results_of_lm_eval_0_4_and_0_5_give_the_same_scores(task: str) -> None:
    """Compare what both releases wrote for the model and the tasks of this file, with fewer documents."""
    samples = Path(__file__).parent / "lm_eval_samples"
    older, newer = (read(samples / version, task).outcomes for version in ("0.4.13", "0.5.0.dev1"))
    assert [row._replace(task=row.task.removeprefix("both::")) for row in newer] == list(older)
    assert len(older) == {"both": 20, "letters": 12, "endings": 8}[task]


def test_a_field_of_the_documents_can_group_them(written: Path) -> None:
    results = find_results(written / "one")
    assert {outcome.cluster for outcome in read_task(results, "letters", "right").outcomes} == {"0", "1"}
    with pytest.raises(InvalidInput, match="did you mean 'right'"):
        read_task(results, "letters", "rihgt")
    with pytest.raises(InvalidInput, match="did you mean 'letters'"):
        read_task(results, "leters")


def test_the_output_path_its_folder_and_the_file_itself_are_the_same_results(written: Path) -> None:
    file = the(written / "one", "results_*.json")
    whole, *others = (read(place, "letters").outcomes for place in (written / "one", file.parent, file))
    assert others == [whole, whole]


def test_the_newest_results_of_a_task_are_read(copied: Path) -> None:
    old = the(copied, "results_*.json")
    date = old.stem.removeprefix("results_")
    for path in list(old.parent.iterdir()):
        newer = path.with_name(path.name.replace(date, "2999-01-01T00-00-00.000001"))
        shutil.copy(path, newer)
    (newest, _) = find_results(copied)
    assert newest.date.startswith("2999")
    assert read(copied, "letters").file == newest.path
    rewrite(newest.path, lambda content: content["configs"].pop("letters"))  # this run covered only the other tasks
    assert read(copied, "letters").file == old


def test_results_of_two_models_in_one_directory_are_ambiguous(written: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        shutil.copytree(written / name, tmp_path / "mixed", dirs_exist_ok=True)
    with pytest.raises(InvalidInput, match="results of 2 models"):
        find_results(tmp_path / "mixed")


@pytest.mark.parametrize("what", ["nowhere", "empty"])
def test_a_directory_without_results_is_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="--log_samples"):
        find_results(tmp_path / what)


def change_a_score(samples: Path) -> None:
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    lines[7]["acc"] = 1 - lines[7]["acc"]
    write_jsonl(samples, lines)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda samples: samples.write_bytes(samples.read_bytes()[:-100]), r"line .*not JSON.*(\n.*)*cut off"),
        (
            lambda samples: samples.write_text("".join(samples.read_text().splitlines(keepends=True)[:-3])),
            "37 documents, 40 were scored",
        ),
        (change_a_score, "not the mean of its samples"),
        (
            lambda samples: shutil.copy(the(samples.parent, "samples_numbers_*"), samples),
            "other samples than those of results_",
        ),
        (lambda samples: samples.write_text("17\n"), "line 1: not a sample of lm-eval"),
        (lambda samples: samples.write_text("{}\n"), "line 1: not a sample of lm-eval"),
        (
            lambda samples: samples.write_text('{"doc_id": 0, "filter": "none", "metrics": ["acc"]}\n'),
            "line 1: not a sample of lm-eval",
        ),
        (lambda samples: samples.unlink(), "--log_samples"),
    ],
    ids=["in a line", "at a line", "a score", "another task", "number", "empty", "lacking", "no samples"],
)
def test_damaged_samples_are_refused(copied: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(the(copied, "samples_letters_*"))
    with pytest.raises(InvalidInput, match=message):
        read(copied, "letters")


@pytest.mark.parametrize("text", ['{"results": {', "[]", '{"results": {}}'])
def test_a_file_other_than_a_results_file_is_refused(copied: Path, text: str) -> None:
    the(copied, "results_*.json").write_text(text)
    with pytest.raises(InvalidInput, match="results_"):
        find_results(copied)


def decided(original: TaskResults, changed: TaskResults) -> list[tuple[DocumentScore, ...]]:
    """Return the scores in ``changed`` that guards on each metric of ``original`` would use."""
    require_same_conditions(original, changed, "changed")
    before = {row[:3]: row for row in original.outcomes if row.metric == "prob,none"}
    assert all(before[row[:3]] == row for row in changed.outcomes if row.metric == "prob,none")
    metrics = sorted({row.metric for row in original.outcomes} - {"prob,none"})
    rows = [row for row in changed.outcomes if row.metric != "prob,none"]
    return [choose_metrics(rows, metric, "changed").judge(rows, "changed") for metric in metrics]


@pytest.fixture(scope="module")
def originals(written: Path) -> dict[str, TaskResults]:
    return {task: read(written / "one", task) for task in ("both", "endings")}


@pytest.mark.proof
@pytest.mark.parametrize("is_sample", [False, True], ids=["results", "samples"])
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_altered_file_is_refused_by_name_or_keeps_its_meaning(
    copied: Path, originals: dict[str, TaskResults], is_sample: bool, data: st.DataObject
) -> None:
    task = data.draw(st.sampled_from(["letters", "numbers", "endings"]))
    path = the(copied, f"samples_{task}_*" if is_sample else "results_*.json")
    before = path.read_text()
    lines = [json.loads(line) for line in before.splitlines()] if is_sample else [json.loads(before)]
    number = data.draw(st.integers(0, len(lines) - 1))
    place = data.draw(st.sampled_from(list(values_in(lines[number], ["pretty_env_info"]))))
    lines[number] = with_value(lines[number], place, data.draw(st.sampled_from(OTHER_VALUES)))
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    try:
        for task, original in originals.items():
            refusal, judged = "", None
            try:
                judged = decided(original, read(copied, task))
            except InvalidInput as error:
                refusal = str(error)
            assert judged == decided(original, original) or refusal.startswith(("changed", str(path.parent)))
    finally:
        path.write_text(before)


@pytest.mark.parametrize(
    ("pattern", "place", "value", "message"),
    [
        ("results_*.json", ("configs", "letters"), "x", r"configs\.letters: 'x'\n  expected: a mapping"),
        ("results_*.json", ("configs", "letters", "metric_list"), 5, r"letters\.metric_list: 5\n  expected: a list"),
        ("results_*.json", ("group_subtasks",), 5, r"group_subtasks: 5\n  expected: a mapping"),
        ("results_*.json", ("versions", "letters"), True, r"versions\.letters: true\n  expected: a text or a"),
        ("results_*.json", ("results", "letters", "acc,none"), True, r"letters\.acc,none: true\n  expected: a number"),
        ("samples_letters_*", ("doc_id",), 2**70, rf"line 3: doc_id: {2**70}\n  expected: a number less than"),
        ("samples_letters_*", ("doc_id",), 40, r"line 3: doc_id: 40\n  expected: less than the 40 documents"),
        ("samples_letters_*", ("metrics", 0), 7, r"line 3: metrics\[0\]: 7\n  expected: a text"),
    ],
)
def test_an_error_names_a_value_of_the_wrong_type(
    copied: Path, pattern: str, place: tuple[str | int, ...], value: object, message: str
) -> None:
    path = the(copied, pattern)
    lines = path.read_text().splitlines() if pattern.startswith("samples") else ["", "", path.read_text()]
    lines[2] = json.dumps(with_value(json.loads(lines[2]), place, value))
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InvalidInput, match=message):
        read(copied, "letters")


@pytest.mark.parametrize(
    ("condition", "change"),
    [
        ("lm_eval_version", lambda content: content.update(lm_eval_version="0.4.9")),
        ("chat_template_sha", lambda content: content.update(chat_template_sha="0" * 64)),
        ("system_instruction_sha", lambda content: content.update(system_instruction_sha="0" * 64)),
        ("model_source", lambda content: content.update(model_source="vllm")),
        ("task_versions", lambda content: content["versions"].update(letters=2)),
        ("gen_kwargs", lambda content: content["config"].update(gen_kwargs={"temperature": 1})),
        ("higher_is_better", lambda content: content["higher_is_better"]["letters"].update(acc=False)),
    ],
)
def test_different_conditions_are_refused(
    copied: Path, written: Path, condition: str, change: Callable[[dict[str, Any]], object]
) -> None:
    rewrite(the(copied, "results_*.json"), change)
    with pytest.raises(InvalidInput, match=f"letters: a against b: different {condition}"):
        require_same_conditions(read(written / "one", "letters"), read(copied, "letters"), "letters: a against b")


def test_equal_conditions_compare_and_another_batch_size_is_reported(copied: Path, written: Path) -> None:
    rewrite(the(copied, "results_*.json"), lambda content: content["config"].update(batch_size=4))
    ours, theirs, batched = (read(place, "letters") for place in (written / "one", written / "other", copied))
    for other in (theirs, batched):
        require_same_conditions(ours, other, "letters")
    assert precision_differences(ours, theirs) == ()
    assert precision_differences(ours, batched) == ("batch_size 16 and 4",)


@pytest.mark.proof
def test_the_command_line_of_lm_eval_writes_the_same(
    written: Path, definitions: dict[str, Path], tmp_path: Path
) -> None:
    folder = prepare(list(definitions.values()), tmp_path)
    model = f"pretrained={written / 'models' / 'one'},dtype=auto,softmax_dtype=float32"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", model, "--tasks", "endings"]
    command += ["--include_path", str(folder), "--device", "cpu", "--batch_size", "16"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    ours, theirs = read(written / "one", "endings"), read(tmp_path / "out", "endings")
    assert theirs.outcomes == ours.outcomes
    require_same_conditions(ours, theirs, "endings")
