"""``mergegate verify``, ``reproduce`` and ``export``: examine a release, or convert its results.

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
from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.quality.gate import GuardVerdict, SuiteVerdict
from mergegate.tasks.release.publish.releases import (
    RecomputedVerdict,
    ReproducedRelease,
    VerifiedRelease,
    check_release,
)
from mergegate.tasks.release.publish.targets import find_release

MergeOption = Annotated[
    str | None,
    typer.Option(
        "--merge",
        metavar="RELEASE",
        help="Release of the merge that quantized variants were made from.",
        show_default="the release next to them",
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
        typer.Option(
            help="Sigstore's client trust configuration of a private instance.",
            show_default="the public instance",
            rich_help_panel="Advanced",
        ),
    ] = None,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="Use the stored trusted root of the public instance of sigstore without updating it.",
            rich_help_panel="Advanced",
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
            help="Directory that relative paths of the recipe or of a calibration text start at.",
            show_default="mergegate searches for it",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda[:N]", help="Device of the merge: auto is that of the release.")
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
            metavar="NAME",
            help="Organization that publishes the results.",
            show_default="the supplier that the release states, or its namespace on the Hub",
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
