"""Run a flow in this process, with progress and approval on this terminal, and return its outcome."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from mergegate.flows.operations.progress import EventLines, TerminalProgress
from mergegate.flows.outcome import RunOutcome, flow_outcome
from mergegate.flows.prefect_api import (
    ApprovalRequest,
    Decision,
    approval_function,
    configured_url,
    local_api,
    require_writable,
)
from mergegate.flows.profile import Profile, RemedyChoice, load_profile, parse_profile
from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.errors import Refused
from mergegate.merge_core.parsing import read_yaml
from mergegate.tasks.models.checkpoints import start_model_process
from mergegate.tasks.sweep import convert_evolve_file, count_layers


@dataclass(frozen=True)
class RunView:
    """How a run shows its progress.

    With ``approve``, the user approved publication in advance. With ``events``, one line of JSON is printed for each
    event instead of the progress. ``verbose`` logs details. With ``silent``, nothing is printed.
    """

    approve: bool = False
    events: bool = False
    verbose: bool = False
    silent: bool = False


class ReleaseArguments(NamedTuple):
    """Arguments of the flow ``release``. A path is passed as it is, because Prefect stores the arguments of a flow."""

    profile: Path | Profile
    overrides: tuple[str, ...] = ()
    publish: bool = True
    remedy: RemedyChoice | None = None


def run_release(arguments: ReleaseArguments, view: RunView, console: Console) -> RunOutcome:
    """Run the flow ``release``, and return its outcome. An invalid profile raises InvalidInput."""
    from mergegate.flows.release import release, run_release_dry_pass

    loaded = load_for_flow(arguments.profile, arguments.overrides).with_remedies(arguments.remedy)
    return run_flow(
        partial(release, *arguments, return_state=True),
        headline_of(loaded, arguments.profile),
        view,
        console,
        dry_pass=partial(run_release_dry_pass, *arguments),
        prepare=partial(start_models_early, loaded),
    )


def run_comparison(
    reference: str, candidate: str, profile: Path | Profile, view: RunView, console: Console
) -> RunOutcome:
    """Run the flow ``compare``, and return its outcome."""
    from mergegate.flows.compare import compare

    load_profile(profile, needs_recipe=False)  # a usage error ends the command at once
    name = profile.name if isinstance(profile, Profile) else profile
    headline = (f"{Path(candidate).name} against {Path(reference).name}", f"profile {name}")
    return run_flow(partial(compare, reference, candidate, profile, return_state=True), headline, view, console)


def start_models_early(profile: Profile) -> None:
    """Start the model process while Prefect's API starts, if the profile lets it use this machine without limits."""
    # A cluster evaluates elsewhere, and a memory limit applies only inside the flow.
    if profile.runner.kind == "local" and profile.limits.memory is None:
        start_model_process()


def headline_of(profile: Profile, source: Path | Profile) -> tuple[str, str]:
    """Return the two parts of the line above the progress: the merge, and the profile as the user named it."""
    return profile.headline(), f"profile {source.name if isinstance(source, Profile) else source}"


def load_for_flow(profile: Path | Profile, overrides: tuple[str, ...] = ()) -> Profile:
    """Load a profile and its recipes before a flow starts, so that usage errors end the command immediately."""
    loaded = load_profile(profile, overrides)
    loaded.headline()
    return loaded


def run_flow(
    flow: Callable[[], Any],
    headline: tuple[str, str],
    view: RunView,
    console: Console,
    *,
    dry_pass: Callable[[], RunOutcome | None] = lambda: None,
    prepare: Callable[[], None] = lambda: None,
) -> RunOutcome:
    """Run a flow with progress on the console and Prefect's API available, and return its outcome.

    ``headline`` is the line above the progress, in two parts. First try ``dry_pass``. If it returns an outcome, there
    is no work and the flow does not run. ``prepare`` starts work in the background that the flow needs in any case.
    """
    progress = TerminalProgress(console, verbose=view.verbose)
    watching: Callable[[], AbstractContextManager[None]] = nullcontext if view.silent else progress.watching
    if view.events:
        watching = partial(EventLines().watching, verbose=view.verbose)
    progress.headline(*headline)
    if not configured_url():  # a server should record every run, because other users see its list
        with watching():
            if (cached_outcome := dry_pass()) is not None:
                return cached_outcome
    prepare()
    with ExitStack() as stack:
        with console.status("starting Prefect's API") if console.is_terminal else nullcontext():
            stack.enter_context(local_api())
        with watching(), approval_function(TerminalApproval(progress, console, in_advance=view.approve)):
            try:
                state = flow()
            except Exception as failure:
                require_writable(Path(os.environ["MERGEGATE_HOME"]))
                raise failure from None
    outcome = flow_outcome(state)
    if isinstance(outcome, RunOutcome):
        return outcome
    # Prefect's API reports a full disk only as a failure.
    require_writable(Path(os.environ["MERGEGATE_HOME"]))
    if isinstance(outcome, Exception):
        raise outcome
    raise RuntimeError(f"the run ended without an outcome: {outcome!r}")


def run_sweep(
    profile: Path | Profile, view: RunView, console: Console, *, release: bool, study_view: str | None = None
) -> RunOutcome:
    """Run the flow ``sweep``, and return its outcome. ``study_view`` is the study for Optuna's dashboard."""
    from mergegate.flows.sweep import sweep

    loaded = load_for_flow(profile)
    flow = partial(sweep, profile, release=release, view=study_view, return_state=True)
    return run_flow(flow, headline_of(loaded, profile), view, console)


def convert_evolve(file: Path, console: Console) -> Path | Profile:
    """Convert mergekit-evolve's YAML to an equivalent profile, and print the settings without an equivalent.

    A profile file is returned as its path, because Prefect stores the arguments of a flow.

    Raises:
        InvalidInput: The file is neither.
    """
    documents = read_yaml(file, "a profile (YAML)")
    if len(documents) != 1 or not isinstance(documents[0], Mapping) or "genome" not in documents[0]:
        return file
    content = documents[0]
    genome = content["genome"]
    models = genome.get("models") if isinstance(genome, Mapping) else None
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("model") if isinstance(first, Mapping) else first
    layers = None  # all layers of a model that is not local share one value
    if isinstance(name, str) and (file.parent / name).is_dir():
        layers = count_layers(open_checkpoint(file.parent / name).tensors)
    converted = convert_evolve_file(content, file.stem, str(file), layers)
    console.print(Text(f"{file}: converted from mergekit-evolve, without these settings"), style="bold")
    for dropped in converted.unsupported:
        console.print(Text(f"  {dropped.setting}: {dropped.reason}", style="dim"))
    return parse_profile({"root": file.absolute().parent, **converted.profile}, str(file))


def current_user() -> str:
    """Return ``user@machine``, or only the machine if the user is unknown."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError, ImportError):
        return socket.gethostname()


class TerminalApproval:
    """Prompts the user on this terminal to approve a release, or approves without a prompt if ``in_advance`` is set."""

    def __init__(self, progress: TerminalProgress, console: Console, *, in_advance: bool) -> None:
        self._progress, self._console, self._in_advance = progress, console, in_advance

    def __call__(self, request: ApprovalRequest) -> Decision:
        """Return the decision of the user.

        Raises:
            Refused: There is no terminal, or the input ends before the user answers.
        """
        version, digest = request.pending.version, request.pending.digest
        if self._in_advance:
            return Decision(True, current_user(), "approved in advance", version, digest)
        if not (sys.stdin.isatty() and self._console.is_terminal):
            raise Refused(
                request.name,
                found=f"{version} needs approval before mergegate may {request.verb} it, and there is no terminal",
                expected="an approval",
                remedy=f"approve it in advance: mergegate {'run' if request.verb == 'publish' else 'shadow evaluate'} "
                "--approve; or use mergegate trigger, whose run waits for approval",
            )
        with self._progress.pause():
            self._console.print(Markdown(request.summary))
            try:
                answer = self._console.input(f"{request.verb} {request.name} {version}? \\[y/N] ").strip().lower()
                publish = answer in ("y", "yes")
                reason = "" if publish else self._console.input("reason: ").strip()
            except EOFError:
                raise Refused(request.name, found=f"no decision about {version}", expected="y or n") from None
        return Decision(publish, current_user(), reason, version, digest)
