"""Locate a project's own Prefect server and provide the environment of server, workers and clients.

A project has one home, one secret (``<home>/prefect/auth``, readable by its owner only) and one address. This module
sets everything that Prefect reads from the environment, so that users do not have to export anything::

    site = find_site(schedules)
    os.execve(python, [...], site.server_environment(database_url(schedules)))

Prefect's own command line reads the same settings from ``prefect.toml``, which ``mergegate server`` writes to the
project's directory (git-ignored, readable by its owner only). Prefect looks for the file only in that directory.
"""

from __future__ import annotations

import os
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mergegate.flows.prefect_api.schedules import Schedules, is_server_address
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import disk_errors_refused, state_directory
from mergegate.merge_core.parsing import open_plain, read_text
from mergegate.tasks.base.stage import home

SETTINGS = "prefect.toml"
DATABASE = "MERGEGATE_DATABASE"
PORT = 4200
# Seconds between the heartbeats of a run. A rule in ``notifications`` detects missing ones.
HEARTBEAT_S = 30
_OURS = "# Written by mergegate: how Prefect's own command line reaches this project's server. Holds its secret."
_MAX_BYTES = 1 << 16
_DRIVER = "postgresql+asyncpg"


def page_of_run(run: object, address: str | None = None) -> str:
    """Return the URL of a flow run's page on the server at ``address``, by default the configured one.

    For a run without a server, return an empty string, because its API and pages end with the run.
    """
    if address is None:
        api = os.environ.get("PREFECT_API_URL", "")
        address = os.environ.get("PREFECT_UI_URL") or api.removesuffix("/").removesuffix("/api")
    return f"{address.removesuffix('/')}/runs/flow-run/{run}" if run and address else ""


@dataclass(frozen=True)
class Site:
    """Location of a project's server.

    Profile paths are relative to ``root``, the project's directory. ``home`` is its state directory. Browsers and
    clients use the same ``address``, for example ``http://127.0.0.1:4200``. ``secret`` is ``user:password``. It is
    empty if the server does not require a password.
    """

    root: Path
    home: Path
    address: str
    secret: str

    @property
    def api(self) -> str:
        """URL of the server's API."""
        return f"{self.address}/api"

    def client_environment(self) -> dict[str, str]:
        """Return the environment of a Prefect client: that of this process and the settings of the site."""
        return {
            **os.environ,
            "MERGEGATE_HOME": str(self.home),
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_API_URL": self.api,
            "PREFECT_UI_URL": self.address,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "0",
            "DO_NOT_TRACK": "1",
            **({"PREFECT_API_AUTH_STRING": self.secret} if self.secret else {}),
        }

    def worker_environment(self) -> dict[str, str]:
        """Return the environment of a worker.

        Its runs send heartbeats often enough that missing ones are detected. They also retry after a status 500, which
        the server sends while its database is briefly unavailable. Prefect's default is not to retry.
        """
        settings = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S), "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500"}
        return settings | self.client_environment()

    def server_environment(self, database: str | None) -> dict[str, str]:
        """Return the environment of the server.

        ``database`` is the URL of a PostgreSQL database in Prefect's form. None selects a SQLite file below the home.
        """
        settings = {
            **self.client_environment(),
            # Every user of this machine and every web page in its browsers can reach a loopback port.
            "PREFECT_SERVER_API_AUTH_STRING": self.secret,
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "1",
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": self.address,
            # Occupied slots must survive a restart of the server. By default, they are only in its memory.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        }
        if database:
            settings["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = database
        return settings


def find_site(schedules: Schedules | None = None, *, address: str | None = None) -> Site:
    """Find the site of the project in the working directory.

    The address is the first of: the argument, ``PREFECT_API_URL``, ``schedules.yaml``, and the last start of
    ``mergegate server`` in this directory. The secret is ``PREFECT_API_AUTH_STRING``, or else the project's own.

    Raises:
        InvalidInput: The address is invalid.
    """
    addresses = {
        "--address": address,
        "PREFECT_API_URL": os.environ.get("PREFECT_API_URL"),
        "schedules.yaml: server.address": schedules.server.address if schedules else None,
        SETTINGS: own_settings().get("url"),
    }
    default = ("", f"http://127.0.0.1:{PORT}")
    source, url = next(((source, value) for source, value in addresses.items() if value), default)
    plain = url.rstrip("/").removesuffix("/api")
    if not is_server_address(plain):
        raise InvalidInput(source, found=repr(url), expected="an address such as http://127.0.0.1:4200/api")
    secret = os.environ.get("PREFECT_API_AUTH_STRING") or _read_secret(_secret_file())
    return Site(Path.cwd(), home(), plain, secret)


def load_or_create_secret() -> str:
    """Return ``PREFECT_API_AUTH_STRING``, or else the project's own secret, which is created if it does not exist.

    Raises:
        DiskUnavailable: The secret cannot be stored.
    """
    if configured := os.environ.get("PREFECT_API_AUTH_STRING"):
        return configured
    file = _secret_file()
    with disk_errors_refused(file):
        state_directory(file.parent, private=True)
        if not (secret := _read_secret(file)):
            secret = f"mergegate:{secrets.token_urlsafe(32)}"
            _write_private(file, secret)
        file.chmod(0o600)
    return secret


def write_settings(site: Site) -> bool:
    """Write ``prefect.toml`` for Prefect's own command line. Return False if there is one that mergegate did not write.

    Raises:
        DiskUnavailable: The file cannot be written.
    """
    file = site.root / SETTINGS
    if file.exists() and not _is_ours(file):
        return False
    settings = {"home": str(site.home / "prefect"), "url": site.api, "secret": site.secret}
    quoted = {name: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' for name, text in settings.items()}
    lines = [
        _OURS,
        f"home = {quoted['home']}",
        "[api]",
        f"url = {quoted['url']}",
        f"auth_string = {quoted['secret']}",
        "[server]",
        "analytics_enabled = false",
        "",
    ]
    with disk_errors_refused(file):
        _write_private(file, "\n".join(lines))
    return True


def own_settings() -> Mapping[str, str]:
    """Return the server settings (``url``, ``auth_string``) in ``prefect.toml``, if mergegate wrote the file."""
    file = Path(SETTINGS)
    if not _is_ours(file):
        return {}
    try:
        settings = tomllib.loads(read_text(file, _MAX_BYTES)).get("api", {})
    except (InvalidInput, ValueError):
        return {}
    return {str(name): str(value) for name, value in settings.items()} if isinstance(settings, dict) else {}


def database_url(schedules: Schedules | None) -> str | None:
    """Return the URL of the server's PostgreSQL database, or None if the server uses a file.

    ``MERGEGATE_DATABASE`` takes precedence over ``schedules.yaml``.

    Raises:
        InvalidInput: The database is not PostgreSQL.
    """
    url, source = os.environ.get(DATABASE, ""), DATABASE
    if not url and schedules is not None and schedules.server.database:
        url, source = schedules.server.database, "schedules.yaml: server.database"
    if not url:
        return None
    scheme, _, rest = url.partition("://")
    if scheme not in ("postgresql", "postgres", _DRIVER) or not rest:
        raise InvalidInput(
            source,
            found=f"an address that starts with {scheme!r}",
            expected="postgresql://user@host:5432/name",
            remedy="use PostgreSQL for a team, or omit the setting to store the records in a file of this project",
        )
    return f"{_DRIVER}://{rest}"


def require_database(url: str) -> None:
    """Raise InvalidInput unless the database answers. Prefect's server would report a failure in two hundred lines."""
    import asyncio

    import asyncpg  # type: ignore[import-untyped]  # has no type information

    plain = url.replace(_DRIVER, "postgresql", 1)

    async def connect() -> None:
        connection = await asyncpg.connect(plain, timeout=10)
        await connection.close()

    try:
        asyncio.run(connect())
    except (OSError, OverflowError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        # Do not parse the address, because it may be the malformed part. The password ends at the last '@'.
        address = plain.partition("://")[2].rpartition("@")[2].partition("?")[0]
        raise InvalidInput(
            f"the database at {address}",
            found=str(error).splitlines()[0] if str(error) else type(error).__name__,
            expected="a PostgreSQL server that grants access",
            remedy="start the server, correct the address, or set PGPASSWORD",
        ) from None


def require_site(site: Site) -> None:
    """Raise InvalidInput unless the server answers and grants access, instead of letting every later call fail."""
    import httpx

    auth = tuple(site.secret.split(":", 1)) if ":" in site.secret else None
    try:
        answer = httpx.get(f"{site.api}/admin/version", auth=auth, timeout=10)  # type: ignore[arg-type]  # has two parts
    except httpx.HTTPError as error:
        raise InvalidInput(
            site.address,
            found=f"no server answers ({error})",
            expected="this project's Prefect server",
            remedy="start it (mergegate server), or set PREFECT_API_URL or server.address in schedules.yaml",
        ) from None
    if answer.status_code in (401, 403):
        raise InvalidInput(
            site.address,
            found="the server rejects this project's secret" if site.secret else "the server requires a secret",
            expected=f"the secret in PREFECT_API_AUTH_STRING or in {_secret_file()}",
            remedy="it may be the server of another project: copy the secret of that project, or start this project's "
            "server on another port (mergegate server --port)",
        )
    if answer.status_code != 200:
        raise InvalidInput(
            site.address,
            found=f"the server answers with status {answer.status_code}",
            expected="this project's Prefect server",
        )


def _secret_file() -> Path:
    return home() / "prefect" / "auth"


def _read_secret(file: Path) -> str:
    """Return the secret in a file. A damaged file counts as missing, so that a new secret is created."""
    try:
        secret = read_text(file, _MAX_BYTES).strip()
    except InvalidInput:
        return ""
    return secret if ":" in secret and secret.isprintable() else ""


def _is_ours(file: Path) -> bool:
    try:
        with open_plain(file) as settings:
            return settings.read(len(_OURS) + 1) == f"{_OURS}\n".encode()
    except (InvalidInput, OSError):
        return False


def _write_private(file: Path, text: str) -> None:
    """Write a file atomically. Other users cannot read it at any time."""
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as output:
            output.write(text)
            output.flush()
            os.fsync(output.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
