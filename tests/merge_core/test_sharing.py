"""Several processes that merge into one directory share the work, and the others finish if one dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from family import merge_text, random_tensors, save_checkpoint
from patience import HANG_S
from samples import sampled

from mergegate.merge_core.engine import journal
from mergegate.merge_core.engine.writer import PARTIAL, final_or_partial
from mergegate.merge_core.errors import InvalidInput
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


@pytest.fixture
def parents(tmp_path: Path) -> Path:
    """Checkpoints in three shards."""
    base = random_tensors(0)
    save_checkpoint(tmp_path / "base", base, shards=3)
    for seed, name in enumerate("ab", start=1):
        save_checkpoint(tmp_path / name, random_tensors(seed, base), shards=3)
    return tmp_path


def together(root: Path, count: int, kills: int, seed: int = 0) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the exit codes of all participants and the reports of the successful ones."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            TOGETHER,
            str(root),
            str(Path(__file__).parent),
            STEPS,
            str(count),
            str(kills),
            str(seed),
            str(HANG_S),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    assert all(code in (0, -9) for code in codes), done.stderr
    return codes, [json.loads(path.read_text()) for path in sorted(root.glob("report*.json"))]


@pytest.mark.story
@pytest.mark.parametrize("count", sampled([2, 3], [2]))
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


@pytest.mark.story
@pytest.mark.parametrize("seed", sampled(range(4), [0], pytest.mark.proof))
def test_the_shards_of_a_killed_participant_are_taken_over(parents: Path, seed: int) -> None:
    alone = merge_text(STEPS, parents, "alone", kernels="torch")
    codes, (report,) = together(parents, 3, 2, seed)
    assert codes == [-9, -9, 0]
    assert report["files"] == dict(alone.files)
    assert {path.name for path in (parents / "out").iterdir()} == set(alone.files)


@pytest.mark.story
def test_when_all_are_killed_the_next_one_resumes(parents: Path) -> None:
    alone = merge_text(STEPS, parents, "alone", kernels="torch")
    codes, reports = together(parents, 2, 2)
    assert (codes, reports) == ([-9, -9], [])
    assert journal.exists(parents / "out")
    assert not (parents / "out/config.json").exists()
    assert merge_text(STEPS, parents, kernels="torch").files == alone.files


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
    import errno
    import fcntl

    def none(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    alone = merge_text(STEPS, parents, "alone", kernels="torch")
    monkeypatch.setattr(fcntl, "flock", none)
    assert merge_text(STEPS, parents, kernels="torch").files == alone.files
