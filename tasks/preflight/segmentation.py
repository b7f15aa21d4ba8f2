"""Compare tokenizers on a sample text: those of two models, or the class and the ``tokenizer.json`` of one model.

A tokenizer is untrusted input, so it runs in the confined child process. A failed measurement is reported and does not
change the severity of a finding.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergegate.merge_core import Checkpoint, Finding, MergePlan, PlannedMerge
from mergegate.merge_core.checkpoint import companion_kind
from mergegate.merge_core.checkpoint.vocabulary import TOKENIZER_BOUNDS
from mergegate.merge_core.errors import InvalidInput, MergegateError, to_printable, worst_first
from mergegate.tasks.checkpoints import CallNeeds, TellProgress, call_model_process
from mergegate.tasks.preflight.sample_text import SAMPLE

# Each pair builds two tokenizers, which takes seconds for the largest.
_MAX_PAIRS = 16
_TIME_LIMIT = 300.0  # Seconds.
_PROBES = 2000  # Number of tokens of a vocabulary that are texts too.
# Classes that follow tokenizer.json and add no rules of their own.
_WITHOUT_RULES = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")

Shares = tuple[float, float]


def add_segmentation_shares(planned_merge: PlannedMerge) -> tuple[Finding, ...]:
    """Return the findings of a plan, adding to each tokenizer difference how much sample text it affects."""
    pairs = planned_merge.tokenizer_pairs[:_MAX_PAIRS]
    if not pairs:
        return planned_merge.findings
    texts = tuple(
        tuple(json.dumps(side, ensure_ascii=False) for side in (pair.original, pair.result)) for pair in pairs
    )
    try:
        answer: object = call_model_process(
            measure_segmentation, (texts,), location="tokenizers", needs=CallNeeds(time_limit=_TIME_LIMIT)
        )
    except MergegateError as error:
        answer = [error.found] * len(pairs)
    # Untrusted code in that process may have sent something else.
    if (
        not isinstance(answer, list)
        or len(answer) != len(pairs)
        or not all(
            isinstance(result, str)
            or (isinstance(result, tuple) and [type(share) for share in result] == [float, float])
            for result in answer
        )
    ):
        answer = ["the tokenizer process returned no result"] * len(pairs)
    updated = {}
    for pair, shares in zip(pairs, answer, strict=True):
        if isinstance(shares, str):
            effect = f"the share of text that it changes is unknown: {shares}"
        else:
            tokens, lines = shares
            effect = (
                f"in a sample text, {tokens:.1%} of the tokens of {pair.model} are segmented differently, in "
                f"{lines:.0%} of the lines"
            )
        updated[pair.finding] = replace(pair.finding, found=f"{pair.finding.found}; {effect}")
    return worst_first(updated.get(finding, finding) for finding in planned_merge.findings)


def measure_segmentation(pairs: Sequence[tuple[str, str]], on_progress: TellProgress) -> list[Shares | str]:
    """Return, for each pair of tokenizers, the shares of tokens and lines that differ, or an error message.

    A pair holds the contents of two ``tokenizer.json`` files.
    """
    results: list[Shares | str] = []
    for number, (left, right) in enumerate(pairs, start=1):
        try:
            results.append(segmentation_shares(left, right, SAMPLE))
        except Exception as error:  # The library raises plain exceptions for unsupported input.
            results.append(f"the library cannot load the tokenizer: {' '.join(str(error).split())[:200]}")
        on_progress(number, len(pairs))
    return results


def segmentation_shares(first_json: str, second_json: str, lines: Sequence[str]) -> Shares:
    """Return the share of the first tokenizer's tokens, and the share of lines, that the second segments differently.

    A token agrees if the other tokenizer has it at the same position.
    """
    from tokenizers import Tokenizer

    first, second = Tokenizer.from_str(first_json), Tokenizer.from_str(second_json)

    def token_positions(tokenizer: Tokenizer, line: str) -> Counter[tuple[int, int, str]]:
        encoded = tokenizer.encode(line)
        # Both characters stand for a space.
        texts = (token.replace("▁", "Ġ") for token in encoded.tokens)
        return Counter((start, end, text) for (start, end), text in zip(encoded.offsets, texts, strict=True))

    total = agreeing = changed = 0
    for line in lines:
        first_tokens, second_tokens = token_positions(first, line), token_positions(second, line)
        total += first_tokens.total()
        agreeing += (first_tokens & second_tokens).total()
        changed += first_tokens != second_tokens
    return 1 - agreeing / max(total, 1), changed / max(len(lines), 1)


def tokenizer_class_findings(plan: MergePlan | None, checkpoints: Mapping[str, Checkpoint]) -> list[Finding]:
    """Return a finding for each model whose tokenizer class splits text differently from its ``tokenizer.json``.

    The result of ``plan`` is compared too, but is reported only if it differs from all models.
    """
    models = {name: (checkpoint.config, checkpoint.companions) for name, checkpoint in checkpoints.items()}
    models |= {"the result": (plan.config, plan.companions)} if plan else {}
    names: dict[tuple[tuple[str, bytes], ...], list[str]] = {}
    classes: dict[str, str] = {}
    for name, (config, companions) in models.items():
        with suppress(InvalidInput):  # The comparison of tokenizers reports a damaged file.
            settings = companions.json("tokenizer_config.json", TOKENIZER_BOUNDS) or {}
            classes[name] = str(settings.get("tokenizer_class") or _WITHOUT_RULES[0])
            if classes[name] in _WITHOUT_RULES or "tokenizer.json" not in companions:
                continue
            files = companions.only(lambda file: companion_kind(file) == "tokenizer")
            contents = {file: files.read(file) for file in files}
            contents["config.json"] = json.dumps({"model_type": config.get("model_type")}).encode()
            names.setdefault(tuple(contents.items()), []).append(name)
    answer: object = None
    with suppress(MergegateError):  # Whatever loads the tokenizer next fails for the same reason and reports it.
        needs, contents_of_models = CallNeeds(time_limit=_TIME_LIMIT), [dict(files) for files in names]
        if names:
            answer = call_model_process(compare_classes, (contents_of_models,), location="tokenizers", needs=needs)
    findings: list[Finding] = []
    for same_models, effect in zip(names.values(), answer if isinstance(answer, list) else [], strict=False):
        if not isinstance(effect, tuple) or [type(value) for value in effect] != [int, int, str] or not effect[0]:
            continue  # Untrusted code in that process may have sent something else.
        changed, texts, example = effect
        for name in [name for name in same_models if name != "the result"] or (same_models if not findings else []):
            findings.append(
                Finding(
                    "warn",
                    f"{name}: tokenizer_config.json: tokenizer_class",
                    found=f"transformers replaces rules of tokenizer.json by those of {to_printable(classes[name])}: "
                    f"{changed:,} of {texts:,} texts are split differently, such as {to_printable(repr(example[:40]))}",
                    expected="the rules of tokenizer.json, which other software reads",
                    remedy="if the model was trained with tokenizer.json, set tokenizer_class to "
                    "PreTrainedTokenizerFast",
                )
            )
    return findings


def compare_classes(models: Sequence[Mapping[str, bytes]], on_progress: TellProgress) -> list[tuple[int, int, str]]:
    """Return, for each model, how many texts its class and its ``tokenizer.json`` split differently.

    ``models`` holds the contents of files by name. The texts are ``SAMPLE`` and tokens of the vocabulary. A result is
    the number of different texts, the number of texts, and an example. Both numbers are 0 if loading fails.
    """
    # Importing torch takes seconds, and tokenizers do not need it.
    is_lean = not {"torch", "transformers"} & sys.modules.keys()
    if is_lean:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        return [_class_effect(files) for files in models]
    finally:  # Models that are loaded later need both libraries.
        for name in list(sys.modules) if is_lean else ():
            if name.partition(".")[0] in ("torch", "transformers"):
                del sys.modules[name]


def _class_effect(files: Mapping[str, bytes]) -> tuple[int, int, str]:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer
    with tempfile.TemporaryDirectory() as directory:
        for name, content in files.items():
            (Path(directory) / name).write_bytes(content)
        try:
            loaded: Any = loader.from_pretrained(directory, local_files_only=True)
            own = Tokenizer.from_file(f"{directory}/tokenizer.json")
            own.no_padding()
            own.no_truncation()
            size = own.get_vocab_size()
            numbers = range(0, size, max(1, size // _PROBES))
            texts = [*SAMPLE, *own.decode_batch([[number] for number in numbers], skip_special_tokens=False)]
            all_ids = loaded(texts, add_special_tokens=False)["input_ids"]
            own_ids = [encoded.ids for encoded in own.encode_batch(texts, add_special_tokens=False)]
            changed = [text for text, ids, expected in zip(texts, all_ids, own_ids, strict=True) if ids != expected]
            return len(changed), len(texts), next(iter(changed), "")
        except Exception:  # The libraries raise plain exceptions for unsupported input.
            return 0, 0, ""
