"""Serving as a stage of the release: cached by the model's content, the settings, and the server's version.

::

    served = serve_models(profile.serve, profile.root, merged_model(merged), pinned.parents)   # None without ``serve``
    refusal = served.verdict.refused() if served else None
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
from mergegate.tasks.serve.smoke import LOG, STEPS, smoke_checkpoint
from mergegate.tasks.serve.verdict import MachineFailed, Measurement, ServedModels, ServeVerdict
from mergegate.tasks.stage import Runtime, advance, home, runtime, stage
from mergegate.tasks.store import NotInKey


class ServerVersion(BaseModel):
    """The server that a verdict is about."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str  # 'vllm 0.33.0'
    python: Annotated[Path | None, NotInKey] = None
    on_cpu: bool = False


def server_of(settings: ServeSettings, root: Path) -> ServerVersion:
    """The server that the settings mean, found without starting it.

    Raises:
        InvalidInput: when there is none.
    """
    kind = find_server(settings, root)
    return ServerVersion(label=kind.label, python=kind.python, on_cpu=kind.on_cpu)


def check_server(settings: ServeSettings | None, root: Path) -> None:
    """See that there is a server to serve with, long before there is a merge to serve.

    Raises:
        InvalidInput: when there is none.
    """
    if settings is not None:
        server_of(settings, root)


def serve_models(
    settings: ServeSettings | None,
    root: Path,
    merge: Model,
    parents: Sequence[Model] = (),
    adapted: PinnedCheckpoint | None = None,
) -> ServedModels | None:
    """Verdict on the merge, and what its parents cost where they are to be measured; None without settings.

    A merge that is an adapter comes in two forms: ``merge`` is the model that it makes, ``adapted`` its base with it.

    Parents are there to be compared with: what one of them does, or that it cannot be served here, refuses nothing.

    Raises:
        InvalidInput: when there is no server, or the merge cannot be read.
        MachineFailed: when the server cannot be run here.
    """
    if settings is None:
        return None
    server = server_of(settings, root)
    verdict = serve(merge, settings, server, runtime(), adapted).value
    if not settings.parents or verdict.refuses():
        return ServedModels(verdict=verdict)
    # A base model need not chat.
    settings = settings.model_copy(update={"chat": None})
    return ServedModels(
        verdict=verdict, parents={parent.name: _measurement(parent, settings, server) for parent in parents}
    )


def _measurement(parent: Model, settings: ServeSettings, server: ServerVersion) -> Measurement:
    try:
        return measure_parent(parent, settings, server, runtime()).value
    except ChangedInput:
        raise
    except MergegateError as error:
        return Measurement(model=parent.name, server=server.label, problem=error.found.splitlines()[0])


@stage("serve", version=3)
def serve(
    out: Path,
    model: Model,
    settings: ServeSettings,
    server: ServerVersion,
    runtime: Runtime,
    adapted: PinnedCheckpoint | None = None,
) -> ServeVerdict:
    """Serve ``model`` and ask it; the verdict, and ``server.log`` unless no server was needed.

    Raises:
        InvalidInput: for a checkpoint that cannot be read.
        MachineFailed: when the server cannot be run here. That is no verdict, so nothing is stored but the log, in the
            project's state under ``logs``.
    """
    return _smoke(out, model, settings, server, runtime, adapted)


@stage("measure", version=1, subject="model")
def measure_parent(
    out: Path, model: Model, settings: ServeSettings, server: ServerVersion, runtime: Runtime
) -> Measurement:
    """Serve ``model`` and ask it the same, only to know what that costs. Raises as ``serve``."""
    verdict = _smoke(out, model, settings, server, runtime)
    known = verdict.measured.tokens_per_second is not None
    problem = "" if known or not verdict.failures else str(verdict.failures[0])
    return Measurement(model=model.name, server=server.label, measured=verdict.measured, problem=problem)


def _smoke(
    out: Path,
    model: Model,
    settings: ServeSettings,
    server: ServerVersion,
    runtime: Runtime,
    adapted: PinnedCheckpoint | None = None,
) -> ServeVerdict:
    kind = ServerKind(server.label, server.python, server.on_cpu)
    log = out / LOG
    try:
        return smoke_checkpoint(
            model,
            settings,
            kind,
            device=runtime.device,
            log=log,
            adapted=adapted,
            on_progress=lambda done, doing: advance(done, STEPS, "steps"),
        )
    except MachineFailed as failed:
        if not log.exists():
            raise
        kept = home() / "logs" / f"serve-{model.digest[:12]}.log"
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, kept)
        found = failed.found.replace(str(log), str(kept))
        raise type(failed)(failed.where, found=found, expected=failed.expected, remedy=failed.remedy) from None
