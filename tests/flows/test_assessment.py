"""Assessment runs perplexity first, then interim looks at tasks, and stops as soon as the verdict is decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from prefect import flow
from samples import sampled

from mergegate.flows.attempt import Assessment, assess_merge, assessment
from mergegate.merge_core.architecture import TEXT_GENERATOR, find_kind
from mergegate.merge_core.checkpoint import Companions
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.runners import RunnerSettings, open_runner
from mergegate.tasks.base.stage.environment import Runtime
from mergegate.tasks.base.store.manifest import digest
from mergegate.tasks.base.store.store import Artifact
from mergegate.tasks.merge.weight_comparison import CopiedParent
from mergegate.tasks.models.checkpoints.model import Model, QuantizedModel
from mergegate.tasks.preflight import Evidence, power_forecast
from mergegate.tasks.quality.evaluation import find_backend
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.document_order import document_ranges
from mergegate.tasks.quality.evaluation.scoring import document_scores
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.scoring.scores import Scores, TaskScore
from mergegate.tasks.quality.evaluation.settings import Scoring
from mergegate.tasks.quality.gate.settings import CHAMPION, GateRule, Guard
from mergegate.tasks.quality.gate.verdicts import GateVerdict
from mergegate.tasks.release.report import gate_notes

pytestmark = pytest.mark.usefixtures("prefect_api", "home")

SIZE = 1319
TASKS = tuple(
    EvalTask(name=name, digest=digest(name), definition=None, data_digest=digest(f"data of {name}"), documents=SIZE)
    for name in ("copy", "reverse", "sort")
)


def model(name: str) -> Model:
    return Model(name=name, digest=digest(name), directory=Path("/nowhere"))


Right = Callable[[str, str, int], bool]  # whether a model answers a document of a task right
Judged = Callable[..., tuple[Assessment, "Bench"]]
EACH = GateRule(rule="each")


class Bench:
    """A fake lm-eval whose answers are a function of model, task and document. It records every request."""

    def __init__(self, place: Path, right: Right) -> None:
        self.place, self.right = place, right
        self.asked: list[tuple[str, str, int]] = []

    def evaluate_to(
        self, model: Model, task: EvalTask, scoring: Scoring, documents: int | None, runtime: Runtime
    ) -> list[Artifact[Scores]]:
        assert documents is not None
        self.asked.append((model.name, task.name, documents))
        wanted = [part for part in document_ranges(SIZE, scoring.first_look) if part.first < documents]
        return [self._part(model.name, task.name, part.first, part.last) for part in wanted]

    @property
    def looks(self) -> dict[str, set[int]]:
        """The numbers of documents that were requested, by task."""
        return {task: {n for _, name, n in self.asked if name == task} for _, task, _ in self.asked}

    def _part(self, name: str, task: str, first: int, last: int) -> Artifact[Scores]:
        directory = self.place / f"{name}-{task}-{first}"
        directory.mkdir(exist_ok=True)
        scored = [
            DocumentScore(task, "acc,none", doc, f"d{doc}", "p", "t", float(self.right(name, task, doc)))
            for doc in range(first, last)
        ]
        document_scores.write_document_scores(directory / document_scores.SCORES_FILE, scored)
        table = TaskScore(task=task, metric="acc,none", n=last - first, score=0.5, stderr=0.0, higher_is_better=True)
        value = Scores(model=name, tasks=(table,), lm_eval_version="0.4.13")
        return Artifact("evaluate", str(directory), digest([list(o) for o in scored]), value, directory, {})


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judged:
    """Return a function that assesses a merge with a fake evaluation. The models have no files."""
    monkeypatch.setattr(assessment, "kind_of_directory", lambda directory: TEXT_GENERATOR)

    def run(
        right: Right,
        *guards: Guard,
        first: int | Literal["all"] | None = 500,
        rule: GateRule | None = None,
        champion: Model | None = None,
        workers: int = 1,
        bench: Bench | None = None,
    ) -> tuple[Assessment, Bench]:
        bench = bench or Bench(tmp_path, right)
        monkeypatch.setattr(assessment, "evaluate_documents", bench.evaluate_to)
        no_copies = SimpleNamespace(build=lambda *_: SimpleNamespace(value=CopiedParent(parent=None)))
        monkeypatch.setattr(assessment, "find_copied_parent", no_copies)
        monkeypatch.setattr(EvalTask, "form", "text")  # lm-eval has no tasks of these names
        tasks = tuple(task for task in TASKS if task.name in {guard.task for guard in guards})
        evidence = Evidence(tasks=tasks, scoring=Scoring(documents=first), guards=guards, rule=rule or EACH)

        @flow
        def judge() -> Assessment:
            with open_runner(RunnerSettings(workers=workers)) as runner:
                parents = (model("base"), model("reverser"))
                return assess_merge(model("merge"), parents, champion, evidence, runner=runner)

        return judge(), bench

    return run


COPY, REVERSE = Guard(task="copy", guarded_by="base"), Guard(task="reverse", guarded_by="reverser")
SORT = Guard(task="sort", guarded_by="base")
WIDE_SORT = SORT.model_copy(update={"max_drop": 9.0})  # a drop of 10 points is detected sooner than one of 3


def sometimes_wrong(name: str, task: str, doc: int) -> bool:
    """Return whether the answer is right: on ``reverse``, merge and parent each miss one document in twenty.

    They miss different documents. All answers on ``copy`` are right.
    """
    return task == "copy" or (doc % 20 != 3 if name == "merge" else doc % 20 != 7)


def noisy(name: str, task: str, doc: int) -> bool:
    return doc % 2 == (name == "merge")  # they disagree on every document, and neither is better


def loses(*tasks: str) -> Right:
    """Return answers that are all right except those of the merge on every third document of these tasks."""
    return lambda name, task, doc: not (name == "merge" and task in tasks and doc % 3 == 0)


# Answers, guards, settings, outcome, and the numbers of documents at which each task is looked at.
LOOKS: dict[str, tuple[Right, tuple[Guard, ...], dict[str, Any], str, dict[str, set[int]]]] = {
    "one look at all documents": (sometimes_wrong, (REVERSE,), {"first": "all"}, "pass", {"reverse": {SIZE}}),
    "one look": (sometimes_wrong, (REVERSE,), {"rule": GateRule(extend=False)}, "pass", {"reverse": {500}}),
    "more looks by default": (sometimes_wrong, (REVERSE,), {"first": None}, "pass", {"reverse": {500, 1000}}),
    "more looks for the inconclusive task": (
        *(sometimes_wrong, (COPY, REVERSE), {}, "pass"),
        {"copy": {500}, "reverse": {500, 1000}},
    ),
    "all looks if none decides": (noisy, (REVERSE,), {}, "inconclusive", {"reverse": {500, 1000, SIZE}}),
}


@pytest.mark.story
@pytest.mark.parametrize("name", LOOKS)
def test_a_task_is_looked_at_until_its_guard_is_decided(judged: Judged, name: str) -> None:
    right, guards, settings, outcome, looks = LOOKS[name]
    result, bench = judged(right, *guards, **settings)
    assert (result.verdict.value.outcome, bench.looks) == (outcome, looks)
    verdicts = result.verdict.value.guards
    assert [guard.n for guard in verdicts] == [max(looks[guard.task]) for guard in guards]
    assert outcome == "pass" or verdicts[-1].documents_left == 0
    if name == "one look":
        look = verdicts[0].look
        assert look is not None
        assert (look.number, look.of, look.confidence) == (1, 1, 0.95)


@pytest.mark.story
@pytest.mark.parametrize("rule", ["each", "suite"])
def test_when_a_task_is_lost_those_to_come_are_not_run(judged: Judged, rule: Literal["each", "suite"]) -> None:
    result, bench = judged(loses("reverse"), COPY, REVERSE, SORT, rule=GateRule(rule=rule))
    verdict = result.verdict.value
    assert bench.looks == {"copy": {500}, "reverse": {500}}
    assert (verdict.outcome, verdict.publishable, verdict.suites) == ("fail", False, ())
    assert [guard.task for guard in verdict.guards] == ["copy", "reverse"]
    assert [(one.task, one.word, one.documents) for one in verdict.not_run] == [
        ("sort", "skipped: reverse had already failed", SIZE)
    ]
    assert all(part.value.tasks[0].task != "sort" for parts in result.scores.values() for part in parts)


def test_what_decides_most_in_a_second_comes_first(judged: Judged) -> None:
    result, bench = judged(sometimes_wrong, COPY, REVERSE, WIDE_SORT, rule=GateRule())
    assert list(bench.looks) == ["sort", "copy", "reverse"]
    for parts in result.scores.values():  # in the order of the profile
        assert list(dict.fromkeys(part.value.tasks[0].task for part in parts)) == ["copy", "reverse", "sort"]


@pytest.mark.story
def test_tasks_are_not_run_after_the_first_that_is_lost(judged: Judged) -> None:
    result, bench = judged(loses("sort"), COPY, REVERSE, WIDE_SORT, rule=GateRule())
    assert set(bench.looks) == {"sort"}
    assert [one.task for one in result.verdict.value.not_run] == ["copy", "reverse"]  # in the order of the profile


@pytest.mark.story
def test_a_task_that_is_lost_at_the_second_look_leaves_the_others_where_they_were(judged: Judged) -> None:
    def falls_late(name: str, task: str, doc: int) -> bool:
        if task == "copy" and name == "merge" and doc >= 500:
            return doc % 2 == 0
        return doc % 7 != (1 if name == "merge" else 2)  # too noisy for the first look to decide

    result, bench = judged(falls_late, COPY, REVERSE, SORT, rule=GateRule())
    verdict = result.verdict.value
    assert verdict.outcome == "fail"
    assert bench.looks == {"copy": {500, 1000}, "reverse": {500}, "sort": {500}}
    assert [(guard.task, guard.n) for guard in verdict.guards] == [("copy", 1000), ("reverse", 500), ("sort", 500)]
    assert verdict.not_run == ()
    assert verdict.suites == ()


@pytest.mark.story
def test_what_costs_nothing_is_never_left_out(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessment, "count_missing_documents", lambda task, *_: 0 if task.name == "copy" else 500)
    result, bench = judged(loses("reverse", "copy"), REVERSE, SORT, COPY, rule=GateRule())
    assert set(bench.looks) == {"copy"}
    assert {one.decided_by for one in result.verdict.value.not_run} == {"copy"}
    monkeypatch.setattr(assessment, "count_missing_documents", lambda *_: 0)
    result, bench = judged(loses("reverse", "copy"), REVERSE, SORT, COPY, rule=GateRule())
    assert set(bench.looks) == {"copy", "reverse", "sort"}
    assert result.verdict.value.not_run == ()


@pytest.mark.story
def test_where_each_model_has_a_process_of_its_own_references_are_loaded_once(
    judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = dataclasses.replace(find_backend("hf"), frees_memory=False)
    monkeypatch.setattr(assessment, "find_backend", lambda name: backend)
    _, bench = judged(sometimes_wrong, COPY, REVERSE, first="all")
    assert [name for name, *_ in bench.asked[:4]] == ["base", "base", "reverser", "reverser"]


@pytest.mark.story
def test_a_variant_is_scored_by_its_own_backend_and_may_copy_the_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, backends = Bench(tmp_path, lambda name, task, doc: doc % 20 != 3), set[tuple[str, str]]()

    def evaluate_with(
        scored: Model, task: EvalTask, scoring: Scoring, documents: int | None, runtime: Runtime
    ) -> list[Artifact[Scores]]:
        backends.add((scored.name, scoring.backend))
        return bench.evaluate_to(scored, task, scoring, documents, runtime)

    def search(scored: Model, task: EvalTask, scoring: Scoring, runtime: Runtime) -> tuple[Artifact[Scores], ...]:
        backends.add((scored.name, scoring.backend))
        return ()

    monkeypatch.setattr(assessment, "kind_of_directory", lambda directory: TEXT_GENERATOR)
    monkeypatch.setattr(assessment, "evaluate_documents", evaluate_with)
    monkeypatch.setattr(assessment, "known_scores", search)
    monkeypatch.setattr(power_forecast, "known_scores", search)
    monkeypatch.setattr(assessment, "find_copied_parent", None)  # a variant is not searched for copies
    merge = model("merge")
    variant = QuantizedModel(**{**model("Q8_0").model_dump(), "source": merge, "backend": "vllm"})
    guards = tuple(guard.model_copy(update={"guarded_by": "merge"}) for guard in (COPY, REVERSE))
    evidence = Evidence(tasks=TASKS[:2], guards=guards, rule=GateRule(reference="all"), accepted_copies=("merge",))

    @flow
    def judge() -> Assessment:
        return assess_merge(variant, (merge,), None, evidence)

    verdict = judge().verdict.value
    assert backends == {("merge", "hf"), ("Q8_0", "vllm")}
    assert verdict.publishable
    assert {guard.reference for guard in verdict.guards} == {"merge"}


@pytest.mark.story
def test_interim_looks_that_cannot_decide_are_skipped(judged: Judged) -> None:
    def wild(name: str, task: str, doc: int) -> bool:
        return (doc * 7919) % 11 < 5 if name == "merge" else (doc * 7919) % 11 >= 5  # opposite answers, similar scores

    strict = REVERSE.model_copy(update={"max_drop": 12.0, "margin": 12.5})
    result, bench = judged(wild, strict, first=1300)
    assert result.verdict.value.outcome == "inconclusive"
    (guard,) = result.verdict.value.guards
    assert guard.chance_left is not None
    assert (bench.looks == {"reverse": {1300}}) == (guard.chance_left < 0.02)


REIGNING = REVERSE.model_copy(update={"guarded_by": CHAMPION})


@pytest.mark.story
def test_the_champion_is_scored_where_a_guard_asks_for_it(judged: Judged) -> None:
    result, bench = judged(sometimes_wrong, COPY, REIGNING, champion=model(CHAMPION))
    assert {task for name, task, _ in bench.asked if name == CHAMPION} == {"reverse"}
    assert [guard.reference for guard in result.verdict.value.guards] == ["base", CHAMPION]


@pytest.mark.story
def test_the_first_release_is_not_held_against_a_champion(judged: Judged) -> None:
    verdict = judged(sometimes_wrong, COPY, REIGNING)[0].verdict.value
    assert (verdict.publishable, verdict.notes) == (True, ("reverse: no release to compare with yet",))


@pytest.mark.story
@pytest.mark.parametrize("rule", sampled(["each", "suite"], ["suite"], pytest.mark.proof))
@pytest.mark.parametrize("lost", sampled([(), ("reverse",), ("copy", "sort")], [("copy", "sort")], pytest.mark.proof))
def test_side_by_side_nothing_else_is_asked_and_nothing_else_comes_out(
    judged: Judged, rule: Literal["each", "suite"], lost: tuple[str, ...]
) -> None:
    """Several workers skip the tasks that one worker would skip, and reach the same verdict.

    A task without a guard runs in parallel with the next one.
    """

    def right(name: str, task: str, doc: int) -> bool:
        return sometimes_wrong(name, task, doc) if not lost else loses(*lost)(name, task, doc)

    alone, bench = judged(right, COPY, REVERSE, SORT, rule=GateRule(rule=rule))
    together, others = judged(right, COPY, REVERSE, SORT, rule=GateRule(rule=rule), workers=3)
    assert together.verdict.digest == alone.verdict.digest
    assert together.scores == alone.scores
    assert sorted(others.asked) == sorted(bench.asked)


def test_what_can_leave_others_out_is_asked_alone() -> None:
    evidence = Evidence(guards=(REVERSE,))
    copy, reverse, sort = TASKS

    def groups(*order: tuple[EvalTask, int]) -> list[list[str]]:
        return [[task.name for task, _ in group] for group in assessment._independent_groups(order, evidence)]

    assert groups((copy, 5), (sort, 5), (reverse, 5)) == [["copy", "sort", "reverse"]]
    assert groups((reverse, 5), (copy, 5), (sort, 5)) == [["reverse"], ["copy", "sort"]]
    assert groups((copy, 5), (reverse, 5), (sort, 5)) == [["copy", "reverse"], ["sort"]]
    assert groups((copy, 0), (sort, 5), (reverse, 0)) == [["copy"], ["sort"], ["reverse"]]  # cached: never skipped


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.story), 3])
def test_the_first_that_fails_is_what_is_said(judged: Judged, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If two models cannot be scored, the error names the model that a single worker would score first."""

    def fail(name: str, task: str, doc: int) -> bool:
        raise InvalidInput(name, found="cannot be loaded")

    with pytest.raises(InvalidInput) as caught:
        judged(fail, COPY, workers=workers)
    assert caught.value.where == "base"


class CutBench(Bench):
    """A bench whose answers are cut off on every tenth document until their budget has been doubled often enough."""

    def __init__(self, place: Path, right: Right, needed: int) -> None:
        super().__init__(place, right)
        self.needed = needed
        self.lengthened: list[tuple[str, str, int, int]] = []  # model, task, documents, doublings

    def _part(self, name: str, task: str, first: int, last: int) -> Artifact[Scores]:
        return self._with_budget(super()._part(name, task, first, last), 0)

    def lengthen(
        self,
        model: Model,
        task: EvalTask,
        scoring: Scoring,
        artifacts: Sequence[Artifact[Scores]],
        doublings: int,
        limit: int | None,
        runtime: Runtime,
    ) -> list[Artifact[Scores]]:
        documents = sum(artifact.value.tasks[0].n for artifact in artifacts)
        self.lengthened.append((model.name, task.name, documents, doublings))
        return [self._with_budget(artifact, doublings) for artifact in artifacts]

    def _with_budget(self, artifact: Artifact[Scores], doublings: int) -> Artifact[Scores]:
        rows = []
        for row in document_scores.read_document_scores(artifact.directory / document_scores.SCORES_FILE):
            budgets = tuple(40 * 2**step for step in range(doublings + len(row.budgets or (40,))))
            is_cut = row.doc_id % 10 == 0 and len(budgets) <= self.needed
            rows.append(row._replace(ended=("length" if is_cut else "eos",), answer_tokens=(9,), budgets=budgets))
        directory = artifact.directory.with_name(f"{artifact.directory.name}-{len(rows[0].budgets)}")
        directory.mkdir(exist_ok=True)
        document_scores.write_document_scores(directory / document_scores.SCORES_FILE, rows)
        return dataclasses.replace(artifact, directory=directory, digest=digest([list(row) for row in rows]))


def judge_cut_answers(
    judged: Judged, place: Path, monkeypatch: pytest.MonkeyPatch, needed: int, **rule: Any
) -> tuple[GateVerdict, list[tuple[str, str, int, int]]]:
    """Return the verdict and the calls that lengthened answers."""
    bench = CutBench(place, sometimes_wrong, needed)
    monkeypatch.setattr(assessment, "lengthen_answers", bench.lengthen)
    result, _ = judged(sometimes_wrong, REVERSE, rule=GateRule(rule="each", **rule), bench=bench)
    return result.verdict.value, bench.lengthened


@pytest.mark.story
@pytest.mark.parametrize("needed", [1, 3])
def test_cut_off_answers_are_lengthened_at_the_same_look_for_all_models(
    judged: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: int
) -> None:
    verdict, lengthened = judge_cut_answers(judged, tmp_path, monkeypatch, needed)
    assert (verdict.outcome, verdict.guards[0].n) == ("pass", 1000)
    assert verdict.guards[0].cut_answers is None
    models = ("base", "reverser", "merge")
    # At the first look, one doubling after another; at the second look, all doublings at once.
    assert [one for one in lengthened if one[2] == 500] == [(it, "reverse", 500, 1) for it in needed * models]
    second = [one for one in lengthened if one[2] == 1000]
    assert sorted(second) == sorted((name, "reverse", 1000, needed) for name in models)


@pytest.mark.story
def test_answers_are_not_lengthened_beyond_the_limit(
    judged: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict, lengthened = judge_cut_answers(judged, tmp_path, monkeypatch, 9, max_answer_tokens=80)
    assert [doublings for *_, doublings in lengthened] == [1, 1, 1]
    (guard,) = verdict.guards
    assert (guard.outcome, guard.n, guard.documents_left) == ("inconclusive", 500, SIZE - 500)
    assert guard.reason.endswith("evaluate.max_answer_tokens above 80 would decide")


@pytest.mark.story
@pytest.mark.parametrize(
    ("class_name", "untested"), [("LlamaForCausalLM", ""), ("VoxtralForConditionalGeneration", "sound")]
)
def test_the_verdict_notes_that_only_text_was_tested(
    judged: Judged, monkeypatch: pytest.MonkeyPatch, class_name: str, untested: str
) -> None:
    kind = find_kind({"architectures": [class_name]}, Companions())
    monkeypatch.setattr(assessment, "kind_of_directory", lambda directory: kind)
    result, _ = judged(lambda *_: True, COPY)
    verdict = result.verdict.value
    note = f"only text was tested: no task tests how the merge reads {untested}" if untested else ""
    assert (verdict.outcome, verdict.untested_note) == ("pass", note)
    assert gate_notes(verdict) == ((note,) if note else ())
