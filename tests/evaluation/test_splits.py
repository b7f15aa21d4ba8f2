"""The three splits are disjoint in any document order, and keep clusters and duplicate documents together."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo, sha256_file
from mergegate.tasks.evaluation import DocumentSplits, EvalTask, Scoring, pin_task
from mergegate.tasks.evaluation.document_order import DocumentRange, documents_of_range
from mergegate.tasks.evaluation.splits import split_documents
from mergegate.tasks.evaluation.task_loading import documents_in_set, inspect_data, load_task
from mergegate.tasks.perplexity.text import HeldOutText, read_texts

NAMES = ("search", "confirmation", "gate")


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


def test_adding_a_document_moves_hardly_any_other() -> None:
    division = DocumentSplits(search=100, confirmation=200)
    before = split_documents([(n, str(n)) for n in range(1000)], division, "t")
    after = split_documents([(n, str(n)) for n in range(1001)], division, "t")
    moved = sum(len(before[name] - after[name]) for name in NAMES)
    assert moved <= 2  # at most one across each border


def test_another_seed_gives_another_division() -> None:
    documents = [(n, str(n)) for n in range(1000)]
    one, other = (
        split_documents(documents, DocumentSplits(search=100, confirmation=100, seed=seed), "t") for seed in (0, 1)
    )
    assert 1 <= len(one["search"] & other["search"]) <= 30  # ten expected


def write_task(folder: Path, rows: list[dict[str, object]]) -> EvalTask:
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "t.yaml").write_text(
        "task: t\ndataset_path: json\ndataset_kwargs: {data_files: {test: data.jsonl}}\ntest_split: test\n"
        'output_type: loglikelihood\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    return pin_task("t.yaml", folder, HashMemo(folder / "memo.db"))


def test_a_task_with_a_document_set_has_only_its_documents(tmp_path: Path) -> None:
    rows = [{"q": f"q{n % 50}", "a": "x", "id": n, "passage": f"p{n % 7}"} for n in range(100)]  # each question twice
    task = write_task(tmp_path, rows)
    division = DocumentSplits(search=20, confirmation=30)
    parts = {name: task.model_copy(update={"only": division.of(name)}) for name in NAMES}
    sizes = {name: inspect_data(part).documents for name, part in parts.items()}
    assert sizes == {"search": 20, "confirmation": 30, "gate": 50}
    assert inspect_data(task).documents == 100
    assert len({inspect_data(part).data.digest for part in parts.values()}) == 1  # all splits have the same data

    loaded = load_task(task)
    seen = {}
    for name, part in parts.items():
        whole = DocumentRange(first=0, last=sizes[name])
        seen[name] = documents_of_range(loaded.sizes, 0, whole, documents_in_set(loaded, part))["t"]
    assert sorted(doc for docs in seen.values() for doc in docs) == list(range(100))
    questions = {name: {rows[doc]["q"] for doc in docs} for name, docs in seen.items()}
    assert not questions["search"] & questions["gate"]
    assert not questions["confirmation"] & questions["gate"]

    by_passage = task.model_copy(
        update={"only": DocumentSplits(search=20, confirmation=20, together="passage").of("gate")}
    )
    members = documents_in_set(loaded, by_passage)
    gate = documents_of_range(loaded.sizes, 0, DocumentRange(first=0, last=99), members)["t"]
    passages = {rows[doc]["passage"] for doc in gate}
    assert len(gate) == sum(row["passage"] in passages for row in rows)


def test_an_error_names_a_field_that_documents_lack(tmp_path: Path) -> None:
    task = write_task(tmp_path, [{"q": str(n), "a": "x", "passage": "p"} for n in range(9)])
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
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {n % 30}"}) + "\n" for n in range(60)))
    whole = HeldOutText(path=path, sha256=sha256_file(path))
    assert whole.content_key() == {"sha256": whole.sha256, "field": "text"}
    division = DocumentSplits(search=10, confirmation=20)
    texts = {name: read_texts(whole.model_copy(update={"only": division.of(name)}), None) for name in NAMES}
    assert sorted(one for each in texts.values() for one in each) == sorted(read_texts(whole, None))
    assert {name: len(each) for name, each in texts.items()} == {"search": 10, "confirmation": 20, "gate": 30}
    words = {name: {text for _, text in each} for name, each in texts.items()}
    assert sum(map(len, words.values())) == 30
    assert read_texts(whole.model_copy(update={"only": division.of("gate")}), 7) == texts["gate"][:7]
