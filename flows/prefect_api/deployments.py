"""The deployments of a project, kept in step with ``nights.yaml``: made, changed, removed; twice does nothing.

``release/release``, ``sweep/sweep`` and ``shadow/shadow`` take any profile, as in ``prefect.yaml``; each listed
profile has one of its own (``release/support-assistant``), whose form, schedule and limit are its own. What should be
there is a pure function of the files (:func:`desired_deployments`); what differs on the server is changed, and what
carries our tag, belongs to this directory and is listed no more is removed, with the runs that it had ahead.

A deployment starts in the project's directory, because profiles are named relative to it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mergegate.flows.prefect_api.schedules import NIGHTS, RESERVED, ScheduledProfile, Schedules
from mergegate.flows.prefect_api.site import Site
from mergegate.flows.profile import Profile, load_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.wording import format_duration

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

POOL = "mergegate"
TAG = "mergegate"
_DIRECTORY = "prefect.deployments.steps.set_working_directory"

DeployChange = Literal["made", "changed", "unchanged", "removed"]


@dataclass(frozen=True)
class DesiredDeployment:
    """What should stand on the server.

    Attributes:
        flow: ``release``, ``sweep`` or ``shadow``; also names the file and the function.
        schedule: As Prefect has it: of a cron ``{'cron', 'timezone'}``, else ``{'interval'}`` in seconds; None: none.
        on_collision: What becomes of a run that begins while one of the same deployment goes on; None: they may run
            together.
        profile: Of what it is a deployment; None: of any.
    """

    flow: str
    name: str
    description: str
    tags: tuple[str, ...]
    parameters: Mapping[str, str]
    schedule: Mapping[str, Any] | None = None
    on_collision: Literal["CANCEL_NEW", "ENQUEUE"] | None = None
    profile: Profile | None = field(default=None, compare=False)

    @property
    def full_name(self) -> str:
        return f"{self.flow}/{self.name}"

    @property
    def entrypoint(self) -> str:
        return f"mergegate.flows.{self.flow}:{self.flow}"

    def told(self) -> str:
        """In a line: what it is, and when."""
        said = self.schedule or {}
        if "cron" in said:
            when = f" · {said['cron']} {said['timezone']}"
        else:
            when = f" · every {format_duration(said['interval'])}" if said else ""
        return self.description + when


class DeployedChange(NamedTuple):
    """What has been done about one deployment."""

    name: str
    change: DeployChange
    id: str = ""


def desired_deployments(nights: Schedules, root: Path) -> tuple[DesiredDeployment, ...]:
    """What should be on the server: those that take any profile, then one for each that is listed.

    Args:
        root: The project's directory, to which profiles are relative.

    Raises:
        InvalidInput: for a profile that cannot be read, a name that two of them have, or one that is taken.
    """
    found = [
        _of_any("release", "profiles/demo.yaml"),
        _of_any("sweep", "profiles/demo-sweep.yaml"),
        _of_any("shadow", "profiles/demo.yaml"),
    ]
    for number, night in enumerate(nights.profiles):
        where = f"{NIGHTS}: profiles[{number}]"
        profile = load_profile(root / night.profile)
        if night.flow == "sweep" and profile.sweep is None:
            raise InvalidInput(
                f"{where}.flow",
                found=f"sweep, and {night.profile} has no section 'sweep'",
                expected="a profile that says what is searched",
                remedy="add the section, or leave 'flow' out to release it as it is",
            )
        if night.flow == "shadow" and profile.shadow is None:
            raise InvalidInput(
                f"{where}.flow",
                found=f"shadow, and {night.profile} has no section 'shadow'",
                expected="a profile that says how a release is watched",
                remedy="add the section (docs/shadow.md), or leave 'flow' out to release it",
            )
        if profile.name in RESERVED:
            raise InvalidInput(
                f"{night.profile}: name", found=f"{profile.name!r}, a name that takes any profile", remedy="rename it"
            )
        one = _of_profile(night, profile)
        if one.full_name in [other.full_name for other in found]:
            raise InvalidInput(
                where,
                found=f"{one.full_name} a second time",
                expected="each profile once",
                remedy="remove one of them, or give one of the profiles another name",
            )
        found.append(one)
    return tuple(found)


def sync_deployments(
    client: SyncPrefectClient, wanted: Sequence[DesiredDeployment], site: Site
) -> tuple[DeployedChange, ...]:
    """Bring the server in step: what was done about each, in their order, those that were removed at the end.

    Raises:
        InvalidInput: when another project has a deployment of that name on the server, or Prefect does not take a
            schedule.
    """
    make_pool(client)
    there = {name: one for name, one in _deployed(client).items() if TAG in one.tags or name in _names(wanted)}
    for name, one in there.items():
        if name in _names(wanted) and (other := _project_of(one)) not in (None, str(site.root)):
            raise InvalidInput(
                name,
                found=f"on {site.address} it belongs to another project, {other}",
                expected="a name of its own",
                remedy=f"rename the profile, or remove that one first: prefect deployment delete {name}",
            )
    done = [_keep_one(client, one, there.get(one.full_name), site) for one in wanted]
    _remove_leftovers(client, [one.full_name for one in wanted if one.schedule is None])
    for name, one in there.items():
        if name not in _names(wanted) and TAG in one.tags and _project_of(one) == str(site.root):
            client.delete_deployment(one.id)
            done.append(DeployedChange(name, "removed", str(one.id)))
    return tuple(done)


def _remove_leftovers(client: SyncPrefectClient, without_schedule: Collection[str]) -> None:
    """Take back runs of deployments that have no schedule any more: the server's scheduler may have been about to plan
    them when the schedule went. What a person has planned stays."""
    ids = [one.id for name, one in _deployed(client).items() if name in without_schedule]
    for run in client.get_scheduled_flow_runs_for_deployments(ids) if ids else ():
        if run.auto_scheduled:
            client.delete_flow_run(run.id)


def find_deployment(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    """The deployment ``release/name``, ``sweep/name`` or ``shadow/name`` of that full name; None when there is none."""
    return _deployed(client).get(name)


def deployment_names(client: SyncPrefectClient) -> tuple[str, ...]:
    """Full names of all deployments that mergegate made."""
    return tuple(name for name, one in _deployed(client).items() if TAG in one.tags)


def _of_any(flow: Literal["release", "sweep", "shadow"], profile: str) -> DesiredDeployment:
    """As in ``prefect.yaml``."""
    about = {
        "release": "Make one release now, of any profile.",
        "sweep": "Search a recipe's numbers, confirm the winner, release it: any profile with a section 'sweep'.",
        "shadow": "Look at a release on users' traffic, promote or roll back: any profile with a section 'shadow'.",
    }
    return DesiredDeployment(
        flow,
        flow,
        about[flow],
        (TAG, flow),
        {"profile": profile},
        on_collision="ENQUEUE" if flow != "release" else None,
    )


def _of_profile(night: ScheduledProfile, profile: Profile) -> DesiredDeployment:
    every = night.every_s
    schedule: Mapping[str, Any] | None = None
    if every is not None:
        schedule = {"interval": every}
    elif night.schedule is not None:
        schedule = {"cron": " ".join(night.schedule.split()), "timezone": night.timezone}
    nightly = ("nightly",) if schedule else ()
    return DesiredDeployment(
        night.flow,
        profile.name,
        profile.headline(),
        (TAG, night.flow, profile.name, *nightly),
        {"profile": night.profile.as_posix()},
        schedule,
        # A night that takes longer than a day must not pile up: what it would have found, the next one finds.
        "CANCEL_NEW",
        profile,
    )


def make_pool(client: SyncPrefectClient) -> None:
    """One run at a time: a merge takes the machine. Whoever wants more raises the pool's limit, which stays."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        with suppress(ObjectAlreadyExists):  # somebody else deploys at this moment
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=1))


def _keep_one(
    client: SyncPrefectClient, wanted: DesiredDeployment, there: DeploymentResponse | None, site: Site
) -> DeployedChange:
    fields = _fields(wanted, site)
    if there is not None and _fields_of(there) == _comparable(fields):
        return DeployedChange(wanted.full_name, "unchanged", str(there.id))
    made = client.create_deployment(  # of that name there is one: then it is changed, with its schedules
        flow_id=client.create_flow_from_name(wanted.flow), name=wanted.name, **fields
    )
    return DeployedChange(wanted.full_name, "changed" if there else "made", str(made))


def _fields(wanted: DesiredDeployment, site: Site) -> dict[str, Any]:
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema

    schema = parameter_schema(load_flow_from_entrypoint(wanted.entrypoint))
    options = wanted.on_collision and ConcurrencyOptions(
        collision_strategy=ConcurrencyLimitStrategy(wanted.on_collision)
    )
    schedules = [
        DeploymentScheduleCreate(schedule=_schedule(wanted), active=True, slug="nightly")
        for _ in [wanted.schedule]
        if wanted.schedule
    ]
    return {
        "entrypoint": wanted.entrypoint,
        "description": wanted.description,
        "tags": list(wanted.tags),
        "parameters": dict(wanted.parameters),
        "schedules": schedules,
        "concurrency_limit": 1 if options else None,
        "concurrency_options": options or None,
        "parameter_openapi_schema": schema.model_dump_for_openapi(),
        "enforce_parameter_schema": True,
        "work_pool_name": POOL,
        "job_variables": {"env": {"MERGEGATE_HOME": str(site.home)}},
        "pull_steps": [{_DIRECTORY: {"directory": str(site.root)}}],
        "path": str(site.root),
    }


def _schedule(wanted: DesiredDeployment) -> Any:
    from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
    from pydantic import ValidationError

    said = wanted.schedule or {}
    try:
        if "cron" in said:
            return CronSchedule(cron=said["cron"], timezone=said["timezone"])
        # Counted from a moment that is always the same: deploying again moves nothing.
        return IntervalSchedule(interval=said["interval"], anchor_date="2026-01-01T00:00:00Z")
    except ValidationError as error:
        raise InvalidInput(
            f"{NIGHTS}: schedule of {wanted.name}",
            found=f"{said.get('cron')!r}: {error.errors()[0]['msg'].lower()}",
            expected="cron in five fields: minute, hour, day of the month, month, day of the week",
        ) from None


def _comparable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``fields`` as they are compared: plain values."""
    options = fields["concurrency_options"]
    return {
        **{name: value for name, value in fields.items() if name not in ("schedules", "concurrency_options", "tags")},
        "tags": sorted(fields["tags"]),
        "schedules": [one.schedule.model_dump(mode="json") for one in fields["schedules"]],
        "concurrency_options": options and options.collision_strategy.value,
    }


def _fields_of(there: DeploymentResponse) -> dict[str, Any]:
    """The same of what stands on the server."""
    limit, options = there.global_concurrency_limit, there.concurrency_options
    return {
        "entrypoint": there.entrypoint,
        "description": there.description,
        "tags": sorted(there.tags),
        "parameters": there.parameters,
        "schedules": [one.schedule.model_dump(mode="json") for one in there.schedules],
        "concurrency_limit": limit.limit if limit else None,
        "concurrency_options": options and options.collision_strategy.value,
        "parameter_openapi_schema": there.parameter_openapi_schema,
        "enforce_parameter_schema": there.enforce_parameter_schema,
        "work_pool_name": there.work_pool_name,
        "job_variables": there.job_variables,
        "pull_steps": there.pull_steps,
        "path": there.path,
    }


def _deployed(client: SyncPrefectClient) -> dict[str, DeploymentResponse]:
    """Every deployment of our flows on the server, by its full name."""
    flows = {one.id: one.name for one in client.read_flows() if one.name in RESERVED}
    found: dict[str, DeploymentResponse] = {}
    while page := client.read_deployments(limit=200, offset=len(found)):
        found |= {f"{flows.get(one.flow_id, one.flow_id)}/{one.name}": one for one in page}
    return {name: one for name, one in found.items() if name.partition("/")[0] in RESERVED}


def _project_of(there: DeploymentResponse) -> str | None:
    """Directory in which its runs start."""
    steps = [step[_DIRECTORY] for step in there.pull_steps or [] if _DIRECTORY in step]
    return str(steps[0]["directory"]) if steps else None


def _names(wanted: Sequence[DesiredDeployment]) -> list[str]:
    return [one.full_name for one in wanted]
