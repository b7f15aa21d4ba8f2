"""Each merge is judged on the documents after those of the last one, and repeating a run changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegate.tasks.base.stage import home as home_of
from mergegate.tasks.preflight import Evidence, with_next_samples
from mergegate.tasks.quality import gate
from mergegate.tasks.quality.evaluation import EvalTask, SampleUse, Scoring
from mergegate.tasks.quality.gate import (
    CHAMPION,
    Guard,
    JudgedSample,
    read_samples,
    record_sample,
    sample_start,
    wear_findings,
)

pytestmark = pytest.mark.usefixtures("home")

TASK = EvalTask(name="copy", digest="d" * 64, definition=None, data_digest="e" * 64, documents=1319)
GUARDS = (Guard(task="copy", guarded_by=CHAMPION),)
EVIDENCE = Evidence(tasks=(TASK,), guards=GUARDS, scoring=Scoring(documents=500))
SELECTING = {"copy": SampleUse(start=0, documents=500)}


def judge(merge: str, champion: str = "c", documents: int = 500) -> int:
    """Judge a merge on its sample, record it, and return the start of the sample."""
    (task,) = with_next_samples(EVIDENCE, merge, champion, SELECTING).tasks
    use = {"start": task.sample_start, "documents": documents}
    record_sample(TASK, 0, JudgedSample(merge=merge, champion=champion, **use))
    return task.sample_start


def test_the_samples_of_merges_follow_each_other_through_the_whole_task() -> None:
    assert [judge(merge) for merge in ("m1", "m2", "m3", "m4")] == [500, 1000, 181, 681]


def test_the_same_merge_is_judged_on_the_same_documents_again() -> None:
    starts = [judge(merge) for merge in ("m1", "m2", "m1", "m2")]
    assert starts == [500, 1000, 500, 1000]
    assert len(read_samples(TASK, 0)) == 2
    assert judge("m3") == 181


def test_a_new_champion_starts_behind_the_documents_that_selected_it() -> None:
    assert judge("m1") == 500
    assert judge("m2", champion="m1") == 500  # SELECTING names the documents of the champion
    assert judge("m3", champion="m1") == 1000


@pytest.mark.parametrize(
    ("evidence", "champion"),
    [
        (EVIDENCE, ""),
        (EVIDENCE._replace(resample=False), "c"),
        (EVIDENCE._replace(guards=(Guard(task="copy", guarded_by="base"),)), "c"),
        (EVIDENCE._replace(scoring=Scoring(documents="all")), "c"),
        (EVIDENCE._replace(scoring=Scoring(documents=1319)), "c"),
    ],
    ids=["no release", "resample off", "no guard against the champion", "all documents", "as many as the task has"],
)
def test_a_task_that_has_no_other_sample_keeps_its_own(evidence: Evidence, champion: str) -> None:
    (task,) = with_next_samples(evidence, "m", champion, SELECTING).tasks
    assert task.sample_start == 0


def test_an_interrupted_publication_is_judged_on_the_documents_of_its_release() -> None:
    (task,) = with_next_samples(EVIDENCE, "c", "c", {"copy": SampleUse(start=700, documents=500)}).tasks
    assert task.sample_start == 700


def test_the_start_of_a_sample_is_in_no_key() -> None:
    assert TASK.model_copy(update={"sample_start": 7}).content_key() == TASK.content_key()


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 100)), max_size=6), st.integers(0, 99), st.integers(1, 100)
)
def test_uses_are_counted_per_document(windows: list[tuple[int, int]], start: int, documents: int) -> None:
    history = [JudgedSample(merge=f"m{at}", start=begin, documents=n) for at, (begin, n) in enumerate(windows)]
    sample = {(start + at) % 100 for at in range(documents)}
    uses = sum((begin + at) % 100 in sample for begin, n in windows for at in range(n))
    assert gate.uses_per_document(history, start, documents, 100) == pytest.approx(uses / documents)


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"{", b"[1]", b'[{"merge": ""}]', b'[{"merge": "m", "start": -1}]'])
def test_a_damaged_record_counts_as_missing(garbage: bytes) -> None:
    judge("m1")
    (record,) = (home_of() / "samples").glob("*.json")
    record.write_bytes(garbage)
    assert [damage.path for damage in gate.damaged_records()] == [record]
    assert judge("m2") == 500


def test_another_size_of_the_task_still_gives_a_valid_start() -> None:
    judged = JudgedSample(merge="m", champion="c", start=1300, documents=500)
    assert 0 <= sample_start((judged,), judged, 700, 100) < 700
    assert sample_start((), judged, 700, 100) == 1800 % 700


def test_check_names_worn_documents_and_the_fix() -> None:
    for number in range(12):
        record_sample(TASK, 0, JudgedSample(merge=f"m{number}", champion="c", start=0, documents=500))
        lines, _ = wear_findings(GUARDS, [TASK], EVIDENCE.scoring, resample=False)
        assert f"have judged {number + 1} merge{'s' * (number > 0)} so far" in lines[0]
    lines, (worn,) = wear_findings(GUARDS, [TASK], EVIDENCE.scoring, resample=False)
    assert "the same 500 of 1,319 documents, which have judged 12 merges" in lines[0]
    assert worn.severity == "warn"
    assert "12 merges" in worn.found
    assert worn.remedy == "set evaluate.resample: true"
    lines, fresh = wear_findings(GUARDS, [TASK], EVIDENCE.scoring, resample=True)
    assert "the next 500 of 1,319 documents, which have judged 0 merges" in lines[0]
    assert fresh == []
    everything = Scoring(documents="all")
    assert wear_findings(GUARDS, [TASK], everything, resample=True)[1] == []  # 12 merges on 500 of 1,319 documents
    for number in range(12, 24):
        record_sample(TASK, 0, JudgedSample(merge=f"m{number}", champion="c", start=0, documents=1319))
    assert wear_findings(GUARDS, [TASK], everything, resample=True)[1][0].remedy == "use a task with more documents"


@pytest.mark.parametrize("discordance", [0.05, 0.1, 0.3])
def test_the_expected_inflation_is_that_of_simulated_merges_that_pass(discordance: float) -> None:
    rng, n = np.random.default_rng(0), 500
    by_chance = rng.binomial(n, 2 * discordance, 40_000)  # documents that each model answers by chance
    reference, merge = rng.binomial(by_chance, 0.5), rng.binomial(by_chance, 0.5)
    error = 100 * math.sqrt(discordance / n)
    half = gate.normal_quantile(0.95) * error
    drop = 100 * (reference - merge) / n
    passes = (drop <= 2) & (drop + half <= 3)
    luck = 100 * (merge - by_chance / 2) / n
    wanted = gate.selection_inflation(0.0, half, 0.95, 2.0, 3.0)
    assert luck[passes].mean() == pytest.approx(wanted, abs=0.1)
