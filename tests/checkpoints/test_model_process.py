"""The model process loads each model once for all calls, and never more models than fit in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import process_functions as functions
import pytest
import torch
from patience import HANG_S
from tiny_models import CPU, make_model, words, write_choices, write_jsonl

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files.hashing import HashMemo
from mergegate.merge_core.files.records import JOURNAL, JournalLocation, open_journal
from mergegate.merge_core.system import Capacity
from mergegate.tasks.models.checkpoints import model_cache, model_process
from mergegate.tasks.models.checkpoints.model import Model, files_fingerprint
from mergegate.tasks.models.checkpoints.model_process import call_model_process, end_model_process, start_model_process
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask, pin_task
from mergegate.tasks.quality.evaluation.document_order import DocumentRange
from mergegate.tasks.quality.evaluation.scoring import harness
from mergegate.tasks.quality.evaluation.scoring.harness import ScoringJob, score_in_child
from mergegate.tasks.quality.evaluation.settings import Scoring
from mergegate.tasks.quality.evaluation.stage import evaluate
from mergegate.tasks.quality.perplexity.measurement import WindowSettings
from mergegate.tasks.quality.perplexity.settings import PerplexitySettings
from mergegate.tasks.quality.perplexity.stage import ensemble_likelihoods, perplexity, pin_documents, read_documents
from mergegate.tasks.quality.perplexity.text import HeldOutText

TEXTS = [". ".join(words(5, seed)) + "." for seed in range(12)]


@pytest.fixture(scope="module", autouse=True)
def one_process_for_all() -> Iterator[None]:
    """Use one model process that can import ``process_functions``."""
    places = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))
        end_model_process()
        yield
        end_model_process()


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start with an empty model process, and end it after the test."""
    monkeypatch.setattr(model_process, "_alone", False)
    end_model_process()
    yield
    end_model_process()


@pytest.fixture
def documents(tmp_path: Path) -> HeldOutText:
    path = write_jsonl(tmp_path / "text.jsonl", ({"text": text} for text in TEXTS))
    return pin_documents(PerplexitySettings(documents=path), tmp_path, HashMemo(tmp_path / "h.db"))


@pytest.fixture
def task(tmp_path: Path) -> EvalTask:
    path = write_choices(tmp_path / "tasks")
    return pin_task(path.name, path.parent, HashMemo(tmp_path / "hashes.db"))


def score(model: Model, task: EvalTask, first: int) -> None:
    part = DocumentRange(first=first, last=first + 10)
    score_in_child(ScoringJob(model, task, Scoring(), part, "cpu"), lambda done, total: None)


@pytest.mark.story
def test_all_stages_load_each_model_once(tmp_path: Path, documents: HeldOutText, task: EvalTask) -> None:
    """Runs the order of an evaluation: perplexity of all models, two looks at all models, then the ensemble."""
    models = tuple(make_model(tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b", "merge")))
    call_model_process(functions.count_loads, (), location="here")
    for model in models:
        (tmp_path / f"out-{model.name}").mkdir()
        perplexity.work(tmp_path / f"out-{model.name}", model, documents, WindowSettings(), CPU)
    for first in (0, 10):
        for model in models:
            score(model, task, first)
    (tmp_path / "together").mkdir()
    ensemble_likelihoods.work(tmp_path / "together", models[:2], documents, WindowSettings(), CPU)
    assert call_model_process(functions.loads, (), location="here") == ["a", "b", "merge"]


@pytest.mark.proof
@pytest.mark.usefixtures("new_process")
def test_if_memory_runs_out_with_several_models_one_at_a_time_is_loaded(tmp_path: Path) -> None:
    models = [make_model(tmp_path / name) for name in ("a", "b")]
    notes = tmp_path / "notes"
    for model in (*models, *models):
        assert call_model_process(functions.die_unless_alone, (model, notes), location=model.name, models=[model]) == 1
    assert notes.read_text().splitlines() == ["a 1", "b 2", "b 1", "a 1", "b 1"]


class Killed(BaseException):
    """Simulated SIGKILL in this process."""


@pytest.mark.story
@pytest.mark.parametrize("kind", ["one", "together"])
def test_a_killed_stage_resumes_with_identical_results(
    tmp_path: Path, documents: HeldOutText, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mergegate.tasks.quality.perplexity import measurement, stage

    models = tuple(make_model(tmp_path / f"m{seed}", seed=seed) for seed in range(2))
    windows = WindowSettings(batch_size=5, max_length=9)
    read: list[int] = []
    limit = -1
    read_batch = measurement.read_batch

    def watched(loaded: model_cache.LoadedModel, batch: list[measurement.TextWindow]) -> object:
        if len(read) == limit:
            raise Killed
        read.append(len(batch))
        return read_batch(loaded, batch)

    monkeypatch.setattr(measurement, "read_batch", watched)
    monkeypatch.setattr(stage, "read_batch", watched)

    def measured(name: str) -> measurement.TextMeasurement:
        place = JournalLocation(tmp_path / name / JOURNAL, "key")
        (tmp_path / name).mkdir(exist_ok=True)
        given = (documents, windows, "cpu", place, lambda done, total: None)
        return stage._measure_together(models, *given) if kind == "together" else measurement.measure(models[0], *given)

    try:
        wanted = measured("undisturbed")
        batches = len(read)
        assert batches >= 10
        for limit in range(0, batches, 3):  # ``watched`` reads it
            del read[:]
            with pytest.raises(Killed):
                measured(f"at-{limit}")
            done, limit = limit, -1
            assert measured(f"at-{done}") == wanted
            assert len(read) == batches
    finally:
        model_cache.unload_models()


@pytest.mark.proof
def test_a_complete_journal_needs_no_evaluation(tmp_path: Path, documents: HeldOutText) -> None:
    model = make_model(tmp_path / "m")
    (tmp_path / "out").mkdir()
    windows = WindowSettings(batch_size=4)
    value = perplexity.work(tmp_path / "out", model, documents, windows, CPU)
    rows = read_documents(tmp_path / "out")
    key = perplexity.key(model, documents, windows, CPU) + files_fingerprint([model])
    place = JournalLocation(tmp_path / "out" / JOURNAL, key)
    with open_journal(place) as journal:
        assert len(journal.records) == len(TEXTS) // 4
    before = place.path.read_bytes()
    assert perplexity.work(tmp_path / "out", model, documents, windows, CPU) == value
    assert read_documents(tmp_path / "out") == rows
    assert place.path.read_bytes() == before


def test_answers_of_one_server_are_not_resumed_with_another(
    tmp_path: Path, task: EvalTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of a model are one artifact for all servers, so a resumed run must not combine answers of two servers."""
    places: list[JournalLocation] = []

    def noted(job: ScoringJob, on_progress: object) -> None:
        places.append(job.journal)
        raise Killed

    monkeypatch.setattr(harness, "score_in_child", noted)
    model = Model(name="merge", digest="0" * 64, directory=tmp_path)
    for url in ("http://one/v1", "http://two/v1", "http://one/v1"):
        scoring = Scoring.model_validate({"backend": "served", "server": {"url": url}})
        with pytest.raises(Killed):
            evaluate.work(tmp_path, model, task, scoring, DocumentRange(first=0, last=10), CPU)
    assert places[0] == places[2] != places[1]


def keep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capacity: int | None, sizes: dict[str, int], asked: str
) -> list[str]:
    """Return the models in memory after loading the ``asked`` ones in turn, with sizes in bytes."""
    for name, size in sizes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"0" * size)
    held: dict[tuple[str, str, str], object] = {}
    monkeypatch.setattr(model_cache, "_loaded", held)
    monkeypatch.setattr(model_cache, "_unload_callbacks", [])
    monkeypatch.setattr(model_cache, "torch_threads", nullcontext)

    def load(model: Model, dtype: str, device: str) -> SimpleNamespace:
        weights = torch.empty(sizes[model.name], dtype=torch.uint8)
        return SimpleNamespace(network=SimpleNamespace(parameters=lambda: [weights], buffers=list))

    def memory() -> Capacity | None:
        return None if capacity is None else Capacity(capacity, capacity - sum(sizes[name] for name, _, _ in held))

    monkeypatch.setattr(model_cache, "_load", load)
    monkeypatch.setattr(model_cache, "system_memory", memory)
    for name in asked:
        model = Model(name=name, digest=name, directory=tmp_path / name)
        with model_cache.load_model(model, dtype="auto", device="cpu") as loaded:
            assert held[name, "auto", "cpu"] is loaded
    return [name for name, _, _ in held]


EACH_10 = dict.fromkeys("abcd", 10)


@pytest.mark.story
@pytest.mark.parametrize(
    ("capacity", "sizes", "asked", "held"),
    [
        (100, EACH_10, "abcd", "abcd"),  # 40 of 100
        (80, EACH_10, "abcd", "abcd"),  # exactly half
        (79, EACH_10, "abcd", "bcd"),
        (79, EACH_10, "abcad", "cad"),  # evicts the least recently used
        (39, EACH_10, "abab", "b"),
        (5, EACH_10, "a", "a"),  # one model is always tried
        (None, EACH_10, "ab", "b"),  # the system does not report its memory
        (100, {"a": 10, "b": 20, "c": 15, "d": 25}, "abcd", "cd"),  # a large model drops as many as necessary
    ],
)
def test_models_are_held_up_to_half_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capacity: int | None, sizes: dict[str, int], asked: str, held: str
) -> None:
    assert keep(monkeypatch, tmp_path, capacity, sizes, asked) == list(held)


@pytest.mark.story
def test_the_limit_of_one_model_applies_even_if_more_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_cache, "_max_models", 1)
    assert keep(monkeypatch, tmp_path, 10**6, dict.fromkeys("abcd", 1), "abc") == ["c"]


@pytest.mark.parametrize(("parameters", "inside"), [(9_999_999, 1), (10_000_000, 3)])
def test_a_small_network_uses_one_thread_and_the_setting_is_restored(parameters: int, inside: int) -> None:
    network = torch.nn.ParameterList([torch.empty(parameters, device="meta")])
    loaded = model_cache.LoadedModel(network, tokenizer=None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with model_cache.torch_threads(loaded, 3):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("settings", "waiting"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
        ({"GOMP_SPINCOUNT": "5"}, {"GOMP_SPINCOUNT": "5"}),
    ],
)
def test_waiting_threads_spin_briefly_unless_the_user_overrides_it(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], waiting: dict[str, str]
) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    environment = model_process._environment()
    assert {name: environment[name] for name in names if name in environment} == waiting


@pytest.mark.proof
def test_a_call_uses_the_process_that_was_started_early_and_is_not_tried_again_if_it_dies_with_one_model(
    new_process: None, tmp_path: Path
) -> None:
    start_model_process()
    slot = wait_for_early_process()
    pid = slot.current.child.pid if slot.current else 0
    assert call_model_process(functions.process_id, (), location="a call") == pid
    with pytest.raises(InvalidInput, match="killed by signal 9") as caught:
        call_model_process(functions.die, (), location="x", models=[make_model(tmp_path / "a")])
    assert "batch_size" in caught.value.remedy


@pytest.mark.story
def test_a_failed_early_start_is_reported_by_the_first_call_only(
    new_process: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(model_process, "_START", "raise SystemExit('no libraries')")
    start_model_process()
    wait_for_early_process()
    assert caplog.records == []
    with pytest.raises(InvalidInput, match="a call: the model process ended with exit code 1: no libraries"):
        call_model_process(functions.process_id, (), location="a call")


def wait_for_early_process() -> model_process._SlotProcess:
    """Wait for the thread of ``start_model_process``, and return the process of the first slot."""
    for thread in threading.enumerate():
        if thread.name == model_process.EARLY_START:
            thread.join(HANG_S)
            assert not thread.is_alive()
    return model_process._slot_processes[0]


def test_permission_to_read_a_directory_does_not_include_what_its_links_name(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "environment").symlink_to(tmp_path / "elsewhere")
    process = SimpleNamespace(readable={str(tmp_path / "project")})
    for name, is_readable in {"config.json": True, "environment/pyproject.toml": False}.items():
        asked = {str(tmp_path / "project" / name)}
        assert model_process._ModelProcess.reads(process, asked) == is_readable  # type: ignore[arg-type]
