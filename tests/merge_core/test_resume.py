"""A killed merge resumes where it stopped and produces the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from family import merge_text, random_tensors, save_checkpoint
from safetensors.torch import save_file

from mergegate.merge_core import EngineSettings, load_recipe, merge_weights, open_checkpoint, plan_merge
from mergegate.merge_core.engine import journal

TEXT = """
merge_method: dare_ties
base_model: base
models: [{model: a}, {model: first}]
parameters: {weight: 0.6, density: 0.5}
dtype: bfloat16
---
name: first
merge_method: linear
models: [{model: a}, {model: b}]
parameters: {weight: 1}
"""

# Forks merges that kill themselves at a chosen system call, then finishes and reports each of them.
KILLER = """
import json, os, random, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from family import merge_text

root, text, kills = Path(sys.argv[1]), sys.argv[3], int(sys.argv[4])
events, limit = 0, None

def counted(function):
    def call(*args, **kw):
        global events
        events += 1
        if events == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kw)
    return call

os.pwrite, os.write, os.fsync, os.rename = map(counted, (os.pwrite, os.write, os.fsync, os.rename))
Path.rename = counted(Path.rename)
undisturbed = merge_text(text, root, "undisturbed", kernels="torch")
total, found = events, []
draw = random.Random(1)
for number in range(kills):
    limit = draw.randint(1, total)
    child = os.fork()
    if child == 0:
        events = 0
        merge_text(text, root, f"out{number}", kernels="torch")
        os._exit(0)
    died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    events, limit = 0, None
    left = {p.name for p in (root / f"out{number}").iterdir()} if (root / f"out{number}").exists() else set()
    record = merge_text(text, root, f"out{number}", kernels="torch")
    names = {p.relative_to(root / f"out{number}").as_posix() for p in (root / f"out{number}").rglob("*") if p.is_file()}
    same = record.files == undisturbed.files and names == set(record.files)
    found.append({"died": died, "finished": "config.json" in left, "same": same, "resumed": record.bytes_resumed})
print(json.dumps({"undisturbed": undisturbed.bytes_resumed, "written": undisturbed.bytes_written, "found": found}))
"""


@pytest.fixture
def parents(tmp_path: Path) -> Path:
    """Checkpoints in three shards."""
    base = random_tensors(0)
    save_checkpoint(tmp_path / "base", base, shards=3)
    for seed, name in enumerate("ab", start=1):
        save_checkpoint(tmp_path / name, random_tensors(seed, base), shards=3)
    return tmp_path


@pytest.mark.story
@pytest.mark.parametrize("kills", [15, pytest.param(100, marks=pytest.mark.proof)])
def test_a_merge_killed_anywhere_is_resumed_to_the_same_bytes(parents: Path, kills: int) -> None:
    for number, name in enumerate(("base", "a", "b")):
        (parents / name / "modules.json").write_text('[{"path": "", "type": "T"}, {"path": "2_Dense", "type": "D"}]')
        (parents / name / "2_Dense").mkdir()
        save_file({"linear.weight": torch.full((3, 5), number + 1.0)}, parents / name / "2_Dense/model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(parents), str(Path(__file__).parent), TEXT, str(kills)],
        capture_output=True,
        text=True,
        check=False,
        cwd=parents,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["undisturbed"] == 0
    assert all(run["died"] for run in report["found"])
    assert all(run["same"] for run in report["found"])
    resumed = [run["resumed"] for run in report["found"]]
    assert sum(size > 0 for size in resumed) > kills / 2, "most kills come after the first finished tensor"


def interrupted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave an unfinished merge of ``a`` and ``b`` in ``out``, by failing the flush of its last shard."""
    synced = 0

    def failing(fd: int, fsync=os.fsync) -> None:  # type: ignore[no-untyped-def]
        nonlocal synced
        synced += 1
        if synced == 3:
            raise OSError(5, "Input/output error")
        fsync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(Exception, match="Input/output error"):
            merge_text(LINEAR, root)


LINEAR = "merge_method: linear\nmodels: [{model: a}, {model: b}]\nparameters: {weight: 1}\n"


def test_a_journal_of_another_merge_is_not_continued(parents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(parents, monkeypatch)
    other = merge_text(LINEAR.replace("weight: 1", "weight: 1, normalize: false"), parents)
    assert other.bytes_resumed == 0
    assert other.files == merge_text(LINEAR.replace("weight: 1", "weight: 1, normalize: false"), parents, "new").files


def test_the_journal_of_an_older_engine_is_not_continued(parents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.setattr(journal, "ENGINE", 2)
        interrupted(parents, older)
    for file in (parents / "out").glob("*.journal.partial"):  # Rename the keys to those of the older engine.
        text = file.read_text()
        assert '"non_finite"' in text or '"tensor"' not in text
        file.write_text(text.replace('"non_finite"', '"broken"').replace('"rms"', '"size"'))
    record = merge_text(LINEAR, parents)
    assert record.bytes_resumed == 0
    assert record.files == merge_text(LINEAR, parents, "new").files


def test_a_changed_input_restarts_the_merge(parents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(parents, monkeypatch)
    for file in (parents / "b").glob("*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-2] ^= 1
        file.write_bytes(content)
    record = merge_text(LINEAR, parents)
    assert record.bytes_resumed == 0
    assert record.files == merge_text(LINEAR, parents, "new").files


def test_after_a_machine_crash_only_flushed_shards_are_resumed(parents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(parents, monkeypatch)
    journals = {path.name: path.read_text() for path in (parents / "out").glob("*.journal.partial")}
    flushed = {name.removesuffix(".journal.partial") for name, text in journals.items() if "sha256" in text}
    assert len(flushed) == 2
    monkeypatch.setattr(journal, "boot_id", lambda: "another")
    for file in (parents / "out").glob("*.safetensors.partial"):  # After a crash, unflushed data is arbitrary.
        if file.name.removesuffix(".partial") not in flushed:
            file.write_bytes(bytes(file.stat().st_size))
    record = merge_text(LINEAR, parents)
    assert 0 < record.bytes_resumed < record.bytes_written
    monkeypatch.undo()
    assert record.files == merge_text(LINEAR, parents, "new").files


def test_a_truncated_shard_of_an_interrupted_merge_is_written_again(
    parents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(parents, monkeypatch)
    for file in (parents / "out").glob("*.safetensors.partial"):
        file.write_bytes(file.read_bytes()[:-10])
    record = merge_text(LINEAR, parents)
    assert record.bytes_resumed == 0
    assert record.files == merge_text(LINEAR, parents, "new").files


def test_progress_of_a_resumed_merge_starts_where_it_was(parents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(parents, monkeypatch)
    recipe = load_recipe(LINEAR)
    plan = plan_merge(recipe, {str(ref): open_checkpoint(parents / ref.path) for ref in recipe.references()})
    seen: list[int] = []
    record = merge_weights(
        plan, parents / "out", on_progress=lambda done, _: seen.append(done), settings=EngineSettings()
    )
    assert seen[0] >= record.bytes_resumed > 0
