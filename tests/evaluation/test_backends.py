"""All backends produce the same scores, or report clearly that they cannot."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_server import serving
from pydantic import ValidationError
from samples import sampled_rows
from scoring_runs import pin, quiet, score, scoring_job, without_probability
from tiny_models import Prefix, make_model, write_choices

from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.store.manifest import digest
from mergegate.tasks.models.checkpoints import end_model_process
from mergegate.tasks.models.checkpoints.model import Model
from mergegate.tasks.models.checkpoints.model_cache import unload_models
from mergegate.tasks.quality.evaluation.backends import vllm
from mergegate.tasks.quality.evaluation.backends.server import ModelEndpoint, ServerSettings
from mergegate.tasks.quality.evaluation.definitions.task import EvalTask
from mergegate.tasks.quality.evaluation.scoring import harness
from mergegate.tasks.quality.evaluation.scoring.document_scores import DocumentScore
from mergegate.tasks.quality.evaluation.scoring.harness import score_documents
from mergegate.tasks.quality.evaluation.settings import Scoring


@pytest.fixture(autouse=True)
def nothing_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(vllm, "_engine", None)
    yield
    unload_models()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("models") / "merge")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> EvalTask:
    return pin(write_choices(tmp_path_factory.mktemp("tasks")))


def outcomes_by(model: Model, task: EvalTask, **scoring: object) -> tuple[DocumentScore, ...]:
    """Return the scores under lm-eval's metrics, which are equal; the likelihoods differ in the last digits."""
    return without_probability(score(model, task, (0, 40), **scoring))


def heard(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[float, bool]]]:
    """Record the answers of lm-eval's models to likelihood requests, one list per run."""
    from lm_eval.api.model import TemplateLM

    runs: list[list[tuple[float, bool]]] = []
    original = TemplateLM.loglikelihood

    def listen(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(list(original(self, *args, **kwargs)))
        return runs[-1]

    monkeypatch.setattr(TemplateLM, "loglikelihood", listen)
    return runs


@pytest.mark.story
@pytest.mark.parametrize("prefix", ["bos added by the tokenizer", "eos only"])
def test_a_served_model_scores_as_it_does_here(
    tmp_path: Path, task: EvalTask, monkeypatch: pytest.MonkeyPatch, prefix: Prefix
) -> None:
    model, runs = make_model(tmp_path / "merge", prefix=prefix), heard(monkeypatch)
    here = outcomes_by(model, task)
    with serving({"merge": model}) as server:
        there = outcomes_by(model, task, backend="served", server={"url": server.url})
    assert there == here
    assert 0 < sum(o.outcome for o in here if o.metric == "acc,none") < 40
    assert [loglik for loglik, _ in runs[1]] == pytest.approx([loglik for loglik, _ in runs[0]], abs=1e-4)
    assert [greedy for _, greedy in runs[1]] == [greedy for _, greedy in runs[0]]


@pytest.mark.story
def test_a_server_receives_its_own_model_name_and_tokens(model: Model, task: EvalTask) -> None:
    told: list[tuple[int, int]] = []
    with serving({"acme/merge-7": model}) as server:
        endpoint = {"url": f"{server.url}/completions", "model": "acme/merge-7"}
        job = scoring_job(model, task, backend="served", server={"models": {"merge": endpoint}}, batch_size=4)
        score_documents(job, lambda *how_far: told.append(how_far))
    assert {body["model"] for body in server.bodies} == {"acme/merge-7"}
    assert all(isinstance(token, int) for body in server.bodies for prompt in body["prompt"] for token in prompt)
    # Prompts begin with one BOS token, not two, although the tokenizer adds its own.
    assert all(prompt[0] == 1 != prompt[1] for body in server.bodies for prompt in body["prompt"])
    assert told[-1] == (20, 20)  # 80 choices in batches of 4


FAULTS = [
    ("no echo", "merge", "log-probabilities of 1 tokens", "backend: hf"),
    ("zeros", "merge", "all 0", "backend: hf"),
    ("begin of text added", "merge", "one more", "backend: hf"),
    ("", "other", "404", "evaluate.server.models: {merge: …}"),
    ("no log-probabilities", "merge", "without log-probabilities", "backend: hf"),
    ("not JSON", "merge", "without log-probabilities", "backend: hf"),
    ("gives up", "merge", "the server stopped answering", ""),
]


@pytest.mark.parametrize(("fault", "name", "found", "remedy"), sampled_rows(FAULTS, FAULTS[:4]))
def test_a_server_that_does_not_score_prompts_is_refused(
    model: Model, task: EvalTask, monkeypatch: pytest.MonkeyPatch, fault: str, name: str, found: str, remedy: str
) -> None:
    from lm_eval.models import api_models
    from tenacity import wait_none

    monkeypatch.setattr(api_models, "wait_exponential", lambda **_: wait_none())
    with serving({name: model}, fault) as server, pytest.raises(InvalidInput, match=found) as caught:
        outcomes_by(model, task, backend="served", server={"url": server.url})
    assert remedy in caught.value.remedy


def test_an_unreachable_server_is_refused(model: Model, task: EvalTask) -> None:
    with serving({"merge": model}) as server:
        pass
    with pytest.raises(InvalidInput, match="cannot be reached"):
        outcomes_by(model, task, backend="served", server={"url": server.url})


@pytest.mark.story
def test_the_scoring_process_reaches_servers(model: Model, task: EvalTask) -> None:
    with serving({"merge": model}) as server:
        job = scoring_job(model, task, (0, 40), backend="served", server={"url": server.url})
        there = harness.score_in_child(job, quiet)
    end_model_process()
    assert without_probability(there) == outcomes_by(model, task)


def test_an_address_applies_to_one_model_or_to_all() -> None:
    settings = ServerSettings.model_validate(
        {"url": "http://a/v1", "models": {"base": "b", "merge": {"url": "http://c/v1", "model": "d"}}}
    )
    assert settings.at("base") == ModelEndpoint(url="http://a/v1", model="b")
    assert settings.at("merge") == ModelEndpoint(url="http://c/v1", model="d")
    assert settings.at("other") == ModelEndpoint(url="http://a/v1", model="other")
    with pytest.raises(InvalidInput, match="no address for 'other'"):
        ServerSettings(models={"base": "b"}).at("other")


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend": "served"}, {"backend": "hf", "server": {"url": "http://a"}},
        {"backend": "served", "server": {"url": "a:80"}}, {"backend": "hf", "vllm": {}},
        {"backend": "vllm", "vllm": {"gpu_memory_utilization": 1.5}},
        {"backend": "vllm", "vllm": {"tensor_parallel_size": 0}}, {"backend": "hugging"}, {"time_limit": 0},
    ],
)  # fmt: skip
def test_settings_that_do_not_belong_to_the_backend_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Scoring.model_validate(wrong)


def test_only_what_moves_scores_is_in_the_key() -> None:
    def key(**scoring: object) -> str:
        return digest(Scoring.model_validate(scoring))

    served = {"backend": "served", "server": {"url": "http://a/v1"}}
    assert key(**served) == key(**served | {"server": {"url": "http://b/v1", "concurrency": 3}, "time_limit": 5})
    assert key(backend="vllm", vllm={"gpu_memory_utilization": 0.5}) == key(backend="vllm", vllm={})
    different = [{}, served, {"backend": "vllm"}, {"backend": "vllm", "vllm": {"tensor_parallel_size": 2}}]
    different += [{"batch_size": 1}, {"dtype": "bfloat16"}, {"max_length": 512}, {"num_fewshot": 2}]
    different += [{"chat_template": True}, {"seed": 1}]
    assert len({key(**scoring) for scoring in different}) == len(different)


def install_vllm(monkeypatch: pytest.MonkeyPatch, engine: type) -> None:
    module = types.ModuleType("lm_eval.models.vllm_causallms")
    module.VLLM = engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.story
def test_vllm_receives_the_settings_of_the_profile(
    model: Model, task: EvalTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.models.huggingface import HFLM

    here, given = outcomes_by(model, task), list[dict[str, Any]]()

    class VLLM(HFLM):
        def __init__(self, **arguments: Any) -> None:
            given.append(arguments)
            super().__init__(pretrained=arguments["pretrained"], device="cpu", batch_size=arguments["batch_size"])

    install_vllm(monkeypatch, VLLM)
    asked = {"backend": "vllm", "dtype": "bfloat16", "max_length": 48, "vllm": {"tensor_parallel_size": 2}}
    there = outcomes_by(model, task, **asked)
    outcomes_by(model, task, **asked)
    assert there == here
    engine = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.8, "trust_remote_code": False}
    expected = {"pretrained": str(model.directory), "dtype": "bfloat16", "max_length": 48, "batch_size": 16, **engine}
    assert given == [expected]  # once, because the engine is reused


def test_an_engine_that_does_not_start_is_explained(
    model: Model, task: EvalTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    class VLLM:
        def __init__(self, **arguments: Any) -> None:
            raise ValueError("No available memory for the cache blocks")

    install_vllm(monkeypatch, VLLM)
    with pytest.raises(InvalidInput, match="No available memory") as caught:
        outcomes_by(model, task, backend="vllm")
    assert "gpu_memory_utilization" in caught.value.remedy


def test_without_vllm_the_remedy_is_named(model: Model, task: EvalTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # even if it is installed
    monkeypatch.delitem(sys.modules, "lm_eval.models.vllm_causallms", raising=False)
    with pytest.raises(InvalidInput, match="vLLM cannot be imported here") as caught:
        outcomes_by(model, task, backend="vllm")
    assert "backend: served" in caught.value.remedy
