"""A killed merge resumes to the same bytes, processes share a merge, and inputs must not change until it is sealed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family import LINEAR, merge_text, plan_recipe, random_tensors, save_checkpoint
from patience import HANG_S
from safetensors.torch import save_file
from samples import sampled

from mergegate.merge_core import merge_weights
from mergegate.merge_core.engine import blocks, journal
from mergegate.merge_core.engine.writer import PARTIAL, final_or_partial
from mergegate.merge_core.errors import ChangedInput, InvalidInput
from mergegate.merge_core.plan import Shard

STEPS = """
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
    command = [sys.executable, "-c", KILLER, str(parents), str(Path(__file__).parent), STEPS, str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=parents)
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


@pytest.mark.parametrize("change", ["another merge", "an older engine", "changed inputs", "truncated shards"])
def test_what_another_merge_left_is_not_continued(parents: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    with monkeypatch.context() as older:
        if change == "an older engine":
            older.setattr(journal, "ENGINE", 2)
        interrupted(parents, older)
    text, out = LINEAR, parents / "out"
    match change:
        case "another merge":
            text = LINEAR.replace("weight: 1", "weight: 1, normalize: false")
        case "an older engine":
            for file in out.glob("*.journal.partial"):  # Rename the keys to those of the older engine.
                content = file.read_text()
                assert '"non_finite"' in content or '"tensor"' not in content
                file.write_text(content.replace('"non_finite"', '"broken"').replace('"rms"', '"size"'))
        case "changed inputs":  # Their size and modification time are unchanged.
            for file in (parents / "b").glob("*.safetensors"):
                overwrite(file)
        case "truncated shards":
            for file in out.glob("*.safetensors.partial"):
                file.write_bytes(file.read_bytes()[:-10])
    record = merge_text(text, parents)
    assert record.bytes_resumed == 0
    assert record.files == merge_text(text, parents, "new").files


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


def test_progress_of_a_resumed_merge_starts_where_it_was(parents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(parents, monkeypatch)
    seen: list[int] = []
    plan = plan_recipe(LINEAR, parents)
    record = merge_weights(plan, parents / "out", on_progress=lambda done, _: seen.append(done))
    assert seen[0] >= record.bytes_resumed > 0


# Forks merges into one directory. Each waits at its first write for all the others, so that every one has a shard by
# then. The first ``kills`` of them kill themselves at a randomly chosen write.
TOGETHER = """
import json, multiprocessing, os, random, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from family import merge_text

root, text, count, kills, seed = Path(sys.argv[1]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6])
barrier, draw = multiprocessing.Barrier(count), random.Random(seed)

def participant(number, dies_at):
    writes, pwrite = 0, os.pwrite
    def counted(*args):
        nonlocal writes
        writes += 1
        if writes == 1:
            barrier.wait(float(sys.argv[7]))
        if writes == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return pwrite(*args)
    os.pwrite = counted
    record = merge_text(text, root, kernels="torch", threads=2)
    report = {"files": dict(record.files), "found": record.bytes_resumed, "findings": len(record.findings)}
    (root / f"report{number}.json").write_text(json.dumps(report))

children = []
for number in range(count):
    dies_at = draw.randint(2, 5) if number < kills else 0
    child = os.fork()
    if child == 0:
        try:
            participant(number, dies_at)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    children.append(child)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""


def together(root: Path, count: int, kills: int, seed: int = 0) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the exit codes of all participants and the reports of the successful ones."""
    words = [root, Path(__file__).parent, STEPS, count, kills, seed, HANG_S]
    command = [sys.executable, "-c", TOGETHER, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    assert all(code in (0, -9) for code in codes), done.stderr
    return codes, [json.loads(path.read_text()) for path in sorted(root.glob("report*.json"))]


@pytest.mark.proof
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.proof)])
def test_processes_divide_a_merge_and_all_return_the_same_result(parents: Path, count: int) -> None:
    alone = merge_text(STEPS, parents, "alone", kernels="torch")
    codes, reports = together(parents, count, 0)
    assert codes == [0] * count
    assert all(report["files"] == dict(alone.files) for report in reports)
    assert {path.name for path in (parents / "out").iterdir()} == set(alone.files)
    assert all(report["found"] > 0 for report in reports), "everybody left something to others"
    written = sum(alone.bytes_written - report["found"] for report in reports)
    headers = count * (alone.bytes_written - tensor_bytes())
    assert written - headers == tensor_bytes(), "every tensor was written once"


def tensor_bytes() -> int:
    """Return the bytes of all tensors of the merge and of its intermediate step."""
    base = random_tensors(0)
    return sum(tensor.numel() * (2 + 4) for tensor in base.values())


@pytest.mark.proof
@pytest.mark.parametrize("seed", sampled(range(4), [0], pytest.mark.proof))
def test_the_shards_of_a_killed_participant_are_taken_over(parents: Path, seed: int) -> None:
    alone = merge_text(STEPS, parents, "alone", kernels="torch")
    codes, (report,) = together(parents, 3, 2, seed)
    assert codes == [-9, -9, 0]
    assert report["files"] == dict(alone.files)
    assert {path.name for path in (parents / "out").iterdir()} == set(alone.files)


def test_a_late_participant_learns_that_the_merge_is_complete(parents: Path) -> None:
    merge_text(STEPS, parents, kernels="torch")
    before = {path.name: path.stat().st_mtime_ns for path in (parents / "out").iterdir()}
    with pytest.raises(InvalidInput, match="not empty"):
        merge_text(STEPS, parents, kernels="torch")
    assert {path.name: path.stat().st_mtime_ns for path in (parents / "out").iterdir()} == before


@pytest.mark.parametrize("look", range(1, 5))
def test_a_shard_is_found_while_another_participant_renames_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: int
) -> None:
    """If it were missed, a complete shard would be written again while others already read it."""
    shard, stat, looks = Shard("shard", b"1234", (), (), 4, ()), os.stat, 0
    partial = tmp_path / f"shard{PARTIAL}"
    partial.write_bytes(bytes(shard.size))

    def after_naming(*args: Any, **options: Any) -> os.stat_result:
        nonlocal looks
        looks += 1
        if looks == look:
            partial.rename(tmp_path / "shard")
        return stat(*args, **options)

    monkeypatch.setattr(os, "stat", after_naming)
    assert final_or_partial(tmp_path, shard) is not None


def test_a_file_system_without_locks_serves_one_process(parents: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    alone = merge_text(STEPS, parents, "alone", kernels="torch")
    monkeypatch.setattr(fcntl, "flock", none)
    assert merge_text(STEPS, parents, kernels="torch").files == alone.files


WEIGHTS = "model.safetensors"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    for seed, name in enumerate("ab"):
        save_checkpoint(tmp_path / name, random_tensors(seed))
    return tmp_path


def overwrite(file: Path) -> None:
    """Change bytes of a file in place and restore its modification time."""
    status = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-2, os.SEEK_END)
        opened.write(b"\x01\x02")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(file: Path) -> None:
    another = file.with_name("another")
    another.write_bytes(file.read_bytes())
    another.rename(file)


def exchange(file: Path) -> None:
    file.rename(file.with_name("real"))
    file.symlink_to("real")


CHANGES: dict[str, Callable[[Path], None]] = {
    "overwritten": overwrite,
    "replaced": replace,
    "linked": exchange,
    "truncated": lambda file: os.truncate(file, 100),
    "appended": lambda file: file.open("ab").write(b"x") and None,
    "removed": Path.unlink,
    "touched": Path.touch,  # Without a hash, the engine cannot tell a touched file from a changed one.
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("nth", [1, 9])
def test_an_input_that_changes_while_it_is_read_ends_the_merge(
    pair: Path, change: Callable[[Path], None], nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, original = [0], blocks.read_into

    def reading(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
        reads[0] += 1
        if reads[0] == nth:
            change(pair / "b" / WEIGHTS)
        original(fd, buffer, offset, path)

    monkeypatch.setattr(blocks, "read_into", reading)
    with pytest.raises(ChangedInput) as caught:
        merge_text(LINEAR, pair, threads=1)
    assert str(pair / "b" / WEIGHTS) in caught.value.where
    assert not (pair / "out" / "config.json").exists()
    assert not list((pair / "out").glob("*.safetensors"))
    assert reads[0] >= nth


def test_nothing_is_sealed_if_the_last_check_fails(pair: Path) -> None:
    plan = plan_recipe(LINEAR, pair)

    def say_no() -> None:
        assert not (pair / "out" / "config.json").exists()
        raise ChangedInput("a tokenizer", found="is another")

    with pytest.raises(ChangedInput, match="a tokenizer"):
        merge_weights(plan, pair / "out", before_sealing=say_no)
    assert not (pair / "out" / "config.json").exists()
    assert merge_weights(plan, pair / "out").files == merge_weights(plan, pair / "undisturbed").files
