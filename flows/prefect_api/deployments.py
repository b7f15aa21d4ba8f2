"""Create, change and remove the deployments of a project on its server to match ``schedules.yaml``.

``release/release``, ``sweep/sweep`` and ``shadow/shadow`` accept any profile, as in ``prefect.yaml``. Each listed
profile has its own deployment (``release/support-assistant``) with its own form, schedule and limit.
:func:`desired_deployments` computes them from ``schedules.yaml`` and the profiles. A deployment on the server is
removed with its scheduled runs if it has mergegate's tag, belongs to this directory and is no longer listed.

A deployment starts in the project's directory, because profile paths are relative to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from mergegate.flows.prefect_api.schedules import RESERVED, SCHEDULES_FILE, Schedules
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
    """Desired state of a deployment on the server.

    Attributes:
        flow: ``release``, ``sweep`` or ``shadow``. It is also the name of the file and the function.
        schedule: Schedule in Prefect's form: ``{'cron', 'timezone'}``, or ``{'interval'}`` in seconds. None: no
            schedule.
        on_collision: What to do with a run that starts while another one of the deployment is active. None: run both.
        profile: Profile of the deployment. None if it accepts any.
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

    def summary(self) -> str:
        """Return the description and the schedule in one line."""
        schedule = self.schedule or {}
        if "cron" in schedule:
            when = f" · {schedule['cron']} {schedule['timezone']}"
        else:
            when = f" · every {format_duration(schedule['interval'])}" if schedule else ""
        return self.description + when


class DeployedChange(NamedTuple):
    """How ``mergegate deploy`` changed one deployment."""

    name: str
    change: DeployChange
    id: str = ""


def desired_deployments(schedules: Schedules, root: Path) -> tuple[DesiredDeployment, ...]:
    """Return the deployments that accept any profile, then one for each listed profile.

    Profile paths are relative to ``root``, the directory of the project.

    Raises:
        InvalidInput: A profile cannot be read, two profiles have the same name, or a name is reserved.
    """
    deployments = [
        _of_any("release", "profiles/demo.yaml"),
        _of_any("sweep", "profiles/demo-sweep.yaml"),
        _of_any("shadow", "profiles/demo.yaml"),
    ]
    for number, entry in enumerate(schedules.profiles):
        location = f"{SCHEDULES_FILE}: profiles[{number}]"
        profile = load_profile(root / entry.profile)
        if entry.flow == "sweep" and profile.sweep is None:
            raise InvalidInput(
                f"{location}.flow",
                found=f"sweep, but {entry.profile} has no section 'sweep'",
                expected="a profile with free values to search",
                remedy="add the section, or omit 'flow' to release the recipe as it is",
            )
        if entry.flow == "shadow" and profile.shadow is None:
            raise InvalidInput(
                f"{location}.flow",
                found=f"shadow, but {entry.profile} has no section 'shadow'",
                expected="a profile with settings for a shadow test",
                remedy="add the section (docs/how-to/watch-a-release.md), or omit 'flow' to release it",
            )
        if profile.name in RESERVED:
            raise InvalidInput(
                f"{entry.profile}: name", found=f"{profile.name!r} is a reserved name", remedy="rename the profile"
            )
        schedule: Mapping[str, Any] | None = None
        if entry.every_s is not None:
            schedule = {"interval": entry.every_s}
        elif entry.schedule is not None:
            schedule = {"cron": " ".join(entry.schedule.split()), "timezone": entry.timezone}
        deployment = DesiredDeployment(
            entry.flow,
            profile.name,
            profile.headline(),
            (TAG, entry.flow, profile.name, *(("nightly",) if schedule else ())),
            {"profile": entry.profile.as_posix()},
            schedule,
            # A run that takes longer than a day must not cause a queue. The next run does the work of the skipped one.
            "CANCEL_NEW",
            profile,
        )
        if deployment.full_name in [previous.full_name for previous in deployments]:
            raise InvalidInput(
                location,
                found=f"a second entry for {deployment.full_name}",
                expected="one entry for each profile",
                remedy="remove one of the entries, or rename one of the profiles",
            )
        deployments.append(deployment)
    return tuple(deployments)


def sync_deployments(
    client: SyncPrefectClient, deployments: Sequence[DesiredDeployment], site: Site
) -> tuple[DeployedChange, ...]:
    """Create, change and remove deployments until the server matches, and return the change of each one.

    Changes are in the order of ``deployments``, followed by the removed ones.

    Raises:
        InvalidInput: Another project has a deployment of this name on the server, or Prefect rejects a schedule.
    """
    make_pool(client)
    names = [deployment.full_name for deployment in deployments]
    existing = {
        name: deployment
        for name, deployment in deployments_on_server(client).items()
        if TAG in deployment.tags or name in names
    }
    for name, on_server in existing.items():
        if name in names and (project := _project_of(on_server)) not in (None, str(site.root)):
            raise InvalidInput(
                name,
                found=f"on {site.address} it belongs to another project, {project}",
                expected="a name that no other project uses",
                remedy=f"rename the profile, or delete that deployment: prefect deployment delete {name}",
            )
    changes = []
    for deployment in deployments:
        fields, current = _fields(deployment, site), existing.get(deployment.full_name)
        if current is not None and _has_fields(current, fields):
            changes.append(DeployedChange(deployment.full_name, "unchanged", str(current.id)))
            continue
        deployment_id = client.create_deployment(  # changes an existing deployment of that name, with its schedules
            flow_id=client.create_flow_from_name(deployment.flow), name=deployment.name, **fields
        )
        change: DeployChange = "changed" if current else "made"
        changes.append(DeployedChange(deployment.full_name, change, str(deployment_id)))
    # Delete runs that the server's scheduler planned while a schedule was removed, but not those that a user planned.
    unscheduled = [deployment.full_name for deployment in deployments if deployment.schedule is None]
    ids = [on_server.id for name, on_server in deployments_on_server(client).items() if name in unscheduled]
    for run in client.get_scheduled_flow_runs_for_deployments(ids) if ids else ():
        if run.auto_scheduled:
            client.delete_flow_run(run.id)
    for name, on_server in existing.items():
        if name not in names and TAG in on_server.tags and _project_of(on_server) == str(site.root):
            client.delete_deployment(on_server.id)
            changes.append(DeployedChange(name, "removed", str(on_server.id)))
    return tuple(changes)


def _of_any(flow: Literal["release", "sweep", "shadow"], profile: str) -> DesiredDeployment:
    """Return the deployment that runs a flow for any profile, as in ``prefect.yaml``."""
    descriptions = {
        "release": "Release any profile now.",
        "sweep": "Search the free values of a recipe, and release the winner. For profiles with a section 'sweep'.",
        "shadow": "Test a release on users' traffic, then promote it or roll it back. For profiles with 'shadow'.",
    }
    return DesiredDeployment(
        flow,
        flow,
        descriptions[flow],
        (TAG, flow),
        {"profile": profile},
        on_collision="ENQUEUE" if flow != "release" else None,
    )


def make_pool(client: SyncPrefectClient) -> None:
    """Create the work pool. It runs one run at a time, because a merge takes the whole machine.

    If the pool exists, it stays unchanged, because a user may have raised its limit.
    """
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        with suppress(ObjectAlreadyExists):  # another process deploys at the same time
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=1))


def _fields(deployment: DesiredDeployment, site: Site) -> dict[str, Any]:
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.objects import ConcurrencyLimitStrategy, ConcurrencyOptions
    from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
    from prefect.flows import load_flow_from_entrypoint
    from prefect.utilities.callables import parameter_schema
    from pydantic import ValidationError

    schema = parameter_schema(load_flow_from_entrypoint(deployment.entrypoint))
    options = deployment.on_collision and ConcurrencyOptions(
        collision_strategy=ConcurrencyLimitStrategy(deployment.on_collision)
    )
    schedules = []
    if planned := deployment.schedule:
        try:
            # An interval has a fixed anchor, so that deploying again does not move the schedule.
            schedule: Any = (
                CronSchedule(cron=planned["cron"], timezone=planned["timezone"])
                if "cron" in planned
                else IntervalSchedule(interval=planned["interval"], anchor_date="2026-01-01T00:00:00Z")
            )
        except ValidationError as error:
            raise InvalidInput(
                f"{SCHEDULES_FILE}: schedule of {deployment.name}",
                found=f"{planned.get('cron')!r}: {error.errors()[0]['msg'].lower()}",
                expected="cron in five fields: minute, hour, day of the month, month, day of the week",
            ) from None
        schedules.append(DeploymentScheduleCreate(schedule=schedule, active=True, slug="nightly"))
    return {
        "entrypoint": deployment.entrypoint,
        "description": deployment.description,
        "tags": list(deployment.tags),
        "parameters": dict(deployment.parameters),
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


def _has_fields(existing: DeploymentResponse, fields: Mapping[str, Any]) -> bool:
    on_server = {name: getattr(existing, name) for name in fields if name != "concurrency_limit"}
    limit = existing.global_concurrency_limit
    on_server["concurrency_limit"] = limit.limit if limit else None

    def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
        options = values["concurrency_options"]
        return {
            **values,
            "tags": sorted(values["tags"]),
            "schedules": [schedule.schedule.model_dump(mode="json") for schedule in values["schedules"]],
            "concurrency_options": options and options.collision_strategy.value,
        }

    return plain_values(on_server) == plain_values(fields)


def deployments_on_server(client: SyncPrefectClient) -> dict[str, DeploymentResponse]:
    """Return all deployments of mergegate's flows on the server, by full name."""
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName

    ours = FlowFilter(name=FlowFilterName(any_=list(RESERVED)))  # without it, the server returns any 200 flows
    flows = {flow.id: flow.name for flow in client.read_flows(flow_filter=ours)}
    deployments: dict[str, DeploymentResponse] = {}
    while page := client.read_deployments(limit=200, offset=len(deployments)):
        deployments |= {
            f"{flows.get(deployment.flow_id, deployment.flow_id)}/{deployment.name}": deployment for deployment in page
        }
    return {name: deployment for name, deployment in deployments.items() if name.partition("/")[0] in RESERVED}


def _project_of(existing: DeploymentResponse) -> str | None:
    """Return the directory in which the runs of a deployment start."""
    steps = [step[_DIRECTORY] for step in existing.pull_steps or [] if _DIRECTORY in step]
    return str(steps[0]["directory"]) if steps else None
