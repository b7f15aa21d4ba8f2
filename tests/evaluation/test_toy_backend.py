"""A third-party backend is found by its entry point, here and in the model process, and works like a built-in one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from pydantic import ValidationError
from scoring_runs import backend_site, model_in, pin
from tiny_models import CPU, write_choices

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.stage.stages import separate_store
from mergegate.tasks.base.store import Artifact
from mergegate.tasks.quality.evaluation import Scores, Scoring, evaluate_documents
from mergegate.tasks.quality.evaluation.backends import find_backend

TOY = '''
from contextlib import contextmanager
from mergegate.tasks.quality.evaluation import Backend

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

BACKEND = Backend("extra", "the alphabet", opened, libraries=("mergegate-extra", "not-installed"))
TAKEN = Backend("vllm", "another one of that name", opened)
NOT_ONE = "extra"
'''


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Return a function that installs the toy backend."""
    with backend_site(tmp_path / "site") as install_backend:
        yield partial(install_backend, TOY)


@pytest.mark.proof
def test_a_backend_of_another_package_scores_and_its_version_is_in_the_key(
    tmp_path: Path, install: Callable[..., None]
) -> None:
    task = pin(write_choices(tmp_path, n=12))
    model = model_in(tmp_path / "never read", "merge")
    rows = [json.loads(line) for line in (tmp_path / "data" / "letters.jsonl").read_text().splitlines()]
    right = [row["choices"][row["right"]] == min(row["choices"]) for row in rows]
    found: list[Artifact[Scores]] = []
    with separate_store(tmp_path / "state"):
        for version in ("1.0", "1.0", "1.1"):
            install(version)
            found += evaluate_documents(model, task, Scoring(backend="extra"), None, CPU)
    first, again, newer = found
    score, sure = first.value.tasks
    assert sure.metric == "prob,none"
    assert (score.task, score.n, score.score) == ("letters", 12, sum(right) / 12)
    assert 0 < score.score < 1
    assert again.key == first.key
    assert newer.key != first.key
    assert newer.value.tasks == first.value.tasks


def test_an_unknown_backend_or_setting_is_refused_with_all_names(install: Callable[..., None]) -> None:
    install()
    with pytest.raises(ValidationError, match="unknown backend 'extr'; expected: one of hf, vllm, served, extra"):
        Scoring(backend="extr")
    with pytest.raises(InvalidInput, match="did you mean 'extra'") as caught:
        find_backend("extr")
    assert caught.value.where == "evaluate.backend"
    with pytest.raises(ValidationError, match="'vllm' is not a setting of backend: extra"):
        Scoring.model_validate({"backend": "extra", "vllm": {}})


@pytest.mark.parametrize(("entry", "found"), [("TAKEN", "the name 'vllm' is taken"), ("NOT_ONE", "not a Backend")])
def test_an_invalid_backend_of_another_package_is_refused(install: Callable[..., None], entry: str, found: str) -> None:
    install(entry=entry)
    with pytest.raises(InvalidInput, match=found) as caught:
        find_backend("extra")
    assert "mergegate.backends:extra" in caught.value.where
    assert Scoring(backend="vllm").backend == "vllm"  # built-in backends need no entry point scan
