"""Find problems in headers, configuration, tokenizer and weights before a server starts.

vLLM starts without complaint despite each of these problems:

* A projection is missing. vLLM leaves its memory uninitialized.
* The configuration has fewer key and value heads than the weights. vLLM cuts the weights.
* One weight is NaN. Answers are empty.
* The tokenizer has more ids than the embedding has rows. The engine dies at the first prompt that uses such an id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mergegate.merge_core.checkpoint import EXPONENTS, Checkpoint, StoredTensor, read_into
from mergegate.merge_core.checkpoint.vocabulary import read_vocabulary
from mergegate.merge_core.engine import count_infinite, count_non_finite
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_json
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.models.checkpoints import compare_with_classes
from mergegate.tasks.quality.serve.verdict import Check

_BLOCK = 1 << 24  # bytes of weights per read

# 8-bit formats: bit mask, and the masked pattern that is not a number (OCP "8-bit Floating Point Specification").
_SMALL: Mapping[str, tuple[int, int]] = {"F8_E4M3": (0x7F, 0x7F), "F8_E5M2": (0x7C, 0x7C), "F8_E8M0": (0xFF, 0xFF)}


def static_checks(checkpoint: Checkpoint, *, must_chat: bool | None) -> list[Check]:
    """Run all static checks, the cheapest first.

    ``must_chat`` requires a chat template.
    """
    checks = [*check_tensors(checkpoint), check_vocabulary(checkpoint), check_finite(checkpoint)]
    if must_chat and checkpoint.chat_template is None:
        expected = "a chat template, because serve.chat is true and a server refuses every chat without it"
        remedy = "set 'chat_template' in the recipe to auto or to the name of a known template"
        location = str(checkpoint.directory / "chat_template.jinja")
        checks.append(Check.failed_check("chat template", "no chat template", expected, remedy, location))
    return checks


def check_tensors(checkpoint: Checkpoint) -> list[Check]:
    """Compare names and shapes of the tensors with the model that ``config.json`` describes.

    The result has one failed check for missing, one for mismatched and one for unexpected tensors.
    """

    def failed_check(location: str, observation: str, expected: str, remedy: str) -> Check:
        return Check.failed_check("tensors", observation, expected, remedy, location)

    def count_others(items: Sequence[Any]) -> str:
        return f" (and {len(items) - 1} more)" if len(items) > 1 else ""

    pickled = [tensor for tensor in checkpoint.stored_tensors() if tensor.file.suffix != ".safetensors"]
    if pickled:
        return [failed_check(str(pickled[0].file), "pickled weights", "safetensors", "save the weights as safetensors")]
    (found,) = compare_with_classes([(checkpoint.config, checkpoint.tensors.values())])
    if found.unknown:
        return [Check.not_offered("tensors", found.reason, "a model of transformers")]
    if found.reason:
        seen = f"transformers cannot build a model from it: {found.reason}"
        location = str(checkpoint.directory / "config.json")
        return [failed_check(location, seen, "a configuration of transformers", "compare it with a parent's")]
    checks = []
    if missing := found.missing + found.unjoined:
        seen = f"missing{count_others(missing)}; the configuration requires it"
        checks.append(
            failed_check(missing[0], seen, "every tensor of the model", "merge again, or copy it from a parent")
        )
    if found.shapes:
        name, stored, expected = found.shapes[0]
        seen = f"shape {list(stored)}{count_others(found.shapes)}"
        remedy = "correct config.json (heads, sizes, number of experts, vocab_size), or the weights"
        checks.append(failed_check(name, seen, f"shape {list(expected)}, according to config.json", remedy))
    if found.ignored:
        seen = f"not part of the model that config.json describes{count_others(found.ignored)}"
        remedy = "correct config.json (num_hidden_layers, architectures), or remove the tensor"
        checks.append(failed_check(found.ignored[0], seen, "only tensors of the model", remedy))
    count = f"{len(checkpoint.tensors)} tensors"
    return checks or [Check.passed_check("tensors", count, "the tensors that config.json describes")]


def check_vocabulary(checkpoint: Checkpoint) -> Check:
    """Check that the embedding has a row for every id in the tokenizer and the configuration."""
    name, directory = "vocabulary", checkpoint.directory
    # The input embedding, by its names in the architectures of transformers.
    endings = (
        "embed_tokens.weight",
        "wte.weight",
        "word_embeddings.weight",
        "embed_in.weight",
        "tok_embeddings.weight",
    )
    tensors = checkpoint.tensors.items()
    shapes = [
        tensor.shape for ending in endings for key, tensor in tensors if key.endswith(ending) and len(tensor.shape) == 2
    ]
    try:
        vocabulary = read_vocabulary(checkpoint.companions)
    except InvalidInput as error:
        return Check.failed_check(name, error.found, error.expected, error.remedy, error.where)
    if vocabulary is None:
        remedy = "copy tokenizer.json and tokenizer_config.json from a parent"
        return Check.failed_check(name, "no tokenizer", "tokenizer.json next to the weights", remedy, str(directory))
    if not shapes:
        return Check.not_offered(name, "the checkpoint has no embedding with a known name")
    rows = shapes[0][0]
    if vocabulary.ids:
        token, highest = max(vocabulary.ids.items(), key=lambda item: item[1])
        if highest >= rows:
            beyond = sum(number >= rows for number in vocabulary.ids.values())
            seen = f"{token!r} has id {highest}, the embedding {rows} rows ({beyond} ids without a row)"
            remedy = "set 'tokenizer: {source: union}' in the recipe, or use the tokenizer of the embedding's parent"
            return Check.failed_check(name, seen, f"ids below {rows}", remedy, str(directory / "tokenizer.json"))
    sources: dict[str, Mapping[str, Any]] = {"config.json": checkpoint.config}
    if (directory / "generation_config.json").is_file():
        sources["generation_config.json"] = read_json(directory / "generation_config.json")
    for file, content in sources.items():
        for field in ("bos_token_id", "eos_token_id"):
            value = content.get(field)
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int and not 0 <= number < rows:
                    seen = f"{field} is {number}, the embedding has {rows} rows"
                    expected, remedy = f"ids below {rows}", "copy the field from a parent"
                    return Check.failed_check(name, seen, expected, remedy, str(directory / file))
    size = f"{len(vocabulary.ids)} tokens" if vocabulary.is_complete else "a binary tokenizer file"
    return Check.passed_check(name, f"{size}, {rows} rows", "a row for every id")


def check_finite(checkpoint: Checkpoint) -> Check:
    """Check that every weight is finite, reading all weights one block at a time.

    A tensor that has only infinities is a constant, such as the clip bound of an audio tower, and passes.
    """
    broken: list[tuple[str, int]] = []
    total = 0
    for tensor in checkpoint.stored_tensors():
        count, infinite, code = 0, 0, tensor.dtype.code
        for block in _blocks(tensor):
            elements = np.frombuffer(block, dtype=np.uint8)
            if code in EXPONENTS:
                count += count_non_finite(elements, tensor.dtype, fused=False)
                infinite += count_infinite(elements, tensor.dtype) if count else 0
            else:
                mask, pattern = _SMALL[code]
                count += int(np.count_nonzero((elements & np.uint8(mask)) == pattern))
        if count and infinite < tensor.numel:
            broken.append((tensor.name, count))
        total += tensor.nbytes
    if broken:
        name, count = broken[0]
        others = f", and some of {len(broken) - 1} more tensors" if len(broken) > 1 else ""
        seen = f"{count} of {checkpoint.tensors[name].numel:,} elements are NaN or infinite{others}"
        remedy = "check the parents for NaN, and the range of the recipe's dtype"
        return Check.failed_check("finite weights", seen, "finite numbers", remedy, name)
    return Check.passed_check("finite weights", f"{format_bytes(total)}, all finite", "finite numbers")


def _blocks(tensor: StoredTensor) -> Iterator[memoryview]:
    if tensor.dtype.code not in EXPONENTS and tensor.dtype.code not in _SMALL:
        return  # integers are always numbers
    buffer = memoryview(bytearray(min(_BLOCK, tensor.nbytes)))
    with Path(tensor.file).open("rb", buffering=0) as file:
        for start in range(0, tensor.nbytes, _BLOCK):
            block = buffer[: min(_BLOCK, tensor.nbytes - start)]
            read_into(file.fileno(), block, tensor.offset + start, tensor.file)
            yield block
