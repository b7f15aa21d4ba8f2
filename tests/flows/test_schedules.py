"""``schedules.yaml``: which settings it accepts, and which deployments and rules it creates on the server."""

from __future__ import annotations

import inspect
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from demo_project import PROFILES
from prefect.settings import get_current_settings

from mergegate.flows import prefect_api
from mergegate.flows.prefect_api.automations import StateChange
from mergegate.flows.prefect_api.schedules import OCCASIONS, load_schedules, parse_schedules
from mergegate.flows.prefect_api.site import Site, own_settings
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.wording import parse_duration

PROJECT = PROFILES.parent
DEMO = {"profile": "profiles/demo.yaml"}


def nights(*profiles: Mapping[str, object], **more: object) -> prefect_api.Schedules:
    return parse_schedules({"profiles": list(profiles) or [DEMO], **more}, "schedules.yaml")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "profiles").mkdir()
    for file in PROFILES.glob("*.yaml"):
        shutil.copy(file, tmp_path / "profiles")
    (tmp_path / "profiles" / "demo").symlink_to(PROFILES / "demo")
    return tmp_path


def test_the_file_that_is_shipped_means_something() -> None:
    found = prefect_api.desired_deployments(load_schedules(PROJECT / "schedules.yaml"), PROJECT)
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
    *_, one = prefect_api.desired_deployments(nights(scheduled), project)
    assert one.full_name == "release/demo"
    assert one.description == "demo · ties of 2 over base"
    assert one.summary() == "demo · ties of 2 over base · 0 3 * * * Europe/Berlin"
    assert set(one.tags) == {"mergegate", "release", "demo", "nightly"}
    assert one.parameters == {"profile": "profiles/demo.yaml"}
    assert one.on_collision == "CANCEL_NEW"
    *_, one = prefect_api.desired_deployments(nights(DEMO), project)  # without a schedule, it is not a night
    assert one.schedule is None
    assert "nightly" not in one.tags
    swept = {"profile": "profiles/demo-sweep.yaml", "flow": "sweep", "schedule": "every 7 d"}
    *_, one = prefect_api.desired_deployments(nights(swept), project)
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
        ([{"profile": "profiles/release.yaml"}], "rename the profile"),  # its name is reserved
    ],
)
def test_what_cannot_be_deployed_is_refused_before_anything_is(
    project: Path, profiles: list[dict[str, str]], said: str
) -> None:
    text = (project / "profiles" / "demo.yaml").read_text().replace("name: demo", "name: release")
    (project / "profiles" / "release.yaml").write_text(text)
    with pytest.raises(InvalidInput, match=said):
        prefect_api.desired_deployments(nights(*profiles), project)


def test_prefect_yaml_says_the_same_of_those_that_take_any_profile() -> None:
    """``prefect deploy --all`` and ``mergegate deploy`` must not undo each other."""
    shipped: list[dict[str, Any]] = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
    ours = prefect_api.desired_deployments(nights(DEMO), PROJECT)[:3]
    for theirs, one in zip(shipped, ours, strict=True):
        limit = theirs.get("concurrency_limit") or {}
        assert theirs["name"] == one.name
        assert theirs["entrypoint"] == one.entrypoint
        assert theirs["description"] == one.description
        assert theirs["tags"] == list(one.tags)
        assert theirs["parameters"] == one.parameters
        assert limit.get("collision_strategy") == one.on_collision
        assert theirs["work_pool"] == {"name": "mergegate"}


def rules_of(project: Path, *recipients: Mapping[str, object]) -> list[str]:
    told = nights(DEMO, notify=list(recipients))
    return [rule.name for rule in prefect_api.desired_rules(told, prefect_api.desired_deployments(told, project))]


def test_each_recipient_has_a_rule_for_each_occasion_and_silence_needs_nobody(project: Path) -> None:
    slack = {"to": "slack", "address": "$A", "events": ["refused"]}
    names = rules_of(project, slack, {"to": "webhook", "address": "$B"})
    silences = ["mergegate: a silent run has crashed", "mergegate: a run that did not start has crashed"]
    assert names[:3] == [*silences, "mergegate: notify slack of refused"]
    assert names[3:] == [f"mergegate: notify webhook of {occasion}" for occasion in OCCASIONS]
    assert len(set(names)) == len(names)
    late = {**slack, "events": ["late"]}
    two = ["mergegate: notify slack 1 of late", "mergegate: notify slack 2 of late"]
    assert rules_of(project, late, late)[2:] == two


def test_a_profile_with_approval_has_a_rule_for_its_timeout(project: Path) -> None:
    text = (project / "profiles" / "demo.yaml").read_text()
    assert "releases/demo\n" in text
    asked = text.replace("releases/demo\n", "releases/demo\n  approval: {timeout: 12 h}\n")
    (project / "profiles" / "demo.yaml").write_text(asked)
    file = nights(DEMO)
    rule = prefect_api.desired_rules(file, prefect_api.desired_deployments(file, project))[2]
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
    silences = {
        event: rule
        for rule in prefect_api.desired_rules(file, prefect_api.desired_deployments(file, project))
        for event in rule.on
    }
    for event in (*under_way, "heartbeat"):
        rule = silences[f"prefect.flow-run.{event}"]
        assert rule.silence_s
        assert isinstance(rule.then, StateChange)
        assert rule.then.state == "CRASHED"
        assert "release/demo" in rule.deployments


# The server.


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty project the working directory, and return it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEGATE_HOME", str(tmp_path / ".mergegate"))
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "MERGEGATE_DATABASE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_the_secret_is_drawn_once_and_readable_by_its_owner_only(here: Path) -> None:
    old = os.umask(0)
    try:
        secret = prefect_api.load_or_create_secret()
    finally:
        os.umask(old)
    file = here / ".mergegate" / "prefect" / "auth"
    assert prefect_api.load_or_create_secret() == secret == file.read_text()
    assert len(secret.partition(":")[2]) >= 40
    assert (mode(file), mode(file.parent)) == (0o600, 0o700)
    file.chmod(0o644)  # a secret that others can read is made private
    assert prefect_api.load_or_create_secret() == secret
    assert mode(file) == 0o600


@pytest.mark.parametrize("damage", [b"", b"no colon", b"\xff\xfe:", b"a:b\x00c"])
def test_a_damaged_secret_is_replaced(here: Path, damage: bytes) -> None:
    prefect_api.load_or_create_secret()
    (here / ".mergegate" / "prefect" / "auth").write_bytes(damage)
    assert len(prefect_api.load_or_create_secret()) > 40


def test_prefects_own_command_line_is_told_in_a_file_for_the_owner_only(here: Path) -> None:
    site = Site(here, here / ".mergegate", "http://127.0.0.1:4300", prefect_api.load_or_create_secret())
    assert prefect_api.write_settings(site)
    assert mode(here / "prefect.toml") == 0o600
    assert own_settings() == {"url": "http://127.0.0.1:4300/api", "auth_string": site.secret}
    assert prefect_api.find_site().address == "http://127.0.0.1:4300"
    assert "/prefect.toml" in (Path(__file__).resolve().parents[2] / ".gitignore").read_text().splitlines()


def test_a_foreign_prefect_toml_stays_unchanged(here: Path) -> None:
    (here / "prefect.toml").write_text('[api]\nurl = "http://elsewhere/api"\n')
    assert not prefect_api.write_settings(prefect_api.find_site())
    assert own_settings() == {}
    assert "elsewhere" in (here / "prefect.toml").read_text()


def test_a_run_by_hand_does_not_depend_on_that_server(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefect_api.write_settings(prefect_api.find_site(address="http://127.0.0.1:9"))
    monkeypatch.setenv("PREFECT_API_URL", "x")
    monkeypatch.delenv("PREFECT_API_URL")
    prefect_api.configure(here / ".mergegate")
    assert os.environ["PREFECT_API_URL"] == ""
    assert not type(get_current_settings())().api.url  # Construct the settings again.


def test_the_address_is_what_is_said_nearest(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = parse_schedules({"profiles": [], "server": {"address": "http://in-nights:1/"}}, "schedules.yaml")
    assert prefect_api.find_site().address == "http://127.0.0.1:4200"
    assert prefect_api.find_site(file).address == "http://in-nights:1"
    monkeypatch.setenv("PREFECT_API_URL", "http://in-environment:2/api")
    assert prefect_api.find_site(file).address == "http://in-environment:2"
    assert prefect_api.find_site(file, address="http://said:3").api == "http://said:3/api"
    with pytest.raises(InvalidInput, match="no server answers"):
        prefect_api.require_site(prefect_api.find_site(address="http://127.0.0.1:9"))


MALFORMED = (
    "http://[::1",
    "http://[zz]:1",
    "http://host:abc",
    "http://host:65536",
    "http://host:0",
    "http://256.1.1.1:1",
    f"http://{'a' * 64}",
)


@pytest.mark.parametrize("address", ["127.0.0.1:4200", "ftp://x", "http://", "http://:4200", *MALFORMED])
def test_an_invalid_address_is_refused_with_its_source(
    here: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    with pytest.raises(InvalidInput, match="expected http://host:port"):
        parse_schedules({"profiles": [], "server": {"address": address}}, "schedules.yaml")
    monkeypatch.setenv("PREFECT_API_URL", address)
    with pytest.raises(InvalidInput, match="PREFECT_API_URL"):
        prefect_api.find_site()


@pytest.mark.parametrize("address", ["http://[::1]:4200", "https://server_1", "http://bücher.example:1"])
def test_a_valid_address_is_accepted_from_every_source(here: Path, address: str) -> None:
    file = parse_schedules({"profiles": [], "server": {"address": address}}, "schedules.yaml")
    assert prefect_api.find_site(file).address == prefect_api.find_site(address=address).address == address


def test_the_server_asks_for_the_secret_and_keeps_its_slots_on_disk(here: Path) -> None:
    site = Site(here, here / ".mergegate", "http://10.0.0.1:4200", "a:b")
    told = site.server_environment("postgresql+asyncpg://db/x")
    assert told["PREFECT_SERVER_API_AUTH_STRING"] == told["PREFECT_API_AUTH_STRING"] == "a:b"
    assert told["PREFECT_SERVER_CSRF_PROTECTION_ENABLED"] == "1"
    assert told["PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"].endswith("filesystem")
    assert told["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == "postgresql+asyncpg://db/x"
    assert "PREFECT_SERVER_DATABASE_CONNECTION_URL" not in {
        name: text for name, text in site.server_environment(None).items() if name not in os.environ
    }


def test_the_database_comes_from_the_environment_or_the_schedules_file(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = parse_schedules({"profiles": [], "server": {"database": "postgresql://me@db/one"}}, "schedules.yaml")
    assert prefect_api.database_url(None) is None
    assert prefect_api.database_url(file) == "postgresql+asyncpg://me@db/one"
    monkeypatch.setenv("MERGEGATE_DATABASE", "postgres://me:secret@db/two")
    assert prefect_api.database_url(file) == "postgresql+asyncpg://me:secret@db/two"
    monkeypatch.setenv("MERGEGATE_DATABASE", "sqlite:///x")
    with pytest.raises(InvalidInput, match="MERGEGATE_DATABASE"):
        prefect_api.database_url(file)


@pytest.mark.parametrize("hosts", [*(f"127.0.0.1:{port}" for port in ("abc", "65536", "1,127.0.0.1:2", "1")), "[::1"])
def test_a_database_that_cannot_be_reached_is_named_without_its_password(hosts: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        prefect_api.require_database(f"postgresql+asyncpg://me:secret@{hosts}/records?ssl=disable")
    assert caught.value.where == f"the database at {hosts}/records"
    assert "secret" not in str(caught.value)
