"""Resolve, inspect and pin the adapter of a parent ``model+adapter``.

``mergegate.tasks.checkpoints.pin`` does the same for the model.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from mergegate.merge_core import Checkpoint
from mergegate.merge_core.adapters import Adapter, AdapterOwnTensor, adapter_files, open_adapter
from mergegate.merge_core.checkpoint import nested_names
from mergegate.merge_core.errors import Finding
from mergegate.merge_core.recipe import name_in_path
from mergegate.tasks.checkpoints.card import card_directory, quantization_in_card
from mergegate.tasks.checkpoints.hub.snapshot import Snapshot, element_reader, read_snapshot

# Where the name of a quantized model starts to differ from the name of the model: base-bnb-4bit, base-GPTQ-Int4.
_QUANTIZED_NAME = re.compile(
    r"(?:[-_.]unsloth)?[-_.](?:quantized|bnb|mlx|gptq|awq|hqq|aqlm|eetq|exl[23]|gguf|auto-?round|[1-8]-?bit"
    r"|(?:int|u?fp|nf|nvfp|mxfp)[48]|w[2-8]a(?:4|8|16)|q[2-8]_[k0-9])(?![a-z0-9])",
    re.IGNORECASE,
)


class ResolvedAdapter(BaseModel, frozen=True, extra="forbid"):
    """An adapter that has been located but not read. Its weights may still have to be downloaded from the Hub."""

    ref: str  # Text after the ``+`` in the recipe.
    directory: Path  # Directory of the adapter. For the Hub, the directory of the commit in the Hub's cache.
    revision: str | None = None  # Commit of the Hub repository, or None for a local directory.
    snapshot: Snapshot | None = None  # Files of that commit, or None for a local directory.

    @property
    def deciding(self) -> tuple[str, ...]:
        """Names of the files that determine the behavior of the adapter."""
        if self.snapshot:
            return self.snapshot.deciding
        return adapter_files(
            [*(path.name for path in self.directory.iterdir() if path.is_file()), *nested_names(self.directory)]
        )

    def open(self) -> Adapter:
        """Return the adapter, read from its configuration and its header."""
        return read_snapshot(self.snapshot, open_adapter) if self.snapshot else open_adapter(self.directory)

    def findings(self, parent: str, checkpoint: Checkpoint | None = None) -> tuple[Finding, ...]:
        """Return warnings if the adapter was trained on other weights than those of its parent, or changes nothing.

        ``parent`` is the parent's reference. ``checkpoint`` is the opened parent, in which the adapter may lack rows.
        Factors are read until one of them is not zero.
        """
        base, adapter, warnings = parent.partition("+")[0], self.open(), list[tuple[str, str, str, str]]()
        named, where = adapter.config.base, f"{adapter.config.location}: base_model_name_or_path"
        name, base_name = name_in_path(named), name_in_path(base.partition("@")[0])
        is_quantized = _QUANTIZED_NAME.search(name) is not None
        words = "" if is_quantized else quantization_in_card(card_directory(self.directory))
        if words or (is_quantized and name != base_name):
            model = f"a quantized copy of {named or base} ({words})" if words else f"the quantized model {named}"
            found = f"trained on {model}. It also corrects rounding errors that {base} lacks, so the merge differs"
            expected = f"an adapter that was trained on {base}, to which it is applied"
            remedy = "evaluate the merge, or apply the adapter to a dequantized copy (transformers: model.dequantize())"
            warnings.append((where, f"{found} from the model that was trained", expected, remedy))
        if named and base_name not in (name, _QUANTIZED_NAME.split(name)[0]):
            remedy = "make sure that the adapter was trained on these weights. mergegate can only compare shapes"
            warnings.append((where, named, f"{base}, to which the adapter is applied", remedy))
        if adapter.has_zero_factors(element_reader(self.snapshot)):
            found, expected = "each module has a factor of zeros, which changes nothing", "trained factors"
            remedy = "make sure that the adapter was trained and saved completely, or remove it from the recipe"
            warnings.append((str(adapter.directory), found, expected, remedy))
        findings = [Finding("warn", *texts, cause=texts[1]) for texts in warnings]
        for tensor in checkpoint.tensors.values() if checkpoint else ():
            if isinstance(tensor, AdapterOwnTensor) and tensor.own.shape != tensor.shape:
                found = (
                    f"the adapter has {tensor.own.shape[0]} of {tensor.shape[0]} rows. The other rows, which belong to"
                )
                findings.append(Finding("info", f"{parent}: {tensor.name}", f"{found} no token, stay those of {base}"))
        return tuple(findings)


class PinnedAdapter(BaseModel, frozen=True, extra="forbid"):
    """An adapter whose files are pinned by their hashes."""

    ref: str
    directory: Path
    revision: str | None
    files: tuple[tuple[str, str], ...]  # name and sha256

    def pinned_files(self) -> dict[Path, str]:
        """Return the sha256 of each file of the adapter, by path."""
        return {self.directory / name: sha256 for name, sha256 in self.files}
