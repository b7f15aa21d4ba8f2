"""Describe the quantized variants of a merge: one row per variant, and the sentences about them."""

from __future__ import annotations

from dataclasses import dataclass

from mergegate.merge_core.wording import format_bytes, format_count
from mergegate.tasks.report import wording
from mergegate.tasks.report.content import ReportContent
from mergegate.tasks.variants import ConversionCheck, VariantVerdict

VARIANT_COLUMNS = ("variant", "runtime", "size", "largest drop", "perplexity", "verdict")
_RUNTIMES = {"llama_cpp": "llama.cpp", "hf": "transformers", "vllm": "vLLM"}


@dataclass(frozen=True)
class VariantRow:
    """One variant as the page, the terminal and Markdown display it. A text is empty if nothing was measured."""

    verdict: VariantVerdict
    runtime: str  # runtime that evaluated the variant: 'llama.cpp'
    size: str  # '145 MB'
    share: str  # size relative to the merge: '54 %'
    drop: str  # '3.8 [1.6, 5.9]': mean drop of a suite, or else the largest drop of all guards
    task: str  # task of this guard; empty for a mean and for a single guard
    perplexity: str  # ratio to the merge: '1.078 [1.065, 1.091]'
    consequence: str  # effect of a verdict that does not allow publication; empty if it does

    @property
    def cells(self) -> tuple[str, ...]:
        """Texts of ``VARIANT_COLUMNS``."""
        ratio = f"{wording.TIMES}{self.perplexity}" if self.perplexity else ""
        return (self.verdict.type, self.runtime, self.size, self.drop, ratio, self.verdict.outcome)


def variant_rows(content: ReportContent) -> tuple[VariantRow, ...]:
    """Return one row per variant, in the profile's order."""
    merge_bytes = sum(file.size for file in content.files)
    rows = []
    for variant in content.variants:
        gate, record = variant.gate, variant.record
        drop = task = ""
        if gate is not None and gate.suites:
            drop = wording.suite_change(gate.suites[0])
        elif gate is not None and gate.guards:
            worst = max(gate.guards, key=lambda guard: guard.drop)
            drop, task = wording.drop(worst), worst.task if len(gate.guards) > 1 else ""
        consequence = "refuses the release" if variant.required else "not published"
        rows.append(
            VariantRow(
                verdict=variant,
                runtime=_RUNTIMES.get(variant.backend, variant.backend),
                size=format_bytes(record.bytes) if record else "",
                share=f"{100 * record.bytes / merge_bytes:.0f} %" if record and merge_bytes else "",
                drop=drop,
                task=task,
                perplexity=wording.format_ratio(gate.drift) if gate and gate.drift else "",
                consequence="" if variant.publishable else consequence,
            )
        )
    return tuple(rows)


def variant_sentences(content: ReportContent) -> tuple[str, ...]:
    """Return a sentence about the variants that passed, followed by :func:`variant_refusals`."""
    passed = [variant.type for variant in content.variants if variant.publishable]
    sentences = []
    if passed:
        effect = "may be published with the merge" if content.verdict.publishable else "would have been published"
        names = " and ".join(filter(None, (", ".join(passed[:-1]), passed[-1])))
        sentences.append(f"{format_count(len(passed), 'quantized variant')} {effect}: {names}.")
    return (*sentences, *variant_refusals(content))


def variant_refusals(content: ReportContent) -> tuple[str, ...]:
    """Return one sentence for each variant that is not published, with its most severe reason."""
    return tuple(
        f"{variant.type} is refused: {variant.reasons[0].removesuffix('.')}."
        for variant in content.variants
        if not variant.publishable
    )


def conversion_sentences(conversion: ConversionCheck) -> tuple[str, ...]:
    """Return sentences about the comparison of the unquantized file with the merge, without its problems."""
    documents = format_count(conversion.documents, "document")
    sentences = [
        f"Without quantization, the log-likelihoods of {documents} differ from those of the merge by "
        f"{conversion.mean_difference:.2g} nats on average and by {conversion.max_difference:.2g} at most (limit of "
        f"the average: {wording.plain(conversion.limit)})."
    ]
    texts = format_count(conversion.texts, "text")
    if conversion.different_texts:
        sentences.append(
            f"Its tokenizer splits {len(conversion.different_texts)} of {texts} differently from that of the merge."
        )
    elif conversion.texts:
        sentences.append(f"Both tokenizers split all {texts} into the same tokens.")
    return tuple(sentences)
