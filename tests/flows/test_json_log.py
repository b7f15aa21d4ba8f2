"""The JSON log: every line identifies its run, and a failure to write the log never affects the run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from prefect import flow

from mergegate.flows.outcome import RunOutcome, conclude_flow, flow_outcome
from mergegate.merge_core.errors import Refused
from mergegate.tasks.stage import StageValue, value_stage

pytestmark = pytest.mark.usefixtures("prefect_api", "home")


class Said(StageValue):
    word: str

    def summary(self) -> str:
        return f"said {self.word}"


@value_stage("say", version=1)
def say(word: str) -> Said:
    logging.getLogger("mergegate.tasks.somebody").warning("odd: %s", word)
    if word == "no":
        raise Refused("here", found="no")
    return Said(word=word)


def night(word: str) -> RunOutcome:
    def make() -> RunOutcome:
        say(word)
        return RunOutcome(status="passed", message="passed")

    @flow(name="release")
    def run() -> object:
        return conclude_flow(make, "support")

    found = flow_outcome(run(return_state=True))
    assert isinstance(found, RunOutcome)
    return found


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_line_names_run_flow_and_profile_and_those_of_a_stage_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "log.jsonl"
    monkeypatch.setenv("MERGEGATE_LOG", str(file))
    night("yes")
    lines = lines_of(file)
    assert {(line["flow"], line["profile"]) for line in lines} == {("release", "support")}
    assert len({line["run"] for line in lines}) == 1
    started, odd, ended = (
        next(line for line in lines if line["event"] == event and line.get("stage") == "say")
        for event in ("stage started", "log", "stage ended")
    )
    key = say.key("yes")
    assert [started["key"], odd["key"], ended["key"]] == [key] * 3
    assert odd["message"] == "odd: yes"
    assert (ended["status"], ended["message"]) == ("made", "said yes")
    assert ended["seconds"] >= 0
    assert (lines[-1]["event"], lines[-1]["status"]) == ("run ended", "passed")


@pytest.mark.story
def test_the_log_distinguishes_cache_hits_and_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "log.jsonl"
    monkeypatch.setenv("MERGEGATE_LOG", str(file))
    for word in ("yes", "yes", "no"):
        night(word)
    ended = [line for line in lines_of(file) if line["event"] == "stage ended"]
    assert [(line["status"], line["level"]) for line in ended] == [
        ("made", "info"),
        ("cached", "info"),
        ("refused", "warning"),
    ]
    assert [line["status"] for line in lines_of(file) if line["event"] == "run ended"] == [
        "passed",
        "passed",
        "refused",
    ]


def test_no_handler_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [list(logging.getLogger(name).handlers) for name in ("", "prefect")]
    monkeypatch.setenv("MERGEGATE_LOG", str(tmp_path / "log.jsonl"))
    night("yes")
    assert [list(logging.getLogger(name).handlers) for name in ("", "prefect")] == before


@pytest.mark.story
@pytest.mark.parametrize("place", ["nowhere/log.jsonl", ".", "/dev/full"])
def test_an_unwritable_log_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEGATE_LOG", place)
    assert night("yes").status == "passed"
