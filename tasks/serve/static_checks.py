"""What headers, configuration, tokenizer and weights give away before a server is started.

vLLM starts with each of these as if nothing were wrong: a missing projection (its memory is left as it was), fewer
key and value heads in the configuration than in the weights (which are cut), one NaN (empty answers), a tokenizer with
more ids than the embedding has rows (the engine dies at the first prompt that uses one).
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

_BLOCK = 1 << 24  # bytes of weights looked at at once
_RESAVE = "merge again, or copy what is missing from a parent"

# 8-bit formats: mask and the pattern under it that are no number (OCP "8-bit Floating Point Specification").
_SMALL: Mapping[str, tuple[int, int]] = {"F8_E4M3": (0x7F, 0x7F), "F8_E5M2": (0x7C, 0x7C), "F8_E8M0": (0xFF, 0xFF)}


def static_checks(checkpoint: Checkpoint, *, must_chat: bool | None, runs_code: bool = False) -> list[Check]:
    """All static checks, in the order of their cost.

    Args:
        checkpoint: What is to be served.
        must_chat: Whether a chat template is required.
        runs_code: Whether Python files in it may be run.
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
    """Names and shapes of the tensors against the model that the configuration describes, built without memory.

    transformers itself translates the names that a checkpoint has into those of the model, as it does when it loads.
    One check for each kind of disagreement: missing, of another shape, not of this model.
    """
    pickled = [tensor for tensor in checkpoint.stored() if tensor.file.suffix != ".safetensors"]
    if pickled:
        return [_tensors_failed(str(pickled[0].file), "pickled weights", "safetensors", "save it as safetensors")]
    said = call_model_process(_load_on_meta, (checkpoint, runs_code), where=f"{checkpoint.directory}: its tensors")
    if said.unknown:
        return [Check(name="tensors", outcome="not offered", seen=said.unknown, expected="a model of transformers")]
    if said.problem:
        where = str(checkpoint.directory / "config.json")
        return [_tensors_failed(where, f"describes no model: {said.problem}", "a configuration of transformers", "")]
    checks = []
    if missing := said.missing:
        found = f"missing{_more(missing)}; the configuration has it"
        checks.append(_tensors_failed(missing[0], found, "every tensor of the model", _RESAVE))
    if mismatched := said.mismatched:
        name, stored, wanted = mismatched[0]
        found = f"shape {list(stored)}{_more(mismatched)}"
        remedy = "correct config.json (heads, sizes, number of experts, vocab_size), or the weights"
        checks.append(_tensors_failed(name, found, f"shape {list(wanted)}, as config.json says", remedy))
    if unexpected := said.unexpected:
        found = f"not of the model that config.json describes{_more(unexpected)}"
        remedy = "correct config.json (num_hidden_layers, architectures), or leave the tensor out"
        checks.append(_tensors_failed(unexpected[0], found, "only tensors of the model", remedy))
    count = f"{len(checkpoint.tensors)} tensors"
    return checks or [Check(name="tensors", outcome="pass", seen=count, expected="those that config.json describes")]


def check_vocabulary(checkpoint: Checkpoint) -> Check:
    """Whether every id that tokenizer and configuration know has a row in the embedding."""
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
            found = f"{token!r} has id {highest}, the embedding {rows} rows ({beyond} ids without a row)"
            remedy = "recipe: tokenizer: {source: union}, or the tokenizer of the parent whose embedding it is"
            return _vocabulary_failed(str(directory / "tokenizer.json"), found, f"ids below {rows}", remedy)
    for file, name, number in _special_ids(checkpoint):
        if not 0 <= number < rows:
            found = f"{name} is {number}, the embedding has {rows} rows"
            return _vocabulary_failed(str(directory / file), found, f"ids below {rows}", "copy it from a parent")
    known = f"{len(vocabulary.ids)} tokens" if vocabulary.is_complete else "a binary tokenizer file"
    return Check(name="vocabulary", outcome="pass", seen=f"{known}, {rows} rows", expected="a row for every id")


def check_finite(checkpoint: Checkpoint) -> Check:
    """Whether every weight is a number: all are read, a block at a time."""
    broken: list[tuple[str, int]] = []
    read = 0
    for tensor in checkpoint.stored():
        if count := sum(_broken(block, tensor) for block in _blocks(tensor)):
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
    """What transformers says about names and shapes; each list sorted."""

    missing: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, list[int], list[int]], ...] = ()  # name, shape stored, shape wanted
    unexpected: tuple[str, ...] = ()
    unknown: str = ""  # why there is no such model
    problem: str = ""  # what it raised


def _load_on_meta(checkpoint: Checkpoint, runs_code: bool, on_progress: TellProgress) -> Disagreements:
    """Load the checkpoint onto a device without memory, in the process that holds models."""
    try:
        return _compare_on_meta(checkpoint, runs_code)
    except Exception as error:
        # Whatever a configuration makes transformers raise: its types are many.
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
    _, said = network.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        device_map={"": "meta"},
        ignore_mismatched_sizes=True,  # they are what is wanted here: all of them, not the first
        output_loading_info=True,
    )
    mismatched = [(str(name), list(stored), list(wanted)) for name, stored, wanted in said["mismatched_keys"]]
    return Disagreements(
        tuple(sorted(map(str, said["missing_keys"]))),
        tuple(sorted(mismatched)),
        tuple(sorted(map(str, said["unexpected_keys"]))),
    )


def _embedding_rows(checkpoint: Checkpoint) -> int | None:
    """Rows of the input embedding, by the names that it has in the architectures of transformers."""
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
    """File, field and value of the ids that configurations name; lists count one by one."""
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
    """The bytes of a tensor, some at a time, in memory that is used again."""
    if tensor.dtype.code not in EXPONENTS and tensor.dtype.code not in _SMALL:
        return  # integers are always numbers
    buffer = memoryview(bytearray(min(_BLOCK, tensor.nbytes)))
    with Path(tensor.file).open("rb", buffering=0) as file:
        for start in range(0, tensor.nbytes, _BLOCK):
            block = buffer[: min(_BLOCK, tensor.nbytes - start)]
            read_into(file.fileno(), block, tensor.offset + start, tensor.file)
            yield block


def _broken(block: memoryview, tensor: StoredTensor) -> int:
    """NaN and infinities in it."""
    if tensor.dtype.code in EXPONENTS:
        return count_non_finite(np.frombuffer(block, dtype=np.uint8), tensor.dtype, fused=False)
    bits, none = _SMALL[tensor.dtype.code]
    return int(np.count_nonzero((np.frombuffer(block, dtype=np.uint8) & np.uint8(bits)) == none))


def _tensors_failed(where: str, seen: str, expected: str, remedy: str) -> Check:
    return Check(name="tensors", outcome="fail", where=where, seen=seen, expected=expected, remedy=remedy)


def _vocabulary_failed(where: str, seen: str, expected: str, remedy: str) -> Check:
    return Check(name="vocabulary", outcome="fail", where=where, seen=seen, expected=expected, remedy=remedy)


def _more(items: Sequence[Any]) -> str:
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""
