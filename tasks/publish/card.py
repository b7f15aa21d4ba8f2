"""Write the model card of a merge: metadata for the Hub, and a page that helps readers decide about the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import yaml

from mergegate.tasks.preflight.licenses import LicenseVerdict, Obligation, ObligationKind
from mergegate.tasks.publish.card_metadata import CardMetadata
from mergegate.tasks.publish.card_scores import escape, markdown_table, quality_section
from mergegate.tasks.report import ReportContent
from mergegate.tasks.serve import SERVED_AS_LORA

# For each kind of obligation: what this release does about it, and what remains for anyone who redistributes the model.
_DONE: dict[ObligationKind, str] = {
    "text": "The text is part of this release: {texts}.",
    "notice": "It stands in [NOTICE](NOTICE).",
    "display": "It stands at the top of this page.",
    "use_policy": "It is passed on here.",
    "changes": "It stands at the top of this page and in [MODIFICATIONS](MODIFICATIONS).",
    "name_prefix": "The name was checked.",
    "cap": "",
}
_LEFT: dict[ObligationKind, str] = {
    "display": "Show it, too, where people meet what you build with this model: website, interface, about page.",
    "use_policy": "Read it, keep to it, and bind those to it to whom you pass the model on.",
    "cap": "See whether you are above the threshold; if so, ask the licensor first.",
    "name_prefix": "Begin the name of anything that you make from this model in the same way.",
}
_AS_LORA = (
    "vLLM has served it as LoRA before it was released: `--enable-lora --lora-modules NAME=DIRECTORY`, and a "
    "`--max-lora-rank` that is not below its rank."
)
_NOT_AS_LORA = "vLLM has not served it as LoRA."
_OPEN = "**Still to be done:** the text was not to be had. Put it beside the model before you pass it on."


@dataclass(frozen=True)
class Publication:
    """Facts about the publication that the card states."""

    address: str  # reference to pass to mergegate: 'acme/demo' on the Hub, '.' in the release's directory
    signed: bool
    device: str  # kind of device that computed the merge
    versions: Mapping[str, str]  # libraries that determine the weights and the scores


def model_card(
    content: ReportContent,
    metadata: CardMetadata,
    license: LicenseVerdict,
    missing: Sequence[Obligation],
    files: Sequence[str],
    publication: Publication,
) -> str:
    """Return the content of README.md, which contains no dates and no local paths.

    ``missing`` lists the obligations that the release does not fulfill: license texts that a user must add. ``files``
    names the files of the release that exist before the card is written.
    """
    front = yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)
    # Lines that licenses require to be displayed, such as 'Built with Llama'.
    display_lines = dict.fromkeys(item.text for item in license.combination.obligations if item.kind == "display")
    sections = [
        f"# {escape(content.name)}",
        *(f"**{escape(line)}**" for line in display_lines),
        f"A merge made without training: {escape(content.method)}. It was checked, evaluated and gated by mergegate "
        "before it was released. The evidence is in [report.html](report.html), where it comes from in "
        "[provenance.json](provenance.json).",
        "**Statement of changes.** The weights are not those of any model named below: they were computed from them by "
        "the recipe below and replace theirs. Configuration and tokenizer are taken over or adapted.",
    ]
    if metadata.get("library_name") == "peft":
        sections.append(
            "This is a LoRA adapter: it holds factors, not a model, and changes the model that `adapter_config.json` "
            "names. PEFT loads it with `PeftModel.from_pretrained(model, …)`. "
            + (_AS_LORA if content.served_as.startswith(SERVED_AS_LORA) else _NOT_AS_LORA)
        )
    address, is_signed = publication.address, publication.signed
    is_local = any(model.revision is None for model in content.parents)
    verify = f"mergegate verify {address}" + (" --key release.pub" if is_signed else "")
    reproduce = f"mergegate reproduce {address}" + (" --parents DIR" if is_local else "")
    commands = [f"{verify:<48} # every file, and what they say about each other"]
    if is_signed:
        commands.append(
            "model_signing verify key . --signature model.sig --public_key release.pub    # the same signature, by "
            "OpenSSF's own tool"
        )
    commands += [
        f"{'sha256sum --check SHA256SUMS':<48} # the bytes alone, in its directory",
        f"{reproduce:<48} # the weights again, from recipe and parents, to the byte",
        *(line for line in content.reproduce if not line.startswith("mergegate reproduce")),
    ]
    libraries = ", ".join(f"{name} {version}" for name, version in publication.versions.items())
    notes = f"Made with {libraries}, on {publication.device}."
    notes += " DIR is what the paths in the recipe are relative to." if is_local else ""
    if is_signed:
        notes += " The public key must come from the publisher by another way than this release."
    sections += [
        f"## Made from\n\n{_sources(content, license)}\n\n{_fenced(content.recipe.strip(), 'yaml')}",
        f"## Evidence\n\n{quality_section(content)}",
        f"## Licence\n\n{_license(license, missing, files)}",
        f"## Verify and reproduce\n\n{_fenced(chr(10).join(commands), 'sh')}\n\n{notes}",
    ]
    return f"---\n{front}---\n\n" + "\n\n".join(sections) + "\n"


def _sources(content: ReportContent, license: LicenseVerdict) -> str:
    rows = [
        f"| {escape(model.ref)} | {model.role} | {escape(model.licence)} | `{model.revision or model.digest[:16]}` |"
        for model in content.parents
    ]
    head = "| model | role | licence | commit or digest |\n| :-- | :-- | :-- | :-- |\n"
    parts = [head + "\n".join(rows)]
    if license.ancestors:
        rows = [
            f"| {escape(model.name)} | {escape(model.license)} | {f'`{model.revision}`' if model.revision else ''} |"
            for model in license.ancestors
        ]
        head = "Models that these were made from, as far as their cards say, with what they are licensed under:\n\n"
        parts.append(head + "| model | licence | commit |\n| :-- | :-- | :-- |\n" + "\n".join(rows))
    if license.unread:
        names = ", ".join(f"{escape(name)} ({escape(reason)})" for name, reason in license.unread.items())
        parts.append(f"Named by those cards, but not to be read: {names}.")
    return "\n\n".join(parts)


def _license(license: LicenseVerdict, missing: Sequence[Obligation], files: Sequence[str]) -> str:
    combination = license.combination
    reasons = [reason.sentence for reason in combination.reasons if reason.rule.startswith("R7")]
    parts = [f"**{escape(license.result)}**" + (f": {escape(reasons[0])}." if reasons else "")]
    if "LICENSE" in files:
        parts[0] += " The text is in [LICENSE](LICENSE)."
    texts = [name for name in files if name == "LICENSE" or name.startswith("licenses/")]
    rows = []
    for item in dict.fromkeys((*combination.obligations, *missing)):
        if item in missing:
            outcome = f" | {_OPEN}"
        else:
            sources = (*item.because, item.model)
            own = [name for name in texts if name.removeprefix("licenses/").removesuffix(".txt") in sources]
            links = ", ".join(f"[{name}]({quote(name)})" for name in own or texts)
            outcome = f"{_DONE[item.kind].format(texts=links)} | {_LEFT.get(item.kind, '')}"
        rows.append(f"| {escape(item.text)} | {escape(', '.join(item.because))} | {outcome} |")
    head = "| what is asked | by | done here | left to you |\n| :-- | :-- | :-- | :-- |\n"
    parts.append(head + "\n".join(rows) if rows else "No obligations.")
    if accepted := [reason for reason in combination.reasons if reason.accepted]:
        settled = [(reason.sentence, "; ".join(reason.accepted)) for reason in accepted]
        parts.append(
            f"Doubts that a person has settled:\n\n{markdown_table(('doubt', 'accepted (what: who: why)'), settled, 0)}"
        )
    return "\n\n".join(parts)


def _fenced(text: str, language: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"
