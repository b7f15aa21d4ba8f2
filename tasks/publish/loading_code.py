"""Write the Python code that the model card shows for loading the released model, for each kind of model."""

from __future__ import annotations

from collections.abc import Collection

from mergegate.merge_core.architecture import TEXT_GENERATOR, ModelKind
from mergegate.merge_core.checkpoint import companion_kind

_RANK_BY_EMBEDDING = """queries = model.encode_query(["a question"])
texts = model.encode_document(["a text", "another text"])
print(model.similarity(queries, texts))"""
_RANK_PAIRS = 'print(model.predict([("a question", "a text"), ("a question", "another text")]))'


def loading_code(kind: ModelKind, address: str, files: Collection[str], *, is_adapter: bool) -> str:
    """Return the code that loads a release, or an empty string if no library has a class for it.

    Args:
        kind: Kind of the model. For an adapter, the kind of its base model.
        address: Id on the Hub, or path of the release.
        files: Names of the files of the release.
        is_adapter: Whether the release is a LoRA adapter.
    """
    if not kind.loader:
        return ""
    if is_adapter and kind == TEXT_GENERATOR:
        return (
            "from peft import AutoPeftModelForCausalLM\n\n"
            f'model = AutoPeftModelForCausalLM.from_pretrained("{address}")'
        )
    # Everything but the adapter comes from its base model.
    source = "base" if is_adapter else f'"{address}"'
    lines = [f'base = PeftConfig.from_pretrained("{address}").base_model_name_or_path'] if is_adapter else []
    if kind.loader.startswith("Auto"):
        processor = _processor_class(kind, files, is_adapter=is_adapter)
        names = ", ".join(sorted({kind.loader, processor} - {""}))
        imports = [f"from transformers import {names}"]
        lines.append(f'model = {kind.loader}.from_pretrained({source}, dtype="auto")')
        if is_adapter:
            imports.insert(0, "from peft import PeftConfig, PeftModel")
            lines.append(f'model = PeftModel.from_pretrained(model, "{address}")')
        if processor:
            lines.append(f"{processor.removeprefix('Auto').lower()} = {processor}.from_pretrained({source})")
    else:
        imports = [f"from sentence_transformers import {kind.loader}"]
        lines.append(f"model = {kind.loader}({source})")
        if is_adapter:
            imports.insert(0, "from peft import PeftConfig")
            lines.append(f'model.load_adapter("{address}")')
        lines.append(_RANK_PAIRS if kind.loader == "CrossEncoder" else _RANK_BY_EMBEDDING)
    return "\n".join([*imports, "", *lines])


def _processor_class(kind: ModelKind, files: Collection[str], *, is_adapter: bool) -> str:
    """Return the class that prepares the model's inputs. Empty if the release has no files for it."""
    kinds = {companion_kind(name) for name in files}
    if "processor" in kinds or (is_adapter and kind.modalities):
        return "AutoProcessor"
    return "AutoTokenizer" if "tokenizer" in kinds or is_adapter or kind == TEXT_GENERATOR else ""
