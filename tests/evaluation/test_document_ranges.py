"""Looks, parts and splits depend only on settings and size, and each document is in one of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise
from pathlib import Path

import gate_samples as samples
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scoring_runs import mean_of, pin, write_task
from tiny_models import write_choices, write_jsonl

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import sha256_file
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.quality.evaluation import DocumentSplits, EvalTask, Scoring, document_order
from mergegate.tasks.quality.evaluation.document_order import split_documents
from mergegate.tasks.quality.evaluation.scoring.loading import documents_in_set, inspect_data, load_task
from mergegate.tasks.quality.evaluation.scoring.scores import Scores
from mergegate.tasks.quality.evaluation.stage import GENERATED, document_seconds
from mergegate.tasks.quality.perplexity.text import HeldOutText, read_texts

NAMES = ("search", "confirmation", "gate")

totals = st.integers(1, 20_000)
firsts = st.none() | st.integers(1, 30_000)


@pytest.mark.parametrize(
    ("total", "first", "wanted"),
    [
        (1319, 500, (500, 1000, 1319)), (14042, 500, (500, 1000, 2000, 4000, 8000, 14042)), (1000, 500, (500, 1000)),
        (400, 500, (400,)), (500, 500, (500,)), (1319, None, (1319,)), (1, 1, (1,)), (7, 1, (1, 2, 4, 7)),
    ],
)  # fmt: skip
def test_looks_double_up_to_the_whole_task(total: int, first: int | None, wanted: tuple[int, ...]) -> None:
    assert document_order.interim_looks(total, first) == wanted


@given(totals, firsts)
def test_looks_rise_and_each_is_at_most_twice_the_one_before(total: int, first: int | None) -> None:
    found = document_order.interim_looks(total, first)
    assert found[-1] == total
    assert found[0] == min(total, first or total)
    assert all(a < b <= 2 * a for a, b in pairwise(found))


@given(totals, st.integers(1, 5_000), st.integers(0, 20_000), st.integers(1, 20_000))
def test_the_next_sample_avoids_the_documents_that_selected_the_release(
    total: int, first: int, start: int, documents: int
) -> None:
    used = document_order.SampleUse(start=start % total, documents=min(documents, total))
    following = used.next_start(total, first)
    assert used.next_start(total, None) == 0
    if first >= total:
        assert following == 0  # there is no other sample
        return
    selecting = {(used.start + at) % total for at in range(used.documents)}
    shared = sum((following + at) % total in selecting for at in range(first))
    assert shared == max(0, first - (total - used.documents))  # only as many as must be shared


@pytest.mark.parametrize(("total", "first"), [(0, None), (-1, 5), (10, 0)])
def test_no_documents_are_no_look(total: int, first: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        document_order.interim_looks(total, first)


@given(totals, firsts)
def test_parts_follow_each_other_are_small_and_end_at_every_look(total: int, first: int | None) -> None:
    found = document_order.document_ranges(total, first)
    assert [part.first for part in found] == [0, *(part.last for part in found[:-1])]
    assert found[-1].last == total
    assert all(0 < part.last - part.first <= document_order.CHUNK_SIZE for part in found)
    assert set(document_order.interim_looks(total, first)) <= {part.last for part in found}


@settings(max_examples=40)
@given(st.dictionaries(st.text(max_size=3), st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_parts_share_out_every_document_once(sizes: dict[str, int], seed: int, data: st.DataObject) -> None:
    total = sum(sizes.values())
    found = [
        (task, doc)
        for part in document_order.document_ranges(total, data.draw(st.none() | st.integers(1, total)))
        for task, docs in document_order.documents_of_range(sizes, seed, part).items()
        for doc in docs
    ]
    assert sorted(found) == [(task, doc) for task in sorted(sizes) for doc in range(sizes[task])]


def test_documents_of_a_group_are_mixed_and_ascend_within_each_task() -> None:
    found = document_order.documents_of_range({"a": 500, "b": 500}, 0, document_order.DocumentRange(first=0, last=200))
    assert 60 < len(found["a"]) < 140  # a fair coin, 200 tosses
    assert all(docs == sorted(docs) for docs in found.values())


def test_the_order_is_the_same_on_every_machine() -> None:
    """The expected order is hard-coded, because every key in the store depends on it."""
    assert document_order.order_documents({"t": 8}, 0) == [("t", doc) for doc in (3, 2, 0, 5, 4, 1, 6, 7)]
    assert document_order.order_documents({"t": 8}, 1) != document_order.order_documents({"t": 8}, 0)


@pytest.mark.parametrize(("first", "last"), [(5, 5), (6, 5), (-1, 5)])
def test_an_empty_range_is_refused(first: int, last: int) -> None:
    with pytest.raises(ValidationError):
        document_order.DocumentRange(first=first, last=last)


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=120),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 5),
    st.randoms(use_true_random=False),
)
def test_every_document_is_in_one_set_with_its_cluster_in_any_order(clusters, search, confirmation, seed, random):
    documents = [(position, f"cluster {cluster}") for position, cluster in enumerate(clusters)]
    division = DocumentSplits(search=search, confirmation=confirmation, seed=seed)
    if len(clusters) <= search + confirmation:
        with pytest.raises(InvalidInput, match="leaves no document for the gate"):
            split_documents(documents, division, "task t")
        return
    # Enough documents for all splits, plus the clusters that cross a border.
    documents += [(len(clusters) + n, f"further {n}") for n in range(2 * max(Counter(clusters).values()))]
    clusters = [*clusters, *(f"further {n}" for n in range(len(documents) - len(clusters)))]
    sets = split_documents(documents, division, "task t")
    assert Counter(one for name in NAMES for one in sets[name]) == Counter(range(len(clusters)))
    of_cluster = {name: {clusters[one] for one in sets[name]} for name in NAMES}
    assert all(not of_cluster[a] & of_cluster[b] for a in NAMES for b in NAMES if a != b)
    assert len(sets["search"]) >= search
    assert len(sets["confirmation"]) >= confirmation
    random.shuffle(documents)
    assert split_documents(documents, division, "task t") == sets


def test_few_documents_move_to_another_split_with_another_document_and_most_with_another_seed() -> None:
    def split(count: int, **settings: int) -> dict[str, frozenset[int]]:
        return split_documents([(n, str(n)) for n in range(count)], DocumentSplits(**settings), "t")

    before, after = (split(count, search=100, confirmation=200) for count in (1000, 1001))
    moved = sum(len(before[name] - after[name]) for name in NAMES)
    assert moved <= 2  # at most one across each border
    one, other = (split(1000, search=100, confirmation=100, seed=seed) for seed in (0, 1))
    assert 1 <= len(one["search"] & other["search"]) <= 30  # ten expected


def write_questions(folder: Path, rows: list[dict[str, object]]) -> EvalTask:
    config = {"output_type": "loglikelihood", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}"}
    return pin(write_task(folder, "t", rows, **config, metric_list=[mean_of("acc")]))


def test_a_task_with_a_document_set_has_only_its_documents(tmp_path: Path) -> None:
    rows = [{"q": f"q{n % 50}", "a": "x", "id": n, "passage": f"p{n % 7}"} for n in range(100)]  # each question twice
    task = write_questions(tmp_path, rows)
    division = DocumentSplits(search=20, confirmation=30)
    parts = {name: task.model_copy(update={"only": division.of(name)}) for name in NAMES}
    sizes = {name: inspect_data(part).documents for name, part in parts.items()}
    assert sizes == {"search": 20, "confirmation": 30, "gate": 50}
    assert inspect_data(task).documents == 100
    assert len({inspect_data(part).data.digest for part in parts.values()}) == 1  # all splits have the same data

    loaded = load_task(task)
    seen = {}
    for name, part in parts.items():
        whole = document_order.DocumentRange(first=0, last=sizes[name])
        seen[name] = document_order.documents_of_range(loaded.sizes, 0, whole, documents_in_set(loaded, part))["t"]
    assert sorted(doc for docs in seen.values() for doc in docs) == list(range(100))
    questions = {name: {rows[doc]["q"] for doc in docs} for name, docs in seen.items()}
    assert not questions["search"] & questions["gate"]
    assert not questions["confirmation"] & questions["gate"]

    by_passage = task.model_copy(
        update={"only": DocumentSplits(search=20, confirmation=20, together="passage").of("gate")}
    )
    members = documents_in_set(loaded, by_passage)
    gate = document_order.documents_of_range(loaded.sizes, 0, document_order.DocumentRange(first=0, last=99), members)[
        "t"
    ]
    passages = {rows[doc]["passage"] for doc in gate}
    assert len(gate) == sum(row["passage"] in passages for row in rows)


def test_an_error_names_a_field_that_documents_lack(tmp_path: Path) -> None:
    task = write_questions(tmp_path, [{"q": str(n), "a": "x", "passage": "p"} for n in range(9)])
    only = DocumentSplits(search=2, confirmation=2, together="pasage").of("gate")
    with pytest.raises(InvalidInput, match="passage"):
        inspect_data(task.model_copy(update={"only": only}))


def test_a_task_without_a_document_set_keeps_its_old_key() -> None:
    task = EvalTask(name="t", digest="d" * 64, definition=None)
    assert task.content_key() == {"name": "t", "digest": "d" * 64, "cluster_field": None, "data_digest": None}
    only = DocumentSplits(search=1, confirmation=1).of("gate")
    assert task.model_copy(update={"only": only}).content_key() != task.content_key()
    assert Scoring().first_look == 500


def test_held_out_text_has_document_sets(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "text.jsonl", ({"text": f"line {n % 30}"} for n in range(60)))
    whole = HeldOutText(path=path, sha256=sha256_file(path))
    assert whole.content_key() == {"sha256": whole.sha256, "field": "text"}
    division = DocumentSplits(search=10, confirmation=20)
    texts = {name: read_texts(whole.model_copy(update={"only": division.of(name)}), None) for name in NAMES}
    assert sorted(one for each in texts.values() for one in each) == sorted(read_texts(whole, None))
    assert {name: len(each) for name, each in texts.items()} == {"search": 10, "confirmation": 20, "gate": 30}
    words = {name: {text for _, text in each} for name, each in texts.items()}
    assert sum(map(len, words.values())) == 30
    assert read_texts(whole.model_copy(update={"only": division.of("gate")}), 7) == texts["gate"][:7]


@pytest.fixture
def slow_and_fast(tmp_path: Path) -> tuple[EvalTask, EvalTask]:
    slow, fast = (write_choices(tmp_path, name=name) for name in ("slow", "fast"))
    slow.write_text(slow.read_text().replace("output_type: multiple_choice", "output_type: generate_until"))
    return pin(slow), pin(fast)


def took(place: Path, seconds: float | None) -> Artifact[Scores]:
    found = samples.part(place, samples.right_on([], 4))
    update = {"part": document_order.DocumentRange(first=0, last=100), "seconds": seconds}
    return dataclasses.replace(found, value=found.value.model_copy(update=update))


def test_the_smallest_measurement_counts_in_powers_of_two(
    tmp_path: Path, slow_and_fast: tuple[EvalTask, EvalTask]
) -> None:
    known = {
        "slow": [took(tmp_path / "1", 900.0), took(tmp_path / "2", 310.0), took(tmp_path / "3", None)],
        "fast": [took(tmp_path / "4", 24.0)],
    }
    assert document_seconds(slow_and_fast, known) == {"slow": 4.0, "fast": 0.25}
    noise = known | {"slow": [took(tmp_path / "5", 420.0)]}  # another run
    assert document_seconds(slow_and_fast, noise) == document_seconds(slow_and_fast, known)


def test_measured_and_guessed_are_not_compared(tmp_path: Path, slow_and_fast: tuple[EvalTask, EvalTask]) -> None:
    shipped = EvalTask(name="arc_easy", digest="0" * 64, definition=None)
    guess = {"slow": GENERATED, "fast": 1.0, "arc_easy": 1.0}
    assert document_seconds((*slow_and_fast, shipped), {}) == guess
    assert document_seconds((*slow_and_fast, shipped), {"slow": [took(tmp_path / "1", 900.0)]}) == guess
