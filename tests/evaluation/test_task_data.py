"""Data are pinned: replacing the data behind a name leads to a new measurement, never to silent reuse."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from jinja2 import Environment, StrictUndefined
from loopback import answering
from scoring_runs import mean_of, pin, quiet, scoring_job, write_task
from tiny_models import make_model, words, write_choices, write_jsonl

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.tasks.models.checkpoints import end_model_process
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.quality.evaluation import CountLimit, EvalTask, count_task, data_revisions, pin_data, pin_task
from mergegate.tasks.quality.evaluation.document_order import DataSource
from mergegate.tasks.quality.evaluation.scoring import loading
from mergegate.tasks.quality.evaluation.scoring.harness import score_documents
from mergegate.tasks.quality.evaluation.scoring.lm_eval_tasks import quiet as quiet_lm_eval
from mergegate.tasks.quality.evaluation.scoring.loading import digest_of_leaves, inspect_data, load_task, revision_now
from mergegate.tasks.quality.gate.settings import Guard

REPO = "acme/letters"
COMMITS = ("a" * 40, "b" * 40)
# Without the settings of the data, the task ``acme/letters`` of the Hub.
LETTERS: dict[str, Any] = {"output_type": "multiple_choice", "doc_to_text": "{{word}}", "doc_to_target": "right"}
LETTERS |= {"doc_to_choice": "{{choices}}", "target_delimiter": "", "metric_list": [mean_of("acc")]}
GUARDS = (Guard(task="letters", guarded_by="parent"),)


class CachedHub:
    """Simulated cache of ``acme/letters``: one directory per commit; the datasets library loads the newest."""

    def __init__(self, cache: Path) -> None:
        self.place = cache / "acme___letters" / "default" / "0.0.0"
        self.times = 0

    def fetch(self, commit: str, right: int) -> None:
        """Add a commit in which the correct choice of every document is ``right``."""
        rows = [{"word": word, "right": right, "choices": ["a", "b"]} for word in words(12)]
        made = self.place.parents[2] / "made"
        datasets.Dataset.from_list(rows).save_to_disk(str(made))
        directory = self.place / commit
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (arrow,) = made.glob("*.arrow")
        shutil.copy(arrow, directory / "letters-test.arrow")
        info = json.loads((made / "dataset_info.json").read_text())
        info |= {"builder_name": "json", "config_name": "default", "dataset_name": "letters", "version": "0.0.0"}
        info["splits"] = {"test": {"name": "test", "num_bytes": 1, "num_examples": 12, "dataset_name": "letters"}}
        (directory / "dataset_info.json").write_text(json.dumps(info))
        shutil.rmtree(made)
        self.times += 1
        for path in (directory, *directory.parents[:1]):
            os.utime(path, ns=(10**18 + self.times * 10**9,) * 2)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set the datasets cache of this process and of the model process, which reads its environment at start."""
    cache = tmp_path_factory.mktemp("datasets")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_DATASETS_CACHE", str(cache))
        patched.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
        end_model_process()
        yield cache
    end_model_process()


@pytest.fixture
def hub(cache: Path) -> CachedHub:
    shutil.rmtree(cache)
    stand_in = CachedHub(cache)
    stand_in.fetch(COMMITS[0], right=0)
    return stand_in


@pytest.fixture
def task(tmp_path: Path) -> EvalTask:
    return pin(write_task(tmp_path, "letters", dataset_path=REPO, test_split="test", **LETTERS))


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return make_model(tmp_path / "model")


@pytest.mark.story
def test_unchanged_data_is_not_loaded_again_and_a_new_commit_with_equal_documents_needs_no_new_measurement(
    hub: CachedHub, task: EvalTask, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = pin_data(task)
    end_model_process()
    with monkeypatch.context() as patch:
        patch.setattr(loading, "inspect_in_child", lambda *asked: pytest.fail("the data are loaded again"))
        assert pin_data(task) == before
    hub.fetch(COMMITS[1], right=0)
    after = pin_data(task)
    assert (after.data_digest, after.documents) == (before.data_digest, 12)
    assert [source.revision for source in (*before.sources, *after.sources)] == list(COMMITS)


@pytest.mark.story
def test_data_replaced_during_a_run_is_refused_and_counted_again(
    hub: CachedHub, task: EvalTask, model: Model, home: Path
) -> None:
    pinned, before = pin_data(task), data_revisions(task, CountLimit())
    hub.fetch(COMMITS[1], right=1)
    with pytest.raises(InvalidInput, match="replaced during the run"):
        score_documents(scoring_job(model, pinned, (0, 12)), quiet)
    after = data_revisions(task, CountLimit())
    assert count_task.key(task, before, CountLimit()) != count_task.key(task, after, CountLimit())


@pytest.mark.story
def test_local_data_is_not_loaded_a_second_time(tmp_path: Path, home: Path) -> None:
    task = pin(write_choices(tmp_path))
    assert data_revisions(task, CountLimit()) == ()
    assert pin_data(task).sources == ()


@pytest.mark.parametrize(
    ("choices", "change"),
    [
        (["a", "c"], {}), (["a", "b"], {"doc_to_text": "{{word}}!"}), (["a", "b"], {"fewshot_split": "train"}),
        (["a", "b"], {"fewshot_split": "test", "num_fewshot": 1}), (["a", "b"], {"repeats": 2}),
    ],
    ids=["documents", "a template", "examples", "number of examples", "settings"],
)  # fmt: skip
def test_documents_examples_and_templates_are_in_the_digest(
    tmp_path: Path, choices: list[str], change: dict[str, Any]
) -> None:
    """All variants load from one directory, so that only the prompts differ."""
    rows = [{"word": word, "right": 0, "choices": ["a", "b"]} for word in words(6)]
    write_jsonl(tmp_path / "train.jsonl", rows[:2])
    files = {"dataset_kwargs": {"data_files": {"test": "t.jsonl", "train": "train.jsonl"}}}
    before = inspect_data(pin(write_task(tmp_path, "t", rows, **files, **LETTERS))).data.digest
    rows = [row | {"choices": choices} for row in rows]
    path = write_task(tmp_path, "t", rows, **files | LETTERS | change)
    task = pin_task(path.name, tmp_path, HashMemo(tmp_path / "fresh.db"))
    assert inspect_data(task).data.digest != before


def test_the_digest_does_not_depend_on_the_directory(tmp_path: Path) -> None:
    digests = set()
    for place in ("here", "there"):
        path = write_choices(tmp_path / place, extra="process_docs: !function cleaning.clean\n")
        (tmp_path / place / "cleaning.py").write_text("def clean(docs):\n    return docs\n")
        digests.add(inspect_data(pin(path)).data.digest)
    assert len(digests) == 1


def test_the_commit_of_a_dataset_comes_from_the_hub(hub: CachedHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    asked: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = json.dumps({"id": REPO, "sha": COMMITS[1], "siblings": []}).encode()
            known = self.path.startswith(f"/api/datasets/{REPO}")
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    source = DataSource(path=REPO)
    cached = revision_now(source)
    assert cached is not None
    assert cached.startswith("cache ")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Answers)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        assert revision_now(source) == f"commit {COMMITS[1]}"
        assert revision_now(DataSource(path="acme/other")) is None  # neither known there nor cached
    assert asked


@pytest.mark.parametrize("is_directory", [True, False])
def test_the_revision_of_local_files_changes_with_their_content(tmp_path: Path, is_directory: bool) -> None:
    path = write_jsonl(tmp_path / "data" / "test.jsonl", [{"a": 1}])
    source = DataSource(path=str(path.parent)) if is_directory else DataSource(path="json", data_files=(str(path),))
    before = revision_now(source)
    assert before is not None
    assert revision_now(source) == before
    write_jsonl(path, [{"a": 2}])
    assert revision_now(source) != before
    assert revision_now(DataSource(path="json", data_files=("https://example.org/a.jsonl",))) is None


def test_an_opaque_object_is_digested_by_its_bytes() -> None:
    def digest(content: bytes) -> str:
        picture = SimpleNamespace(tobytes=lambda: content)
        leaf = SimpleNamespace(VERSION=1, config={}, eval_docs=[{"picture": picture}])
        return digest_of_leaves({"leaf": leaf})

    assert digest(b"one") == digest(b"one") != digest(b"two")


def test_a_cached_template_renders_like_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = pin(write_choices(tmp_path))
    with quiet_lm_eval():
        leaves = load_task(task).leaves
        (leaf,) = leaves.values()
        documents = list(leaf.eval_docs)
        for way in (leaf.doc_to_text, leaf.doc_to_choice):  # compiles the templates
            way(documents[0])
        monkeypatch.setattr(Environment, "compile", lambda *_: pytest.fail("compiled again"))
        said = [(leaf.doc_to_text(one), leaf.doc_to_choice(one)) for one in documents]
    monkeypatch.undo()
    anew = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    config = leaf.config
    assert len(documents) > 3
    for document, (text, choices) in zip(documents, said, strict=True):
        assert text == anew.from_string(config.doc_to_text).render(**document)
        assert str(choices) == anew.from_string(config.doc_to_choice).render(**document)
