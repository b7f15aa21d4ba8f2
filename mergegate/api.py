"""Define the public functions of mergegate for scripts and notebooks.

Each function runs the same code as the command of the same name. A function never ends the process, and all errors are
exceptions: :class:`mergegate.InvalidInput` for a wrong profile, recipe or argument, :class:`mergegate.Refused` for
checkpoints or releases that fail a check, and :class:`mergegate.CannotDecide` for a full disk, a changed file or a time
limit. Their base class is :class:`mergegate.MergegateError`. A refused run is not an error. It is a
:class:`mergegate.RunResult` with reasons, remedies and a report.

A ``FilePath`` is a text or an object such as :class:`pathlib.Path`, relative to the working directory as on the command
line. ``Overrides`` are a mapping from settings to values, or texts of the form ``KEY=VALUE``.

The project's state is in ``.mergegate`` in the directory ``project``. By default, it is ``$MERGEGATE_HOME``, or
``.mergegate`` in the working directory.

The functions also work while an event loop runs in this thread, as in a notebook. They block it until they return, so
that Ctrl-C and time limits work. Only one function runs at a time in a process. A script needs no
``if __name__ == "__main__"``, because mergegate starts its subprocesses with their own programs.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from rich.console import Console

from mergegate.flows.operations import convert_os_error
from mergegate.flows.operations.check import CheckReport, check_file
from mergegate.flows.operations.console import FittingConsole
from mergegate.flows.operations.gate import judge_results, load_guards
from mergegate.flows.operations.merge import MergeOptions, merge_recipe
from mergegate.flows.operations.plan import MergeForecast, PlanOptions, plan_file
from mergegate.flows.operations.releases import ExportResult, export_release, reproduce_release, signer_policy
from mergegate.flows.operations.run import (
    ReleaseArguments,
    RunView,
    convert_evolve,
    run_comparison,
    run_release,
    run_sweep,
)
from mergegate.flows.outcome import RunOutcome
from mergegate.flows.prefect_api import configure
from mergegate.flows.profile import Profile, RemedyChoice, override_profile
from mergegate.flows.profile import load_profile as read_profile
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import parse_path
from mergegate.results import MergeResult, RunResult
from mergegate.tasks.release.publish.releases import ReproducedRelease, VerifiedRelease, check_release
from mergegate.tasks.release.publish.targets import find_release

FilePath: TypeAlias = str | os.PathLike[str]
Overrides: TypeAlias = Mapping[str, Any] | Sequence[str]

_lock = threading.RLock()


def load_profile(profile: FilePath, overrides: Overrides = ()) -> Profile:
    """Load a profile from a YAML file, and check its settings and its recipes.

    Args:
        profile: Path of the profile.
        overrides: Settings to override, as a mapping or as texts of the form ``KEY=VALUE``.

    Returns:
        The frozen settings. Every other function accepts them in place of a path.

    Raises:
        InvalidInput: The file is not a valid profile. The message lists all faults.

    Example:
        >>> profile = mergegate.load_profile("profiles/demo.yaml", {"evaluate.documents": 200})
        >>> profile.name, profile.evaluate.documents
        ('demo', 200)
    """
    with _errors():
        loaded = read_profile(parse_path(os.fspath(profile)), _override_texts(overrides))
        loaded.candidates()
        return loaded


def check(
    profile: FilePath | Profile, overrides: Overrides = (), *, progress: bool = True, project: FilePath | None = None
) -> CheckReport:
    """Find every problem of a profile or a recipe before any weight is read.

    Args:
        profile: Profile, or the path of a profile or recipe.
        overrides: Settings to override, as a mapping or as texts of the form ``KEY=VALUE``.
        progress: Whether to print the settings of mergekit-evolve that have no equivalent.
        project: Directory of the project. Default: the working directory.

    Returns:
        All findings, worst first. Blocking findings are part of the report and do not raise an error.

    Raises:
        InvalidInput: The file is not a valid profile or recipe.

    Example:
        >>> report = mergegate.check("profiles/demo.yaml")
        >>> report.passed, len(report.remarks)
        (True, 0)
    """
    with _session(project, progress) as console:
        return check_file(_profile(profile, overrides), console)


def plan(
    profile: FilePath | Profile,
    overrides: Overrides = (),
    *,
    output: FilePath = ".",
    device: str = "auto",
    prices: Mapping[str, float] | None = None,
    probe: bool | None = None,
    project: FilePath | None = None,
) -> MergeForecast:
    """Forecast bytes, memory, disk, time and cost of a merge from headers alone.

    Args:
        profile: Profile, or the path of a profile or recipe.
        overrides: Settings to override, as a mapping or as texts of the form ``KEY=VALUE``.
        output: Directory for the result. It need not exist.
        device: Device of the merge: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        prices: Dollars per hour by name of an instance.
        probe: Whether to measure this machine now (True), never (False), or once an hour (None).
        project: Directory of the project. Default: the working directory.

    Returns:
        The needs of the merge, its duration on this machine, and the power of the profile's gate.

    Raises:
        InvalidInput: The file, a parent or the device does not exist or is not valid.
        Refused: A parent is not accessible.

    Example:
        >>> forecast = mergegate.plan("profiles/demo.yaml", probe=False)
        >>> forecast.method, forecast.needs.tensors, forecast.disk_missing
        ('ties', 29, 0)
    """
    with _session(project, False):
        options = PlanOptions(parse_path(os.fspath(output)), device, dict(prices or {}), probe)
        return plan_file(_profile(profile, overrides), options)


def merge(
    recipe: FilePath,
    output: FilePath,
    *,
    seed: int = 0,
    device: str = "auto",
    progress: bool = True,
    project: FilePath | None = None,
) -> MergeResult:
    """Merge a recipe into a directory, without evaluation.

    An interrupted merge resumes with the next call. An existing identical merge is reused.

    Args:
        recipe: Path of the recipe, a YAML file in mergekit's dialect.
        output: Directory for the merge: new, or with this same merge.
        seed: Seed of the random masks of DARE and DELLA.
        device: Device: ``auto``, ``cpu``, ``cuda`` (all of them) or ``cuda:N``.
        progress: Whether to draw a progress bar.
        project: Directory of the project. Default: the working directory.

    Returns:
        The method, the size and the sha256 of each file.

    Raises:
        InvalidInput: The recipe is not valid, a parent does not exist, or ``output`` contains something else.
        Refused: The parents do not fit each other, or the result is not healthy.
        CannotDecide: The disk is full, or a parent changed during the merge.

    Example:
        >>> result = mergegate.merge("profiles/demo/recipes/ties.yaml", "merged", progress=False)
        >>> result.method, result.tensors, sorted(result.files)[-1]
        ('ties', 29, 'tokenizer_config.json')
    """
    with _session(project, progress) as console:
        options = MergeOptions(parse_path(os.fspath(output)), seed, device)
        record: Mapping[str, Any] = merge_recipe(parse_path(os.fspath(recipe)), options, console)
        names = ("seconds", "tensors", "bytes_written", "files", "error")
        return MergeResult(
            output=Path(record["out"]),
            method=record["method"],
            new=record["new"],
            findings=tuple(record.get("findings", ())),
            **{name: record[name] for name in names if name in record},
        )


def run(
    profile: FilePath | Profile,
    overrides: Overrides = (),
    *,
    publish: bool = True,
    remedy: RemedyChoice | None = None,
    approve: bool = False,
    progress: bool = True,
    project: FilePath | None = None,
) -> RunResult:
    """Check, merge, evaluate, gate and publish a release. Stages that are already cached are reused.

    Args:
        profile: Profile, or its path.
        overrides: Settings to override in this run, as a mapping or as texts of the form ``KEY=VALUE``.
        publish: Whether to publish a merge that passes.
        remedy: Remedies to try after a refusal: only the list in the profile (``written``), or also proposed ones
            (``auto``). Default: the setting in the profile.
        approve: Whether publication is approved, if the profile asks for approval.
        progress: Whether to show the progress: live in a notebook with ipywidgets and on a terminal, else as lines.
        project: Directory of the project. Default: the working directory.

    Returns:
        The outcome with its evidence. A refused release is a result, too.

    Raises:
        InvalidInput: The profile, the recipe or a checkpoint is not valid.

    Example:
        >>> result = mergegate.run("profiles/demo.yaml", {"evaluate.documents": 400}, publish=False, progress=False)
        >>> result.status, result.verdict
        ('passed', 'pass')
    """
    with _session(project, progress) as console:
        arguments = ReleaseArguments(_path(profile), _override_texts(overrides), publish, remedy)
        return _result(run_release(arguments, RunView(approve=approve, silent=not progress), console))


def compare(
    reference: FilePath,
    candidate: FilePath,
    profile: FilePath | Profile,
    overrides: Overrides = (),
    *,
    progress: bool = True,
    project: FilePath | None = None,
) -> RunResult:
    """Judge a checkpoint against a reference with the evidence and guards of a profile, without a merge.

    Args:
        reference: Checkpoint to compare with: a directory, or ``org/name@revision``.
        candidate: Checkpoint to judge.
        profile: Profile with the evidence and the guards, or its path.
        overrides: Settings to override, as a mapping or as texts of the form ``KEY=VALUE``.
        progress: Whether to show the progress.
        project: Directory of the project. Default: the working directory.

    Returns:
        The outcome with its evidence. Its status is ``passed`` or ``refused``.

    Raises:
        InvalidInput: The profile or a checkpoint is not valid.

    Example:
        >>> models = "profiles/demo/models"
        >>> result = mergegate.compare(f"{models}/reverser", f"{models}/base", "profiles/demo.yaml", progress=False)
        >>> result.status, result.verdict
        ('refused', 'fail')
        >>> next(guard.drop > guard.max_drop for guard in result.guards if guard.task == "reverse")
        True
    """
    with _session(project, progress) as console:
        names, guards = (os.fspath(reference), os.fspath(candidate)), _profile(profile, overrides, needs_recipe=False)
        return _result(run_comparison(*names, guards, RunView(silent=not progress), console))


def gate(
    results: Mapping[str, FilePath],
    profile: FilePath | Profile,
    overrides: Overrides = (),
    *,
    progress: bool = True,
    project: FilePath | None = None,
) -> RunResult:
    """Judge results that lm-eval or inspect_ai has already written, with the guards of a profile. No model runs.

    lm-eval 0.4 or 0.5 must have run with ``--log_samples``. Logs of inspect_ai may be ``.eval`` or ``.json`` files.

    Args:
        results: Directory with the results, by model: ``merge``, and ``reference`` or the models of the guards. A log
            or results file also works.
        profile: Profile with the guards, or its path.
        overrides: Settings to override, as a mapping or as texts of the form ``KEY=VALUE``.
        progress: Whether to print warnings about differences between the results.
        project: Directory of the project. Default: the working directory.

    Returns:
        The outcome with its evidence. Its status is ``passed`` or ``refused``.

    Raises:
        InvalidInput: A model is missing, or results are not valid or not comparable.

    Example:
        >>> results = {"merge": "lm-eval/merge", "reference": "lm-eval/reverser"}
        >>> result = mergegate.gate(results, "profiles/reverse.yaml", progress=False)
        >>> [(guard.task, guard.reference, guard.outcome) for guard in result.guards]
        [('reverse', 'reference', 'pass')]
    """
    with _session(project, progress) as console:
        directories = {name: parse_path(os.fspath(directory)) for name, directory in results.items()}
        guards = _profile(profile, overrides, needs_recipe=False)
        return _result(judge_results(directories, *load_guards(guards), console))


def sweep(
    profile: FilePath | Profile,
    overrides: Overrides = (),
    *,
    release: bool = True,
    progress: bool = True,
    project: FilePath | None = None,
) -> RunResult:
    """Search the free values of a recipe, confirm the winner on documents that no trial saw, and release it.

    Args:
        profile: Profile with a section ``sweep``, or the path of such a profile or of mergekit-evolve's YAML.
        overrides: Settings to override, as a mapping or as texts of the form ``KEY=VALUE``.
        release: Whether to release a confirmed winner. If false, only its recipe is stored.
        progress: Whether to show the progress.
        project: Directory of the project. Default: the working directory.

    Returns:
        The outcome with its evidence. The status ``refused`` means that no candidate was confirmed, or that the gate
        refused the winner.

    Raises:
        InvalidInput: The profile or its search is not valid.

    Example:
        >>> result = mergegate.sweep("profiles/demo-sweep.yaml", release=False, progress=False)
        >>> result.status, result.location.suffix
        ('passed', '.yaml')
    """
    with _session(project, progress) as console:
        settings = _profile(profile, overrides)
        converted = convert_evolve(settings, console) if isinstance(settings, Path) else settings
        return _result(run_sweep(converted, RunView(silent=not progress), console, release=release))


def verify(
    release: FilePath,
    *,
    key: FilePath | None = None,
    verdict: bool = False,
    merge: FilePath | None = None,
    identity: str | None = None,
    issuer: str | None = None,
    trust_config: FilePath | None = None,
    offline: bool = False,
) -> VerifiedRelease:
    """Verify every byte, the provenance, the model card and the signatures of a release.

    For quantized variants, also verify the release of their merge, if it is available.

    Args:
        release: Directory of the release, or ``org/name[@version]`` on the Hub.
        key: Public key (EC P-256, PEM) that must have signed the release. Default: its signature is not checked.
        verdict: Whether to decide again from the outcomes in the release and compare the verdicts.
        merge: Release of the merge that quantized variants were made from. Default: the one next to them.
        identity: Identity that must have created the keyless signature, exactly as in the certificate. Default: the
            signature is not checked.
        issuer: OIDC issuer that must have confirmed ``identity``. Both are required together.
        trust_config: Sigstore's client trust configuration of a private instance. Default: the public instance.
        offline: Whether to use the stored trusted root of the public instance without updating it.

    Returns:
        The number and size of the files, the version and the provenance of the release. ``signed`` is the state of the
        signature with a key, and ``keyless`` that of the keyless signature with its signer. ``recomputed`` is the
        verdict that was decided again, and ``variants`` has those of quantized variants. ``merge`` is the release that
        they were made from, and the reason if it was not checked.

    Raises:
        InvalidInput: There is no such release, ``key`` is not a public key, ``identity`` or ``issuer`` is missing, or
            the verdict cannot be recomputed.
        Refused: The release differs from its records, or its verdict does not follow from its outcomes. The message
            lists every difference.

    Example:
        >>> verified = mergegate.verify("releases/demo/latest")
        >>> verified.signed, verified.version == Path("releases/demo/latest").resolve().name
        ('none', True)
        >>> mergegate.verify("releases/demo/latest", verdict=True).recomputed.verdict.outcome
        'pass'
    """
    with _errors():
        public_key = None if key is None else parse_path(os.fspath(key))
        reference = None if merge is None else os.fspath(merge)
        trust = None if trust_config is None else parse_path(os.fspath(trust_config))
        signer = signer_policy(identity, issuer, trust, offline=offline)
        published = find_release(os.fspath(release))
        return check_release(published, public_key, recompute=verdict, merge=reference, signer=signer)


def reproduce(
    release: FilePath,
    *,
    parents: FilePath | None = None,
    device: str = "auto",
    merge: FilePath | None = None,
    progress: bool = True,
    project: FilePath | None = None,
) -> ReproducedRelease:
    """Rebuild the weights of a release from its parents, or from its merge, and compare them byte by byte.

    Args:
        release: Directory of the release, or ``org/name[@version]`` on the Hub.
        parents: Directory that relative paths of the recipe or of a calibration text start at. Default: mergegate
            searches for it.
        device: Device of the merge: ``auto`` (that of the release), ``cpu``, ``cuda`` or ``cuda:N``.
        merge: Release of the merge that quantized variants were made from. Default: the one next to them.
        progress: Whether to draw a progress bar.
        project: Directory of the project. Default: the working directory.

    Returns:
        The rebuilt files, all identical to the release.

    Raises:
        InvalidInput: There is no such release, a parent is missing, or the device does not exist.
        Refused: The release or the rebuilt weights differ from the records of the release.

    Example:
        >>> rebuilt = mergegate.reproduce("releases/demo/latest", parents="profiles/demo/recipes", progress=False)
        >>> "model.safetensors" in rebuilt.files
        True
    """
    with _session(project, progress) as console:
        directory = None if parents is None else parse_path(os.fspath(parents))
        reference = None if merge is None else os.fspath(merge)
        return reproduce_release(os.fspath(release), directory, device, console, reference)


def export(release: FilePath, format: Literal["inspect"], output: FilePath, *, organization: str = "") -> ExportResult:
    """Export the results of a release to another tool. mergegate verifies the release first.

    Args:
        release: Directory of the release, or ``org/name[@version]`` on the Hub.
        format: Format of the files: ``inspect`` for logs of inspect_ai.
        output: Directory to create.
        organization: Organization that publishes the results. Default: the supplier that the release states, or its
            namespace on the Hub.

    Returns:
        The directory, and the number and size of its files.

    Raises:
        InvalidInput: There is no such release, it has no results, or ``output`` exists.
        Refused: The release differs from its records.

    Example:
        >>> exported = mergegate.export("releases/demo/latest", "inspect", "logs")
        >>> exported.files, exported.models, exported.tasks
        (16, 4, 12)
    """
    with _errors():
        if format != "inspect":
            raise InvalidInput("format", found=f"{format!r:.60}", expected="inspect")
        return export_release(os.fspath(release), parse_path(os.fspath(output)), organization)


def _result(outcome: RunOutcome) -> RunResult:
    """Return the result of a run. Invalid input and an interruption raise an error instead."""
    if outcome.status == "interrupted":
        raise KeyboardInterrupt(outcome.message)
    if outcome.status == "invalid" and outcome.stopped_by:
        raise outcome.stopped_by.error()
    return RunResult(outcome)


def _path(profile: FilePath | Profile) -> Path | Profile:
    return profile if isinstance(profile, Profile) else parse_path(os.fspath(profile))


def _profile(profile: FilePath | Profile, overrides: Overrides, *, needs_recipe: bool = True) -> Path | Profile:
    """Return a path or a profile that includes the overrides."""
    return override_profile(_path(profile), _override_texts(overrides), needs_recipe=needs_recipe)


def _override_texts(overrides: Overrides) -> tuple[str, ...]:
    """Return overrides in the form ``KEY=VALUE``, where the value is YAML."""
    if isinstance(overrides, str):
        return (overrides,)
    if not isinstance(overrides, Mapping):
        return tuple(overrides)
    return tuple(f"{key}={_yaml_text(key, value)}" for key, value in overrides.items())


def _yaml_text(key: str, value: object) -> str:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    try:
        # A list in one line, without its brackets. A text gets quotes only if it needs them.
        return yaml.safe_dump([value], default_flow_style=True, width=math.inf, allow_unicode=True).strip()[1:-1]
    except yaml.YAMLError:
        kind = type(value).__name__
        raise InvalidInput(key, found=f"a value of the type {kind}", expected="plain data, as in YAML") from None


@contextmanager
def _session(project: FilePath | None, progress: bool) -> Iterator[Console]:
    """Yield the console of a call while the project's state is selected and no event loop seems to run."""
    # Without ipywidgets, rich cannot redraw the output of a notebook cell, so it gets plain lines.
    jupyter = None if find_spec("ipywidgets") else False
    with _lock, _errors(), _outside_event_loop(), _project_state(project):
        yield FittingConsole(quiet=not progress, highlight=False, force_jupyter=jupyter)


@contextmanager
def _errors() -> Iterator[None]:
    """Convert errors of the operating system into errors that tell the user what to do."""
    try:
        yield
    except OSError as error:
        raise convert_os_error(error) from error


@contextmanager
def _project_state(project: FilePath | None) -> Iterator[None]:
    """Select the state directory of the project while the block runs."""
    previous = os.environ.get("MERGEGATE_HOME")
    if project is None:
        home = Path(previous or ".mergegate").absolute()
    else:
        home = parse_path(os.fspath(project)).absolute() / ".mergegate"
    os.environ["MERGEGATE_HOME"] = str(home)
    try:
        # Prefect opens one database per process. It stays in the first project and records the runs of all projects.
        configure(home)
        yield
    finally:
        if previous is None:
            del os.environ["MERGEGATE_HOME"]
        else:
            os.environ["MERGEGATE_HOME"] = previous


@contextmanager
def _outside_event_loop() -> Iterator[None]:
    """Let the block start event loops of its own, although one may be running in this thread.

    A notebook runs its cells inside an event loop, and a thread cannot start a second one. Running the block in another
    thread would turn off Ctrl-C and time limits, which Python delivers to the main thread only.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        yield
        return
    task = asyncio.current_task(loop)
    if task is not None:
        asyncio.tasks._leave_task(loop, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        asyncio.set_event_loop(loop)
        if task is not None:
            asyncio.tasks._enter_task(loop, task)
