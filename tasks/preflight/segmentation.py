"""Compare tokenizers on a sample text: those of two models, or the class and the ``tokenizer.json`` of one model.

A tokenizer is untrusted input, so it runs in the confined child process. A failed measurement is reported and does not
change the severity of a finding.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from mergegate.merge_core import Checkpoint, Finding, MergePlan, PlannedMerge
from mergegate.merge_core.checkpoint import companion_kind
from mergegate.merge_core.checkpoint.vocabulary import TOKENIZER_BOUNDS
from mergegate.merge_core.errors import InvalidInput, MergegateError, to_printable, worst_first
from mergegate.tasks.models.checkpoints import CallNeeds, TellProgress, call_model_process
from mergegate.tasks.preflight.sample_text import SAMPLE

# Each pair builds two tokenizers, which takes seconds for the largest.
_MAX_PAIRS = 16
_TIME_LIMIT = 300.0  # Seconds.
_PROBES = 2000  # Largest number of tokens of a vocabulary on which its class and its file are compared.
_RESULT = "the result"
# Classes that follow tokenizer.json and add no rules of their own.
_WITHOUT_RULES = ("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")

Shares = tuple[float, float]
TokenizerFiles: TypeAlias = tuple[tuple[str, bytes], ...]
"""Names and contents of the files from which transformers loads a tokenizer."""


def add_segmentation_shares(planned_merge: PlannedMerge) -> tuple[Finding, ...]:
    """Return the findings of a plan, adding to each tokenizer difference how much sample text it affects."""
    pairs = planned_merge.tokenizer_pairs[:_MAX_PAIRS]
    texts = [tuple(json.dumps(side, ensure_ascii=False) for side in (pair.original, pair.result)) for pair in pairs]
    updated = {}
    for pair, shares in zip(pairs, _measure(texts), strict=True):
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


def tokenizer_class_findings(plan: MergePlan | None, checkpoints: Mapping[str, Checkpoint]) -> list[Finding]:
    """Return a finding for each model whose tokenizer class splits text differently from its ``tokenizer.json``.

    The result of ``plan`` is compared too. It is reported only if no model has a finding.
    """
    models = {name: (checkpoint.config, checkpoint.companions) for name, checkpoint in checkpoints.items()}
    models |= {_RESULT: (plan.config, plan.companions)} if plan else {}
    classes: dict[TokenizerFiles, dict[str, str]] = {}
    for name, (config, companions) in models.items():
        with suppress(InvalidInput):  # The comparison of tokenizers reports a damaged file.
            settings = companions.json("tokenizer_config.json", TOKENIZER_BOUNDS) or {}
            class_name = str(settings.get("tokenizer_class") or _WITHOUT_RULES[0])
            if class_name not in _WITHOUT_RULES and "tokenizer.json" in companions:
                files = {file: companions.read(file) for file in companions if companion_kind(file) == "tokenizer"}
                files["config.json"] = json.dumps({"model_type": config.get("model_type")}).encode()
                classes.setdefault(tuple(files.items()), {})[name] = to_printable(class_name)
    findings: list[Finding] = []
    for names, shares in zip(classes.values(), _measure(list(classes)), strict=True):
        if isinstance(shares, str) or not shares[1]:  # If loading fails, the first evaluation reports the reason.
            continue
        models_of_class = [name for name in names if name != _RESULT]
        findings += (
            Finding(
                "warn",
                f"{name}: tokenizer_config.json: tokenizer_class",
                found=f"transformers replaces rules of tokenizer.json by those of {names[name]}, which split "
                f"{shares[1]:.2%} of sample texts and tokens differently",
                expected="the rules of tokenizer.json, which other software reads",
                remedy="if the model was trained with tokenizer.json, set tokenizer_class to PreTrainedTokenizerFast",
            )
            for name in models_of_class or ([] if findings else names)
        )
    return findings


def _measure(tokenizers: Sequence[tuple[Any, ...]]) -> list[Shares | str]:
    """Return the result of :func:`measure_segmentation` in the confined process."""
    if not tokenizers:
        return []
    try:
        answer: object = call_model_process(
            measure_segmentation,
            (tokenizers,),
            location="tokenizers",
            needs=CallNeeds(gpu=False, time_limit=_TIME_LIMIT),
        )
    except MergegateError as error:
        return [error.found] * len(tokenizers)
    # Untrusted code in that process may have sent something else.
    if (
        not isinstance(answer, list)
        or len(answer) != len(tokenizers)
        or not all(
            isinstance(result, str)
            or (isinstance(result, tuple) and [type(share) for share in result] == [float, float])
            for result in answer
        )
    ):
        return ["the tokenizer process returned no result"] * len(tokenizers)
    return answer


def measure_segmentation(tokenizers: Sequence[tuple[Any, ...]], on_progress: TellProgress) -> list[Shares | str]:
    """Return, for each pair of tokenizers, the shares of tokens and lines that differ, or an error message.

    A pair holds the contents of two ``tokenizer.json`` files, or the :data:`TokenizerFiles` of a model, whose class is
    compared with its file.
    """
    results: list[Shares | str] = []
    for number, pair in enumerate(tokenizers, start=1):
        try:
            results.append(
                _class_shares(pair) if isinstance(pair[0], tuple) else segmentation_shares(pair[0], pair[1], SAMPLE)
            )
        except Exception as error:  # The library raises plain exceptions for unsupported input.
            results.append(f"the library cannot load the tokenizer: {' '.join(str(error).split())[:200]}")
        on_progress(number, len(tokenizers))
    return results


def _class_shares(files: TokenizerFiles) -> Shares:
    """Return the share of texts to which a tokenizer's class and ``tokenizer.json`` give different ids, twice.

    The texts are ``SAMPLE`` and tokens of the vocabulary, which a class splits if its rules cut inside them.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer
    with tempfile.TemporaryDirectory() as directory:
        for name, content in files:
            (Path(directory) / name).write_bytes(content)
        loaded: Any = loader.from_pretrained(directory, local_files_only=True)
        own = Tokenizer.from_file(f"{directory}/tokenizer.json")
    own.no_padding()
    own.no_truncation()
    numbers = range(0, own.get_vocab_size(), max(1, own.get_vocab_size() // _PROBES))
    texts = [*SAMPLE, *own.decode_batch([[number] for number in numbers], skip_special_tokens=False)]
    own_ids = [encoded.ids for encoded in own.encode_batch(texts, add_special_tokens=False)]
    class_ids = loaded(texts, add_special_tokens=False)["input_ids"]
    share = sum(ids != expected for ids, expected in zip(class_ids, own_ids, strict=True)) / len(texts)
    return share, share


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
