"""A preflight check reports the resources that a machine lacks, and forecasts the time of a run."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from mergegate.flows.operations.check import PlannedRun, PlannedStage
from mergegate.merge_core.engine.forecast import Rates
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.system import Capacity, control_group, control_groups, system_memory
from mergegate.merge_core.wording import format_roughly
from mergegate.tasks.preflight import machine as duration
from mergegate.tasks.preflight.compatibility import Compatibility
from mergegate.tasks.preflight.machine import Disk, Machine, machine_findings, measure_machine_capacity

GB = 10**9
JOB = Compatibility(
    remarks=(), tensors=10, bytes_read=6 * GB, bytes_written=2 * GB, disk=2 * GB, block=1 << 23, gpu_block=1 << 26,
    largest_bytes=2 * GB, largest_parameters=GB,
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("memory", "gpu", "findings"),
    [
        # 256 MiB for the process, pending writes, and ten blocks of 8 MiB: between 0.3 and 1 GB.
        (Capacity(GB // 4, GB // 4), None, [("block", "memory")]),
        (Capacity(4 * GB, GB // 4), None, [("warn", "memory")]), (Capacity(4 * GB, 2 * GB), None, []),
        (MUCH, Capacity(GB // 2, GB // 2), [("block", "memory of cuda:0")]),
        (MUCH, Capacity(8 * GB, GB // 2), [("warn", "memory of cuda:0")]),
    ],
)  # fmt: skip
def test_memory_that_never_suffices_blocks_and_busy_memory_warns(
    memory: Capacity, gpu: Capacity | None, findings: list[tuple[str, str]]
) -> None:
    assert found(memory=memory, gpu=gpu) == findings


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


def write_group(directory: Path, limit: object, used: object, statistics: str) -> None:
    for name, content in (("max", limit), ("current", used), ("stat", statistics)):
        (directory / f"memory.{name}").write_text(f"{content}\n")


def test_a_container_has_what_its_limit_leaves_and_cached_files_are_free(tmp_path: Path) -> None:
    write_group(tmp_path, 4000, 3500, "anon 500\ninactive_file 2000\nactive_file 1000")
    assert control_group(tmp_path) == Capacity(4000, 3500)
    (tmp_path / "memory.max").write_text("max\n")
    assert control_group(tmp_path) is None
    assert control_group(tmp_path / "nowhere") is None
    write_group(tmp_path, 2000, 3500, "anon 3400\ninactive_file 100")  # lowered below the current usage
    assert control_group(tmp_path) == Capacity(2000, 0)


@pytest.mark.parametrize(
    ("own", "groups"),
    [
        (["0::/"], ["."]), (["0::/system.slice/nights.service"], ["system.slice/nights.service", "system.slice", "."]),
        (["12:memory:/old", "0::/new"], ["new", "."]), (["12:memory:/old"], ["."]), (["0::/../../elsewhere"], ["."]),
        ([], ["."]),
    ],
)  # fmt: skip
def test_a_service_is_in_all_groups_above_it(tmp_path: Path, own: list[str], groups: list[str]) -> None:
    assert control_groups(tmp_path, own) == tuple(tmp_path / group for group in groups)


def test_the_narrowest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = system_memory()
    assert whole
    inner = tmp_path / "service"
    inner.mkdir()
    write_group(tmp_path, 1 << 30, 900 << 20, "anon 1")
    write_group(inner, 500 << 20, 100 << 20, "anon 1")
    monkeypatch.setattr("mergegate.merge_core.system.control_groups", lambda: (inner, tmp_path))
    assert system_memory() == Capacity(500 << 20, 124 << 20)


def test_a_run_on_an_insufficient_machine_is_refused(home: Path) -> None:
    endless = JOB.model_copy(update={"disk": 10**18})
    findings = machine_findings(endless, measure_machine_capacity(endless, (), "cpu"), device="cpu")
    (blocking,) = (finding for finding in findings if finding.severity == "block")
    assert "free" in blocking.found
    assert "MERGEGATE_HOME" in blocking.remedy
    little = JOB.model_copy(update={"disk": 1})
    assert not machine_findings(little, measure_machine_capacity(little, (), "cpu"), device="cpu")


# --- Time: forecasts for a machine without history are within a factor of three of recorded runs

# Probe results for two cores that other programs used at the same time.
SPEEDS = {"read": 2.2e9, "write": 5.2e8, "copy": 8.1e9, "hash": 1.8e9, "units": 4.5e9, "products": 3.0e10}
RATES = Rates(**SPEEDS, same_disk=True, measured_at=0.0)
DEMO = duration.NetworkSize(parameters=280_000, nbytes=564_000, tensors=29)
MIDDLE = duration.NetworkSize(parameters=20_900_000, nbytes=83_600_000, tensors=74)
# Requests, tokens and batch size of one call; number of calls, and their total seconds in a run on that machine.
RECORDED = {
    "perplexity of the demo, with the start of its process": (DEMO, duration.PromptLoad(600, 27_700, batch=16), 4, 4.0),
    "a task of the demo": (DEMO, duration.PromptLoad(400, 8_800, batch=16), 12, 3.35),
    "perplexity of a larger model": (MIDDLE, duration.PromptLoad(300, 13_900, batch=16), 3, 50.9),
    "a task of a larger model": (MIDDLE, duration.PromptLoad(100, 2_200, batch=16), 3, 9.6),
}


@pytest.mark.parametrize("name", RECORDED)
def test_evaluation_time_is_predicted_within_the_stated_factor(name: str) -> None:
    size, asked, calls, took = RECORDED[name]
    starting = duration.STARTING if "start" in name else 0.0
    guessed = starting + calls * duration.evaluation_seconds(size, asked, RATES)
    assert took / 3 < guessed < 3 * took


def test_the_duration_of_the_demo_is_predicted() -> None:
    guessed = duration.merge_seconds(1_680_000, 564_000, RATES) + duration.STARTING + duration.AROUND
    guessed += 4 * duration.evaluation_seconds(DEMO, duration.PromptLoad(600, 27_700, batch=16), RATES)
    guessed += 12 * duration.evaluation_seconds(DEMO, duration.PromptLoad(400, 8_800, batch=16), RATES)
    assert 16.7 / 3 < guessed < 3 * 16.7


def test_larger_loads_take_longer_and_batches_less() -> None:
    written = duration.PromptLoad(100, 10_000, written=12_800, batch=16)
    seconds = duration.evaluation_seconds(MIDDLE, written, RATES)
    assert seconds > 2 * duration.evaluation_seconds(MIDDLE, replace(written, written=0), RATES)
    assert seconds > duration.evaluation_seconds(MIDDLE, replace(written, batch=64), RATES)
    assert seconds > duration.evaluation_seconds(DEMO, written, RATES)


def test_predictions_are_marked_and_unknown_durations_are_not_summed() -> None:
    measured = PlannedStage("merge", "", False, 1, 100.0)
    guessed = PlannedStage("evaluate", "merge, copy", False, 400, 7200.0, rough=True)
    assert PlannedRun((measured,)).time() == "about 1 m 40 s, as in the last run"
    assert PlannedRun((guessed,)).time() == "about 2 h, first run here"
    assert PlannedRun((measured, guessed)).time() == "about 2 h, first run of some stages here"
    unknown = PlannedStage("evaluate", "merge, served", False, 400)
    assert PlannedRun((guessed, unknown)).seconds is None
    assert PlannedRun((PlannedStage("merge", "", True),)).sentence().startswith("all 1 expensive stages")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        *((0.2, "< 3 s"), (14, "15 s"), (130, "2 min"), (41 * 60, "40 min"), (9100, "2.5 h"), (40_000, "11 h")),
        (3e5, "3 days"),
    ],
)
def test_a_predicted_duration_has_few_digits(seconds: float, said: str) -> None:
    assert format_roughly(seconds) == said
