"""Serving as a stage of the release: cached by the model's content, the settings, and the server's version.

::

    served = serve_models(profile.serve, profile.root, merged_model(merged), pinned.parents)   # () without ``serve``
    refusal = served[0].refused() if served else None                                         # the merge comes first
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from merge_core.keys import NotInKey
from tasks.model import Model
from tasks.runtime import Runtime, runtime
from tasks.serve.launch import ServerKind, find_server
from tasks.serve.settings import ServeSettings
from tasks.serve.smoke import LOG, STEPS, smoke_checkpoint
from tasks.serve.verdict import MachineFailed, ServeVerdict
from tasks.stage import home, stage
from tasks.watching import advance


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


def serve_models(
    settings: ServeSettings | None, root: Path, merge: Model, parents: Sequence[Model] = ()
) -> tuple[ServeVerdict, ...]:
    """Verdict on the merge, and on the parents where they are to be measured in the same way; none without settings.

    A parent that fails refuses nothing: it is there to be compared with.

    Raises:
        InvalidInput: when there is no server, or a checkpoint cannot be read.
        MachineFailed: when the server cannot be run here.
    """
    if settings is None:
        return ()
    server = server_of(settings, root)
    verdict = serve(merge, settings, server, runtime()).value
    others = parents if settings.parents and not verdict.refuses() else ()
    return (verdict, *(serve(parent, settings, server, runtime()).value for parent in others))


@stage("serve", version=1, subject="model")
def serve(out: Path, model: Model, settings: ServeSettings, server: ServerVersion, runtime: Runtime) -> ServeVerdict:
    """Serve ``model`` and ask it; the verdict, and ``server.log`` unless no server was needed.

    Raises:
        InvalidInput: for a checkpoint that cannot be read.
        MachineFailed: when the server cannot be run here. That is no verdict, so nothing is stored but the log, in the
            project's state under ``logs``.
    """
    kind = ServerKind(server.label, server.python, server.on_cpu)
    log = out / LOG
    try:
        return smoke_checkpoint(
            model,
            settings,
            kind,
            device=runtime.device,
            log=log,
            on_progress=lambda done: advance(done, STEPS, "checks"),
        )
    except MachineFailed as failed:
        if not log.exists():
            raise
        kept = home() / "logs" / f"serve-{model.digest[:12]}.log"
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, kept)
        found = failed.found.replace(str(log), str(kept))
        raise type(failed)(failed.where, found=found, expected=failed.expected, remedy=failed.remedy) from None
