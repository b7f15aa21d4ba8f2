"""``mergegate merge``, ``plan``, ``extract-lora``, ``transplant-tokenizer`` and ``fingerprint``: handle checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mergegate.flows.cli.command import (
    DeviceOption,
    JsonOption,
    PriceOption,
    SameOutputOption,
    SetOption,
    command_context,
    only_output,
)
from mergegate.flows.operations.console import print_answer, print_created, short_path
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.files import new_directory
from mergegate.merge_core.parsing import require_printable
from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.base.stage import home, store
from mergegate.tasks.models.checkpoints import (
    download_snapshots,
    find_checkpoint,
    identify_parents,
    open_parent,
    require_same_files,
)

_MAX_SHOWN = 5  # modules with the largest errors, or related models


def merge_command(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML, mergekit's dialect).")],
    out: Annotated[
        Path | None,
        typer.Argument(help="Directory for the merged checkpoint: new, or with this same merge.", show_default=False),
    ] = None,
    output: SameOutputOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random masks (DARE, DELLA).")] = 0,
    device: DeviceOption = "auto",
    share: Annotated[
        bool,
        typer.Option(
            "--share",
            help="Divide the work among all processes that were started in the same way.",
            rich_help_panel="Advanced",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Merge a recipe into a directory, without evaluation.

    Only headers are checked. An existing identical merge is reused.
    """
    with command_context(as_json) as console:
        from mergegate.flows.operations.merge import MergeOptions, merge_recipe

        record = merge_recipe(recipe, MergeOptions(only_output(out, output), seed, device, share), console)
        if as_json:
            print_created(record)


def plan_command(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML, mergekit's dialect), or a profile.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the result.")] = Path(),
    overrides: SetOption = None,
    device: DeviceOption = "auto",
    price: PriceOption = None,
    probe: Annotated[
        bool | None,
        typer.Option(
            "--probe/--no-probe",
            help="Measure this machine now, or never.",
            show_default="once an hour",
            rich_help_panel="Advanced",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Forecast memory, disk, time and cost of a merge.

    mergegate reads only the headers of the checkpoints. No weights are read or downloaded.
    """
    with command_context(as_json) as console:
        from mergegate.flows.operations.plan import PlanOptions, named_prices, plan_file, print_plan
        from mergegate.flows.profile import override_profile

        options = PlanOptions(output, device, named_prices(price or ()), probe)
        with console.status("reading headers"):
            forecast = plan_file(override_profile(recipe, overrides), options)
        if as_json:
            facts = {
                **{key: value for key, value in asdict(forecast).items() if key != "routers" or value is not None},
                "place": str(forecast.place),
                "kind": forecast.kind.name,
                "disk_missing": forecast.disk_missing,
                "power": forecast.power.model_dump(mode="json") if forecast.power else None,
                "cost": {name: forecast.cost(dollars) for name, dollars in forecast.prices.items()},
            }
            print_answer("planned", forecast.recipe, facts, forecast.findings)
            return
        print_plan(forecast, console)


def extract_lora_command(
    fine_tune: Annotated[
        str, typer.Argument(metavar="FINETUNED", help="Fine-tune: a directory, or org/name@revision.")
    ],
    base: Annotated[str, typer.Argument(help="Model that it was fine-tuned from.")],
    rank: Annotated[int, typer.Option(help="Largest rank of a factor.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory for the adapter. It must not exist.")
    ] = Path("adapter"),
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Format of the factors.")
    ] = "float32",
    epsilon: Annotated[
        float,
        typer.Option(
            help="Leave out directions whose singular value is at most this large.", rich_help_panel="Advanced"
        ),
    ] = 0.0,
    save_module: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Save modules whose name ends like this (for example lm_head) in full. Repeatable.",
            rich_help_panel="Advanced",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Extract a LoRA adapter from a fine-tune and its base.

    mergegate prints the share of the change that the adapter misses.
    """
    with command_context(as_json) as console:
        from mergegate.merge_core.adapters import ExtractionSettings, extract_adapter, write_adapter

        settings = ExtractionSettings(rank, epsilon, tuple(save_module or ()), dtype)
        with new_directory(output) as directory:
            checkpoints = [find_checkpoint(name) for name in (fine_tune, base)]
            if snapshots := [snapshot for parent in checkpoints for snapshot in parent.snapshots]:
                with console.status("fetching weights"):
                    download_snapshots(snapshots, store().hashes)
            identities = identify_parents(checkpoints)
            with console.status("reading headers") as status:
                extracted = extract_adapter(
                    open_parent(checkpoints[0]),
                    open_parent(checkpoints[1]),
                    base,
                    settings,
                    lambda done, total: status.update(f"factoring: {done / max(total, 1):.0%}"),
                )
            write_adapter(extracted.adapter, directory)
            require_same_files(identities)
        worst = sorted(extracted.errors, key=lambda module_error: -module_error.error)
        for module_error in worst[:_MAX_SHOWN]:
            rest = f"rank {module_error.rank} misses {100 * module_error.error:.1f} % of the change"
            console.print(f"  {module_error.module}: {rest}")
        if len(worst) > _MAX_SHOWN:
            rest = format_count(len(worst) - _MAX_SHOWN, "module")
            console.print(f"  and {rest} with smaller errors")
        size = sum(file.stat().st_size for file in output.iterdir())
        full = len(extracted.adapter.full_tensors)
        console.print(
            f"{output}: {format_bytes(size)}, {format_count(len(extracted.errors), 'module')} with factors, "
            f"{full} saved in full, {format_count(extracted.unchanged, 'tensor')} unchanged"
        )
        console.print(f"  the adapter misses {100 * extracted.error:.1f} % of the change")
        if as_json:
            modules = {item.module: {"rank": item.rank, "error": item.error} for item in extracted.errors}
            facts = {"out": str(output), "error": extracted.error, "unchanged": extracted.unchanged}
            print_created({**facts, "saved_whole": sorted(extracted.adapter.full_tensors), "modules": modules})


def transplant_tokenizer_command(
    model: Annotated[str, typer.Argument(help="Model with the weights: a directory, or org/name@revision.")],
    donor: Annotated[
        str, typer.Argument(help="Model with the tokenizer. Its embeddings define the meaning of new tokens.")
    ],
    out: Annotated[
        Path | None, typer.Argument(help="Directory for the new checkpoint. It must not exist.", show_default=False)
    ] = None,
    output: SameOutputOption = None,
    method: Annotated[
        Literal["omp", "mean"], typer.Option(help="Method that computes the rows of new tokens.")
    ] = "omp",
    device: Annotated[str, typer.Option(metavar="cpu|cuda[:N]", help="Device that computes the rows.")] = "cpu",
    k: Annotated[
        int,
        typer.Option(
            "-k",
            min=1,
            help="Maximum number of shared tokens that omp combines into one row.",
            rich_help_panel="Advanced",
        ),
    ] = 64,
    as_json: JsonOption = False,
) -> None:
    """Give a model the tokenizer of another model.

    Shared tokens keep their rows. The rows of other tokens are combinations of shared ones.
    """
    with command_context(as_json) as console:
        from mergegate.merge_core.engine import TransplantSettings, transplant_tokenizer

        result_path = only_output(out, output)
        with new_directory(result_path) as directory:
            checkpoints = [find_checkpoint(text) for text in (model, donor)]
            if snapshots := [snapshot for checkpoint in checkpoints for snapshot in checkpoint.snapshots]:
                download_snapshots(snapshots, store().hashes, lambda done, total: None)
            first, second = (open_parent(checkpoint) for checkpoint in checkpoints)
            scratch = directory.with_name("rows.partial")
            columns = (TextColumn("transplant"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            try:
                with Progress(*columns, console=console) as bar:
                    job = bar.add_task("transplant", total=None)
                    result = transplant_tokenizer(
                        first,
                        second,
                        directory,
                        scratch,
                        TransplantSettings(method, k, device),
                        on_progress=lambda done, total: bar.update(job, completed=done, total=total),
                    )
            finally:
                scratch.unlink(missing_ok=True)
        counts = f"{result.tokens} tokens, {result.shared} of them shared"
        console.print(f"{result_path}: {counts}, the others computed by {method}")
        for name, error in result.errors.items():
            console.print(f"{name}: combinations deviate from the donor's own rows by {error:.1%}")
        if as_json:
            facts = {"tokens": result.tokens, "shared": result.shared, "errors": result.errors}
            print_created({"out": str(result_path), **facts, "files": dict(result.record.files)})


def fingerprint_command(
    model: Annotated[str, typer.Argument(help="Known model: a directory, or org/name@revision.")],
    name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name by which cards refer to the model.",
            show_default="org/name, or the directory's name",
        ),
    ] = "",
    license: Annotated[
        str, typer.Option(metavar="ID", help="Identifier of its license.", show_default="the license in its card")
    ] = "",
    index: Annotated[
        Path | None, typer.Option(help="File to extend.", show_default="the index of this project")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the fingerprint of a known model to an index.

    mergegate samples 128 elements of each matrix. The license check of every later run compares the parents with the
    index. From a model on the Hub, only the samples are read.
    """
    with command_context(as_json, with_state=True) as console:
        from mergegate.merge_core.analysis import MOST_TENSORS, compare_fingerprints
        from mergegate.merge_core.recipe import name_in_path
        from mergegate.tasks.preflight.licenses import (
            INDEX_FILE,
            LONGEST_NAME,
            IndexedAncestor,
            IndexedModel,
            add_to_index,
            fingerprint_model,
            load_table,
            read_index,
            read_licenses,
        )

        checkpoint, table = find_checkpoint(model), load_table()
        if checkpoint.adapter is not None:
            raise InvalidInput(
                model, found="a model with an adapter", expected="a model", remedy="add the model without its adapter"
            )
        own, *ancestors = read_licenses([checkpoint], table).families[checkpoint.name]
        declared = table.lookup(license) if license else own.license
        if not (license or declared.resolved):
            raise InvalidInput(
                model,
                found=f"its license is unknown ({own.declared or declared.id})",
                expected="the license by which the model binds merges",
                remedy="specify its identifier with --license, for example --license apache-2.0",
            )
        path = index or home() / INDEX_FILE
        fingerprint = fingerprint_model(checkpoint, MOST_TENSORS)
        if not fingerprint.names:
            raise InvalidInput(model, found="no matrix with 128 elements", expected="a model with matrices of floats")
        directory_name = checkpoint.directory.resolve().name
        names = {  # Others do not have the directories that a card names.
            item.name: name_in_path(item.name) if item.name.startswith((".", "/", "~")) else item.name
            for item in ancestors
        }
        entry_name = name or (checkpoint.snapshot.repo if checkpoint.snapshot else directory_name)
        for text in (entry_name, license, *names.values()):
            require_printable(text, model)
            if len(text) > LONGEST_NAME:
                raise InvalidInput(
                    model,
                    found=f"a name of {len(text)} characters: {text:.40}...",
                    expected=f"names of models and licenses of at most {LONGEST_NAME} characters",
                    remedy="shorten the name, or correct the card",
                )
        entry = IndexedModel(
            name=entry_name,
            license=declared.id if declared.resolved else license,
            ancestors=tuple(IndexedAncestor(name=names[item.name], license=item.license.id) for item in ancestors),
            revision=checkpoint.revision,
            digest=fingerprint.digest,
            samples=fingerprint.to_json(),
        )
        known = [each for each in (read_index(path) if path.exists() else ()) if each.name != entry.name]
        add_to_index(path, entry)
        size = format_bytes(len(entry.model_dump_json()))
        console.print(
            f"{short_path(path)}: {entry.name} ({entry.license}), {len(fingerprint.names)} matrices, {size}; "
            f"{format_count(len(known) + 1, 'model')} in the index"
        )
        if not declared.resolved:
            console.print(
                f"  {entry.license} is not in the license table, so a check that finds the model needs a review; "
                "to avoid that, add it to the file in checks.license.table"
            )
        relations = compare_fingerprints(fingerprint, [each.fingerprint for each in known])
        related = sorted(
            ((relation, each) for relation, each in zip(relations, known, strict=True) if relation),
            key=lambda pair: (-pair[0].share, pair[0].distance),
        )
        for relation, each in related[:_MAX_SHOWN]:
            console.print(
                f"  {relation.kind} of {each.name} ({each.license}): {100 * relation.share:.0f} % of the matrices are "
                f"within {100 * relation.distance:.2g} %"
            )
        if as_json:
            matches = [
                {"name": each.name, "kind": relation.kind, "share": relation.share, "distance": relation.distance}
                for relation, each in related
            ]
            print_created(
                {
                    "index": str(path),
                    "name": entry.name,
                    "license": entry.license,
                    "digest": entry.digest,
                    "matrices": len(fingerprint.names),
                    "related": matches,
                }
            )
