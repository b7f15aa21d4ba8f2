"""Write the model card of a merge: metadata for the Hub, and a page that helps readers decide about the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import yaml

from mergegate.merge_core.architecture import TEXT_GENERATOR
from mergegate.merge_core.checkpoint import MODULES_FILE, companion_kind
from mergegate.tasks.merge import describe_changes
from mergegate.tasks.preflight.licenses import LicenseVerdict, Obligation, ObligationKind
from mergegate.tasks.publish.card_metadata import CardMetadata
from mergegate.tasks.publish.card_scores import escape, markdown_table, quality_section, untested_sentence
from mergegate.tasks.publish.content import KEYLESS_SIGNATURE, STATEMENT_OF_CHANGES
from mergegate.tasks.publish.loading_code import loading_code
from mergegate.tasks.publish.settings import SigstoreSettings
from mergegate.tasks.report import ReportContent, ReportedModel
from mergegate.tasks.serve import SERVED_AS_LORA

# For each kind of obligation: what this release does about it, and what remains for anyone who redistributes the model.
_DONE: dict[ObligationKind, str] = {
    "text": "The text is part of this release: {texts}.",
    "notice": "It is in [NOTICE](NOTICE).",
    "display": "It is at the top of {page}.",
    "use_policy": "This release passes it on.",
    "changes": "The statement is at the top of {page} and in [MODIFICATIONS](MODIFICATIONS).",
    "name_prefix": "mergegate checked the name of this model.",
    "cap": "",
}
_LEFT: dict[ObligationKind, str] = {
    "display": "Show it on the website, in the interface or on the about page of every product with this model.",
    "use_policy": "Read and follow the policy. Require the same of everyone who receives the model from you.",
    "cap": "Check whether you exceed the threshold. If you do, ask the licensor for permission first.",
    "name_prefix": "Start the name of every model that you derive from this model in the same way.",
}
_AS_LORA = (
    "vLLM served it as LoRA before the release. Start the server with `--enable-lora --lora-modules NAME=DIRECTORY` "
    "and with a `--max-lora-rank` of at least its rank."
)
_NOT_AS_LORA = "This release was not tested as LoRA in vLLM."
_NO_LOADER = "mergegate knows no class that loads this model. `architectures` in `config.json` names its class."
_OPEN = "**Open:** mergegate could not get this text. Add it to the model before you redistribute it."
_LIMITS = """* mergegate tested this model only as shown above. Other abilities, safety and bias were not tested.
* Each score is an estimate from the stated number of documents. Its interval shows how exact it is.
* A merge can inherit the limits of every model that it was computed from. Read their model cards."""


@dataclass(frozen=True)
class Publication:
    """Facts about the publication that the card states."""

    address: str  # reference to pass to mergegate: 'acme/demo' on the Hub, '.' in the release's directory
    signed: bool  # with a key
    device: str  # kind of device that computed the merge
    compliance: str  # summary of the compliance sheet
    versions: Mapping[str, str]  # libraries that determine the weights and the scores
    keyless: SigstoreSettings | None = None  # settings of the keyless signature


def model_card(
    content: ReportContent,
    metadata: CardMetadata,
    license: LicenseVerdict,
    missing: Sequence[Obligation],
    files: Sequence[str],
    publication: Publication,
    changes: str = describe_changes(None, ()),
) -> str:
    """Return the content of README.md, which contains no dates and no local paths.

    ``missing`` lists the obligations that the release does not fulfill: license texts that a user must add. ``files``
    names the files of the release that exist before the card is written. ``changes`` says which weights are new.
    Default: a sentence that says it is unknown.
    """
    front = yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)
    is_adapter = metadata.get("library_name") == "peft"
    sections = [
        f"# {escape(content.name)}",
        *display_lines(license),
        f"This {'LoRA adapter' if is_adapter else 'model'} is a merge, computed without training: "
        f"{escape(content.method)}. mergegate tested it before the release. The [report](report.html) shows every "
        "result, [provenance.json](provenance.json) identifies the inputs, and [evidence](evidence/gate.json) has the "
        "outcomes of all documents, without texts.",
        f"{STATEMENT_OF_CHANGES} The weights were computed with the recipe below from the models listed with it. "
        f"{changes} {_copied_files(content, files)} copied or adapted."
        + (f" {content.routers.sentences}" if content.routers else ""),
    ]
    address, is_signed = publication.address, publication.signed
    is_local = any(model.revision is None for model in content.parents)
    verify = f"mergegate verify {address}" + signature_options(publication.keyless, has_key=is_signed)
    reproduce = f"mergegate reproduce {address}" + (" --parents DIR" if is_local else "")
    commands = [
        f"{verify:<48} # check all files and the provenance",
        f"{f'{verify} --verdict':<48} # also decide again from the outcomes in evidence/, without a model",
    ]
    if is_signed:
        commands.append(
            "model_signing verify key . --signature model.sig --public_key release.pub    # check the signature with "
            "the tool of OpenSSF"
        )
    if publication.keyless:
        trust = " --trust_config FILE" if publication.keyless.trust_config else ""
        commands.append(
            f"model_signing verify sigstore . --signature {KEYLESS_SIGNATURE} --identity ID --identity_provider URL"
            f"{trust}    # check the keyless signature with the tool of OpenSSF"
        )
    commands += [
        f"{'sha256sum --check SHA256SUMS':<48} # check the files only, in the directory of the release",
        f"{reproduce:<48} # merge again and compare the weights byte by byte",
        *(line for line in content.reproduce if not line.startswith(("mergegate verify", "mergegate reproduce"))),
    ]
    libraries = ", ".join(f"{name} {version}" for name, version in publication.versions.items())
    notes = f"Built with {libraries} on {publication.device}."
    notes += " Paths in the recipe are relative to DIR." if is_local else ""
    notes += signature_note(publication.keyless, has_key=is_signed)
    sections += [
        f"## How to load it\n\n{_loading(content, files, publication, is_adapter=is_adapter)}",
        f"## Evaluation\n\n{quality_section(content)}",
        f"## Limits\n\n{_LIMITS}{f'{chr(10)}* {note}' if (note := untested_sentence(content)) else ''}",
        f"## How it was made\n\n{_sources(content, license)}\n\n{code_block(content.recipe.strip(), 'yaml')}",
        f"## License\n\n{license_section(license, missing, files)}",
        f"## Compliance\n\n{publication.compliance}",
        f"## How to verify it\n\n{code_block(chr(10).join(commands), 'sh')}\n\n{notes}",
    ]
    return f"---\n{front}---\n\n" + "\n\n".join(sections) + "\n"


def signature_options(keyless: SigstoreSettings | None, *, has_key: bool) -> str:
    """Return the options of ``mergegate verify`` that check the signatures of a release."""
    options = " --key release.pub" if has_key else ""
    if keyless:
        options += " --identity ID --issuer URL" + (" --trust-config FILE" if keyless.trust_config else "")
    return options


def signature_note(keyless: SigstoreSettings | None, *, has_key: bool) -> str:
    """Return a sentence that says where to get the values of those options, or an empty string."""
    parts = ["the public key"] if has_key else []
    parts += ["the identity (ID) and issuer (URL) of the signer"] if keyless else []
    parts += ["the trust configuration (FILE)"] if keyless and keyless.trust_config else []
    *others, last = parts or [""]
    listed = f"{', '.join(others)} and {last}" if others else last
    return f" Get {listed} from the publisher, but not from this release." if parts else ""


def display_lines(license: LicenseVerdict) -> tuple[str, ...]:
    """Return the lines that licenses require to be displayed, such as 'Built with Llama'."""
    lines = dict.fromkeys(item.text for item in license.combination.obligations if item.kind == "display")
    return tuple(f"**{escape(line)}**" for line in lines)


def _copied_files(content: ReportContent, files: Sequence[str]) -> str:
    """Return the start of the sentence about all files except weights: 'Configuration and tokenizer were'."""
    kinds = {companion_kind(name) for name in files}
    names = ["tokenizer"] if "tokenizer" in kinds or content.kind == TEXT_GENERATOR else []
    names += ["processor"] if "processor" in kinds and content.kind != TEXT_GENERATOR else []
    names += ["settings of its modules"] if MODULES_FILE in files else []
    *others, last = ["Configuration", *names]
    return f"{', '.join(others)} and {last} were" if others else f"{last} was"


def _loading(content: ReportContent, files: Sequence[str], publication: Publication, *, is_adapter: bool) -> str:
    code = loading_code(content.kind, publication.address, files, is_adapter=is_adapter)
    notes = [] if code else [_NO_LOADER]
    if is_adapter:
        first = "PEFT loads" if content.kind == TEXT_GENERATOR else "is loaded"
        notes.append(f"`adapter_config.json` names the base model, which {first} first.")
    if publication.address == ".":
        notes.append("Run this in the directory of the release.")
    if is_adapter and content.kind.reads_text:
        notes.append(_AS_LORA if content.served_as.startswith(SERVED_AS_LORA) else _NOT_AS_LORA)
    parts = [code_block(code, "python")] if code else []
    return "\n\n".join([*parts, " ".join(notes)] if notes else parts)


def _sources(content: ReportContent, license: LicenseVerdict) -> str:
    def row(model: ReportedModel) -> str:
        identity = model.revision or model.digest[:16]
        return f"| {escape(model.ref)} | {model.role} | {escape(model.licence)} | `{identity}` |"

    head = "| model | role | license | commit or digest |\n| :-- | :-- | :-- | :-- |\n"
    rows, folded = list[str](), list[str]()
    for group in content.model_groups:
        if len(group) == 1:
            rows += [row(model) for model in group if model.role != "merge"]
            continue
        first, last, count = escape(group[0].ref), escape(group[-1].name), len(group)
        licenses = ", ".join(dict.fromkeys(escape(model.licence) for model in group))
        rows.append(f"| {first} to {last} ({count} checkpoints) | parents | {licenses} | listed below |")
        table = head + "\n".join(map(row, group))
        summary = f"{count} checkpoints of the training run, ordered by step"
        folded.append(f"<details>\n<summary>{summary}</summary>\n\n{table}\n\n</details>")
    parts = [head + "\n".join(rows), *folded]
    if license.ancestors:
        rows = [
            f"| {escape(model.name)} | {escape(model.license)} | {f'`{model.revision}`' if model.revision else ''} |"
            for model in license.ancestors
        ]
        head = "These models were derived from the following models, as far as their model cards say:\n\n"
        parts.append(head + "| model | license | commit |\n| :-- | :-- | :-- |\n" + "\n".join(rows))
    if license.unread:
        names = ", ".join(f"{escape(name)} ({escape(reason)})" for name, reason in license.unread.items())
        parts.append(f"mergegate could not read the following models, which those cards name: {names}.")
    if license.undeclared:
        lines = [f"* {escape(relation.summary)}" for relation in license.undeclared]
        parts.append("\n".join(["mergegate compared the weights with those of known models:\n", *lines]))
    return "\n\n".join(parts)


def license_section(
    license: LicenseVerdict, missing: Sequence[Obligation], files: Sequence[str], page: str = "this page"
) -> str:
    """Return the text under 'License'. ``missing`` and ``files`` are those of ``model_card``.

    ``page`` is how to refer to the card.
    """
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
            outcome = f"{_DONE[item.kind].format(texts=links, page=page)} | {_LEFT.get(item.kind, '')}"
        rows.append(f"| {escape(item.text)} | {escape(', '.join(item.because))} | {outcome} |")
    head = "| requirement | license | in this release | your part |\n| :-- | :-- | :-- | :-- |\n"
    parts.append(head + "\n".join(rows) if rows else "The license has no further requirements.")
    if accepted := [reason for reason in combination.reasons if reason.accepted]:
        settled = [(reason.sentence, "; ".join(reason.accepted)) for reason in accepted]
        parts.append(
            "The publisher accepted these open questions about the license:\n\n"
            f"{markdown_table(('question', 'accepted (model: name: reason)'), settled, 0)}"
        )
    return "\n\n".join(parts)


def code_block(text: str, language: str) -> str:
    """Return ``text`` as a code block of Markdown."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"
