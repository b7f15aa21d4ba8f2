"""Define the commands and exit codes of the command line.

``merge_core.errors.EXIT_CODES`` maps every outcome to its exit code. Heavy imports wait until a command needs them, so
that ``mergegate --help`` answers immediately.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mergegate.flows.cli.help import FirstIsProfile, command_line
from mergegate.flows.cli.streams import close_streams, prepare_streams, require_utf8_paths
from mergegate.merge_core.errors import (
    EXIT_CODES,
    INTERRUPTED,
    DiskUnavailable,
    Finding,
    MergegateError,
    Status,
    findings_of,
)
from mergegate.merge_core.system import require_posix

app = typer.Typer(
    name="mergegate",
    help="Merge recipe in; a verified model release out, or a clear reason why not.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

store_app = typer.Typer(
    help="What the store holds, whether it is whole, and what may go.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(store_app, name="store")

shadow_app = typer.Typer(
    cls=FirstIsProfile,
    help="Watch a release on users' traffic: a proxy before its server and its parent's, and what follows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(shadow_app, name="shadow")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines for people.")]


def local_path(text: str | Path) -> Path:
    """Parse a path on the command line. The import is deferred because pydantic is slow to import."""
    from mergegate.merge_core.parsing import parse_path

    return parse_path(os.fspath(text))


Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="What is asked of whom meanwhile: keys, the store, files, processes."),
]


class RemedyOption(StrEnum):
    """Remedies to try when the gate refuses."""

    WRITTEN = "written"
    AUTO = "auto"


@app.callback(invoke_without_command=True)
def root_command(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Print the version, or continue with the command."""
    with _refusals(False):
        require_posix(os.name)
    if version:
        from importlib.metadata import version as installed

        print(f"mergegate {installed('mergegate')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


@app.command("run")
def run_command(
    profile: Annotated[Path, typer.Argument(parser=local_path, help="The profile (YAML).")],
    approve: Annotated[bool, typer.Option("--approve", help="Say yes beforehand, where the profile asks.")] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Otherwise for this run: evaluate.documents=200; repeatable."),
    ] = None,
    publish: Annotated[
        bool, typer.Option("--publish/--no-publish", help="Whether what passes is published, or the run ends before.")
    ] = True,
    remedy: Annotated[
        RemedyOption | None,
        typer.Option(
            help="When the gate refuses: only what the profile lists, or then also what the refusal proposes.",
            show_default="as the profile says",
        ),
    ] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Only check, and say what is cached and what is not.")] = False,
    price: Annotated[
        list[str] | None, typer.Option(help="Of --dry-run: NAME=DOLLARS_PER_HOUR of an instance; repeatable.")
    ] = None,
    events: Annotated[
        bool, typer.Option("--events", help="Print a line of JSON for each event, as it happens.")
    ] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Make a release: check, merge, evaluate, gate, publish. Stages that are already cached are reused."""
    with _refusals(as_json or events):
        _prepare_environment()
        all_overrides = tuple(overrides or ())
        if dry:
            from mergegate.flows.cli.dry_run import dry_run
            from mergegate.flows.profile import load_profile

            loaded = load_profile(profile, all_overrides).remedied(remedy.value if remedy else None)
            loaded = loaded if publish else loaded.model_copy(update={"publish": None})
            raise typer.Exit(dry_run(loaded, _console(as_json), as_json, tuple(price or ())))
        from mergegate.flows.release import release, run_release_dry_pass

        console = _console(as_json or events)
        loaded = _read_profile(profile, "release", all_overrides)
        # Pass the file name, because Prefect stores the parameters of a flow.
        choice: Any = remedy.value if remedy else None
        arguments = (profile, all_overrides, publish, choice)
        outcome = _run_watched(
            partial(release, *arguments, return_state=True),
            loaded.remedied(choice).headline(),
            profile,
            console,
            look=partial(run_release_dry_pass, *arguments),
            approve=approve,
            events=events,
            verbose=verbose,
        )
        if events:
            from mergegate.flows.cli.json_events import print_event

            print_event("finished", **_outcome_json(outcome))
        else:
            _print_outcome(console, outcome, as_json, profile)
    raise typer.Exit(outcome.exit_code)


@app.command("demo")
def demo_command(
    directory: Annotated[
        Path, typer.Argument(parser=local_path, help="Where it is copied to, with all that it makes.")
    ] = Path("mergegate-demo"),
    as_json: Json = False,
) -> None:
    """Copy the demo models into a directory and release them there: half a minute, no network, no account."""
    with _refusals(as_json):
        from mergegate.flows.cli.demo import PROFILE, place_demo

        placed = place_demo(directory)
        if not as_json:
            print(
                f"{'copied the demo into' if placed else 'the demo is in'} {directory}: what is named below lies there"
            )
        os.chdir(directory)
    run_command(PROFILE, as_json=as_json)


@app.command("sweep")
def sweep_command(
    profile: Annotated[
        Path, typer.Argument(parser=local_path, help="A profile with a section 'sweep', or mergekit-evolve's YAML.")
    ],
    release: Annotated[
        bool, typer.Option("--release/--no-release", help="Whether a winner that is confirmed is released.")
    ] = True,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Serve Optuna's dashboard of it, here only.")] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Search the free values of a recipe, confirm the winner on documents that no trial saw, and release it."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.sweep import look_on, swept_profile, view_of
        from mergegate.flows.sweep import sweep

        console = _console(as_json)
        profile_to_sweep = swept_profile(profile, console)
        loaded = _read_profile(profile_to_sweep, "sweep")
        view = view_of(loaded) if dashboard else None
        wait = look_on(view, console) if view else lambda: None
        flow = partial(sweep, profile_to_sweep, release=release, view=view, return_state=True)
        outcome = _run_watched(flow, loaded.headline(), profile, console, verbose=verbose)
        _print_outcome(console, outcome, as_json)
        wait()
    raise typer.Exit(outcome.exit_code)


@app.command("tune")
def tune_command(
    profile: Annotated[
        Path, typer.Argument(parser=local_path, help="A profile whose recipe has a 'lambda', and tasks.")
    ],
    trials: Annotated[int, typer.Option(min=2, help="Scales that are tried.")] = 16,
    search: Annotated[int, typer.Option(min=10, help="Documents of each task that the search looks at.")] = 50,
    confirmation: Annotated[int, typer.Option(min=20, help="Others, that the one found is confirmed on.")] = 100,
    release: Annotated[bool, typer.Option("--release/--no-release", help="Whether it is released then.")] = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Find the scale ('lambda') at which a merge is most certain of its answers, without labels."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.candidates import TuningSize
        from mergegate.flows.sweep import sweep

        loaded = _read_profile(profile, "sweep").tuned(TuningSize(trials, search, confirmation))
        console = _console(as_json)
        flow = partial(sweep, loaded, release=release, return_state=True)
        outcome = _run_watched(flow, loaded.headline(), profile, console, verbose=verbose)
        _print_outcome(console, outcome, as_json)
    raise typer.Exit(outcome.exit_code)


@shadow_app.command("look")
def shadow_look_command(
    profile: Annotated[Path, typer.Argument(parser=local_path, help="A profile with a section 'shadow'.")],
    approve: Annotated[bool, typer.Option("--approve", help="Say yes beforehand, where the profile asks.")] = False,
    as_json: Json = False,
) -> None:
    """Judge new pairs, then promote the watched release, roll it back, or wait for more."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.shadow_look import print_look
        from mergegate.flows.shadow import shadow

        console = _console(as_json)
        loaded = _read_profile(profile, "shadow")
        flow = partial(shadow, profile, return_state=True)
        outcome = _run_watched(flow, f"{loaded.name} on users' traffic", profile, console, approve=approve)
        print_look(_outcome_json(outcome) if as_json else None, outcome, console)
    raise typer.Exit(outcome.exit_code)


@shadow_app.command("promote")
def shadow_promote_command(
    profile: Annotated[Path, typer.Argument(parser=local_path, help="A profile with a section 'shadow'.")],
    why: Annotated[str, typer.Option(help="The reason, which is kept.")] = "",
    as_json: Json = False,
) -> None:
    """Promote the watched release manually, independent of the evidence."""
    _decide_by_hand(profile, "promote", why, as_json)


@shadow_app.command("rollback")
def shadow_rollback_command(
    profile: Annotated[Path, typer.Argument(parser=local_path, help="A profile with a section 'shadow'.")],
    why: Annotated[str, typer.Option(help="The reason, which is kept.")] = "",
    as_json: Json = False,
) -> None:
    """Route all users back to the parent manually, independent of the evidence."""
    _decide_by_hand(profile, "roll back", why, as_json)


@shadow_app.command("status")
def shadow_status_command(
    profile: Annotated[Path, typer.Argument(parser=local_path, help="A profile with a section 'shadow'.")],
    as_json: Json = False,
) -> None:
    """Show which model serves users and the evidence so far, without judging or changing anything."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.shadow_look import print_state

        print_state(profile, _console(as_json), as_json)


def _decide_by_hand(profile: Path, say: str, why: str, as_json: bool) -> None:
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.approve import who_is_here
        from mergegate.flows.cli.shadow_look import print_look, require_reason
        from mergegate.flows.shadow import shadow

        require_reason(why)
        console = _console(as_json)
        loaded = _read_profile(profile, "shadow")
        flow = partial(shadow, profile, say=say, why=why, by=who_is_here(), return_state=True)
        outcome = _run_watched(flow, f"{loaded.name} on users' traffic", profile, console)
        print_look(_outcome_json(outcome) if as_json else None, outcome, console)
    # The command did its job, even if that was a rollback.
    raise typer.Exit(0 if outcome.status in ("promoted", "rolled back") else outcome.exit_code)


@app.command("server")
def server_command(
    host: Annotated[str, typer.Option(help="Where it listens.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The same.", show_default="that of schedules.yaml, or 4200")
    ] = None,
) -> None:
    """Serve Prefect's API and pages for this project. Set MERGEGATE_DATABASE=postgresql://… for a team."""
    with _refusals(False):
        from mergegate.flows.cli.server import run_server

        run_server(host, port, _console(False))


@app.command("worker")
def worker_command(
    once: Annotated[bool, typer.Option("--once", help="Carry out what is due now, and end.")] = False,
) -> None:
    """Run due deployments, one at a time, in this project's directory."""
    with _refusals(False):
        from mergegate.flows.cli.server import become_worker

        become_worker(once, _console(False))


@app.command("deploy")
def deploy_command(as_json: Json = False) -> None:
    """Sync the server with schedules.yaml: deployments, schedules, notifications. Running it twice changes nothing."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.deploy import deploy_schedules

        deploy_schedules(_console(as_json), as_json)


@app.command("trigger")
def trigger_command(
    profile: Annotated[str, typer.Argument(help="A deployed profile, by its name or its file.")],
    wait: Annotated[bool, typer.Option("--wait", help="Until it has ended, with its exit code.")] = False,
    as_json: Json = False,
) -> None:
    """Let a worker make a release now, and print the URL of the run's page."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.trigger import trigger_run

        code = trigger_run(profile, _console(as_json), as_json, wait=wait)
    raise typer.Exit(code)


@shadow_app.command("serve")
def shadow_command(
    profile: Annotated[Path, typer.Argument(parser=local_path, help="A profile with a section 'shadow'.")],
    candidate: Annotated[
        str | None, typer.Option(help="The version that is watched.", show_default="what is released at the target")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Watch it anew, though it was killed, rolled back or promoted.")
    ] = False,
) -> None:
    """Run the proxy before parent and candidate: answer users and record both (also: mergegate shadow PROFILE)."""
    with _refusals(False):
        _prepare_environment()
        from mergegate.flows.cli.shadow import serve_shadow

        serve_shadow(profile, candidate, _console(False), again=again)


@shadow_app.command("replay")
def shadow_replay_command(
    file: Annotated[Path, typer.Argument(parser=local_path, help="jsonl: requests, conversations or prompts.")],
    to: Annotated[str, typer.Option(metavar="URL", help="The proxy.")] = "http://127.0.0.1:8100",
    model: Annotated[str, typer.Option(help="What requests that name no model ask for.")] = "model",
    header: Annotated[str, typer.Option(help="The header that names a session.")] = "x-session-id",
    rate: Annotated[float, typer.Option(min=0.001, help="Users that begin in a second.")] = 10.0,
    at_once: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="How often, each time as other users.")] = 1,
    stream: Annotated[bool, typer.Option("--stream", help="Ask for streams.")] = False,
    as_json: Json = False,
) -> None:
    """Send the requests of a file to the proxy, as users would."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.shadow import replay_file

        replay_file(
            file,
            to,
            _console(as_json),
            as_json,
            model=model,
            header=header,
            rate=rate,
            at_once=at_once,
            rounds=rounds,
            stream=stream,
        )


@app.command("approve")
def approve_command(
    run: Annotated[
        str | None, typer.Argument(help="A run or a profile that waits.", show_default="the only one")
    ] = None,
    reject: Annotated[bool, typer.Option("--reject", help="Say no.")] = False,
    reason: Annotated[str, typer.Option(help="Why; for a no, what people are told.")] = "",
    as_json: Json = False,
) -> None:
    """Approve or reject a release that waits on the server, after showing its evidence."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.approve import approve_run

        approve_run(run, _console(as_json), as_json, reject=reject, reason=reason)


@app.command("merge")
def merge_command(
    recipe: Annotated[Path, typer.Argument(parser=local_path, help="The recipe (YAML, mergekit's dialect).")],
    out: Annotated[
        Path, typer.Argument(parser=local_path, help="Directory for the merged checkpoint; new, or this merge's.")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random masks (DARE, DELLA).")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda (all of them) or cuda:N.")] = "auto",
    share: Annotated[bool, typer.Option("--share", help="Work together with others that are started alike.")] = False,
    as_json: Json = False,
) -> None:
    """Merge only: recipe in, checkpoint out. An existing identical merge is reused. Only headers are checked."""
    with _refusals(as_json):
        from mergegate.flows.cli.merge import merge_to

        record = merge_to(recipe, out, seed=seed, device=device, share=share, console=_console(as_json))
        if as_json:
            _print_created(record)


@app.command("check")
def check_command(
    file: Annotated[Path, typer.Argument(parser=local_path, help="A profile or a recipe.")],
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Each finding alone; and what each parent is asked, as it reads it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find every problem before any weight is read, and list all findings, worst first."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.check import check_file

        code = check_file(file, _console(as_json), as_json, verbose)
    raise typer.Exit(code)


@app.command("fetch-data")
def fetch_data_command(
    profile: Annotated[Path, typer.Argument(parser=local_path, help="A profile with evaluate.data.")],
    as_json: Json = False,
) -> None:
    """Fetch the datasets of a profile's tasks into the directory evaluate.data, for offline runs."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.fetch_data import fetch_data

        fetch_data(profile, _console(as_json), as_json)


@app.command("extract-lora")
def extract_lora_command(
    finetuned: Annotated[str, typer.Argument(help="The fine-tune: a directory, or org/name@revision.")],
    base: Annotated[str, typer.Argument(help="The model that it was made from.")],
    rank: Annotated[int, typer.Option(help="The largest rank of a factor.")],
    out: Annotated[Path, typer.Option(parser=local_path, help="Directory for the adapter; must not exist yet.")] = Path(
        "adapter"
    ),
    epsilon: Annotated[float, typer.Option(help="Leave out directions with singular values up to this.")] = 0.0,
    save_module: Annotated[
        list[str] | None, typer.Option(help="End of a module's name that is saved whole (lm_head); repeatable.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Format of the factors: float32, bfloat16 or float16.")] = "float32",
    as_json: Json = False,
) -> None:
    """Extract a LoRA adapter from a fine-tune and its base, and report the remaining error."""
    with _refusals(as_json):
        from mergegate.flows.cli.extract import extract_to
        from mergegate.merge_core.adapters import ExtractionSettings

        settings = ExtractionSettings(rank, epsilon, tuple(save_module or ()), dtype)
        record = extract_to(finetuned, base, out, settings, console=_console(as_json))
        if as_json:
            _print_created(record)


@app.command("init")
def init_command(
    base: Annotated[str, typer.Argument(metavar="BASE", help="What the models were fine-tuned from.")],
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Directories, org/name@rev, or adapters.")],
    out: Annotated[Path, typer.Option(parser=local_path, help="Directory for the two files.")] = Path(),
    name: Annotated[str, typer.Option(help="Of the release.", show_default="the models' names")] = "",
    method: Annotated[str, typer.Option(help="A merge method.", show_default="by the headers")] = "",
    documents: Annotated[
        Path | None,
        typer.Option(
            parser=local_path, help="Held-out text.", show_default="one that lies beside the models, or a sample"
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK[=PARENT]", help="To be guarded: lm-eval's name or a file; repeatable."),
    ] = None,
    accept: Annotated[str, typer.Option(metavar="'WHO: WHY'", help="Settles the doubts about licences.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Write a recipe and a profile for your models that pass the checks. Never overwrites files."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.init import InitRequest, init_project, is_interactive

        asks = not as_json and is_interactive(yes)
        request = InitRequest(base, tuple(models), out, name, method, documents, tuple(task or ()), accept, asks)
        code = init_project(request, _console(as_json), as_json)
    raise typer.Exit(code)


@app.command("schema")
def schema_command(
    kind: Annotated[str, typer.Argument(help="Of which file: profile or recipe.")] = "profile",
    write: Annotated[
        Path | None,
        typer.Option(parser=local_path, metavar="DOCS", help="Write both, and the reference page, into a directory."),
    ] = None,
) -> None:
    """Print the JSON Schema of a profile or a recipe, for editors."""
    with _refusals(False):
        from mergegate.flows.cli.schema import schema_text, write_pages

        if write is not None:
            write_pages(write)
        else:
            print(schema_text(kind), end="")


@app.command("plan")
def plan_command(
    recipe: Annotated[
        Path, typer.Argument(parser=local_path, help="The recipe (YAML, mergekit's dialect), or a profile.")
    ],
    out: Annotated[Path, typer.Option(parser=local_path, help="Where the result will be written.")] = Path(),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    price: Annotated[list[str] | None, typer.Option(help="NAME=DOLLARS_PER_HOUR of an instance; repeatable.")] = None,
    probe: Annotated[
        bool | None,
        typer.Option("--probe/--no-probe", help="Measure this machine now, or never.", show_default="once an hour"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Forecast bytes, memory, disk, time and cost of a merge from headers. No weight is read or downloaded."""
    with _refusals(as_json):
        from mergegate.flows.cli.plan import plan_file

        plan_file(recipe, _console(as_json), as_json, out=out, device=device, prices=price or (), probe=probe)


@app.command("smoke")
def smoke_command(
    target: Annotated[str, typer.Argument(help="A checkpoint, or the URL of a server that runs.")],
    profile: Annotated[Path | None, typer.Option(parser=local_path, help="Whose 'serve' says how.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(parser=local_path, help="Of a URL: the checkpoint that it should serve.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Of a URL: what the server calls it.")] = None,
    key_from: Annotated[str | None, typer.Option(help="Of a URL: environment variable with its key.")] = None,
    as_json: Json = False,
) -> None:
    """Serve a checkpoint, send test requests, and print a table of checks with actual and expected results."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.smoke import smoke_target

        key = os.environ.get(key_from, "") if key_from else ""
        code = smoke_target(
            target, _console(as_json), as_json, profile=profile, checkpoint=checkpoint, model=model, key=key
        )
    raise typer.Exit(code)


@app.command("methods")
def methods_command(as_json: Json = False) -> None:
    """List the merge methods with their parameters, ranges and defaults."""
    with _refusals(as_json):
        from mergegate.flows.cli.methods import print_methods

        print_methods(_console(False), as_json)


@app.command("transplant-tokenizer")
def transplant_command(
    model: Annotated[str, typer.Argument(help="Whose weights: a directory, org/name@rev.")],
    donor: Annotated[str, typer.Argument(help="Whose tokenizer; its embeddings say what its tokens mean.")],
    out: Annotated[
        Path, typer.Argument(parser=local_path, help="Directory for the new checkpoint; must not exist yet.")
    ],
    method: Annotated[str, typer.Option(help="How rows of new tokens are made: omp or mean.")] = "omp",
    k: Annotated[int, typer.Option("-k", help="Of omp: shared tokens in one combination, at most.")] = 64,
    device: Annotated[str, typer.Option(help="Where combinations are computed: cpu, cuda or cuda:N.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Give a model another model's tokenizer: shared tokens keep their rows, others get combinations of them."""
    with _refusals(as_json):
        from mergegate.flows.cli.transplant import transplant_to

        record = transplant_to(model, donor, out, method=method, k=k, device=device, console=_console(as_json))
        if as_json:
            _print_created(record)


@app.command("compare")
def compare_command(
    reference: Annotated[
        str, typer.Argument(metavar="A", help="Checkpoint it is compared with: directory, org/name@rev.")
    ],
    candidate: Annotated[str, typer.Argument(metavar="B", help="Checkpoint that is judged.")],
    profile: Annotated[
        Path, typer.Option("--profile", "-p", parser=local_path, help="The profile whose evidence and guards judge.")
    ],
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Judge checkpoint B against checkpoint A with a profile's evidence and guards. Merges and publishes nothing."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.compare import compare as compare_checkpoints

        console = _console(as_json)
        flow = partial(compare_checkpoints, reference, candidate, profile, return_state=True)
        outcome = _run_watched(
            flow, f"{Path(candidate).name} against {Path(reference).name}", profile, console, verbose=verbose
        )
        _print_outcome(console, outcome, as_json)
    raise typer.Exit(outcome.exit_code)


@app.command("gate")
def gate_command(
    results: Annotated[
        list[str],
        typer.Argument(metavar="NAME=DIR", help="lm-eval's output by model: merge=DIR reference=DIR."),
    ],
    profile: Annotated[
        Path, typer.Option("--profile", "-p", parser=local_path, help="The profile whose guards judge.")
    ],
    as_json: Json = False,
) -> None:
    """Judge results that lm-eval has written (with --log_samples) with a profile's guards. No model is run."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.gate import gate_results

        console = _console(as_json)
        outcome = gate_results(results, profile, console)
        _print_outcome(console, outcome, as_json)
    raise typer.Exit(outcome.exit_code)


@app.command("doctor")
def doctor_command(
    mend: Annotated[bool, typer.Option("--mend", help="Set aside what is damaged, remove what nobody needs.")] = False,
    as_json: Json = False,
) -> None:
    """Examine this project's state: damaged, set-aside and leftover files, and their sizes."""
    with _refusals(as_json):
        from mergegate.flows.cli.doctor import examine_project

        code = examine_project(_console(as_json), as_json, mend=mend)
    raise typer.Exit(code)


@app.command("history")
def history_command(
    profile: Annotated[str | None, typer.Argument(help="Whose runs; absent: of all profiles.")] = None,
    last: Annotated[int, typer.Option("--last", min=1, help="How many are shown.")] = 30,
    as_json: Json = False,
) -> None:
    """List how the runs of this project ended, newest first."""
    with _refusals(as_json):
        from mergegate.flows.cli.history import print_history

        print_history(_console(as_json), as_json, profile, last)


@app.command("status")
def status_command(as_json: Json = False) -> None:
    """Show active runs, schedules, the last result of each profile and the size of the store."""
    with _refusals(as_json):
        from mergegate.flows.cli.status import print_status

        print_status(_console(as_json), as_json)


@app.command("open")
def open_command(
    profile: Annotated[
        str | None, typer.Argument(help="Whose last report.", show_default="the page of all runs")
    ] = None,
    as_json: Json = False,
) -> None:
    """Open a report in a browser. Without a browser, print its path."""
    with _refusals(as_json):
        from mergegate.flows.cli.status import open_report

        open_report(_console(as_json), profile, as_json)


@app.command("explain")
def explain_command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id or its beginning, a version, or a profile.")],
    as_json: Json = False,
) -> None:
    """Explain the decision of a past run."""
    with _refusals(as_json):
        from mergegate.flows.cli.status import explain_run

        explain_run(_console(as_json), run, as_json)


@store_app.command("ls")
def store_ls_command(as_json: Json = False) -> None:
    """List every artifact: stage, model, size, age, and the reason why it is kept."""
    with _refusals(as_json):
        from mergegate.flows.cli.store import list_artifacts

        list_artifacts(_console(as_json), as_json)


@store_app.command("du")
def store_du_command(as_json: Json = False) -> None:
    """Show the size of the store by stage, and how much of it is needed."""
    with _refusals(as_json):
        from mergegate.flows.cli.store import print_sizes

        print_sizes(_console(as_json), as_json)


@store_app.command("verify")
def store_verify_command(as_json: Json = False) -> None:
    """Read every byte of the store and compare it with its hash. Exit code 3 if anything is damaged."""
    with _refusals(as_json):
        from mergegate.flows.cli.store import verify_store

        code = verify_store(_console(as_json), as_json)
    raise typer.Exit(code)


@store_app.command("gc")
def store_gc_command(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    older: Annotated[
        float | None,
        typer.Option(min=0, help="Days without use after which it goes.", show_default="1, or by the quota alone"),
    ] = None,
    quota: Annotated[
        str | None, typer.Option(help="What the store may have, such as 50GB: the least recently used goes.")
    ] = None,
    forget: Annotated[
        list[str] | None, typer.Option(help="A profile that is not run any more: nothing is kept for it; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove artifacts that no run, no release and no profile's last runs need. Safe during runs."""
    with _refusals(as_json):
        from mergegate.flows.cli.store import collect_store

        collect_store(_console(as_json), as_json, dry_run=dry_run, older=older, quota=quota, forget=forget or ())


@app.command("verify")
def verify_command(
    release: Annotated[str, typer.Argument(help="Directory of a release, or org/name[@version] on the Hub.")],
    key: Annotated[
        Path | None, typer.Option(parser=local_path, help="Public key (EC P-256, PEM) that must have signed it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify a release against its own claims: every byte, the provenance, the card, the signature."""
    with _refusals(as_json):
        from mergegate.flows.cli.verify import verify_release

        verify_release(release, key, _console(as_json), as_json)


@app.command("reproduce")
def reproduce_command(
    release: Annotated[str, typer.Argument(help="Directory of a release, or org/name[@version] on the Hub.")],
    parents: Annotated[
        Path | None,
        typer.Option(parser=local_path, help="What relative paths of its recipe are relative to; absent: looked for."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto (as the release says), cpu, cuda or cuda:N.")] = "auto",
    as_json: Json = False,
) -> None:
    """Rebuild the weights of a release from its recipe and parents, and compare them byte by byte."""
    with _refusals(as_json):
        _prepare_environment()
        from mergegate.flows.cli.verify import reproduce_release

        reproduce_release(release, parents, device, _console(as_json), as_json)


def main() -> None:
    """Run the ``mergegate`` command."""
    require_utf8_paths()
    prepare_streams()
    # Tables of tensors are trees of a million objects, created within a second. Scanning them for cycles every 700
    # objects would double that time.
    gc.set_threshold(100_000, 20, 20)
    try:
        command_line(app)()
    except OSError as error:  # typer's own output, which no command writes: --help on a full disk
        refusal = _refusal_of(error)
        _print_refusal(refusal, as_json=False)
        raise SystemExit(refusal.exit_code) from None
    finally:
        close_streams()
        # The imports of a run create a million objects. One more scan for cycles would take seconds at exit.
        gc.freeze()


def _prepare_environment() -> None:
    """Set the environment before Prefect and the Hugging Face libraries are imported."""
    from mergegate.flows.prefect_api import configure

    home = Path(os.environ.setdefault("MERGEGATE_HOME", str(Path(".mergegate").absolute())))
    configure(home)


def _console(as_json: bool) -> Any:
    """Return the console for human-readable lines. It is quiet if standard output carries JSON."""
    from rich.console import Console

    return Console(quiet=as_json, highlight=False, soft_wrap=True)


def _read_profile(profile: Any, flow: str, overrides: tuple[str, ...] = ()) -> Any:
    """Load a profile and its recipes. A refused profile gets a report page like any other run."""
    from mergegate.flows.outcome import record_refused_run
    from mergegate.flows.profile import load_profile

    try:
        loaded = load_profile(profile, overrides)
        loaded.headline()
    except MergegateError as error:
        if isinstance(profile, Path):
            record_refused_run(error, profile, flow)
        raise
    return loaded


def _run_watched(
    flow: Callable[[], Any],
    headline: str,
    profile: Path,
    console: Any,
    *,
    look: Callable[[], Any] = lambda: None,
    approve: bool = False,
    events: bool = False,
    verbose: bool = False,
) -> Any:
    """Run a flow with progress on the terminal and Prefect's API available, and return its outcome.

    Args:
        look: Function that returns the outcome without the flow if there is no work, otherwise None.
    """
    from mergegate.flows.cli.approve import TerminalApproval
    from mergegate.flows.cli.json_events import EventLines
    from mergegate.flows.cli.progress import TerminalProgress
    from mergegate.flows.outcome import RunOutcome, flow_outcome
    from mergegate.flows.prefect_api import approval_function, has_server, local_api, require_writable

    progress = TerminalProgress(console, verbose=verbose)
    lines = EventLines()

    def watching() -> AbstractContextManager[None]:
        return lines.watching(verbose=verbose) if events else progress.watching()

    progress.headline(headline, f"profile {profile}")
    if not has_server():
        with watching():
            if (cached_outcome := look()) is not None:
                return cached_outcome
    with ExitStack() as stack:
        with console.status("starting Prefect's API"):
            stack.enter_context(local_api())
        with watching(), approval_function(TerminalApproval(progress, console, beforehand=approve)):
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


def _outcome_json(outcome: Any) -> dict[str, Any]:
    """Return the outcome in the shape of every JSON object."""
    findings = [asdict(outcome.stopped_by)] if outcome.stopped_by else []
    return {**outcome.model_dump(mode="json"), "findings": findings}


def _print_outcome(console: Any, outcome: Any, as_json: bool, profile: Path | None = None) -> None:
    if as_json:
        print(json.dumps(_outcome_json(outcome), indent=1))
        return
    from mergegate.flows.cli.summary import print_next, print_summary

    print_summary(console, outcome)
    if profile is not None:
        print_next(console, outcome, profile)


def _print_created(record: dict[str, Any]) -> None:
    """Print the result of a command in the shape of every JSON object."""
    from mergegate.flows.cli.output import print_answer

    status = "made" if record.pop("new", True) else "nothing new"
    print_answer(status, status, record)


@contextmanager
def _refusals(as_json: bool) -> Iterator[None]:
    """Turn errors caused by a user, a disk or the system into one message and an exit code, without a traceback."""
    try:
        yield
        sys.stdout.flush()
    except MergegateError as error:
        _print_refusal(error, as_json)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        refusal = _refusal_of(error)
        _print_refusal(refusal, as_json)
        raise typer.Exit(refusal.exit_code) from None
    except UnicodeEncodeError as error:
        # Python represents bytes that are not UTF-8 as lone surrogates, which cannot be encoded.
        text = ascii(error.object[max(0, error.start - 40) : error.end + 20])
        refusal = DiskUnavailable(text, found="a name that is not text", expected="UTF-8", remedy="rename it")
        _print_refusal(refusal, as_json)
        raise typer.Exit(refusal.exit_code) from None
    except (KeyboardInterrupt, typer.Abort):  # typer.Abort comes from a prompt
        _print_message("interrupted", INTERRUPTED, as_json)
        raise typer.Exit(EXIT_CODES["interrupted"]) from None


def _refusal_of(error: OSError) -> MergegateError:
    from mergegate.merge_core.files import disk_refusal

    if isinstance(error, FileNotFoundError) and not _has_working_directory():
        return DiskUnavailable(
            "the working directory",
            found="it has been deleted",
            expected="a directory that is there",
            remedy="change to one, then run again",
        )
    return disk_refusal(error)


def _has_working_directory() -> bool:
    try:
        Path.cwd()
    except OSError:
        return False
    return True


def _print_refusal(error: MergegateError, as_json: bool) -> None:
    _print_message(error.status, str(error), as_json, *findings_of(error))


def _print_message(status: Status, message: str, as_json: bool, *findings: Finding) -> None:
    """Print the message if possible. The output itself may be on a full disk."""
    try:
        if as_json:
            from mergegate.flows.cli.output import print_answer

            print_answer(status, message, {}, findings)
            sys.stdout.flush()
            return
    except OSError:
        pass
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)
