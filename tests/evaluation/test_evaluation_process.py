"""Scoring in a separate process yields the same scores, enforces timeouts, and survives the death of that process."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confined_here import directory_of_nobody, require_confinement
from patience import HANG_S, LONGER_THAN_HANG_S
from samples import sampled_rows
from scoring_runs import pin, quiet, scoring_job
from scoring_runs import score as score_here
from tiny_models import make_model, words, write_choices
from traps import PROJECT, asked, ends, in_another_process, parent_of, write_trap

from mergegate.merge_core.errors import InvalidInput, Refused
from mergegate.tasks.models.checkpoints import model_cache, model_process
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.document_order import order_documents
from mergegate.tasks.quality.evaluation.scoring import harness, loading
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.scoring.metrics import documents_of

OUT_OF_MEMORY = ("os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9", "batch_size")
PANIC = ("class Panic(BaseException): pass\nraise Panic('out of bounds')", "Panic: out of bounds", "")
DEATHS = [
    OUT_OF_MEMORY,
    PANIC,
    ("os.kill(os.getpid(), signal.SIGSEGV)", "signal 11 (SIGSEGV)", "batch_size"),
    ('os.write(2, b"device lost\\n"); os._exit(7)', "exit code 7: device lost", ""),
    ("sys.exit(3)", "SystemExit: 3", ""),
    ("class Bare(BaseException): pass\nraise Bare", "Bare: raise Bare (prompts.py, line 10)", ""),
]
SLEEPER = f'child = subprocess.Popen(["sleep", "{LONGER_THAN_HANG_S}"])'


@pytest.fixture(autouse=True)
def few_threads_and_nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    model_cache.unload_models()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A model for all tests, in one process."""
    yield make_model(tmp_path_factory.mktemp("models") / "model")
    model_process.end_model_process()


def score(model: Model, task: EvalTask, first: int, last: int, **scoring: object) -> tuple[DocumentScore, ...]:
    return harness.score_in_child(scoring_job(model, task, (first, last), **scoring), quiet)


@pytest.mark.story
def test_scores_are_those_of_this_process_and_progress_arrives(tmp_path: Path, model: Model) -> None:
    job, told = scoring_job(model, pin(write_choices(tmp_path)), (5, 25)), list[tuple[int, int]]()
    there = harness.score_in_child(job, lambda *how_far: told.append(how_far))
    assert there == harness.score_documents(job, quiet)
    assert told[-1] == (40, 40)  # two choices per document
    assert loading.inspect_in_child(job.task).documents == 40


@pytest.mark.proof
def test_the_process_stays_for_the_next_part_and_after_an_error_of_the_harness(tmp_path: Path, model: Model) -> None:
    task = write_trap(tmp_path / "tasks", "pass", at=0)
    for first in (0, 10):
        score(model, task, first, first + 10)
    with pytest.raises(InvalidInput, match="has no chat template"):
        score(model, task, 20, 25, chat_template=True)
    score(model, task, 20, 25)
    assert len({process for process, _ in asked(task)}) == 1


@pytest.mark.story
def test_a_timeout_stops_the_process_and_its_children(tmp_path: Path, model: Model) -> None:
    deed = f'{SLEEPER}\n(HERE / "child").write_text(str(child.pid))\nchild.wait()'
    task = write_trap(tmp_path / "tasks", deed, at=12)
    score(model, task, 0, 10)
    with pytest.raises(Refused) as caught:
        score(model, task, 10, 20, time_limit=8)
    assert "task trap on model: documents 11 to 20" in caught.value.where
    assert "not finished after 8 s" in caught.value.found
    assert "time_limit" in caught.value.remedy
    assert all(ends(process) for process in {process for process, _ in asked(task)})
    assert ends(int((tmp_path / "tasks" / "child").read_text()))


@pytest.mark.story
@pytest.mark.parametrize(
    ("deed", "found", "remedy"),
    sampled_rows(DEATHS, [OUT_OF_MEMORY], pytest.mark.proof),
    ids=["killed", "panic of a library", "segmentation fault", "exit code", "exit", "exception without a text"],
)
def test_a_dead_process_or_an_unusual_exception_is_explained_and_the_next_part_is_scored(
    tmp_path: Path, model: Model, deed: str, found: str, remedy: str
) -> None:
    task = write_trap(tmp_path / "tasks", deed, at=3)
    with pytest.raises(InvalidInput) as caught:
        score(model, task, 0, 10)
    assert found in caught.value.found
    assert remedy in caught.value.remedy
    assert "documents 1 to 10" in caught.value.where
    assert len(documents_of(score(model, task, 10, 20))) == 10


def test_a_failing_function_of_a_task_is_reported_with_its_line(tmp_path: Path, model: Model) -> None:
    task = write_trap(tmp_path / "tasks", "doc['colour']", at=3)
    with pytest.raises(InvalidInput) as caught:
        score_here(model, task, (0, 10))
    assert (caught.value.where, caught.value.found) == (f"{tmp_path}/tasks/prompts.py: line 9", "KeyError: 'colour'")


def test_a_failing_template_of_a_task_is_reported_with_its_file(tmp_path: Path, model: Model) -> None:
    path = write_choices(tmp_path)
    fourth = words(40)[order_documents({"letters": 40}, 0)[3][1]]
    path.write_text(path.read_text().replace("{{word}}", f"{{{{colour if word == '{fourth}' else word}}}}"))
    with pytest.raises(InvalidInput) as caught:
        score_here(model, pin(path), (0, 10))
    assert (caught.value.where, caught.value.found) == (str(path), "UndefinedError: 'colour' is undefined")


@pytest.mark.proof
def test_a_silent_process_is_stopped_without_a_time_limit(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = write_trap(tmp_path / "tasks", "signal.pause()", at=3)
    monkeypatch.setattr(model_process, "_SILENCE_S", 20.0)
    with pytest.raises(Refused, match="no progress for 20 s"):
        score(model, task, 0, 10)


@pytest.mark.story
def test_a_task_has_no_access_to_secrets_network_or_files(tmp_path: Path, model: Model) -> None:
    require_confinement()
    secret = "hf_planted_where_nobody_may_look"
    deed = """
found = {}
def attempt(name, deed):
    try: found[name] = str(deed())
    except BaseException as error: found[name] = type(error).__name__
def above(number): return int(open(f"/proc/{number}/stat").read().rpartition(")")[2].split()[1])
attempt("environment", lambda: dict(os.environ))
ancestor = os.getppid()
while ancestor > 1:
    attempt(f"environment of {ancestor}", lambda: open(f"/proc/{ancestor}/environ").read())
    ancestor = above(ancestor)
attempt("network", lambda: __import__("socket").create_connection(("192.0.2.1", 80), 5))
attempt("merged weights", lambda: open(Path(os.environ["MERGEGATE_HOME"]) / "store" / "merge" / "weights", "a"))
(HERE / "found").write_text(str(found))
"""
    home = directory_of_nobody()
    try:
        task = write_trap(home / "sandbox" / "tasks", deed, at=3)
        (home / "store" / "merge").mkdir(parents=True)
        (home / "store" / "merge" / "weights").touch()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_TOKEN", secret)
            patch.setenv("MERGEGATE_HOME", str(home))
            with in_another_process(flow(model, task), tmp_path) as running:
                out, err = running.communicate(timeout=HANG_S)
        assert (out, err) == ("20\n", "")
        found = ast.literal_eval((home / "sandbox" / "tasks" / "found").read_text())
    finally:
        shutil.rmtree(home)
    assert secret not in str(found)
    assert found.pop("network") == "OSError"
    assert found.pop("merged weights") == "PermissionError"
    assert "OMP_NUM_THREADS" in found.pop("environment")
    assert len(found) >= 3  # the supervisor, the flow and this test
    assert set(found.values()) == {"PermissionError"}


@pytest.mark.story
def test_data_that_are_never_loaded_are_not_waited_for(tmp_path: Path) -> None:
    write_trap(tmp_path, "pass", at=0)
    (tmp_path / "prompts.py").write_text(f"import time\ntime.sleep({LONGER_THAN_HANG_S})\n")
    with pytest.raises(Refused, match="not finished after 2 s"):
        loading.inspect_in_child(pin(tmp_path / "trap.yaml"), 2)


FLOW = """
from mergegate.tasks.models.checkpoints import Model
from mergegate.tasks.quality.evaluation import EvalTask, Scoring
from mergegate.tasks.quality.evaluation.scoring import harness
from mergegate.tasks.quality.evaluation.scoring.harness import ScoringJob
from mergegate.tasks.quality.evaluation.scoring.metrics import documents_of
from mergegate.tasks.quality.evaluation.document_order import DocumentRange
model = Model.model_validate_json({model!r})
task = EvalTask.model_validate_json({task!r})
job = ScoringJob(model, task, Scoring(), DocumentRange(first=0, last=20), "cpu")
print(len(documents_of(harness.score_in_child(job, lambda *_: None))))
"""


def flow(model: Model, task: EvalTask) -> str:
    return FLOW.format(model=model.model_dump_json(), task=task.model_dump_json())


@pytest.mark.story
@pytest.mark.parametrize(
    "hang",
    [pytest.param("signal.pause()", marks=pytest.mark.proof), f"ctypes.PyDLL(None).sleep({LONGER_THAN_HANG_S})"],
    ids=["waiting", "in code that does not let go of the interpreter"],
)
def test_it_dies_with_the_flow_even_when_that_is_killed(
    tmp_path: Path, model: Model, hang: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path))
    deed = f'{SLEEPER}\n(HERE / "told").write_text(str(child.pid))\n{hang}'
    task = write_trap(tmp_path / "sandbox", deed, at=3)
    os.mkfifo(tmp_path / "sandbox" / "told")
    with in_another_process(flow(model, task), tmp_path) as running:
        child = int((tmp_path / "sandbox" / "told").read_text())  # waits until it hangs
        scoring = asked(task)[-1][0]
        supervisor = parent_of(scoring)
        assert not ends(scoring, within=0)
        running.kill()
        assert ends(scoring)
        assert ends(child)
        assert ends(supervisor)
    assert not list(scratch.glob("mergegate-*"))


@pytest.mark.proof
def test_evaluation_works_offline_silently_and_leaves_no_files_or_process(tmp_path: Path, model: Model) -> None:
    """Runs outside any repository, without the test suite's offline switches, and records every name lookup."""
    sandbox = tmp_path / "state" / "sandbox"
    task = write_trap(sandbox / "tasks", "pass", at=0)
    site, home, scratch = (tmp_path / name for name in ("site", "home", "scratch"))
    for directory in (site, home, scratch):
        directory.mkdir()
    (site / "sitecustomize.py").write_text(
        f"""import socket
def note(text):
    with open({str(sandbox / "noted")!r}, "a") as file: file.write(text + "\\n")
def deny(*args, **kwargs):
    note(f"asked for {{args[0]}}"); raise OSError("no network")
socket.getaddrinfo = deny
note("watched")
"""
    )
    switches = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_UPDATE_DOWNLOAD_COUNTS", "HF_HOME", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    environment |= {"HOME": str(home), "TMPDIR": str(scratch), "PREFECT_HOME": str(tmp_path / "prefect")}
    environment["MERGEGATE_HOME"] = str(tmp_path / "state")
    environment["PYTHONPATH"] = os.pathsep.join((str(site), str(PROJECT)))
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": HANG_S, "check": False}
    done = subprocess.run([sys.executable, "-c", flow(model, task)], cwd=home, env=environment, **options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "20\n", "")
    assert ends(asked(task)[-1][0])
    assert (sandbox / "noted").read_text() == "watched\n" * 2  # the flow and the evaluation process
    assert not [path for directory in (home, scratch) for path in directory.rglob("*") if path.is_file()]


@pytest.mark.story
def test_the_scoring_process_imports_only_what_it_needs() -> None:
    """Prefect alone takes as long to import as everything else together."""
    script = (
        "import sys; from mergegate.tasks.quality.evaluation.scoring import harness; "
        "from mergegate.tasks.models.checkpoints import Model, model_cache; "
        "print([name for name in ('prefect', 'torch', 'matplotlib', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
