"""The real vLLM, in a separate environment (``make test-serve``), with broken variants of the demo's merge."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_kinds import PICTURE_SIZE, letter_tokenizer
from variants import DEMO, PROJECT, model_in, real_server, zeroed_norm

from mergegate.flows.profile import load_profile
from mergegate.tasks.quality.serve import launch as serve_launch
from mergegate.tasks.quality.serve.launch import PYTHON, find_server
from mergegate.tasks.quality.serve.settings import ServeSettings
from mergegate.tasks.quality.serve.stage import SmokeSetup, smoke_checkpoint
from mergegate.tasks.quality.serve.verdict import ServeVerdict

sys.path.append(str(PROJECT / "tests" / "flows"))

from demo_project import Project, make_project  # Shared with the flow tests.

pytestmark = real_server

torch.set_num_threads(1)

SERVED = load_profile(DEMO.parent / "demo-served.yaml").serve
assert SERVED is not None
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SETTINGS = SERVED.model_copy(update={"python": PROJECT / PYTHON, "environment": ONE_THREAD})


# vLLM starts with uninitialized memory: ordinary numbers, or values that JSON cannot represent.
# Broken as in ``STATIC``. Each check that detects the fault in the running server is mapped to a part of its message.
def smoke(checkpoint: Path, log: Path) -> ServeVerdict:
    server = find_server(SETTINGS, PROJECT)
    return smoke_checkpoint(model_in(checkpoint), SETTINGS, SmokeSetup(server, "cpu", log))


def failures(verdict: ServeVerdict) -> dict[str, str]:
    """Return what each failed check has seen."""
    return {check.name: check.seen for check in verdict.failures}


@pytest.mark.proof
def test_a_merge_with_a_zeroed_norm_is_refused_for_empty_answers(merge: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(merge, tmp_path / "zeroed")
    zeroed_norm(broken)
    verdict = smoke(broken, tmp_path / "server.log")
    seen = failures(verdict)
    assert seen["text"] == "nothing after 4 of 4 prompts"
    assert seen["no loop"] == "4 of 4; 100 % at most"


def test_imports_of_a_server_are_compiled_before_it_starts() -> None:
    """A confined server cannot store compiled bytecode; compiling took half of the time until it was ready."""
    serve_launch.compile_server(find_server(SETTINGS, PROJECT))
    package = next((PROJECT / PYTHON).parent.parent.glob("lib/python*/site-packages/vllm"))
    for source in ("v1/engine/core", "v1/worker/cpu_worker", "entrypoints/openai/api_server"):
        place = package / source
        assert list(place.parent.glob(f"__pycache__/{place.name}.*.pyc")), source


def write_idefics(directory: Path) -> Path:
    """Write a tiny Idefics 3, the family of SmolVLM.

    Without torchvision, vLLM 0.32 on a CPU cannot import the classes of LLaVA, Gemma 3, Qwen2-VL, InternVL, Mistral 3
    and PaliGemma.
    """
    torch.manual_seed(1)
    tokenizer = letter_tokenizer()
    markers = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "model_type": "llama", "head_dim": 32, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    text |= {"max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    parts = {"text_config": {**text, "initializer_range": 0.2}}
    parts |= {"vision_config": {**sizes, "image_size": PICTURE_SIZE, "patch_size": 14}}
    config = transformers.Idefics3Config(**parts, image_token_id=5, scale_factor=2, pad_token_id=0)
    network = transformers.Idefics3ForConditionalGeneration(config)
    network.generation_config.eos_token_id = [2, 9]
    edge = {"longest_edge": PICTURE_SIZE}
    images = transformers.Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    template = tokenizer.chat_template
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    for part in (network, processor, tokenizer):
        part.save_pretrained(str(directory))
    return directory


@pytest.mark.proof
def test_vllm_reads_two_pictures(tmp_path: Path) -> None:
    texts = {"prompts": ("two cats sit", "a dog runs away"), "texts": ("two cats sit on a mat",), "max_tokens": 8}
    settings = ServeSettings(python=PROJECT / PYTHON, environment=ONE_THREAD, max_model_len=512, **texts)
    setup = SmokeSetup(find_server(settings, PROJECT), "cpu", tmp_path / "server.log")
    verdict = smoke_checkpoint(model_in(write_idefics(tmp_path / "idefics")), settings, setup)
    outcomes = {check.name: check.outcome for check in verdict.checks}
    assert outcomes["two pictures"] == outcomes["parity"] == "pass", verdict.failures
    assert verdict.outcome == "pass", verdict.failures


# Releases: each is served once for all runs.

# The report mentions some names several times; each is listed here once.
RELEASED = (
    *("tensors", "vocabulary", "finite weights", "ready", "finite logprobs", "text", "greedy twice", "no loop"),
    *("parity", "tokenizer", "chat", "chat template", "end of sequence", "stops", "over-long prompt", "throughput"),
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> tuple[Project, str, dict[str, Any]]:
    """Return a project, the name of its profile, and the output of its first run."""
    project = make_project(tmp_path_factory.mktemp("served"))
    profile = project.edit("demo-served.yaml", "serve:\n", f"serve:\n  python: {PROJECT / PYTHON}\n")
    result = project.mergegate("run", profile, "--json")
    assert result.exit_code == 0, result.output
    return project, profile, json.loads(result.stdout)


Served = tuple[Project, str, dict[str, Any]]


def test_the_demo_passes_every_check_and_is_released(served: Served) -> None:
    project, _, outcome = served
    assert outcome["status"] == "released"
    checks = {check["name"]: check["outcome"] for check in outcome["content"]["served"]}
    assert checks == dict.fromkeys(RELEASED, "pass")
    page = Path(outcome["report"]).read_text()
    assert re.search(r"Served by vllm(-cpu)? \d", page)
    assert [name for name in RELEASED if f">{name}<" not in page] == []
    assert (project.root / "releases" / "edited-demo-served" / "latest" / "model.safetensors").is_file()


def test_a_second_run_starts_no_server(served: Served) -> None:
    project, profile, _ = served
    (before,) = project.artifacts("serve")
    log = project.home / "store" / "serve" / before / "server.log"
    written = log.stat().st_mtime_ns
    result = project.mergegate("run", profile)
    assert result.exit_code == 0, result.output
    assert "nothing new" in result.output
    assert re.search(r"= serve\b", result.output)
    assert project.artifacts("serve") == {before}
    assert log.stat().st_mtime_ns == written
