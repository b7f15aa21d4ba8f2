"""``schedules.yaml``: which settings it accepts, and which deployments and rules it creates on the server.

All functions under test are pure, so no server runs.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from demo_project import PROFILES

from mergegate.flows.prefect_api import Schedules, desired_deployments, desired_rules
from mergegate.flows.prefect_api.notifications import StateChange
from mergegate.flows.prefect_api.schedules import OCCASIONS, load_schedules, parse_schedules
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.wording import parse_duration

PROJECT = PROFILES.parent
DEMO = {"profile": "profiles/demo.yaml"}


def nights(*profiles: Mapping[str, object], **more: object) -> Schedules:
    return parse_schedules({"profiles": list(profiles) or [DEMO], **more}, "schedules.yaml")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "profiles").mkdir()
    for file in PROFILES.glob("*.yaml"):
        shutil.copy(file, tmp_path / "profiles")
    (tmp_path / "profiles" / "demo").symlink_to(PROFILES / "demo")
    return tmp_path


def test_the_file_that_is_shipped_means_something() -> None:
    found = desired_deployments(load_schedules(PROJECT / "schedules.yaml"), PROJECT)
    assert [one.full_name for one in found] == ["release/release", "sweep/sweep", "shadow/shadow", "release/demo"]
    assert found[-1].schedule == {"cron": "0 3 * * *", "timezone": "UTC"}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"profile": []}, "did you mean 'profiles'?"),
        ({"profiles": [{**DEMO, "shedule": "0 3 * * *"}]}, "did you mean 'schedule'?"),
        ({"profiles": [{**DEMO, "schedule": "nightly"}]}, "a cron in five fields"),
        ({"profiles": [{**DEMO, "schedule": "every night"}]}, "20 s, 90 min, 6 h or 3 d"),
        ({"profiles": [{**DEMO, "schedule": "every 1 s"}]}, "at least 10 s"),
        ({"profiles": [{**DEMO, "timezone": "Europe/Berln"}]}, "did you mean 'Europe/Berlin'?"),
        ({"profiles": [DEMO], "notify": [{"to": "webhook", "address": "https://x/secret"}]}, "an environment variable"),
        ({"profiles": [DEMO], "notify": [{"to": "block", "address": "$X"}]}, "TYPE/NAME"),
        ({"profiles": [DEMO], "notify": [{"to": "slack", "address": "$X", "events": ["refusal"]}]}, "refused"),
        ({"profiles": [DEMO], "server": {"database": "postgresql://me:secret@db/x"}}, "contains a password"),
        ({"profiles": [DEMO], "server": {"database": "mysql://db/x"}}, "postgresql://"),
        ({"profiles": [DEMO], "server": {"address": "http://me:secret@db"}}, "http://host:port"),
    ],
)
def test_invalid_schedules_are_refused_with_location_and_suggestion(data: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_schedules(data, "schedules.yaml")
    assert said in str(refused.value)
    assert str(refused.value).startswith("schedules.yaml")


def test_the_former_name_of_the_file_is_an_error_that_says_how_to_rename_it(tmp_path: Path) -> None:
    (tmp_path / "nights.yaml").write_text("profiles: []\n")
    with pytest.raises(InvalidInput) as caught:
        load_schedules(tmp_path / "schedules.yaml")
    assert caught.value.remedy == f"mv {tmp_path / 'nights.yaml'} {tmp_path / 'schedules.yaml'}"


def test_an_absent_file_says_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="profiles: \\[\\{profile"):
        load_schedules(tmp_path / "schedules.yaml")


@pytest.mark.parametrize(
    ("said", "seconds"), [("20 s", 20), ("1.5min", 90), ("6 h", 21_600), ("3 d", 259_200), ("90 m", 5400)]
)
def test_times_are_read_as_people_write_them(said: str, seconds: float) -> None:
    assert parse_duration(said, "here") == seconds


@pytest.mark.parametrize("said", ["", "3", "d", "-1 h", "0 s", "1 year", "1e3 s", "٣ d", "nan s"])
def test_what_is_no_time_is_refused(said: str) -> None:
    with pytest.raises(InvalidInput, match="here"):
        parse_duration(said, "here")


def test_the_deployment_of_a_profile_is_readable(project: Path) -> None:
    scheduled = {**DEMO, "schedule": "0  3 * * *", "timezone": "Europe/Berlin"}
    *_, one = desired_deployments(nights(scheduled), project)
    assert one.full_name == "release/demo"
    assert one.description == "demo · ties of 2 over base"
    assert one.summary() == "demo · ties of 2 over base · 0 3 * * * Europe/Berlin"
    assert set(one.tags) == {"mergegate", "release", "demo", "nightly"}
    assert one.parameters == {"profile": "profiles/demo.yaml"}
    assert one.on_collision == "CANCEL_NEW"


def test_without_a_schedule_it_is_no_night(project: Path) -> None:
    *_, one = desired_deployments(nights(DEMO), project)
    assert one.schedule is None
    assert "nightly" not in one.tags


def test_a_sweep_has_its_own_kind_of_deployment(project: Path) -> None:
    swept = {"profile": "profiles/demo-sweep.yaml", "flow": "sweep", "schedule": "every 7 d"}
    *_, one = desired_deployments(nights(swept), project)
    assert (one.full_name, one.entrypoint) == ("sweep/demo-sweep", "mergegate.flows.sweep:sweep")
    assert one.schedule == {"interval": 604_800}


@pytest.mark.parametrize(
    ("profiles", "said"),
    [
        ([{**DEMO, "flow": "sweep"}], "no section 'sweep'"),
        ([{**DEMO, "flow": "shadow"}], "no section 'shadow'"),
        ([DEMO, DEMO], "a second entry for release/demo"),
        ([{"profile": "profiles/gone.yaml"}], "gone.yaml"),
        ([{"profile": "profiles/demo/recipes/ties.yaml"}], "a recipe"),
    ],
)
def test_what_cannot_be_deployed_is_refused_before_anything_is(
    project: Path, profiles: list[dict[str, str]], said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        desired_deployments(nights(*profiles), project)


def test_a_profile_must_not_have_a_reserved_name(project: Path) -> None:
    text = (project / "profiles" / "demo.yaml").read_text().replace("name: demo", "name: release")
    (project / "profiles" / "release.yaml").write_text(text)
    with pytest.raises(InvalidInput, match="rename the profile"):
        desired_deployments(nights({"profile": "profiles/release.yaml"}), project)


def test_prefect_yaml_says_the_same_of_those_that_take_any_profile() -> None:
    """``prefect deploy --all`` and ``mergegate deploy`` must not undo each other."""
    shipped: list[dict[str, Any]] = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    ours = desired_deployments(nights(DEMO), PROJECT)[:3]
    for theirs, one in zip(shipped, ours, strict=True):
        limit = theirs.get("concurrency_limit") or {}
        assert theirs["name"] == one.name
        assert theirs["entrypoint"] == one.entrypoint
        assert theirs["description"] == one.description
        assert theirs["tags"] == list(one.tags)
        assert theirs["parameters"] == one.parameters
        assert limit.get("collision_strategy") == one.on_collision
        assert theirs["work_pool"] == {"name": "mergegate"}


def test_each_recipient_has_a_rule_for_each_occasion_and_silence_needs_nobody(project: Path) -> None:
    told = nights(
        DEMO,
        notify=[{"to": "slack", "address": "$A", "events": ["refused"]}, {"to": "webhook", "address": "$B"}],
    )
    rules = desired_rules(told, desired_deployments(told, project))
    names = [rule.name for rule in rules]
    assert names[:3] == [
        "mergegate: a silent run has crashed",
        "mergegate: a run that did not start has crashed",
        "mergegate: notify slack of refused",
    ]
    assert names[3:] == [f"mergegate: notify webhook of {occasion}" for occasion in OCCASIONS]
    assert len(set(names)) == len(names)


def test_two_of_a_kind_are_told_apart(project: Path) -> None:
    told = nights(DEMO, notify=[{"to": "slack", "address": "$A", "events": ["late"]}] * 2)
    names = [rule.name for rule in desired_rules(told, desired_deployments(told, project))]
    assert names[2:] == ["mergegate: notify slack 1 of late", "mergegate: notify slack 2 of late"]


def test_a_profile_with_approval_has_a_rule_for_its_timeout(project: Path) -> None:
    text = (project / "profiles" / "demo.yaml").read_text()
    assert "releases/demo\n" in text
    asked = text.replace("releases/demo\n", "releases/demo\n  approval: {timeout: 12 h}\n")
    (project / "profiles" / "demo.yaml").write_text(asked)
    file = nights(DEMO)
    rule = desired_rules(file, desired_deployments(file, project))[2]
    assert rule.deployments == ("release/demo",)
    assert rule.silence_s == 43_200
    assert "the run was not approved within 12 h" in str(rule.then)


def test_whatever_a_run_comes_into_before_it_ends_its_silence_is_missed(project: Path) -> None:
    """A run that goes silent in any of Prefect's states frees its slot."""
    import prefect.states

    made = [getattr(prefect.states, name) for name in dir(prefect.states) if name[0].isupper()]
    states = [make() for make in made if inspect.isfunction(make)]
    under_way = {state.name for state in states if state.type.value in ("PENDING", "RUNNING", "CANCELLING")}
    assert {"Pending", "Submitting", "Running"} <= under_way
    file = nights(DEMO)
    silences = {event: rule for rule in desired_rules(file, desired_deployments(file, project)) for event in rule.on}
    for event in (*under_way, "heartbeat"):
        rule = silences[f"prefect.flow-run.{event}"]
        assert rule.silence_s
        assert isinstance(rule.then, StateChange)
        assert rule.then.state == "CRASHED"
        assert "release/demo" in rule.deployments
