"""The address and secret of a project's server, and how they reach Prefect. No server is started."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from prefect.settings import get_current_settings

from mergegate.flows.prefect_api import (
    configure,
    database_url,
    find_site,
    load_or_create_secret,
    require_database,
    require_site,
    write_settings,
)
from mergegate.flows.prefect_api.schedules import parse_schedules
from mergegate.flows.prefect_api.site import Site, own_settings
from mergegate.merge_core.errors import InvalidInput


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
        secret = load_or_create_secret()
    finally:
        os.umask(old)
    file = here / ".mergegate" / "prefect" / "auth"
    assert load_or_create_secret() == secret == file.read_text()
    assert len(secret.partition(":")[2]) >= 40
    assert mode(file) == 0o600
    assert mode(file.parent) == 0o700


def test_a_secret_that_others_can_read_is_made_private(here: Path) -> None:
    secret = load_or_create_secret()
    (file := here / ".mergegate" / "prefect" / "auth").chmod(0o644)
    assert load_or_create_secret() == secret
    assert mode(file) == 0o600


@pytest.mark.parametrize("damage", [b"", b"no colon", b"\xff\xfe:", b"a:b\x00c"])
def test_a_damaged_secret_is_replaced(here: Path, damage: bytes) -> None:
    load_or_create_secret()
    (here / ".mergegate" / "prefect" / "auth").write_bytes(damage)
    assert len(load_or_create_secret()) > 40


def test_prefects_own_command_line_is_told_in_a_file_for_the_owner_only(here: Path) -> None:
    site = Site(here, here / ".mergegate", "http://127.0.0.1:4300", load_or_create_secret())
    assert write_settings(site)
    assert mode(here / "prefect.toml") == 0o600
    assert own_settings() == {"url": "http://127.0.0.1:4300/api", "auth_string": site.secret}
    assert find_site().address == "http://127.0.0.1:4300"
    assert "/prefect.toml" in (Path(__file__).resolve().parents[2] / ".gitignore").read_text().splitlines()


def test_a_foreign_prefect_toml_stays_unchanged(here: Path) -> None:
    (here / "prefect.toml").write_text('[api]\nurl = "http://elsewhere/api"\n')
    assert not write_settings(find_site())
    assert own_settings() == {}
    assert "elsewhere" in (here / "prefect.toml").read_text()


def test_a_run_by_hand_does_not_depend_on_that_server(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_settings(find_site(address="http://127.0.0.1:9"))
    monkeypatch.setenv("PREFECT_API_URL", "x")
    monkeypatch.delenv("PREFECT_API_URL")
    configure(here / ".mergegate")
    assert os.environ["PREFECT_API_URL"] == ""
    assert not type(get_current_settings())().api.url  # Construct the settings again.


def test_the_address_is_what_is_said_nearest(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = parse_schedules({"profiles": [], "server": {"address": "http://in-nights:1/"}}, "schedules.yaml")
    assert find_site().address == "http://127.0.0.1:4200"
    assert find_site(file).address == "http://in-nights:1"
    monkeypatch.setenv("PREFECT_API_URL", "http://in-environment:2/api")
    assert find_site(file).address == "http://in-environment:2"
    assert find_site(file, address="http://said:3").api == "http://said:3/api"


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
    monkeypatch.setenv("PREFECT_API_URL", address)
    with pytest.raises(InvalidInput, match="PREFECT_API_URL"):
        find_site()


@pytest.mark.parametrize("address", MALFORMED)
def test_a_malformed_address_in_the_schedules_file_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput, match="expected http://host:port"):
        parse_schedules({"profiles": [], "server": {"address": address}}, "schedules.yaml")


@pytest.mark.parametrize("address", ["http://[::1]:4200", "https://server_1", "http://bücher.example:1"])
def test_a_valid_address_is_accepted_from_every_source(here: Path, address: str) -> None:
    file = parse_schedules({"profiles": [], "server": {"address": address}}, "schedules.yaml")
    assert find_site(file).address == find_site(address=address).address == address


def test_a_server_that_does_not_answer_is_one_clear_error(here: Path) -> None:
    with pytest.raises(InvalidInput, match="no server answers"):
        require_site(find_site(address="http://127.0.0.1:9"))


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
    assert database_url(None) is None
    assert database_url(file) == "postgresql+asyncpg://me@db/one"
    monkeypatch.setenv("MERGEGATE_DATABASE", "postgres://me:secret@db/two")
    assert database_url(file) == "postgresql+asyncpg://me:secret@db/two"
    monkeypatch.setenv("MERGEGATE_DATABASE", "sqlite:///x")
    with pytest.raises(InvalidInput, match="MERGEGATE_DATABASE"):
        database_url(file)


@pytest.mark.parametrize(
    "hosts", ["127.0.0.1:abc", "127.0.0.1:65536", "127.0.0.1:1,127.0.0.1:2", "[::1", "127.0.0.1:1"]
)
def test_a_database_that_cannot_be_reached_is_named_without_its_password(hosts: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        require_database(f"postgresql+asyncpg://me:secret@{hosts}/records?ssl=disable")
    assert caught.value.where == f"the database at {hosts}/records"
    assert "secret" not in str(caught.value)
