"""Serve models as a stage of the release, cached by model content, settings and server version.

::

    served = serve_models(profile.serve, profile.root, merged_model(merged), pinned.parents)   # None without ``serve``
    refusal = served.verdict.publication_error() if served else None
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from mergegate.merge_core.errors import ChangedInput, MergegateError
from mergegate.tasks.checkpoints import Model, PinnedCheckpoint
from mergegate.tasks.serve.launch import ServerKind, find_server
from mergegate.tasks.serve.settings import ServeSettings
from mergegate.tasks.serve.smoke import LOG, STEPS, SmokeSetup, smoke_checkpoint
from mergegate.tasks.serve.verdict import MachineFailed, Measurement, ServedModels, ServeVerdict
from mergegate.tasks.stage import Runtime, advance, home, runtime, stage
from mergegate.tasks.store import NotInKey


class ServerVersion(BaseModel):
    """Program and version of the server that produced a verdict."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str  # 'vllm 0.33.0'
    python: Annotated[Path | None, NotInKey] = None
    on_cpu: bool = False


def server_of(settings: ServeSettings, root: Path) -> ServerVersion:
    """Return the server that the settings select, without starting it. Raise InvalidInput if it is not installed."""
    kind = find_server(settings, root)
    return ServerVersion(label=kind.label, python=kind.python, on_cpu=kind.on_cpu)


def serve_models(
    settings: ServeSettings | None,
    root: Path,
    merge: Model,
    parents: Sequence[Model] = (),
    adapted_model: PinnedCheckpoint | None = None,
) -> ServedModels | None:
    """Serve the merge and, if ``settings.parents`` is set, its parents. Return None if ``settings`` is None.

    The parents are served only for comparison. Neither their answers nor a failure to serve them refuses the merge.

    If the merge is an adapter, ``merge`` is the base with the adapter merged into it, and ``adapted_model`` names the
    base and the adapter separately.

    Raises:
        InvalidInput: The server is not installed, or the merge cannot be read.
        MachineFailed: The server cannot run on this machine.
    """
    if settings is None:
        return None
    server = server_of(settings, root)
    verdict = serve(merge, settings, server, runtime(), adapted_model).value
    if not settings.parents or verdict.refuses():
        return ServedModels(verdict=verdict)
    # A parent may be a base model, which need not chat.
    settings = settings.model_copy(update={"chat": None})
    measurements: dict[str, Measurement] = {}
    for parent in parents:
        try:
            measurements[parent.name] = measure_parent(parent, settings, server, runtime()).value
        except ChangedInput:
            raise
        except MergegateError as error:
            problem = error.found.splitlines()[0]
            measurements[parent.name] = Measurement(model=parent.name, server=server.label, problem=problem)
    return ServedModels(verdict=verdict, parents=measurements)


@stage("serve", version=4)
def serve(
    out: Path,
    model: Model,
    settings: ServeSettings,
    server: ServerVersion,
    runtime: Runtime,
    adapted: PinnedCheckpoint | None = None,
) -> ServeVerdict:
    """Serve ``model`` and check the server's answers. The artifact holds ``server.log`` if a server was started.

    Raises:
        InvalidInput: The checkpoint cannot be read.
        MachineFailed: The server cannot run on this machine. There is no verdict then, and only the log is stored,
            under ``logs`` in mergegate's home directory.
    """
    return _smoke(out, model, settings, server, runtime, adapted)


@stage("measure", version=2, subject="model")
def measure_parent(
    out: Path, model: Model, settings: ServeSettings, server: ServerVersion, runtime: Runtime
) -> Measurement:
    """Serve ``model`` to measure its cost, with the same checks and errors as :func:`serve` but without a verdict."""
    verdict = _smoke(out, model, settings, server, runtime)
    is_measured = verdict.measured.tokens_per_second is not None
    problem = "" if is_measured or not verdict.failures else str(verdict.failures[0])
    return Measurement(model=model.name, server=server.label, measured=verdict.measured, problem=problem)


def _smoke(
    out: Path,
    model: Model,
    settings: ServeSettings,
    server: ServerVersion,
    runtime: Runtime,
    adapted_model: PinnedCheckpoint | None = None,
) -> ServeVerdict:
    log = out / LOG
    setup = SmokeSetup(ServerKind(server.label, server.python, server.on_cpu), runtime.device, log)
    try:
        return smoke_checkpoint(
            model,
            settings,
            setup,
            adapted_model=adapted_model,
            on_progress=lambda done, step: advance(done, STEPS, "steps"),
        )
    except MachineFailed as error:
        if not log.exists():
            raise
        log_copy = home() / "logs" / f"serve-{model.digest[:12]}.log"
        log_copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, log_copy)
        message = error.found.replace(str(log), str(log_copy))
        raise type(error)(error.where, found=message, expected=error.expected, remedy=error.remedy) from None
