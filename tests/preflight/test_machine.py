"""A preflight check reports the resources that a machine lacks, on given numbers and on the real machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mergegate.merge_core.errors import Finding
from mergegate.merge_core.system import Capacity, control_group, control_groups, system_memory
from mergegate.tasks.preflight.compatibility import Compatibility
from mergegate.tasks.preflight.machine import Disk, Machine, machine_findings, measure_machine_capacity

GB = 10**9
JOB = Compatibility(
    remarks=(),
    tensors=10,
    bytes_read=6 * GB,
    bytes_written=2 * GB,
    disk=2 * GB,
    block=1 << 23,
    gpu_block=1 << 26,
    largest_bytes=2 * GB,
    largest_parameters=GB,
)
ROOM = Disk(Path("/state"), 100 * GB, {"the merged checkpoint": 2 * GB})
MUCH = Capacity(64 * GB, 60 * GB)


def found(
    *, disks: tuple[Disk, ...] = (ROOM,), memory: Capacity | None = MUCH, gpu: Capacity | None = None, dtypes: str = ""
) -> list[tuple[str, str]]:
    device = "cuda:0" if gpu else "cpu"
    there = Machine(cores=8, disks=disks, memory=memory, gpu=gpu)
    remarks = machine_findings(JOB, there, device=device, dtypes=dtypes.split())
    assert all(remark.found and remark.expected and remark.remedy for remark in remarks)
    return [(remark.severity, remark.where) for remark in remarks]


def test_a_sufficient_machine_has_no_findings() -> None:
    assert found(gpu=Capacity(80 * GB, 79 * GB), dtypes="auto float32") == []


@pytest.mark.parametrize(("free", "enough"), [(2_199_999_999, False), (2_200_000_000, True)])
def test_a_disk_must_hold_the_merge_and_a_reserve(free: int, enough: bool) -> None:
    disk = Disk(Path("/state"), free, {"the merged checkpoint": 2 * GB})
    assert found(disks=(disk,)) == ([] if enough else [("block", "/state")])


def test_downloads_count_on_their_disk() -> None:
    both = Disk(Path("/state"), 7 * GB, {"the merged checkpoint": 2 * GB, "weights from the Hub": 6 * GB})
    assert found(disks=(both,)) == [("block", "/state")]
    apart = Disk(Path("/cache"), 7 * GB, {"weights from the Hub": 6 * GB})
    assert found(disks=(ROOM, apart)) == []
    assert found(disks=(ROOM, Disk(Path("/cache"), 6 * GB, apart.writes))) == [("block", "/cache")]


def test_memory_that_never_suffices_blocks_and_busy_memory_warns() -> None:
    # 256 MiB for the process, pending writes, and ten blocks of 8 MiB: between 0.3 and 1 GB.
    assert found(memory=Capacity(GB // 4, GB // 4)) == [("block", "memory")]
    assert found(memory=Capacity(4 * GB, GB // 4)) == [("warn", "memory")]
    assert found(memory=Capacity(4 * GB, 2 * GB)) == []


def test_gpu_memory_is_checked_if_the_gpu_merges() -> None:
    assert found(gpu=Capacity(GB // 2, GB // 2)) == [("block", "memory of cuda:0")]
    assert found(gpu=Capacity(8 * GB, GB // 2)) == [("warn", "memory of cuda:0")]


@pytest.mark.parametrize(("dtypes", "enough"), [("auto", True), ("bfloat16", True), ("float32", False), ("", True)])
def test_the_largest_model_must_fit_to_be_evaluated(dtypes: str, enough: bool) -> None:
    available = Capacity(64 * GB, 4 * GB)  # 2 GB as stored or in bfloat16, 4 GB in float32, plus a third
    assert found(memory=available, dtypes=dtypes) == ([] if enough else [("warn", "memory")])


def test_unreported_memory_is_not_a_finding() -> None:
    assert found(memory=None, dtypes="float32") == []


def test_a_blocked_merge_has_no_machine_findings() -> None:
    remark = Finding(severity="block", where="x", found="y")
    blocked = JOB.model_copy(update={"remarks": (remark,)})
    empty = Machine(cores=1, disks=(Disk(Path("/"), 0, {"x": 1}),), memory=Capacity(1, 1))
    assert machine_findings(blocked, empty, device="cpu") == ()


def test_this_machine_has_a_disk_and_memory(home: Path) -> None:
    there = measure_machine_capacity(JOB, (), "cpu")
    assert there.gpu is None
    (disk,) = there.disks
    assert home.is_relative_to(disk.directory)
    assert disk.writes == {"the merged checkpoint": JOB.disk}
    assert there.memory
    assert 0 < there.memory.available <= there.memory.total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_container_has_what_its_limit_leaves_and_cached_files_are_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("4000\n")
    (tmp_path / "memory.current").write_text("3500\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 2000\nactive_file 1000\n")
    assert control_group(tmp_path) == Capacity(4000, 3500)
    (tmp_path / "memory.max").write_text("max\n")
    assert control_group(tmp_path) is None
    assert control_group(tmp_path / "nowhere") is None
    (tmp_path / "memory.max").write_text("2000\n")  # lowered below the current usage
    (tmp_path / "memory.stat").write_text("anon 3400\ninactive_file 100\n")
    assert control_group(tmp_path) == Capacity(2000, 0)


@pytest.mark.parametrize(
    ("own", "groups"),
    [
        (["0::/"], ["."]),
        (["0::/system.slice/nights.service"], ["system.slice/nights.service", "system.slice", "."]),
        (["12:memory:/old", "0::/new"], ["new", "."]),
        (["12:memory:/old"], ["."]),
        (["0::/../../elsewhere"], ["."]),
        ([], ["."]),
    ],
)
def test_a_service_is_in_all_groups_above_it(tmp_path: Path, own: list[str], groups: list[str]) -> None:
    assert control_groups(tmp_path, own) == tuple(tmp_path / group for group in groups)


def test_the_narrowest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = system_memory()
    assert whole
    inner = tmp_path / "service"
    inner.mkdir()
    for place, limit, used in ((tmp_path, 1 << 30, 900 << 20), (inner, 500 << 20, 100 << 20)):
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text(f"{used}\n")
        (place / "memory.stat").write_text("anon 1\n")
    monkeypatch.setattr("mergegate.merge_core.system.control_groups", lambda: (inner, tmp_path))
    assert system_memory() == Capacity(500 << 20, 124 << 20)


def test_a_run_on_an_insufficient_machine_is_refused(home: Path) -> None:
    endless = JOB.model_copy(update={"disk": 10**18})
    (blocking,) = (
        one
        for one in machine_findings(endless, measure_machine_capacity(endless, (), "cpu"), device="cpu")
        if one.severity == "block"
    )
    assert "free" in blocking.found
    assert "MERGEGATE_HOME" in blocking.remedy
    little = JOB.model_copy(update={"disk": 1})
    assert not machine_findings(little, measure_machine_capacity(little, (), "cpu"), device="cpu")
