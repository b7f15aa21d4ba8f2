"""Third-party code of every kind reads only what it works on and writes only to its scratch directories."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confined_here import directory_of_nobody, require_confinement

from mergegate.merge_core.checkpoint import open_checkpoint
from mergegate.merge_core.files import HashMemo
from mergegate.tasks.base.sandbox import ProcessOptions, SupervisedProcess, programs
from mergegate.tasks.models.checkpoints import (
    PinnedCheckpoint,
    ResolvedCheckpoint,
    call_model_process,
    model_process,
    pin_checkpoints,
    project_access,
)
from mergegate.tasks.models.llama_cpp import client
from mergegate.tasks.quality.evaluation import pin_task
from mergegate.tasks.quality.serve import ServeSettings
from mergegate.tasks.quality.serve import process as served
from mergegate.tasks.quality.serve.launch import ServerVersion, launch
from mergegate.tasks.quality.serve.process import ServerProcess
from mergegate.tasks.quality.variants import compressed_tensors, gguf_conversion

DEMO = Path(__file__).parents[2] / "profiles" / "demo"
# Files with secrets: of the project, of its user, and next to each file that third-party code may read.
PLANTED = (
    *("release.key", ".env", ".env.local", "trust.json", "docker/config.json", "netrc", "kube/config", "profile.yaml"),
    *(
        "releases/r/README.md",
        "state/prefect/prefect.db",
        "state/reports/r.html",
        "models/base/.env",
        "models/base/id_rsa",
    ),
    *("models/base/credentials.yaml", "tasks/.env", "tasks/notes.txt", "data/secret.jsonl"),
    *("home/.ssh/id_ed25519", "home/.aws/credentials", "home/.docker/config.json", "home/.netrc", "home/.kube/config"),
    *(
        "home/.gitconfig",
        "home/.config/gh/hosts.yml",
        "home/.cache/huggingface/token",
        "home/.local/share/keyrings/login",
    ),
    *("home/.azure/token", "home/bin/key", "home/project2/.env", "usr/src/app/.env"),
)
# Prints the files that it can read and the directories that it can write a byte to, below its argument.
PROBE = """
import json, os, sys
readable, writable = [], []
for place, _, names in os.walk(sys.argv[1]):
    for name in names:
        path = os.path.join(place, name)
        try:
            with open(path, "rb") as file: file.read(1)
            readable.append(path)
        except OSError: pass
        try:
            with open(path, "ab") as file: file.write(b"x")
            writable.append(path)
        except OSError: pass
for place in [place for place, _, _ in os.walk(sys.argv[1])] + sys.argv[2:]:
    try:
        with open(os.path.join(place, "new"), "wb") as file: file.write(b"x")
        os.unlink(os.path.join(place, "new"))
        writable.append(place)
    except OSError: pass
print("FOUND", json.dumps([readable, writable]))
"""


SANDBOX_OF_THE_PRODUCT = project_access.sandbox_directory


class Probed(Exception):
    """The probe ran instead of the program. The arguments are the files that it read, and the places that it wrote."""


def probing(root: Path) -> type:
    """Return a stand-in for the class of supervised processes, which runs the probe in the same confinement."""

    class Probe:
        def __init__(self, command: Any, environment: Any, output: Any, options: ProcessOptions) -> None:
            places = [str(root), "/tmp", "/var/tmp", "/dev", str(Path(__file__).parent), sys.prefix]
            with tempfile.TemporaryFile() as said:
                alone = ProcessOptions(options.name, confinement=options.confinement)
                process = SupervisedProcess([sys.executable, "-I", "-c", PROBE, *places], environment, said, alone)
                assert process.unconfined == ()
                process.wait()
                said.seek(0)
                text = said.read().decode()
            raise Probed(*json.loads(text.partition("FOUND ")[2]))

    return Probe


def evaluate(root: Path) -> None:
    task, model = pin_task("tasks/copy.yaml", root, HashMemo(root / "hashes.db")), model_in(root)
    call_model_process(len, (model, task), location="here", models=[model])


def serve(root: Path) -> None:
    settings = ServeSettings(command=(sys.executable, "-m", "server", "{model}", "{port}"))
    command = launch(settings, ServerVersion(label="server"), open_checkpoint(root / "models" / "base"))
    ServerProcess(command, root / "log", settings).__enter__()


def quantize(root: Path) -> None:
    quantizer = compressed_tensors.Quantizer(python=Path(sys.executable), versions={})
    compressed_tensors._run(quantizer, model_in(root), {}, root / "out", "here")


def convert(root: Path) -> None:
    tools = gguf_conversion.GgufTools(python=Path(sys.executable), versions={})
    gguf_conversion._run_converter(model_in(root), root / "models" / "base", root / "out" / "file", "name", tools)


def load_gguf(root: Path) -> None:
    client._Process((root / "models" / "base" / "model.safetensors",), Path(sys.executable))


def run_generated_program(root: Path) -> None:
    programs.run_program("pass", programs.ProgramLimits())


def model_in(root: Path) -> PinnedCheckpoint:
    located = ResolvedCheckpoint(name="base", ref="base", directory=root / "models" / "base")
    return pin_checkpoints([located], HashMemo(root / "hashes.db"))[0]


WEIGHTS = {"models/base/model.safetensors"}
MODEL = WEIGHTS | {f"models/base/{path.name}" for path in (DEMO / "models" / "base").glob("*.j*")}
# Each caller, what it may read of the project, and where it may write.
CALLERS: list[tuple[Callable[[Path], None], Any, set[str], set[str]]] = [
    (evaluate, model_process, MODEL | {"tasks/copy.yaml", "data/copy.jsonl"}, {"state/sandbox"}),
    (serve, served, MODEL, {"state/sandbox"}),
    (quantize, compressed_tensors, MODEL, {"state/sandbox", "out"}),
    (convert, gguf_conversion, MODEL, {"state/sandbox", "out"}),
    (load_gguf, client, WEIGHTS, {"state/sandbox"}),
    (run_generated_program, programs, set(), set()),
]


@pytest.fixture
def root(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the directory of a project with secrets, below ``/tmp`` or below a home directory."""
    require_confinement()
    outside = directory_of_nobody()
    root = (tmp_path if place == "/tmp" else outside / "home") / "project"
    shutil.copytree(DEMO / "models" / "base", root / "models" / "base")
    shutil.copytree(DEMO / "tasks", root / "tasks")
    for name in ("data", "out", "state/store/merge/m"):
        (root / name).mkdir(parents=True)
    shutil.copy(DEMO / "data" / "copy.jsonl", root / "data")
    for name in (*PLANTED, "state/store/merge/m/value.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("canary")
    monkeypatch.setenv("HOME", str(root / "home"))
    monkeypatch.setenv("MERGEGATE_HOME", str(root / "state"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(root / "home/.aws/credentials"))
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setattr(gguf_conversion.GgufTools, "converter", DEMO / "server.py")
    for module in (project_access, model_process):  # as in the product; other tests share a sandbox
        monkeypatch.setattr(module, "sandbox_directory", SANDBOX_OF_THE_PRODUCT)
        monkeypatch.setattr(module, "expected_files", set())
    model_process.end_model_process()
    yield root
    shutil.rmtree(outside)


@pytest.mark.parametrize("place", ["/tmp", pytest.param("home", marks=pytest.mark.story)])
@pytest.mark.parametrize(("call", "module", "read", "written"), CALLERS, ids=[call.__name__ for call, *_ in CALLERS])
def test_third_party_code_reads_its_inputs_only_and_writes_to_its_scratch_directories(
    root: Path, call: Any, module: Any, read: set[str], written: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SupervisedProcess", probing(root))
    with pytest.raises(Probed) as probed:
        call(root)
    readable, writable = ({os.path.relpath(path, root) for path in found} for found in probed.value.args)
    scratch = {path for path in readable if path.startswith(tuple(written))}
    assert readable - scratch == read | ({"state/store/merge/m/value.json"} if read else set())
    assert {path for path in writable if not writable & {str(above) for above in Path(path).parents}} == written
    assert "canary" in (root / "release.key").read_text()
