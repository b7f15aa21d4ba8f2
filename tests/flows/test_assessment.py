"""Assessment runs perplexity first, then interim looks at tasks, and stops as soon as the verdict is decided."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from prefect import flow

from mergegate.flows.attempt import Assessment, assess_merge, assessment
from mergegate.merge_core.architecture import TEXT_GENERATOR, find_kind
from mergegate.merge_core.checkpoint import Companions
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.checkpoints.model import Model, QuantizedModel
from mergegate.tasks.evaluation import document_scores, find_backend, task_definition
from mergegate.tasks.evaluation.document_order import document_ranges
from mergegate.tasks.evaluation.document_scores import DocumentScore
from mergegate.tasks.evaluation.settings import Scoring
from mergegate.tasks.evaluation.stage import Scores, TaskScore
from mergegate.tasks.evaluation.task_definition import EvalTask
from mergegate.tasks.gate.settings import CHAMPION, GateRule, Guard
from mergegate.tasks.merge.weight_comparison import CopiedParent
from mergegate.tasks.preflight import Evidence, power_forecast
from mergegate.tasks.report import gate_notes
from mergegate.tasks.runners import RunnerSettings, open_runner
from mergegate.tasks.stage.environment import Runtime
from mergegate.tasks.store.keys import digest
from mergegate.tasks.store.store import Artifact

pytestmark = pytest.mark.usefixtures("prefect_api", "home")

SIZE = 1319
TASKS = tuple(
    EvalTask(name=name, digest=digest(name), definition=None, data_digest=digest(f"data of {name}"), documents=SIZE)
    for name in ("copy", "reverse", "sort")
)


def model(name: str) -> Model:
    return Model(name=name, digest=digest(name), directory=Path("/nowhere"))


@pytest.fixture(autouse=True)
def text_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all models be text generators, because they have no files."""
    monkeypatch.setattr(assessment, "kind_of_directory", lambda directory: TEXT_GENERATOR)


class Bench:
    """A fake lm-eval whose answers are a function of model, task and document. It records every request."""

    def __init__(self, place: Path, right: Callable[[str, str, int], bool]) -> None:
        self.place, self.right = place, right
        self.asked: list[tuple[str, str, int]] = []

    def evaluate_to(
        self, model: Model, task: EvalTask, scoring: Scoring, documents: int | None, runtime: Runtime
    ) -> list[Artifact[Scores]]:
        assert documents is not None
        self.asked.append((model.name, task.name, documents))
        wanted = [part for part in document_ranges(SIZE, scoring.first_look) if part.first < documents]
        return [self._part(model.name, task.name, part.first, part.last) for part in wanted]

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


class NoCopies:
    """A replacement for the comparison of weights, because the models of these tests have none."""

    @staticmethod
    def build(merge: Model, parents: tuple[Model, ...]) -> SimpleNamespace:
        return SimpleNamespace(value=CopiedParent(parent=None))


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Assessment, Bench]]:
    """Return a function that assesses a merge with a fake evaluation."""

    def run(
        right: Callable[[str, str, int], bool],
        *,
        guards: tuple[Guard, ...],
        first: int | Literal["all"] | None = 500,
        rule: GateRule | None = None,
        champion: Model | None = None,
        workers: int = 1,
    ) -> tuple[Assessment, Bench]:
        bench = Bench(tmp_path, right)
        monkeypatch.setattr(assessment, "evaluate_documents", bench.evaluate_to)
        monkeypatch.setattr(assessment, "find_copied_parent", NoCopies)
        monkeypatch.setattr(task_definition, "task_form", lambda *_: "text")  # lm-eval has no tasks of these names
        tasks = tuple(task for task in TASKS if task.name in {guard.task for guard in guards})
        evidence = Evidence(
            tasks=tasks, scoring=Scoring(documents=first), guards=guards, rule=rule or GateRule(rule="each")
        )

        @flow
        def judge() -> Assessment:
            with open_runner(RunnerSettings(workers=workers)) as runner:
                parents = (model("base"), model("reverser"))
                return assess_merge(model("merge"), parents, champion, evidence, runner=runner)

        return judge(), bench

    return run


COPY, REVERSE = Guard(task="copy", guarded_by="base"), Guard(task="reverse", guarded_by="reverser")
SORT = Guard(task="sort", guarded_by="base")


def sometimes_wrong(name: str, task: str, doc: int) -> bool:
    """Return whether the answer is right: on ``reverse``, merge and parent each miss one document in twenty.

    They miss different documents. All answers on ``copy`` are right.
    """
    return task == "copy" or (doc % 20 != 3 if name == "merge" else doc % 20 != 7)


@pytest.mark.story
def test_only_the_inconclusive_task_is_extended(judged: Callable[..., tuple[Assessment, Bench]]) -> None:
    result, bench = judged(sometimes_wrong, guards=(COPY, REVERSE))
    assert result.verdict.value.outcome == "pass"
    assert [guard.n for guard in result.verdict.value.guards] == [500, 1000]
    assert max(documents for _, task, documents in bench.asked if task == "copy") == 500


def test_a_failed_guard_ends_the_evaluation_at_the_first_look(judged: Callable[..., tuple[Assessment, Bench]]) -> None:
    def lost(name: str, task: str, doc: int) -> bool:
        return doc % 3 != 0 if name == "merge" and task == "copy" else sometimes_wrong(name, task, doc)

    result, bench = judged(lost, guards=(COPY, REVERSE))
    assert result.verdict.value.outcome == "fail"
    assert {documents for *_, documents in bench.asked} == {500}


def loses(*tasks: str) -> Callable[[str, str, int], bool]:
    """Return answers that are all right except those of the merge on every third document of these tasks."""
    return lambda name, task, doc: not (name == "merge" and task in tasks and doc % 3 == 0)


@pytest.mark.parametrize("rule", ["each", "suite"])
def test_when_a_task_is_lost_those_to_come_are_not_run(
    judged: Callable[..., tuple[Assessment, Bench]], rule: Literal["each", "suite"]
) -> None:
    result, bench = judged(loses("reverse"), guards=(COPY, REVERSE, SORT), rule=GateRule(rule=rule))
    verdict = result.verdict.value
    assert {task for _, task, _ in bench.asked} == {"copy", "reverse"}
    assert (verdict.outcome, verdict.publishable, verdict.suites) == ("fail", False, ())
    assert [guard.task for guard in verdict.guards] == ["copy", "reverse"]
    assert [(one.task, one.word, one.documents) for one in verdict.not_run] == [
        ("sort", "skipped: reverse had already failed", SIZE)
    ]
    assert all(part.value.tasks[0].task != "sort" for parts in result.scores.values() for part in parts)


@pytest.mark.story
def test_what_decides_most_in_a_second_comes_first(judged: Callable[..., tuple[Assessment, Bench]]) -> None:
    wide = SORT.model_copy(update={"max_drop": 9.0})  # a drop of 10 points is detected sooner than one of 3
    _, bench = judged(sometimes_wrong, guards=(COPY, REVERSE, wide), rule=GateRule())
    assert list(dict.fromkeys(task for _, task, _ in bench.asked)) == ["sort", "copy", "reverse"]
    found, bench = judged(loses("sort"), guards=(COPY, REVERSE, wide), rule=GateRule())
    assert {task for _, task, _ in bench.asked} == {"sort"}
    assert [one.task for one in found.verdict.value.not_run] == ["copy", "reverse"]  # in the order of the profile


def test_tasks_that_are_run_later_are_told_in_the_order_of_the_profile(
    judged: Callable[..., tuple[Assessment, Bench]],
) -> None:
    wide = SORT.model_copy(update={"max_drop": 9.0})
    result, _ = judged(sometimes_wrong, guards=(COPY, REVERSE, wide), rule=GateRule())
    for parts in result.scores.values():
        assert list(dict.fromkeys(part.value.tasks[0].task for part in parts)) == ["copy", "reverse", "sort"]


@pytest.mark.story
def test_a_task_that_is_lost_at_the_second_look_leaves_the_others_where_they_were(
    judged: Callable[..., tuple[Assessment, Bench]],
) -> None:
    def falls_late(name: str, task: str, doc: int) -> bool:
        if task == "copy" and name == "merge" and doc >= 500:
            return doc % 2 == 0
        return doc % 7 != (1 if name == "merge" else 2)  # too noisy for the first look to decide

    result, bench = judged(falls_late, guards=(COPY, REVERSE, SORT), rule=GateRule())
    verdict = result.verdict.value
    assert verdict.outcome == "fail"
    assert {task: max(n for _, name, n in bench.asked if name == task) for task in ("copy", "reverse", "sort")} == {
        "copy": 1000,
        "reverse": 500,
        "sort": 500,
    }
    assert [(guard.task, guard.n) for guard in verdict.guards] == [("copy", 1000), ("reverse", 500), ("sort", 500)]
    assert verdict.not_run == ()
    assert verdict.suites == ()


@pytest.mark.story
def test_what_costs_nothing_is_never_left_out(
    judged: Callable[..., tuple[Assessment, Bench]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assessment, "count_missing_documents", lambda task, *_: 0 if task.name == "copy" else 500)
    result, bench = judged(loses("reverse", "copy"), guards=(REVERSE, SORT, COPY), rule=GateRule())
    assert {task for _, task, _ in bench.asked} == {"copy"}
    assert {one.decided_by for one in result.verdict.value.not_run} == {"copy"}
    monkeypatch.setattr(assessment, "count_missing_documents", lambda *_: 0)
    result, bench = judged(loses("reverse", "copy"), guards=(REVERSE, SORT, COPY), rule=GateRule())
    assert {task for _, task, _ in bench.asked} == {"copy", "reverse", "sort"}
    assert result.verdict.value.not_run == ()


@pytest.mark.story
def test_where_each_model_has_a_process_of_its_own_references_are_loaded_once(
    judged: Callable[..., tuple[Assessment, Bench]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = dataclasses.replace(find_backend("hf"), frees_memory=False)
    monkeypatch.setattr(assessment, "find_backend", lambda name: backend)
    _, bench = judged(sometimes_wrong, guards=(COPY, REVERSE), first="all")
    assert [name for name, *_ in bench.asked[:4]] == ["base", "base", "reverser", "reverser"]


@pytest.mark.story
def test_what_no_look_decides_ends_with_the_last_one(judged: Callable[..., tuple[Assessment, Bench]]) -> None:
    def noisy(name: str, task: str, doc: int) -> bool:
        return doc % 2 == (name == "merge")  # they disagree on every document, and neither is better

    result, bench = judged(noisy, guards=(REVERSE,))
    assert result.verdict.value.outcome == "inconclusive"
    assert sorted({documents for *_, documents in bench.asked}) == [500, 1000, SIZE]
    assert result.verdict.value.guards[0].documents_left == 0


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


def test_without_extension_the_first_look_is_the_only_one(judged: Callable[..., tuple[Assessment, Bench]]) -> None:
    result, bench = judged(sometimes_wrong, guards=(REVERSE,), rule=GateRule(extend=False))
    guard = result.verdict.value.guards[0]
    assert guard.look is not None
    assert (guard.look.number, guard.look.of, guard.look.confidence) == (1, 1, 0.95)
    assert {documents for *_, documents in bench.asked} == {500}


def test_all_documents_at_once_are_one_look(judged: Callable[..., tuple[Assessment, Bench]]) -> None:
    _, bench = judged(sometimes_wrong, guards=(REVERSE,), first="all")
    assert {documents for *_, documents in bench.asked} == {SIZE}


@pytest.mark.story
def test_interim_looks_are_the_default(judged: Callable[..., tuple[Assessment, Bench]]) -> None:
    _, bench = judged(sometimes_wrong, guards=(REVERSE,), first=None)
    assert {documents for *_, documents in bench.asked} == {500, 1000}


def test_interim_looks_that_cannot_decide_are_skipped(judged: Callable[..., tuple[Assessment, Bench]]) -> None:
    def wild(name: str, task: str, doc: int) -> bool:
        return (doc * 7919) % 11 < 5 if name == "merge" else (doc * 7919) % 11 >= 5  # opposite answers, similar scores

    strict = REVERSE.model_copy(update={"max_drop": 12.0, "margin": 12.5})
    result, bench = judged(wild, guards=(strict,), first=1300)
    assert result.verdict.value.outcome == "inconclusive"
    (guard,) = result.verdict.value.guards
    assert guard.chance_left is not None
    assert ({documents for *_, documents in bench.asked} == {1300}) == (guard.chance_left < 0.02)


@pytest.mark.story
def test_the_champion_is_scored_where_a_guard_asks_for_it(judged: Callable[..., tuple[Assessment, Bench]]) -> None:
    reigning = REVERSE.model_copy(update={"guarded_by": CHAMPION})
    result, bench = judged(sometimes_wrong, guards=(COPY, reigning), champion=model(CHAMPION))
    assert {task for name, task, _ in bench.asked if name == CHAMPION} == {"reverse"}
    assert [guard.reference for guard in result.verdict.value.guards] == ["base", CHAMPION]


def test_the_first_release_is_not_held_against_a_champion(judged: Callable[..., tuple[Assessment, Bench]]) -> None:
    reigning = REVERSE.model_copy(update={"guarded_by": CHAMPION})
    result, _ = judged(sometimes_wrong, guards=(COPY, reigning))
    assert result.verdict.value.publishable
    assert result.verdict.value.notes == ("reverse: no release to compare with yet",)


@pytest.mark.story
@pytest.mark.parametrize("rule", ["each", "suite"])
@pytest.mark.parametrize("lost", [(), ("reverse",), ("copy", "sort")], ids=["none", "one", "two"])
def test_side_by_side_nothing_else_is_asked_and_nothing_else_comes_out(
    judged: Callable[..., tuple[Assessment, Bench]], rule: Literal["each", "suite"], lost: tuple[str, ...]
) -> None:
    """Several workers skip the tasks that one worker would skip, and reach the same verdict.

    A task without a guard runs in parallel with the next one.
    """

    def right(name: str, task: str, doc: int) -> bool:
        return sometimes_wrong(name, task, doc) if not lost else loses(*lost)(name, task, doc)

    guards = (COPY, REVERSE, SORT)
    alone, bench = judged(right, guards=guards, rule=GateRule(rule=rule))
    together, others = judged(right, guards=guards, rule=GateRule(rule=rule), workers=3)
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


@pytest.mark.parametrize("workers", [1, 3])
def test_the_first_that_fails_is_what_is_said(
    judged: Callable[..., tuple[Assessment, Bench]], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If two models cannot be scored, the error names the model that a single worker would score first."""

    def fail(name: str, task: str, doc: int) -> bool:
        raise InvalidInput(name, found="cannot be loaded")

    with pytest.raises(InvalidInput) as caught:
        judged(fail, guards=(COPY,), workers=workers)
    assert caught.value.where == "base"


class CutBench(Bench):
    """A bench whose answers are cut off on every tenth document until their budget has been doubled often enough."""

    def __init__(self, place: Path, right: Callable[[str, str, int], bool], needed: int) -> None:
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


def cut_benches(monkeypatch: pytest.MonkeyPatch, needed: int) -> list[CutBench]:
    """Let ``judged`` use a ``CutBench``. Return the list to which it adds it."""
    benches: list[CutBench] = []

    def make(place: Path, right: Callable[[str, str, int], bool]) -> CutBench:
        benches.append(CutBench(place, right, needed))
        monkeypatch.setattr(assessment, "lengthen_answers", benches[-1].lengthen)
        return benches[-1]

    monkeypatch.setattr(sys.modules[__name__], "Bench", make)
    return benches


@pytest.mark.story
@pytest.mark.parametrize("needed", [1, 3])
def test_cut_off_answers_are_lengthened_at_the_same_look_for_all_models(
    judged: Callable[..., tuple[Assessment, Bench]], monkeypatch: pytest.MonkeyPatch, needed: int
) -> None:
    benches = cut_benches(monkeypatch, needed)
    result, _ = judged(sometimes_wrong, guards=(REVERSE,), rule=GateRule(rule="each"))
    (bench,) = benches
    verdict = result.verdict.value
    assert (verdict.outcome, verdict.guards[0].n) == ("pass", 1000)
    assert verdict.guards[0].cut_answers is None
    first = [call for call in bench.lengthened if call[2] == 500]
    assert first == [
        (name, "reverse", 500, 1) for _ in range(needed) for name in ("base", "reverser", "merge")
    ]  # one doubling after another, at the first look
    second = [call for call in bench.lengthened if call[2] == 1000]
    assert sorted(second) == sorted((name, "reverse", 1000, needed) for name in ("base", "reverser", "merge"))


def test_answers_are_not_lengthened_beyond_the_limit(
    judged: Callable[..., tuple[Assessment, Bench]], monkeypatch: pytest.MonkeyPatch
) -> None:
    benches = cut_benches(monkeypatch, 9)
    result, _ = judged(sometimes_wrong, guards=(REVERSE,), rule=GateRule(rule="each", max_answer_tokens=80))
    assert [call[3] for call in benches[0].lengthened] == [1, 1, 1]
    (guard,) = result.verdict.value.guards
    assert (guard.outcome, guard.n, guard.documents_left) == ("inconclusive", 500, SIZE - 500)
    assert guard.reason.endswith("evaluate.max_answer_tokens above 80 would decide")


@pytest.mark.parametrize(
    ("class_name", "note"),
    [
        ("LlamaForCausalLM", ""),
        ("LlavaForConditionalGeneration", "only text was tested: no task tests how the merge reads pictures"),
        ("Gemma3nForConditionalGeneration", "only text was tested: no task tests how the merge reads pictures"),
        ("VoxtralForConditionalGeneration", "only text was tested: no task tests how the merge reads sound"),
    ],
)
def test_the_verdict_notes_that_only_text_was_tested(
    judged: Callable[..., tuple[Assessment, Bench]], monkeypatch: pytest.MonkeyPatch, class_name: str, note: str
) -> None:
    kind = find_kind({"architectures": [class_name]}, Companions())
    monkeypatch.setattr(assessment, "kind_of_directory", lambda directory: kind)
    result, _ = judged(lambda *_: True, guards=(COPY,))
    verdict = result.verdict.value
    assert (verdict.outcome, verdict.untested_note) == ("pass", note)
    assert gate_notes(verdict) == ((note,) if note else ())
