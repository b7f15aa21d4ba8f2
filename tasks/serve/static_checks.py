"""Find the problems that headers, configuration, tokenizer and weights reveal before a server starts.

vLLM starts without complaint despite each of these problems:

* A projection is missing. vLLM leaves its memory uninitialized.
* The configuration has fewer key and value heads than the weights. vLLM cuts the weights.
* One weight is NaN. Answers are empty.
* The tokenizer has more ids than the embedding has rows. The engine dies at the first prompt that uses such an id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mergegate.merge_core.checkpoint import EXPONENTS, Checkpoint, StoredTensor, read_into
from mergegate.merge_core.checkpoint.vocabulary import read_vocabulary
from mergegate.merge_core.engine import count_non_finite
from mergegate.merge_core.errors import InvalidInput
from mergegate.merge_core.parsing import read_json
from mergegate.merge_core.wording import format_bytes
from mergegate.tasks.checkpoints import TellProgress, call_model_process
from mergegate.tasks.serve.verdict import Check

_BLOCK = 1 << 24  # bytes of weights per read
_RESAVE = "merge again, or copy what is missing from a parent"

# 8-bit formats: bit mask, and the masked pattern that is not a number (OCP "8-bit Floating Point Specification").
_SMALL: Mapping[str, tuple[int, int]] = {"F8_E4M3": (0x7F, 0x7F), "F8_E5M2": (0x7C, 0x7C), "F8_E8M0": (0xFF, 0xFF)}


def static_checks(checkpoint: Checkpoint, *, must_chat: bool | None, runs_code: bool = False) -> list[Check]:
    """Run all static checks, the cheapest first.

    Args:
        checkpoint: Checkpoint that will be served.
        must_chat: Whether a chat template is required.
        runs_code: Whether Python files in the checkpoint may be executed.
    """
    checks = [*check_tensors(checkpoint, runs_code=runs_code), check_vocabulary(checkpoint), check_finite(checkpoint)]
    if must_chat and checkpoint.chat_template is None:
        checks.append(
            Check(
                name="chat template",
                outcome="fail",
                where=str(checkpoint.directory / "chat_template.jinja"),
                seen="no chat template",
                expected="one: serve.chat is true, and a server refuses every chat without it",
                remedy="recipe: chat_template: auto, or the name of a known one",
            )
        )
    return checks


def check_tensors(checkpoint: Checkpoint, *, runs_code: bool = False) -> list[Check]:
    """Compare names and shapes of the tensors with the model that the configuration describes, built without memory.

    transformers itself translates the names in the checkpoint into names in the model, as it does when it loads a
    checkpoint. Each kind of disagreement gives one check: missing, of another shape, not part of this model.
    """
    pickled = [tensor for tensor in checkpoint.stored() if tensor.file.suffix != ".safetensors"]
    if pickled:
        return [_tensors_failed(str(pickled[0].file), "pickled weights", "safetensors", "save it as safetensors")]
    report = call_model_process(_load_on_meta, (checkpoint, runs_code), location=f"{checkpoint.directory}: its tensors")
    if report.unknown:
        return [Check(name="tensors", outcome="not offered", seen=report.unknown, expected="a model of transformers")]
    if report.problem:
        where = str(checkpoint.directory / "config.json")
        return [_tensors_failed(where, f"describes no model: {report.problem}", "a configuration of transformers", "")]
    checks = []
    if missing := report.missing:
        seen = f"missing{_more(missing)}; the configuration has it"
        checks.append(_tensors_failed(missing[0], seen, "every tensor of the model", _RESAVE))
    if mismatched := report.mismatched:
        name, stored, expected = mismatched[0]
        seen = f"shape {list(stored)}{_more(mismatched)}"
        remedy = "correct config.json (heads, sizes, number of experts, vocab_size), or the weights"
        checks.append(_tensors_failed(name, seen, f"shape {list(expected)}, as config.json says", remedy))
    if unexpected := report.unexpected:
        seen = f"not of the model that config.json describes{_more(unexpected)}"
        remedy = "correct config.json (num_hidden_layers, architectures), or leave the tensor out"
        checks.append(_tensors_failed(unexpected[0], seen, "only tensors of the model", remedy))
    count = f"{len(checkpoint.tensors)} tensors"
    return checks or [Check(name="tensors", outcome="pass", seen=count, expected="those that config.json describes")]


def check_vocabulary(checkpoint: Checkpoint) -> Check:
    """Check that the embedding has a row for every id in the tokenizer and the configuration."""
    directory = checkpoint.directory
    rows = _embedding_rows(checkpoint)
    try:
        vocabulary = read_vocabulary(checkpoint.companions)
    except InvalidInput as error:
        return _vocabulary_failed(error.where, error.found, error.expected, error.remedy)
    if vocabulary is None:
        remedy = "copy tokenizer.json and tokenizer_config.json of a parent"
        return _vocabulary_failed(str(directory), "no tokenizer", "tokenizer.json beside the weights", remedy)
    if rows is None:
        return Check(name="vocabulary", outcome="not offered", seen="no embedding is found by its name")
    if vocabulary.ids:
        token, highest = max(vocabulary.ids.items(), key=lambda item: item[1])
        if highest >= rows:
            beyond = sum(number >= rows for number in vocabulary.ids.values())
            seen = f"{token!r} has id {highest}, the embedding {rows} rows ({beyond} ids without a row)"
            remedy = "recipe: tokenizer: {source: union}, or the tokenizer of the parent whose embedding it is"
            return _vocabulary_failed(str(directory / "tokenizer.json"), seen, f"ids below {rows}", remedy)
    for file, name, number in _special_ids(checkpoint):
        if not 0 <= number < rows:
            seen = f"{name} is {number}, the embedding has {rows} rows"
            return _vocabulary_failed(str(directory / file), seen, f"ids below {rows}", "copy it from a parent")
    size = f"{len(vocabulary.ids)} tokens" if vocabulary.is_complete else "a binary tokenizer file"
    return Check(name="vocabulary", outcome="pass", seen=f"{size}, {rows} rows", expected="a row for every id")


def check_finite(checkpoint: Checkpoint) -> Check:
    """Check that every weight is finite. All weights are read, one block at a time."""
    broken: list[tuple[str, int]] = []
    read = 0
    for tensor in checkpoint.stored():
        if count := sum(_count_broken(block, tensor) for block in _blocks(tensor)):
            broken.append((tensor.name, count))
        read += tensor.nbytes
    if broken:
        name, count = broken[0]
        also = f", and some of {len(broken) - 1} more tensors" if len(broken) > 1 else ""
        return Check(
            name="finite weights",
            outcome="fail",
            where=name,
            seen=f"{count} of {checkpoint.tensors[name].numel:,} elements are NaN or infinite{also}",
            expected="finite numbers",
            remedy="check the parents for NaN, and the range of the recipe's dtype",
        )
    return Check(
        name="finite weights", outcome="pass", seen=f"{format_bytes(read)}, all finite", expected="only numbers"
    )


class Disagreements(NamedTuple):
    """Names and shapes in a checkpoint that disagree with the model in transformers. Each tuple is sorted."""

    missing: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, list[int], list[int]], ...] = ()  # name, stored shape, expected shape
    unexpected: tuple[str, ...] = ()
    unknown: str = ""  # reason why transformers has no such model
    problem: str = ""  # error that transformers raised


def _load_on_meta(checkpoint: Checkpoint, runs_code: bool, on_progress: TellProgress) -> Disagreements:
    """Load the checkpoint onto PyTorch's meta device, in the process that holds models."""
    try:
        return _compare_on_meta(checkpoint, runs_code)
    except Exception as error:
        # A configuration can make transformers raise errors of many types.
        return Disagreements(problem=(" ".join(str(error).split()) or type(error).__name__)[:300])


def _compare_on_meta(checkpoint: Checkpoint, runs_code: bool) -> Disagreements:
    import torch
    import transformers

    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    config: Any = transformers.AutoConfig.from_pretrained(
        checkpoint.directory, local_files_only=True, trust_remote_code=runs_code
    )
    architecture = checkpoint.architecture
    network: Any = getattr(transformers, architecture, None)
    if network is None or not hasattr(network, "from_pretrained"):
        return Disagreements(unknown=f"transformers has no {architecture or 'architectures in config.json'}")
    weights = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype.torch_name), device="meta")
        for name, tensor in checkpoint.tensors.items()
    }
    _, info = network.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        device_map={"": "meta"},
        ignore_mismatched_sizes=True,  # report all mismatches instead of raising an error at the first
        output_loading_info=True,
    )
    mismatched = [(str(name), list(stored), list(expected)) for name, stored, expected in info["mismatched_keys"]]
    return Disagreements(
        tuple(sorted(map(str, info["missing_keys"]))),
        tuple(sorted(mismatched)),
        tuple(sorted(map(str, info["unexpected_keys"]))),
    )


def _embedding_rows(checkpoint: Checkpoint) -> int | None:
    """Return the number of rows of the input embedding, found by its names in the architectures of transformers."""
    for ending in (
        "embed_tokens.weight",
        "wte.weight",
        "word_embeddings.weight",
        "embed_in.weight",
        "tok_embeddings.weight",
    ):
        for name, tensor in checkpoint.tensors.items():
            if name.endswith(ending) and len(tensor.shape) == 2:
                return tensor.shape[0]
    return None


def _special_ids(checkpoint: Checkpoint) -> Iterator[tuple[str, str, int]]:
    """Yield file, field and value of each special token id in the configurations. List items count separately."""
    sources: dict[str, Mapping[str, Any]] = {"config.json": checkpoint.config}
    if (checkpoint.directory / "generation_config.json").is_file():
        sources["generation_config.json"] = read_json(checkpoint.directory / "generation_config.json")
    for file, content in sources.items():
        for name in ("bos_token_id", "eos_token_id"):
            value = content.get(name)
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int:
                    yield file, name, number


def _blocks(tensor: StoredTensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in blocks that share one buffer."""
    if tensor.dtype.code not in EXPONENTS and tensor.dtype.code not in _SMALL:
        return  # integers are always numbers
    buffer = memoryview(bytearray(min(_BLOCK, tensor.nbytes)))
    with Path(tensor.file).open("rb", buffering=0) as file:
        for start in range(0, tensor.nbytes, _BLOCK):
            block = buffer[: min(_BLOCK, tensor.nbytes - start)]
            read_into(file.fileno(), block, tensor.offset + start, tensor.file)
            yield block


def _count_broken(block: memoryview, tensor: StoredTensor) -> int:
    """Count NaN and infinities in ``block``."""
    if tensor.dtype.code in EXPONENTS:
        return count_non_finite(np.frombuffer(block, dtype=np.uint8), tensor.dtype, fused=False)
    mask, pattern = _SMALL[tensor.dtype.code]
    return int(np.count_nonzero((np.frombuffer(block, dtype=np.uint8) & np.uint8(mask)) == pattern))


def _tensors_failed(where: str, seen: str, expected: str, remedy: str) -> Check:
    return Check(name="tensors", outcome="fail", where=where, seen=seen, expected=expected, remedy=remedy)


def _vocabulary_failed(where: str, seen: str, expected: str, remedy: str) -> Check:
    return Check(name="vocabulary", outcome="fail", where=where, seen=seen, expected=expected, remedy=remedy)


def _more(items: Sequence[Any]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""
