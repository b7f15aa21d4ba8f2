"""A third-party backend is found by its entry point, here and in the model process, and works like a built-in one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest
from prefect import flow
from pydantic import ValidationError
from tiny_models import CPU, write_choices

from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.checkpoints import Model, end_model_process
from mergegate.tasks.evaluation import Scores, Scoring, evaluate_documents, pin_task
from mergegate.tasks.evaluation.backends import find_backend
from mergegate.tasks.evaluation.backends.registry import added_backends
from mergegate.tasks.store import Artifact

TOY = '''
from contextlib import contextmanager
from mergegate.tasks.evaluation import Backend

@contextmanager
def opened(model, scoring, device):
    """Likes answers that come early in the alphabet, whatever the model."""
    from lm_eval.api.model import LM

    class Alphabet(LM):
        tokenizer = None

        def loglikelihood(self, requests):
            return [(-float(ord(request.args[1])), False) for request in requests]

        def loglikelihood_rolling(self, requests):
            raise NotImplementedError

        def generate_until(self, requests):
            raise NotImplementedError

    assert model.directory.name == "never read"
    yield Alphabet()

BACKEND = Backend("toy", "the alphabet", opened, libraries=("mergegate-toy", "not-installed"))
TAKEN = Backend("vllm", "another one of that name", opened)
NOT_ONE = "toy"
'''


def install(site: Path, version: str = "1.0", entry: str = "toy_backend:BACKEND") -> None:
    """Install a distribution in ``site``, as an installer would."""
    facts = site / "mergegate_toy.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (site / "toy_backend.py").write_text(TOY)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mergegate-toy\nVersion: {version}\n")
    (facts / "entry_points.txt").write_text(f"[mergegate.backends]\ntoy = {entry}\n")
    forget()


def forget() -> None:
    """Drop the toy backend and all import caches, so that the next lookup scans the installed packages again."""
    sys.modules.pop("toy_backend", None)
    invalidate_caches()
    added_backends.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create a site directory that is visible to this process and its children."""
    place = tmp_path / "site"
    place.mkdir()
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH")))))
    end_model_process()  # a process from before would not see the directory
    yield place
    end_model_process()
    monkeypatch.undo()
    forget()


@pytest.mark.story
@pytest.mark.usefixtures("prefect_api", "home")
def test_a_backend_of_another_package_scores_and_its_version_is_in_the_key(tmp_path: Path, site: Path) -> None:
    path = write_choices(tmp_path / "tasks", n=12)
    task = pin_task(path.name, path.parent, HashMemo(tmp_path / "hashes.db"))
    model = Model(name="merge", digest="0" * 64, directory=tmp_path / "never read")
    rows = [json.loads(line) for line in (tmp_path / "tasks" / "data" / "letters.jsonl").read_text().splitlines()]
    right = [row["choices"][row["right"]] == min(row["choices"]) for row in rows]

    @flow
    def run() -> list[Artifact[Scores]]:
        found = []
        for version in ("1.0", "1.0", "1.1"):
            install(site, version)
            found += evaluate_documents(model, task, Scoring(backend="toy"), None, CPU)
        return found

    first, again, newer = run()
    score, sure = first.value.tasks
    assert sure.metric == "prob,none"
    assert (score.task, score.n, score.score) == ("letters", 12, sum(right) / 12)
    assert 0 < score.score < 1
    assert again.key == first.key
    assert newer.key != first.key
    assert newer.value.tasks == first.value.tasks


def test_an_unknown_backend_is_refused_with_all_names(site: Path) -> None:
    install(site)
    with pytest.raises(ValidationError, match="unknown backend 'tpy'; expected: one of hf, vllm, served, toy"):
        Scoring(backend="tpy")
    with pytest.raises(InvalidInput, match="did you mean 'toy'") as caught:
        find_backend("tpy")
    assert caught.value.where == "evaluate.backend"


def test_settings_of_another_backend_are_refused_for_it_too(site: Path) -> None:
    install(site)
    with pytest.raises(ValidationError, match="'vllm' is not a setting of backend: toy"):
        Scoring.model_validate({"backend": "toy", "vllm": {}})


@pytest.mark.parametrize(
    ("entry", "found"),
    [("toy_backend:TAKEN", "the name 'vllm' is taken"), ("toy_backend:NOT_ONE", "not a Backend")],
)
def test_an_invalid_backend_of_another_package_is_refused(site: Path, entry: str, found: str) -> None:
    install(site, entry=entry)
    with pytest.raises(InvalidInput, match=found) as caught:
        find_backend("toy")
    assert "mergegate.backends:toy" in caught.value.where
    assert Scoring(backend="vllm").backend == "vllm"  # built-in backends need no entry point scan
