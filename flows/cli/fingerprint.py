"""``mergegate fingerprint``: add a model to the index with which the license check finds undeclared ancestors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergegate.flows.cli.command import JsonOption, command_context
from mergegate.flows.cli.output import print_created, short_path
from mergegate.merge_core.analysis import MOST_TENSORS, compare_fingerprints
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import require_printable
from mergegate.merge_core.recipe import name_in_path
from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.checkpoints import find_checkpoint
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
from mergegate.tasks.stage import home

_MOST_SHOWN = 5  # related models


def fingerprint_command(
    model: Annotated[str, typer.Argument(help="Known model: a directory, or org/name@revision.")],
    name: Annotated[
        str, typer.Option(help="Name by which cards refer to the model. Default: org/name, or the directory's name.")
    ] = "",
    license: Annotated[str, typer.Option(help="Identifier of its license. Default: the license in its card.")] = "",
    index: Annotated[Path | None, typer.Option(help="File to extend. Default: the index of this project.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the fingerprint of a known model to an index.

    mergegate samples 128 elements of each matrix. The license check of every later run compares the parents with the
    index. From a model on the Hub, only the samples are read.
    """
    with command_context(as_json, with_state=True) as console:
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
        for relation, each in related[:_MOST_SHOWN]:
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
