"""Apply an adapter to a checkpoint by building a new table of tensors, without reading weights.

Each tensor of the adapter must match a tensor of the model. Otherwise the application fails, because a result with a
missing change looks correct. :mod:`.names` maps module names to weights, :mod:`.arithmetic` computes the new values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mergegate.merge_core.adapters.adapter import AdaptedModule, Adapter
from mergegate.merge_core.adapters.names import ExpertPlace, StoredNames
from mergegate.merge_core.adapters.tensors import AdaptedBias, AdaptedWeight, AdapterOwnTensor, TrainedRows
from mergegate.merge_core.architecture import (
    has_vocabulary_rows,
    is_embedding,
    is_head,
    parse_layer_place,
    stacks,
    ties_embeddings,
)
from mergegate.merge_core.checkpoint import (
    AnyTensor,
    Checkpoint,
    Companions,
    StoredTensor,
    companion_kind,
    config_parts,
    has_vocabulary,
    read_chat_templates,
    with_chat_templates,
)
from mergegate.merge_core.errors import Finding, InvalidInput
from mergegate.merge_core.recipe import name_in_path

_LEFT_OUT = "name the model that the adapter was trained on"
_USE_PEFT = "apply it with PEFT (merge_and_unload), save the model, and name that"
# Models whose projections are GPT-2's Conv1D layers, which store their weights as [in, out].
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
_CONV1D_PARTS = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
# Mixtures whose fused experts PEFT treats as [experts, in, out]. PEFT treats all others as [experts, out, in].
_TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "aria", "aria_text", "openai_privacy_filter"})
_STRAIGHT_EXPERTS = frozenset(
    (
        "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "olmoe", "glm4_moe", "deepseek_v2",
        "deepseek_v3", "llama4", "llama4_text", "granitemoe", "granitemoehybrid", "granitemoeshared", "jamba",
        "minimax", "ernie4_5_moe", "dots1", "hunyuan_v1_moe", "lfm2_moe", "phimoe",
    )
)  # fmt: skip


def apply_adapter(base: Checkpoint, adapter: Adapter) -> Checkpoint:
    """Return ``base`` with ``adapter`` applied.

    Raises:
        InvalidInput: A tensor of the adapter has no target in the model, does not have the shape of its target, or
            lacks its counterpart; or the adapter changes only one of a tied head and embedding.
    """
    application = _Application(base, adapter)
    for name, tensor in adapter.whole.items():
        application.replace_tensor(name, tensor)
    for module in adapter.modules.values():
        if "own_weight" in module.tensors:
            application.replace_tensor(f"{module.name}.weight", module.tensors["own_weight"])
        if "own_bias" in module.tensors:
            application.replace_tensor(f"{module.name}.bias", module.tensors["own_bias"])
    for chain in _chains(adapter):
        application.adapt(chain)
    return application.result()


def is_conv1d(config: Mapping[str, Any], module: str) -> bool:
    """Return whether a module of a model stores its weight as [in, out]."""
    return config.get("model_type") in _CONV1D_MODELS and module.rpartition(".")[2] in _CONV1D_PARTS


def adapter_findings(base: str, adapter: Adapter) -> Iterator[Finding]:
    """Yield a warning if the adapter names a different base than ``base``, the reference of the model."""
    declared_base = adapter.config.base
    if declared_base and name_in_path(declared_base) != name_in_path(base.partition("@")[0]):
        yield Finding(
            "warn",
            f"{adapter.config.where}: base_model_name_or_path",
            found=declared_base,
            expected=f"{base}, which it is applied to",
            remedy="shapes agree; that it was trained on the same weights nobody can see from here",
        )


def _with_own_text(base: Checkpoint, own: Companions) -> Companions:
    """Return the files of ``base`` with the tokenizer and the chat templates of an adapter.

    A loadable tokenizer replaces all tokenizer files of the base. Other files replace the files with the same name. The
    chat templates of the base stay if the adapter has none.
    """
    templates = read_chat_templates(own) or base.chat_templates
    own = own.only(lambda name: companion_kind(name) == "tokenizer")
    files = base.companions
    if has_vocabulary(own.sources):
        files = files.only(lambda name: companion_kind(name) != "tokenizer")
    files = files.changed(own.sources)
    return files if read_chat_templates(files) == templates else with_chat_templates(files, templates)


@dataclass
class _Chain:
    """A module and its wrappers. PEFT nests one wrapper per adapted parameter of the module."""

    module: AdaptedModule
    pairs: list[AdaptedModule] = field(default_factory=list)


def _chains(adapter: Adapter) -> Iterator[_Chain]:
    """Group the modules whose names differ only in trailing ``base_layer`` parts."""
    chains: dict[str, _Chain] = {}
    for name, module in adapter.modules.items():
        inner = name
        while inner.endswith(".base_layer"):
            inner = inner.removesuffix(".base_layer")
        chain = chains.setdefault(inner, _Chain(AdaptedModule(inner, {})))
        if inner == name:
            chain.module = module
        chain.pairs.append(module)
    yield from chains.values()


class _Application:
    """Table of tensors while an adapter is applied to it."""

    def __init__(self, base: Checkpoint, adapter: Adapter) -> None:
        self._base, self._adapter, self._config = base, adapter, adapter.config
        self._names = StoredNames(base)
        self._tensors: dict[str, AnyTensor] = dict(base.tensors)
        self._replaced: set[str] = set()
        self._changed: set[str] = set()
        self._ties = ties_embeddings(base.config)
        self._untied = False
        self._kinds = {part.get("model_type") for part in config_parts(base.config)}

    def result(self) -> Checkpoint:
        self._keep_tied()
        config = {**self._base.config, "tie_word_embeddings": False} if self._untied else self._base.config
        files = _with_own_text(self._base, self._adapter.companions)
        return replace(
            self._base,
            tensors=self._tensors,
            config=config,
            companions=files,
            chat_templates=read_chat_templates(files),
            others=tuple(dict.fromkeys((*self._base.others, *self._adapter.others))),
        )

    def replace_tensor(self, name: str, own: StoredTensor) -> None:
        """Replace a tensor of the model by a full tensor of the adapter."""
        target = self._names.find(name)
        if target is None and is_head(name) and self._ties is not False:
            target = self._new_head(name, own)
        if target is None:
            raise self._no_target_error(own, name)
        self._require_shape(own, own.shape, target.shape, target)
        if target.name in self._replaced:
            raise InvalidInput(f"{own.file}: {own.name}", found=f"{target.name} is brought twice", expected="once")
        self._replaced.add(target.name)
        self._tensors[target.name] = AdapterOwnTensor(target.name, target.dtype, target.shape, target, own)

    def adapt(self, chain: _Chain) -> None:
        """Apply all tensors of the adapter for a module, or for its parameters."""
        tensors = chain.module.tensors
        if len(chain.pairs) > 1 or self._has_parameters(chain):
            for pair in chain.pairs:
                self._adapt_parameter(chain.module.name, pair)
            return
        if "a" in tensors or "b" in tensors or "b_bias" in tensors:
            self._adapt_linear(chain.module)
        elif "embedding_a" in tensors or "embedding_b" in tensors:
            self._adapt_embedding(chain.module)
        elif "magnitude" in tensors:
            raise self._no_partner_error(tensors["magnitude"], "lora_A and lora_B")
        if "token_rows" in tensors:
            self._adapt_rows(chain.module)

    def _adapt_linear(self, module: AdaptedModule) -> None:
        a, b = self._pair(module, "a", "b")
        stray = next((module.tensors[kind] for kind in ("embedding_a", "embedding_b") if kind in module.tensors), None)
        if stray is not None:
            raise InvalidInput(f"{stray.file}: {stray.name}", found="beside lora_A", expected="one kind of factors")
        weight = self._weight(module, a)
        self._require_rank(module.name, a, a.shape[0], b.shape[-1])
        transposed = is_conv1d(self._base.config, module.name)
        product = (b.shape[0], a.shape[1])
        self._require_shape(b, product[::-1] if transposed else product, weight.shape, weight)
        self._put(
            AdaptedWeight(
                weight.name,
                weight.dtype,
                weight.shape,
                weight,
                a,
                b,
                self._config.scale_of(module.name),
                self._magnitude(module, b.shape[0]),
                transposed,
            )
        )
        self._adapt_bias(module)

    def _adapt_bias(self, module: AdaptedModule) -> None:
        shift = module.tensors.get("b_bias")
        if shift is None:
            return
        where = f"{shift.file}: {shift.name}"
        if not self._config.lora_bias:
            raise InvalidInput(
                where,
                found="a bias of lora_B, while the configuration has no lora_bias: PEFT leaves it out",
                expected="lora_bias: true, or no such tensor",
                remedy=f"set lora_bias in {self._config.where} if the bias belongs to the adapter; else remove it",
            )
        bias = self._current(f"{module.name}.bias")
        if bias is None:
            raise InvalidInput(
                where, found="the layer has no bias", expected="one to add it to", remedy="PEFT cannot merge it either"
            )
        self._require_shape(shift, shift.shape, bias.shape, bias)
        self._put(AdaptedBias(bias.name, bias.dtype, bias.shape, bias, shift, self._config.scale_of(module.name)))

    def _adapt_embedding(self, module: AdaptedModule) -> None:
        a, b = self._pair(module, "embedding_a", "embedding_b")
        weight = self._weight(module, a)
        self._require_rank(module.name, a, a.shape[0], b.shape[-1])
        self._require_shape(a, (a.shape[1], b.shape[0]), weight.shape, weight)
        scale, magnitude = self._config.scale_of(module.name), self._magnitude(module, b.shape[0])
        plain = magnitude is None
        self._put(
            AdaptedWeight(
                weight.name, weight.dtype, weight.shape, weight, a, b, scale, magnitude, True, round_change=plain
            )
        )

    def _adapt_rows(self, module: AdaptedModule) -> None:
        values = module.tensors["token_rows"]
        rows, where = self._config.tokens_of(module.name), f"{values.file}: {values.name}"
        if rows is None or len(rows) != values.shape[0]:
            raise InvalidInput(
                where,
                found=f"{values.shape[0]} rows",
                expected=f"trainable_token_indices for {module.name} in {self._config.where}, one for each row",
            )
        name = f"{module.name}.weight"
        if is_head(name) and self._ties is not False and self._names.find(name) is None:
            return  # The head is tied to the embedding, which gets the same rows.
        weight = self._current(name)
        if weight is None:
            raise self._no_target_error(values, name)
        self._require_shape(values, (weight.shape[0], values.shape[-1]), weight.shape, weight)
        if rows and max(rows) >= weight.shape[0]:
            raise self._vocabulary_error(f"{self._config.where}: trainable_token_indices", max(rows) + 1, weight)
        if weight.name in self._changed:
            raise InvalidInput(where, found="its embedding has factors as well", expected="one of them, as in PEFT")
        self._put(TrainedRows(weight.name, weight.dtype, weight.shape, weight, values, rows))

    def _has_parameters(self, chain: _Chain) -> bool:
        return bool(self._parameters(chain.module.name))

    def _parameters(self, module: str) -> list[str]:
        """Return the last name parts of the existing parameters of ``module`` that ``target_parameters`` matches.

        The check for existence is necessary because a bare ``down_proj`` matches the end of any name.
        """
        ends = dict.fromkeys(target.rpartition(".")[2] for target in self._config.parameters)
        matches = [end for end in ends if self._config.adapts_parameter(f"{module}.{end}")]
        return [end for end in matches if self._names.find_parameter(module, end)]

    def _adapt_parameter(self, module: str, pair: AdaptedModule) -> None:
        """Change the parameter of ``module`` with a matching shape, because the nesting does not identify it."""
        a, b = self._pair(pair, "a", "b")
        stray = next((tensor for kind, tensor in pair.tensors.items() if kind not in ("a", "b")), None)
        if stray is not None:
            raise InvalidInput(
                f"{stray.file}: {stray.name}", found="beside target_parameters", expected="factors alone"
            )
        candidates = []
        for parameter in self._parameters(module):
            places = self._names.find_parameter(module, parameter)
            if places and (form := self._form(f"{module}.{parameter}", places, a, b)) is not None:
                candidates.append((parameter, places, form))
        if len(candidates) != 1:
            raise InvalidInput(
                f"{a.file}: {a.name}",
                found=f"factors {list(a.shape)} and {list(b.shape)} fit {len(candidates)} parameters of {module}",
                expected="one parameter of target_parameters, with the experts that the model has",
                remedy=self._unknown_name(),
            )
        parameter, places, (experts, transposed) = candidates[0]
        scale = self._config.scale_of(f"{module}.{parameter}")
        for place in places:
            tensor = self._tensors[place.tensor.name]
            self._put(
                AdaptedWeight(
                    tensor.name,
                    tensor.dtype,
                    tensor.shape,
                    tensor,
                    a,
                    b,
                    scale,
                    None,
                    transposed,
                    experts,
                    place.experts,
                    place.first_row,
                    round_change=True,
                )
            )

    def _form(
        self, name: str, places: tuple[ExpertPlace, ...], a: StoredTensor, b: StoredTensor
    ) -> tuple[int, bool] | None:
        """Return the number of experts, and whether the parameter is stored as [in, out], or None for a mismatch.

        Raises:
            InvalidInput: The experts are square and their family is unknown. Both orientations would match, and one
                would be wrong.
        """
        if len(a.shape) != 2 or len(b.shape) != 2:
            return None
        rank, shape = self._config.rank_of(name), places[0].tensor.shape
        experts, straight = 1, shape
        if places[0].experts is not None:
            numbers = {place.experts for place in places}
            experts, rows = len(numbers), max(place.first_row + place.tensor.shape[0] for place in places)
            straight = (rows, shape[1])
            widths = {place.tensor.shape[1] for place in places}
            if numbers != set(range(experts)) or len(widths) != 1 or len(places) % experts:
                return None
        elif len(shape) == 3:
            experts, straight = shape[0], shape[1:]
        elif len(shape) != 2:
            return None
        if a.shape[0] != experts * rank or b.shape[1] != experts * rank:
            return None
        product = (b.shape[0], a.shape[1])
        if product not in (straight, straight[::-1]):
            return None
        if len(shape) != 3:
            return (experts, False) if product == straight else None
        if straight[0] != straight[1]:
            return experts, product != straight
        if self._kinds & _TRANSPOSED_EXPERTS:
            return experts, True
        if self._kinds & _STRAIGHT_EXPERTS:
            return experts, False
        raise InvalidInput(
            f"{self._config.where}: target_parameters",
            found=f"{name} is square, and of a family that is not known here",
            expected="a parameter whose shape tells how it is stored",
            remedy=_USE_PEFT,
        )

    def _pair(self, module: AdaptedModule, first: str, second: str) -> tuple[StoredTensor, StoredTensor]:
        a, b = module.tensors.get(first), module.tensors.get(second)
        if a is None or b is None:
            present = a or b or next(iter(module.tensors.values()))
            raise self._no_partner_error(present, "both factors")
        for factor in (a, b):
            if len(factor.shape) != 2:
                raise InvalidInput(
                    f"{factor.file}: {factor.name}",
                    found=f"shape {list(factor.shape)}",
                    expected="a matrix: convolutions are not supported",
                    remedy=_USE_PEFT,
                )
        return a, b

    def _magnitude(self, module: AdaptedModule, size: int) -> StoredTensor | None:
        magnitude = module.tensors.get("magnitude")
        if magnitude is None and self._config.dora:
            raise InvalidInput(
                f"{self._config.where}: use_dora",
                found=f"no lora_magnitude_vector for {module.name}",
                expected="one for each module",
            )
        if magnitude is not None and not self._config.dora:
            raise InvalidInput(
                f"{magnitude.file}: {magnitude.name}",
                found="a magnitude, while the configuration has no use_dora: PEFT leaves it out",
                expected="use_dora: true, or no such tensor",
            )
        if magnitude is not None and magnitude.numel != size:
            raise InvalidInput(
                f"{magnitude.file}: {magnitude.name}",
                found=f"{magnitude.numel} numbers",
                expected=f"{size}, one for each output",
            )
        return magnitude

    def _weight(self, module: AdaptedModule, factor: StoredTensor) -> AnyTensor:
        weight = self._current(f"{module.name}.weight")
        if weight is None:
            raise self._no_target_error(factor, f"{module.name}.weight")
        if weight.dtype.kind != "float":
            raise InvalidInput(
                f"{factor.file}: {factor.name}",
                found=f"{weight.name} holds {weight.dtype.code}",
                expected="weights that can be added to",
                remedy="name the unquantised model",
            )
        return weight

    def _current(self, name: str) -> AnyTensor | None:
        target = self._names.find(name)
        return self._tensors[target.name] if target is not None else None

    def _put(self, tensor: AdaptedWeight | AdaptedBias | TrainedRows) -> None:
        if tensor.name in self._changed:
            raise InvalidInput(
                f"{self._adapter.directory}: {tensor.name}",
                found="two modules of the adapter mean it",
                expected="one",
                remedy=_LEFT_OUT,
            )
        self._changed.add(tensor.name)
        self._tensors[tensor.name] = tensor

    def _require_rank(self, module: str, tensor: StoredTensor, *ranks: int) -> None:
        rank = self._config.rank_of(module)
        if any(item != rank for item in ranks):
            raise InvalidInput(
                f"{tensor.file}: {tensor.name}",
                found=f"rank {next(item for item in ranks if item != rank)}",
                expected=f"{rank}, as r and rank_pattern of {self._config.where} say",
            )

    def _require_shape(
        self, own: StoredTensor, shape: tuple[int, ...], target_shape: tuple[int, ...], target: AnyTensor
    ) -> None:
        if tuple(shape) == tuple(target_shape):
            return
        if has_vocabulary_rows(target.name) and shape[0] > target_shape[0] and shape[1:] == target_shape[1:]:
            raise self._vocabulary_error(f"{own.file}: {own.name}", shape[0], target)
        raise InvalidInput(
            f"{own.file}: {own.name}",
            found=f"for a shape of {list(shape)}",
            expected=f"{list(target_shape)}, as {target.name} of {self._base.directory.name} has",
            remedy=_LEFT_OUT,
        )

    def _vocabulary_error(self, where: str, rows: int, target: AnyTensor) -> InvalidInput:
        """Return the error for an adapter that was trained after tokens were added to the vocabulary."""
        directory = self._base.directory.name
        return InvalidInput(
            where,
            found=f"{rows} rows, for a vocabulary with more tokens than {directory} has",
            expected=f"{target.shape[0]} rows, as {target.name} of {directory} has",
            remedy=f"grow {directory} with resize_token_embeddings({rows}), save it as a new model, and name that; or"
            f" {_USE_PEFT}",
        )

    def _new_head(self, name: str, own: StoredTensor) -> AnyTensor | None:
        """Add a head for a model with tied embeddings if the adapter contains both tensors, which unties them."""
        embeddings = [tensor for tensor in self._base.tensors.values() if is_embedding(tensor.name)]
        if len(embeddings) != 1 or not any(is_embedding(name) for name in self._adapter.whole):
            return None
        self._untied = True
        embedding = embeddings[0]
        prefix = "language_model." if embedding.name.startswith("language_model.") else ""
        head = AdapterOwnTensor(f"{prefix}lm_head.weight", embedding.dtype, embedding.shape, embedding, own)
        self._tensors[head.name] = head
        return head

    def _keep_tied(self) -> None:
        """Check that a tied embedding and head stay equal, or that the adapter contains both."""
        heads = [name for name in self._base.tensors if is_head(name)]
        tables = [name for name in self._base.tensors if is_embedding(name)]
        if self._ties is not True or self._untied:
            return
        touched = self._changed | self._replaced
        for head in heads:
            if head in touched:
                raise InvalidInput(
                    f"{self._adapter.directory}: {head}",
                    found="the adapter changes the head, which is tied to the embedding",
                    expected="changes of layers, or of embedding and head together",
                    remedy=_USE_PEFT,
                )
            if any(table in touched for table in tables):
                del self._tensors[head]  # It is a copy of the old embedding. In memory, the head follows the embedding.
        if any(table in self._replaced and is_saved for table in tables for is_saved in [self._is_saved(table)]):
            raise InvalidInput(
                f"{self._adapter.directory}: {tables[0]}",
                found="modules_to_save has the embedding alone, which is tied to the head",
                expected="both of them, or an untied model",
                remedy=_USE_PEFT,
            )

    def _is_saved(self, table: str) -> bool:
        """Return whether the embedding itself was trained, instead of only being saved together with its factors."""
        return any(is_embedding(name) for name in self._adapter.whole) and table in self._replaced

    def _no_target_error(self, tensor: StoredTensor, name: str) -> InvalidInput:
        """Return the error for a tensor of the adapter without a target in the model.

        If the model lacks the layer, the adapter belongs to a different model. If the model has the layer under unknown
        names, the library renames the tensors of this family when it loads them.
        """
        directory, at = self._base.directory.name, parse_layer_place(name)
        tied = is_head(name) and self._ties is not False
        renamed = at is None or at.index < max(stacks(self._base.tensors).values(), default=0)
        found = f"the model {directory} has no tensor {name}"
        if tied:
            found += ": its head is tied to the embedding"
        elif renamed:
            found += ", or stores it under a name that mergegate does not know"
        return InvalidInput(
            f"{tensor.file}: {tensor.name}",
            found=found,
            expected="a place in the model for every tensor of the adapter",
            remedy=_USE_PEFT if tied else self._unknown_name() if renamed else _LEFT_OUT,
        )

    def _unknown_name(self) -> str:
        return f"if the adapter was trained on {self._base.directory.name}, {_USE_PEFT}; else {_LEFT_OUT}"

    def _no_partner_error(self, tensor: StoredTensor, expected: str) -> InvalidInput:
        return InvalidInput(f"{tensor.file}: {tensor.name}", found="alone", expected=expected)
