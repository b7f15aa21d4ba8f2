"""Write the table of all families in ``families.json``, with a merge of a tiny model of each.

    python tests/merge_core/every_family.py                # add missing families, refresh cells that need no trial
    python tests/merge_core/every_family.py --all          # try all families, about 20 minutes
    python tests/merge_core/every_family.py llama bert     # try these families

A family is a ``model_type`` of the installed transformers. Its configuration class has default values, which
``small_configuration`` makes small. ``test_every_family.py`` repeats the trials and compares them with the table.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import transformers
from family_table import BY_NAME, read_table, write_table
from family_table import rows as detailed_rows
from family_trials import DONE, LINEAR, merged, refused, try_adapter
from in_memory import average
from tiny_families import TinyFamily, load
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from mergegate.merge_core import open_checkpoint
from mergegate.merge_core.architecture.model_kinds import ModelKind, class_kinds
from mergegate.merge_core.errors import InvalidInput
from mergegate.tasks.models.checkpoints import Differences, compare_with_classes

PROJECT = Path(__file__).resolve().parents[2]
COMMAND = "python tests/merge_core/every_family.py"
MAX_PARAMETERS = 40_000_000
NOT_TRIED = "not tried"
WRONG = "wrong"
VLLM = "vLLM"
NO_CELL = "\N{EN DASH}"
_FORMS = {
    "text": "text tasks",
    "pictures": "picture tasks",
    "retrieval": "retrieval tasks",
    "transcription": "transcription tasks",
}
_COLUMNS = ("kind", "class", "whole models", "slices", "adapters", "evaluation", "smoke test")
_SLICES = "merge_method: passthrough\nslices:\n- sources: [{model: a, layer_range: [0, 1]}]\n"


class Row(NamedTuple):
    """Cells of a family's row, after its name."""

    kind: str
    class_name: str
    whole: str
    slices: str
    adapters: str
    evaluation: str
    smoke_test: str


class Trial(NamedTuple):
    """Cells of a row that are experiments."""

    whole: str
    slices: str
    adapters: str


class NotBuilt(Exception):
    """No small model of the family can be built. The first argument is the reason in the table."""


# --- Classes -------------------------------------------------------------------------------------------------------


@cache
def class_of(model_type: str) -> str | None:
    """Return the class that represents a family in the table, or None if no task of transformers names one.

    Masked language models and contrastive models precede their variants with another head, and encoder-decoders their
    decoder alone. Otherwise the order of ``model_kinds.json`` decides.
    """
    tables = [value for name, value in vars(modeling_auto).items() if name.endswith("MAPPING_NAMES")]
    entries = [table[model_type] for table in tables if model_type in table]
    names = [name for entry in entries for name in ([entry] if isinstance(entry, str) else entry)]
    order = list(class_kinds())
    known = sorted((name for name in names if name in class_kinds()), key=order.index)
    if not known:
        return None
    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(model_type)
    contrastive = modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES.get(model_type)
    if class_kinds()[known[0]].modalities == () and masked in known:
        return masked
    if class_kinds()[known[0]].name == "text generator":
        return next((name for name in known if class_kinds()[name].name == "sequence-to-sequence"), known[0])
    return contrastive if contrastive in known else known[0]


def kind_cell(kind: ModelKind) -> str:
    """Return the kind, with the task on the Hub for kinds that have several."""
    return kind.name if kind.name in ("text generator", "vision-language") else f"{kind.name}: {kind.pipeline_tag}"


def evaluation_cell(kind: ModelKind) -> str:
    """Return the tasks that can judge the kind, or that ``check`` refuses it."""
    return ", ".join(_FORMS[form] for form in kind.task_forms) or "refused"


@cache
def vllm_classes() -> frozenset[str] | None:
    """Return the classes in the registry of the installed vLLM, or None if it is not installed."""
    found = sorted(PROJECT.glob(".venv-vllm/lib/python*/site-packages/vllm/model_executor/models/registry.py"))
    if not found:
        return None
    names: set[str] = set()
    for statement in ast.parse(found[0].read_text("utf-8")).body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if isinstance(target, ast.Name) and re.fullmatch(r"_(?!SPECULATIVE|PREVIOUSLY|OOT)\w+_MODELS", target.id):
            keys = statement.value.keys if isinstance(statement.value, ast.Dict) else []
            names |= {key.value for key in keys if isinstance(key, ast.Constant)}
    return frozenset(names)


# --- Small models --------------------------------------------------------------------------------------------------

_DEPTHS = re.compile(r"(?:(?:num|n|encoder|decoder)_)*(?:hidden_)?layers?|n_layers?|depth|num_(?:encoder_)?blocks")
_HEAD_SIZES = re.compile(r".*head_dim|kv_channels|d_kv|d_head")
_TOKEN = re.compile(r".*token_(?:id|ids|index)")
# Numbers that are not widths: sizes of inputs, counts, positions, and parameters of operations.
_NOT_WIDTHS = re.compile(
    r"image|patch|num_mel|position|head|_ids?$|_index$|kernel|stride|window|sampl|type_vocab|labels|frame|n_fft|hop"
    r"|max_|dilation|resolution|num_channels|length|groups|temporal|interval|period|section|factor|crop"
)
_IGNORED = ("architectures", "transformers_version", "torch_dtype", "dtype", "id2label", "label2id", "model_type")
# Lists that select outputs of layers by name. Without them, transformers derives them from the number of layers.
_OUTPUTS = ("out_features", "out_indices", "stage_names")
# Values that some families leave open, and without which no model can be built.
_OPEN = {"vocab_size": 64, "prediction_length": 2}
_EXPERTS = re.compile(r"(?:n|num|moe_num)_(?:routed_|local_)?experts")
_CHOSEN_EXPERTS = re.compile(r".*experts_per_tok(?:en)?|(?:moe_)?top_?k")


class Shrink(NamedTuple):
    """A way to make a configuration small: divisor and floor of widths, largest number of layers, and more values."""

    divisor: int
    depth: int
    floor: int = 4
    more: tuple[tuple[str, Any], ...] = ()


_DEEP = 1000
WAYS = (
    Shrink(16, 2), Shrink(8, 2), Shrink(4, 2), Shrink(16, 4), Shrink(16, _DEEP),
    Shrink(16, 2, more=(("head_dim", 16),)), Shrink(4, 2, floor=32), Shrink(8, _DEEP), Shrink(1, 2), Shrink(1, _DEEP),
)  # fmt: skip


def small_configuration(model_type: str, way: Shrink) -> Any:
    """Return a small configuration of a family. It may raise whatever the family's configuration class raises."""
    configuration = CONFIG_MAPPING[model_type]
    values = _shrunk(configuration().to_dict(), way)
    _move_tokens(values, _first_vocabulary(values))
    return configuration(**values)


def _shrunk(values: Mapping[str, Any], way: Shrink) -> dict[str, Any]:
    result = {key: _small(key, value, way) for key, value in values.items() if key not in (*_IGNORED, *_OUTPUTS)}
    for key, value in values.items():
        if isinstance(value, Mapping) and "model_type" in value:
            result[key]["model_type"] = value["model_type"]
    if "depths" in values:  # The number of layers follows from the stages.
        result = {key: value for key, value in result.items() if key not in ("num_hidden_layers", "num_layers")}
    return result | {key: value for key, value in way.more if "num_attention_heads" in values}


def _small(key: str, value: Any, way: Shrink) -> Any:
    if isinstance(value, Mapping):
        return dict(value) if "rope" in key else _shrunk(value, way)
    if isinstance(value, list | tuple):
        if value and all(isinstance(item, str) for item in value) and ("layer" in key or "types" in key):
            return list(value[: way.depth])
        if value and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return [1 if "depth" in key else _small(key, item, way) for item in value]
        return list(value)
    if value is None:
        return _OPEN.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if _DEPTHS.fullmatch(key):
        return min(value, way.depth)
    if _EXPERTS.fullmatch(key):
        return min(value, 4)
    if _CHOSEN_EXPERTS.fullmatch(key):
        return min(value, 2)
    if key in ("n_group", "topk_group"):
        return 1
    if _HEAD_SIZES.fullmatch(key):
        return max(value // way.divisor, 4)
    if _TOKEN.fullmatch(key) or _NOT_WIDTHS.search(key) or value < 64:
        return value
    return max(value // way.divisor, way.floor)


def _first_vocabulary(values: Mapping[str, Any]) -> int | None:
    parts = [values, *(part for part in values.values() if isinstance(part, Mapping))]
    return next((part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)), None)


def _move_tokens(values: dict[str, Any], vocabulary: int | None) -> None:
    """Give special tokens numbers that exist in the smaller vocabulary, different ones where possible."""
    own = values.get("vocab_size")
    size = own if isinstance(own, int) and own > 8 else vocabulary
    for place, (key, value) in enumerate(values.items()):
        if isinstance(value, dict):
            _move_tokens(value, size)
        elif _TOKEN.fullmatch(key) and size:
            values[key] = _moved(value, size, place)


def _moved(value: Any, size: int, place: int) -> Any:
    if isinstance(value, list):
        return [_moved(item, size, place) for item in value]
    return size - 1 - place % min(size, 32) if isinstance(value, int) and value >= size else value


def build(model_type: str, class_name: str) -> Any:
    """Return a small random model of a family, or raise NotBuilt."""
    reasons: list[str] = []
    for way in WAYS:
        try:
            configuration = small_configuration(model_type, way)
            model_class = getattr(transformers, class_name)
            with torch.device("meta"):
                size = sum(tensor.numel() for tensor in model_class(copy.deepcopy(configuration)).parameters())
            if size <= MAX_PARAMETERS:
                torch.manual_seed(0)
                return model_class(configuration).float().eval()
            reasons.append(f"{size} parameters")
        except ImportError as error:
            package = re.search(r"requires the (\S+) library", str(error))
            raise NotBuilt(f"needs {package[1] if package else 'another package'}", str(error)) from error
        except Exception as error:  # Each family has its own ways to refuse a configuration.
            reasons.append(f"{type(error).__name__}: {error}")
    raise NotBuilt("no small configuration", *dict.fromkeys(reasons))


# --- Trials --------------------------------------------------------------------------------------------------------


def tried(model_type: str, root: Path) -> Trial:
    """Return the cells of a family: its small models merged whole, with slices, and with an adapter."""
    class_name = class_of(model_type)
    assert class_name is not None, model_type
    family = TinyFamily(model_type, model_type, {}, class_name, usual=False)
    try:
        model = build(model_type, class_name)
    except NotBuilt as error:
        print(model_type, *error.args, sep="\n  ", file=sys.stderr)
        return Trial(f"{NOT_TRIED}: {error.args[0]}", NOT_TRIED, NOT_TRIED)
    try:
        for seed, name in enumerate("ab"):
            _add_noise(model, seed)
            model.save_pretrained(root / name)
        parents = {name: load(family, root / name) for name in "ab"}
    except Exception as error:  # The reason is in transformers, which cannot read what it wrote.
        print(model_type, f"{type(error).__name__}: {error}", sep="\n  ", file=sys.stderr)
        return Trial(f"{NOT_TRIED}: transformers cannot load its own file", NOT_TRIED, NOT_TRIED)
    checkpoints = {name: open_checkpoint(root / name) for name in "ab"}
    try:
        refusal = merged(LINEAR.format("a", "b"), checkpoints, root / "whole")
    except InvalidInput as error:  # Found in the numbers of a tensor, after the plan.
        refusal = refused(error)
    whole = refusal or _checked(model_type, lambda: require_average(family, parents, root / "whole"))
    slices = merged(_SLICES, {"a": checkpoints["a"]}, root / "slices")
    adapters = NOT_TRIED
    if class_kinds()[class_name].reads_text:
        adapters = _checked(model_type, lambda: _try_adapter(family, parents, root))
    return Trial(whole, slices or NOT_TRIED, adapters)


def _checked(model_type: str, trial: Callable[[], str]) -> str:
    try:
        return trial()
    except AssertionError as error:
        print(model_type, f"{WRONG}: {error}", sep="\n  ", file=sys.stderr)
        return WRONG


def require_average(family: TinyFamily, parents: Mapping[str, Any], directory: Path) -> str:
    """Return ``✓``, and require that a merge loads cleanly, with exactly the weighted average of the parents' tensors.

    Tensors that a class computes instead of storing them, such as Marian's positions, must be those of a parent. The
    check before a merge may not block either.
    """
    written = open_checkpoint(directory)
    (found,) = compare_with_classes([(written.config, written.tensors.values())])
    # Without a package, the class cannot be built, and nothing is compared.
    assert found == Differences(ignored=found.ignored) or found.reason.startswith("ImportError: "), found
    result = load(family, directory).state_dict()
    expected = average([parents["a"], parents["b"]], [0.3, 0.7]).state_dict()
    computed = parents["a"]._keys_to_ignore_on_save or ()
    expected |= {name: tensor for name, tensor in parents["a"].state_dict().items() if name in computed}
    different = [name for name, tensor in expected.items() if not _is_equal(tensor, result[name])]
    assert different == [], different
    return DONE


def _is_equal(expected: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, or within float32 precision if they are in float64."""
    if expected.dtype == torch.float64:  # mergegate computes in float32, and OneFormer has one such number.
        return torch.allclose(expected, tensor, rtol=1e-6)
    return torch.equal(expected, tensor)


def _try_adapter(family: TinyFamily, parents: Mapping[str, Any], root: Path) -> str:
    try:
        cell = try_adapter(family, parents, root)
    except NotImplementedError:
        return NOT_TRIED  # The model has no table of embeddings that adapters must leave alone.
    return f"{NOT_TRIED}: PEFT does not adapt it" if cell.startswith("PEFT: ") else cell


def _add_noise(model: Any, seed: int) -> None:
    """Add noise to all tensors, including norms and biases. Tied tensors get it once."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {tensor.data_ptr(): (name, tensor) for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.values():
        if tensor.is_floating_point() and tensor.numel():
            noise = 0.05 * torch.randn(tensor.shape, generator=generator)
            if name.endswith("balancing_biases"):
                noise[-1] = 0  # transformers writes -1 here when it loads a model of the family zaya.
            tensor.add_(noise)


# --- Table ---------------------------------------------------------------------------------------------------------


@cache
def families() -> tuple[str, ...]:
    """Return the ``model_type`` of each family with a class of its own, in alphabetical order."""
    return tuple(sorted(name for name in CONFIG_MAPPING_NAMES if class_of(name) is not None))


def parts() -> list[str]:
    """Return each ``model_type`` that exists only within another model, or has no task in transformers."""
    return sorted(name for name in CONFIG_MAPPING_NAMES if class_of(name) is None)


@cache
def detailed(model_type: str) -> str | None:
    """Return the row of the table of detailed trials that represents a family, or None."""
    names = [name for name, family in BY_NAME.items() if family.model_type == model_type]
    return min(names, key=lambda name: (name.count(","), "described" in name), default=None)


def known_trial(model_type: str) -> Trial | None:
    """Return the cells that the detailed trials have found, or None if the family has none."""
    name = detailed(model_type)
    cells = detailed_rows().get(name) if name else None
    return Trial(cells[0], cells[1], cells[3]) if cells else None


def row_of(model_type: str, trial: Trial, before: Row | None) -> Row:
    """Return the row of a family. Without vLLM, the cell of the smoke test stays as ``before``."""
    class_name = class_of(model_type) or ""
    kind, served = class_kinds()[class_name], vllm_classes()
    smoke = before.smoke_test if before else NOT_TRIED
    if served is not None:
        smoke = VLLM if class_name in served else NO_CELL
    return Row(kind_cell(kind), class_name, *trial, evaluation_cell(kind), smoke)


def rows() -> dict[str, Row]:
    """Return the rows in the document by family."""
    return {name: Row(*cells.values()) for name, cells in read_table("families").items()}


def write(table: Mapping[str, Row]) -> None:
    """Write the table and the list of parts into the document."""
    found = {name: dict(zip(_COLUMNS, table[name], strict=True)) for name in families() if name in table}
    write_table("families", found)
    write_table("parts", parts())


def try_family(model_type: str) -> Trial:
    """Return the experiments of a family, from the detailed trials or from a new one."""
    if (known := known_trial(model_type)) is not None:
        return known
    with TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tried(model_type, Path(directory))


def main(arguments: list[str]) -> None:
    """Try families and write the table."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    before = rows()
    again = set(families() if "--all" in arguments else arguments)
    table: dict[str, Row] = {}
    for name in families():
        old = before.get(name)
        if old is None or name in again or known_trial(name) is not None:
            trial = try_family(name)
            print(name, *trial, sep="\t", flush=True)
            write({**before, **table})  # An interrupted command has not been in vain.
        else:
            trial = Trial(old.whole, old.slices, old.adapters)
        table[name] = row_of(name, trial, old)
    write(table)


if __name__ == "__main__":
    main(sys.argv[1:])
