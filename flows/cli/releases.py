"""``mergegate verify``, ``reproduce``, ``export`` and ``fingerprint``: examine a release, or index a known model.

``verify`` and ``reproduce`` accept the release of a merge and a release of quantized variants.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from mergegate.flows.cli.command import JsonOption, ReleaseArgument, command_context
from mergegate.flows.operations.console import print_answer, print_created, print_table, short_path
from mergegate.flows.operations.releases import export_release, reproduce_release, signer_policy
from mergegate.merge_core.analysis import MOST_TENSORS, compare_fingerprints
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import require_printable
from mergegate.merge_core.recipe import name_in_path
from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.checkpoints import find_checkpoint
from mergegate.tasks.gate import GuardVerdict, SuiteVerdict
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
from mergegate.tasks.publish.releases import RecomputedVerdict, ReproducedRelease, VerifiedRelease, check_release
from mergegate.tasks.publish.targets import find_release
from mergegate.tasks.stage import home

MergeOption = Annotated[
    str | None,
    typer.Option(
        "--merge",
        metavar="RELEASE",
        help="Release of the merge that quantized variants were made from. Default: the release next to them.",
    ),
]


def verify_command(
    release: ReleaseArgument,
    key: Annotated[Path | None, typer.Option(help="Public key (EC P-256, PEM) that must have signed it.")] = None,
    verdict: Annotated[
        bool, typer.Option("--verdict", help="Also decide again from the outcomes in the release, and compare.")
    ] = False,
    merge: MergeOption = None,
    identity: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Identity that must have created the keyless signature, exactly as in the certificate."
        ),
    ] = None,
    issuer: Annotated[
        str | None, typer.Option(metavar="URL", help="OIDC issuer that must have confirmed --identity.")
    ] = None,
    trust_config: Annotated[
        Path | None,
        typer.Option(help="Sigstore's client trust configuration of a private instance. Default: the public instance."),
    ] = None,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline", help="Use the stored trusted root of the public instance of sigstore without updating it."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Verify a release against its own claims.

    This checks every byte, the provenance, the model card and the signatures. With --verdict, mergegate also recomputes
    the gate's verdict from the files in evidence/, without a model. For quantized variants, mergegate also verifies
    the release of their merge if it is available.
    """
    with command_context(as_json) as console:
        signer = signer_policy(identity, issuer, trust_config, offline=offline)
        verified = check_release(find_release(release), key, recompute=verdict, merge=merge, signer=signer)
        if as_json:
            print_answer("verified", f"{release}: {verified.state}", _plain(verified))
            return
        console.print(str(verified))
        if verified.recomputed:
            _print_verdict(console, verified.recomputed)
        for variant_type, recomputed in verified.variants.items():
            console.print(f"\n{variant_type}")
            _print_verdict(console, recomputed)


def _print_verdict(console: Console, result: RecomputedVerdict) -> None:
    """Print the stored and the recomputed drop of each guard, then the sentences about the verdict."""

    def row(name: str, reference: str, *pair: GuardVerdict | SuiteVerdict) -> tuple[str, ...]:
        drops = (f"{each.drop:.2f} [{each.low:.2f}, {each.high:.2f}]".replace("-", "\N{MINUS SIGN}") for each in pair)
        return name, reference, *drops, pair[-1].outcome

    stored, again = result.stored, result.verdict
    rows = [row(old.task, old.reference, old, new) for old, new in zip(stored.guards, again.guards, strict=True)]
    rows += [row(f"mean of {old.tasks}", "", old, new) for old, new in zip(stored.suites, again.suites, strict=True)]
    if stored.drift and again.drift:
        ratios = (
            f"\N{MULTIPLICATION SIGN}{each.ratio:.3f} [{each.low:.3f}, {each.high:.3f}]" if each.ratio else "not finite"
            for each in (stored.drift, again.drift)
        )
        rows.append(("perplexity", stored.drift.reference, *ratios, again.drift.outcome))
    if rows:
        print_table(console, ("guard", "reference", "stored drop", "recomputed", "verdict"), rows, numbers=True)
    console.print(Text(str(result)))


def reproduce_command(
    release: ReleaseArgument,
    parents: Annotated[
        Path | None,
        typer.Option(
            help="Directory that relative paths of the recipe or of a calibration text start at. Default: mergegate "
            "searches for it."
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Device of the merge: auto (that of the release), cpu, cuda or cuda:N.")
    ] = "auto",
    merge: MergeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rebuild the weights of a release, and compare every byte.

    mergegate verifies the release first. It merges the parents of a merge by its recipe, and quantizes the variants of
    a merge with the recorded settings.
    """
    with command_context(as_json, with_state=True) as console:
        rebuilt = reproduce_release(release, parents, device, console, merge)
        if as_json:
            print_answer("reproduced", f"the rebuilt weights of {release} are identical", _plain(rebuilt))
            return
        console.print(str(rebuilt))


def _plain(result: VerifiedRelease | ReproducedRelease) -> dict[str, object]:
    fields = asdict(result)
    for name in ("recomputed", "variants"):
        fields.pop(name, None)
    if isinstance(result, VerifiedRelease):
        fields["facts_at_risk"] = result.facts_at_risk
        if result.recomputed is not None:
            fields["verdict"] = result.recomputed.to_dict()
        if result.merge is None:
            del fields["merge"]
        if result.keyless is None:
            del fields["keyless"]
        if result.variants:
            fields["verdicts"] = {name: each.to_dict() for name, each in result.variants.items()}
    return {"where": fields.pop("reference")} | {name: value for name, value in fields.items() if name != "statement"}


def export_command(
    release: ReleaseArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to create.")],
    format: Annotated[
        Literal["inspect"], typer.Option(help="Format of the files: inspect for logs of inspect_ai.")
    ] = "inspect",
    organization: Annotated[
        str,
        typer.Option(
            help="Organization that publishes the results. Default: the supplier that the release states, or its "
            "namespace on the Hub."
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Export the results of a release to another tool.

    mergegate verifies the release first. The export has the scores of all models in its evidence, by document, without
    texts. Its date is the time of the export, because a release contains none.
    """
    with command_context(as_json) as console:
        result = export_release(release, output, organization)
        if as_json:
            counts = {"files": result.files, "bytes": result.bytes, "models": result.models, "tasks": result.tasks}
            print_created({"where": str(output), **counts})
            return
        models = format_count(result.models, "model")
        console.print(
            f"{short_path(output)}: {format_count(result.files, 'file')}, {format_bytes(result.bytes)}, the results of "
            f"{models}"
        )


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
