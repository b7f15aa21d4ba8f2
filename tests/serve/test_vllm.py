"""The real vLLM, in an environment of its own (``make test-serve``): a good merge passes, a broken one does not.

What headers and configuration give away is refused before vLLM is started (``test_static_checks``), because vLLM starts
with most of it; so only two servers have to be.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from served_family import merged
from traces import MARK, Traces, flow
from variants import STATIC, model_in, zeroed_norm

from merge_core.checkpoint import open_checkpoint
from tasks.serve.launch import PYTHON, Launch, find_server, launch
from tasks.serve.settings import ServeSettings
from tasks.serve.smoke import smoke_checkpoint
from tasks.serve.verdict import Check, ServeVerdict

PROJECT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.serve,
    # Its environment takes minutes to make; where it is asked for, its absence is a failure and no excuse.
    pytest.mark.skipif(
        not (PROJECT / PYTHON).exists() and "MERGEGATE_REQUIRE_VLLM" not in os.environ, reason="make serve-env first"
    ),
]

torch.set_num_threads(1)

SETTINGS = ServeSettings(
    python=PYTHON,
    prompts=("abcd", "copy: abcd>", "the old ", "the red cat "),
    texts=("the old pig sees the red cat.", "copy: hgfe>hgfe"),
    stops=("the wet dog sees the ",),
    max_tokens=48,
    min_tokens_per_second=1,
    chat=True,
    environment={"OMP_NUM_THREADS": "1"},
)


@pytest.fixture(scope="module")
def merge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merged(tmp_path_factory.mktemp("family"))


def smoke(checkpoint: Path, log: Path) -> ServeVerdict:
    server = find_server(SETTINGS, PROJECT)
    return smoke_checkpoint(model_in(checkpoint), SETTINGS, server, device="cpu", log=log)


def test_a_good_merge_passes_every_check(merge: Path, tmp_path: Path) -> None:
    verdict = smoke(merge, tmp_path / "server.log")
    assert {check.name: check.outcome for check in verdict.checks} == dict.fromkeys(
        (
            *("tensors", "vocabulary", "finite weights", "ready", "finite logprobs", "text", "greedy twice", "no loop"),
            *("parity", "tokenizer", "chat", "chat template", "end of sequence", "stops", "over-long prompt"),
            "throughput",
        ),
        "pass",
    ), "\n".join(str(check) for check in verdict.checks)
    assert verdict.server.startswith("vllm")
    measured = verdict.measured
    assert measured.seconds_to_ready is not None
    assert measured.peak_memory is not None
    assert measured.peak_memory > 500e6


def test_a_merge_with_a_zeroed_norm_is_refused_for_its_silence(merge: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(merge, tmp_path / "zeroed")
    zeroed_norm(broken)
    verdict = smoke(broken, tmp_path / "server.log")
    assert verdict.outcome == "fail"
    found: Check = verdict.failures[0]
    assert (found.name, found.seen) == ("text", "nothing after 4 of 4 prompts")
    assert "no loop" in {check.name for check in verdict.failures}


def test_nothing_of_vllm_survives_a_flow_that_is_killed(merge: Path, tmp_path: Path, traces: Traces) -> None:
    called = launch(SETTINGS, find_server(SETTINGS, PROJECT), open_checkpoint(merge))
    marked = Launch(called.command, {**called.environment, MARK: traces.mark})
    with flow(tmp_path / "log", traces, marked) as parent:
        traces.wait_for(3)  # server, engine and worker, or what helps them to start
        parent.kill()
        parent.wait()
        assert traces.wait_until_gone(60) == []
    assert traces.files() == []


@pytest.mark.parametrize("variant", STATIC)
def test_what_vllm_would_start_with_is_refused_before_it_is_started(merge: Path, tmp_path: Path, variant: str) -> None:
    breaks, name, _ = STATIC[variant]
    broken = shutil.copytree(merge, tmp_path / "broken")
    breaks(broken)
    verdict = smoke(broken, tmp_path / "server.log")
    assert [check.name for check in verdict.failures] == [name]
    assert not (tmp_path / "server.log").exists()
