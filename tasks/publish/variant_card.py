"""Write the model card of quantized variants: which file to choose, what each loses, and how to run and verify it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import quote

import yaml

from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.preflight.licenses import LicenseVerdict, Obligation
from mergegate.tasks.publish.card import (
    Publication,
    code_block,
    display_lines,
    license_section,
    signature_note,
    signature_options,
)
from mergegate.tasks.publish.card_metadata import CardMetadata
from mergegate.tasks.publish.card_scores import escape, guard_note, guard_rows, markdown_table
from mergegate.tasks.publish.content import variant_evidence
from mergegate.tasks.publish.provenance import VariantOrigin
from mergegate.tasks.report import ReportContent, conversion_sentences, variant_rows, wording
from mergegate.tasks.variants import VariantVerdict

_SHOWN_FILES = 3  # files of a variant in the table
_LIMITS = """* mergegate tested the variants only as shown above, with the model that they were quantized from as the
  reference. The limits of that model apply to them, too.
* Each drop is an estimate from the stated number of documents. Its interval shows how exact it is.
* The numbers hold for the stated runtime. Another runtime may round activations differently."""


def variant_card(
    content: ReportContent,
    metadata: CardMetadata,
    license: LicenseVerdict,
    missing: Sequence[Obligation],
    files: Sequence[str],
    origin: VariantOrigin,
    publication: Publication,
    hub_id: str | None,
) -> str:
    """Return the content of README.md for a release of variants, which contains no dates and no local paths.

    ``content`` has the verdicts on all variants of the place, including failed ones. ``missing`` lists the
    obligations that the release does not fulfill, and ``files`` names its files, as in ``model_card``. ``hub_id`` is
    the id of the variants' repository on the Hub, or None.
    """
    front = yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)
    merge, published = origin.merge, [verdict for verdict in content.variants if verdict.type in origin.files]
    model = f"[{merge.hub_id}](https://huggingface.co/{merge.hub_id})" if merge.hub_id else f"**{escape(merge.name)}**"
    parents = ", ".join(escape(parent.ref) for parent in content.parents)
    evidence = ", ".join(
        f"[{each.type}]({quote(variant_evidence('evidence/gate.json', each.type))})" for each in published
    )
    sections = [
        f"# {escape(content.name)}",
        *display_lines(license),
        f"Quantized variants of {model}, release `{merge.version}`. mergegate compared each variant with that model "
        "on the same documents, in the runtime that serves the variant, before it published them. The "
        "[report](report.html) shows every result, and [provenance.json](provenance.json) identifies the model, the "
        f"tools and their settings. The outcomes of all documents, without texts: {evidence}.",
        "**Statement of changes.** The weights were quantized from those of the release above, which is a merge of "
        f"{parents}. Configuration and tokenizer were converted or copied.",
        f"## Variants\n\n{_variants(content, origin.files)}",
        f"## Evaluation\n\n{_evaluation(published)}",
    ]
    if commands := _commands(metadata, merge.name, origin.files, hub_id):
        sections.append(f"## How to run it\n\n{code_block(commands, 'sh')}")
    sections += [
        f"## Limits\n\n{_LIMITS}",
        f"## License\n\n{license_section(license, missing, files)}",
        f"## Compliance\n\n{publication.compliance}",
        f"## How to verify it\n\n{_verification(origin, publication)}",
    ]
    return f"---\n{front}---\n\n" + "\n\n".join(sections) + "\n"


def _variants(content: ReportContent, files: Mapping[str, Sequence[str]]) -> str:
    """Return the table of the published variants, and the reason for each failed one."""
    rows = []
    for row in variant_rows(content):
        verdict = row.verdict
        if verdict.type not in files or verdict.record is None:
            continue
        names = list(files[verdict.type])
        more = [f"and {len(names) - _SHOWN_FILES} more"] if len(names) > _SHOWN_FILES else []
        types = sorted(verdict.record.tensor_types.items(), key=lambda item: (-item[1], item[0]))
        rows.append(
            (
                verdict.type,
                ", ".join([*names[:_SHOWN_FILES], *more]),
                ", ".join(f"{count} {kind}" for kind, count in types),
                ", ".join(f"{tool} {version}" for tool, version in verdict.record.versions.items()),
                row.runtime,
                f"{format_bytes(verdict.record.bytes)} ({row.share})" if row.share else row.size,
                row.perplexity,
                verdict.outcome,
            )
        )
    columns = ("variant", "files", "tensors", "built with", "runtime", "size", "perplexity ratio", "verdict")
    notes = [
        markdown_table(columns, rows, 3),
        "The size in parentheses is relative to the model. The perplexity ratio is that of the variant divided by that "
        "of the model, on the same text. The brackets contain an interval.",
    ]
    refused = [verdict for verdict in content.variants if verdict.type not in files]
    if refused:
        lines = [f"* {escape(verdict.type)}: {escape('; '.join(verdict.reasons))}" for verdict in refused]
        notes.append("The following variants did not pass and are not published:\n\n" + "\n".join(lines))
    return "\n\n".join(notes)


def _evaluation(verdicts: Sequence[VariantVerdict]) -> str:
    parts = []
    gates = [(verdict.type, verdict.gate) for verdict in verdicts if verdict.gate]
    rows = [(name, task, *cells) for name, gate in gates for task, _, *cells in guard_rows(gate)]
    if rows:
        columns = ("variant", "task", "documents", "drop", "max_drop", "margin", "verdict")
        guards = [guard for _, gate in gates for guard in gate.all_guards]
        parts += [
            markdown_table(columns, rows, 5),
            guard_note(guards[0].confidence, "the model", "the variant"),
        ]
    lines = [
        f"* {escape(name)}: the perplexity is {escape(wording.format_ratio(gate.drift))} times that of the model, on "
        f"{gate.drift.documents:,} documents. The limit is {wording.plain(gate.drift.max_ratio)}. "
        f"Verdict: {gate.drift.outcome}."
        for name, gate in gates
        if gate.drift
    ]
    lines += [f"* {escape(name)}: {escape(gate.untested_note)}." for name, gate in gates if gate.untested_note]
    lines += [
        f"* {escape(verdict.type)} is {verdict.outcome}: {escape(reason)}"
        for verdict in verdicts
        for reason in verdict.reasons
    ]
    checks = [(verdict.type, verdict.checks) for verdict in verdicts if verdict.checks]
    lines += [
        f"* {escape(name)}: {sum(check.outcome == 'pass' for check in each)} of {len(each)} checks of the files and "
        "of the runtime passed."
        for name, each in checks
    ]
    conversions = dict.fromkeys(
        " ".join(conversion_sentences(verdict.conversion)) for verdict in verdicts if verdict.conversion
    )
    lines += [f"* {escape(sentences)}" for sentences in conversions]
    return "\n\n".join([*parts, "\n".join(lines)] if lines else parts)


def _commands(metadata: CardMetadata, name: str, files: Mapping[str, Sequence[str]], hub_id: str | None) -> str:
    """Return the commands that run the first variant, or an empty string for an unknown library."""
    variant_type, names = next(iter(files.items()))
    if metadata.get("library_name") == "gguf":
        if hub_id:
            return (
                f"llama-server -hf {hub_id}:{variant_type}         # llama.cpp\n"
                f"ollama run hf.co/{hub_id}:{variant_type}         # Ollama"
            )
        return (
            "# In the directory of the release:\n"
            f"llama-server --model {names[0]}                      # llama.cpp\n"
            f"echo 'FROM ./{names[0]}' > Modelfile                 # Ollama\n"
            f"ollama create {name} -f Modelfile && ollama run {name}"
        )
    if metadata.get("library_name") == "transformers":
        return f"vllm serve {hub_id}" if hub_id else "vllm serve .    # in the directory of the release"
    return ""


def _verification(origin: VariantOrigin, publication: Publication) -> str:
    key = signature_options(publication.keyless, has_key=publication.signed)
    verify = f"mergegate verify {publication.address}{key}"
    commands = [
        (verify, "check all files and the provenance"),
        (f"{verify} --verdict", "also decide again from the outcomes in evidence/, without a model"),
        (f"mergegate verify {origin.merge.reference}{key}", "check the release that the variants were quantized from"),
        (f"mergegate reproduce {publication.address}", "quantize again and compare the weights byte by byte"),
        ("sha256sum --check SHA256SUMS", "check the files only, in the directory of the release"),
    ]
    text = code_block("\n".join(f"{command:<48} # {what}" for command, what in commands), "sh")
    if publication.address == ".":
        text += "\n\nRun these commands in the directory of the release."
    if note := signature_note(publication.keyless, has_key=publication.signed):
        text += f"\n\n{note.lstrip()}"
    return text
