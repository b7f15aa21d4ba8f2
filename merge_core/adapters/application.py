"""Apply an adapter to a checkpoint by building a new table of tensors, without reading weights.

Each tensor of the adapter must match a tensor of the model. Otherwise the application fails, because users would not
notice that a change is missing. :mod:`.names` maps module names to weights, and :mod:`.arithmetic` computes values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from mergegate.merge_core.adapters.adapter import AdaptedModule, Adapter
from mergegate.merge_core.adapters.configuration import USE_PEFT
from mergegate.merge_core.adapters.names import ExpertSlice, StoredNames, join_stored, split_stored
from mergegate.merge_core.adapters.tensors import AdaptedBias, AdaptedWeight, AdapterOwnTensor, TrainedRows
from mergegate.merge_core.architecture import (
    family_defaults,
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
    settle_head,
    with_chat_templates,
)
from mergegate.merge_core.checkpoint.vocabulary import read_vocabulary
from mergegate.merge_core.errors import InvalidInput

_NAME_BASE = "name the model that the adapter was trained on"
# Models whose projections are GPT-2's Conv1D layers, which store their weights as [in, out].
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
_CONV1D_PARTS = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
# Mixtures of transformers whose fused experts PEFT treats as [experts, in, out]. PEFT treats those of all other
# families of transformers as [experts, out, in].
_TRANSPOSED_EXPERTS = frozenset({"gpt_oss", "aria", "aria_text", "openai_privacy_filter"})


def apply_adapter(base: Checkpoint, adapter: Adapter) -> Checkpoint:
    """Return ``base`` with ``adapter`` applied.

    Raises:
        InvalidInput: A tensor of the adapter has no target in the model, does not have the target's shape, or lacks its
            counterpart (``lora_A`` or ``lora_B``). Or the adapter changes only one of a tied head and embedding.
    """
    application = _Application(split_stored(base), adapter)
    # A head that equals the embedding stays tied to it.
    remote = {tensor.file for tensor in adapter.full_tensors.values() if not tensor.file.is_file()}
    full_tensors, _, _ = settle_head(adapter.full_tensors, base.config, adapter.directory, remote)
    for name, tensor in full_tensors.items():
        application.replace_tensor(name, tensor)
    for module in adapter.modules.values():
        if "token_rows" in module.tensors and application.is_tied_head(f"{module.name}.weight"):
            continue  # The embedding has the same weight and the same trained rows.
        if "own_weight" in module.tensors:
            application.replace_tensor(f"{module.name}.weight", module.tensors["own_weight"])
        if "own_bias" in module.tensors:
            application.replace_tensor(f"{module.name}.bias", module.tensors["own_bias"])
    # PEFT nests one wrapper per adapted parameter of a module. The names differ in trailing ``base_layer`` parts.
    wrappers: dict[str, list[AdaptedModule]] = {}
    for name, module in adapter.modules.items():
        while name.endswith(".base_layer"):
            name = name.removesuffix(".base_layer")  # The name of the innermost module.
        wrappers.setdefault(name, []).append(module)
    for name, modules in wrappers.items():
        application.adapt(adapter.modules.get(name, AdaptedModule(name, {})), modules)
    return join_stored(application.result(), base)


def is_conv1d(config: Mapping[str, Any], module: str) -> bool:
    """Return whether the module called ``module`` stores its weight as ``[in, out]``, like GPT-2's Conv1D layers."""
    return config.get("model_type") in _CONV1D_MODELS and module.rpartition(".")[2] in _CONV1D_PARTS


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
        """Return the checkpoint. Raise InvalidInput if a tied embedding and head would no longer be equal."""
        if self._ties is True and not self._untied:
            heads = [name for name in self._base.tensors if is_head(name)]
            tables = [name for name in self._base.tensors if is_embedding(name)]
            touched = self._changed | self._replaced
            for head in heads:
                if head in touched:
                    raise InvalidInput(
                        f"{self._adapter.directory}: {head}",
                        found="the adapter changes the head, which is tied to the embedding",
                        expected="changes of layers, or of embedding and head together",
                        remedy=USE_PEFT,
                    )
                if any(table in touched for table in tables):
                    # The head is a copy of the old embedding. In memory, it follows the embedding.
                    del self._tensors[head]
            # An embedding that PEFT merely saves together with its factors is not in ``full_tensors``. A head in them
            # equals the embedding.
            full = self._adapter.full_tensors
            is_alone = any(map(is_embedding, full)) and not any(map(is_head, full))
            if is_alone and any(table in self._replaced for table in tables):
                raise InvalidInput(
                    f"{self._adapter.directory}: {tables[0]}",
                    found="modules_to_save lists only the embedding, which is tied to the head",
                    expected="both embedding and head, or an untied model",
                    remedy=USE_PEFT,
                )
        config = {**self._base.config, "tie_word_embeddings": False} if self._untied else self._base.config

        # The chat templates of the base stay if the adapter has none.
        templates, files = read_chat_templates(self._adapter.companions) or self._base.chat_templates, self._files
        if read_chat_templates(files) != templates:
            files = with_chat_templates(files, templates)
        return replace(
            self._base,
            tensors=self._tensors,
            config=config,
            companions=files,
            chat_templates=read_chat_templates(files),
            uncopied=tuple(dict.fromkeys((*self._base.uncopied, *self._adapter.uncopied))),
        )

    @cached_property
    def _files(self) -> Companions:
        """Files of the base with the adapter's tokenizer.

        A loadable tokenizer replaces all tokenizer files of the base. Other files replace those with the same name.
        """
        tokenizer = self._adapter.companions.only(lambda name: companion_kind(name) == "tokenizer")
        files = self._base.companions
        if has_vocabulary(tokenizer.sources):
            files = files.only(lambda name: companion_kind(name) != "tokenizer")
        return files.with_changes(tokenizer.sources)

    @cached_property
    def _token_count(self) -> float:
        """Number of rows that the tokenizer of the result needs, or infinity if it is unknown."""
        vocabulary = read_vocabulary(self._files)
        return max(vocabulary.ids.values(), default=-1) + 1 if vocabulary and vocabulary.is_complete else math.inf

    def replace_tensor(self, name: str, own_tensor: StoredTensor) -> None:
        target = self._names.find(name)
        if self.is_tied_head(name):
            # An adapter that contains embedding and head unties a model with tied embeddings, which gets a head.
            embeddings = [tensor for tensor in self._base.tensors.values() if is_embedding(tensor.name)]
            if len(embeddings) == 1 and any(map(is_embedding, self._adapter.full_tensors)):
                self._untied = True
                (embedding,) = embeddings
                prefix = "language_model." if embedding.name.startswith("language_model.") else ""
                target = AdapterOwnTensor(
                    f"{prefix}lm_head.weight", embedding.dtype, embedding.shape, embedding, own_tensor
                )
                self._tensors[target.name] = target
        if target is None:
            raise self._no_target_error(own_tensor, name)
        shape, rows = own_tensor.shape, own_tensor.shape[:1]
        if has_vocabulary_rows(target.name) and () < rows < target.shape[:1] and self._token_count <= rows[0]:
            shape = (*target.shape[:1], *shape[1:])  # The rows beyond, which belong to no token, stay the model's.
        self._require_shape(own_tensor, shape, target.shape, target)
        if target.name in self._replaced:
            raise InvalidInput(
                own_tensor.full_name,
                found=f"the adapter contains {target.name} twice",
                expected="one tensor with this name",
            )
        self._replaced.add(target.name)
        self._tensors[target.name] = AdapterOwnTensor(target.name, target.dtype, target.shape, target, own_tensor)

    def is_tied_head(self, name: str) -> bool:
        """Return whether ``name`` is a head that is not stored, because it is tied to the embedding."""
        return is_head(name) and self._ties is not False and self._names.find(name) is None

    def adapt(self, module: AdaptedModule, wrappers: list[AdaptedModule]) -> None:
        """Apply the adapter's tensors for ``module``. If it has several ``wrappers``, each adapts one parameter."""
        if len(wrappers) > 1 or self._parameters(module.name):
            for wrapper in wrappers:
                self._adapt_parameter(module.name, wrapper)
            return
        tensors = module.tensors
        if "a" in tensors or "b" in tensors or "b_bias" in tensors:
            self._adapt_weight(module, "a", "b")
        elif "embedding_a" in tensors or "embedding_b" in tensors:
            self._adapt_weight(module, "embedding_a", "embedding_b")
        elif "magnitude" in tensors:
            raise self._missing_factor_error(tensors["magnitude"], "lora_A and lora_B")
        if (values := tensors.get("token_rows")) is None:
            return
        rows = self._config.tokens_of(module.name)
        if len(values.shape) != 2:
            raise InvalidInput(
                values.full_name,
                found=f"shape {list(values.shape)}",
                expected=f"a matrix with one row for each of the trainable_token_indices for {module.name}",
                remedy="save the adapter again with PEFT",
            )
        if rows is None or len(rows) != values.shape[0]:
            raise InvalidInput(
                values.full_name,
                found=f"{values.shape[0]} rows",
                expected=f"as many trainable_token_indices for {module.name} in {self._config.location}",
            )
        name = f"{module.name}.weight"
        if self.is_tied_head(name):
            return  # The embedding gets the same rows.
        weight = self._current(name)
        if weight is None:
            raise self._no_target_error(values, name)
        self._require_shape(values, (weight.shape[0], values.shape[-1]), weight.shape, weight)
        if rows and max(rows) >= weight.shape[0]:
            raise self._vocabulary_error(f"{self._config.location}: trainable_token_indices", max(rows) + 1, weight)
        if weight.name in self._changed:
            raise InvalidInput(
                values.full_name,
                found=f"the adapter also has factors for {weight.name}",
                expected="either factors or trained rows, as in PEFT",
            )
        self._put(TrainedRows(weight.name, weight.dtype, weight.shape, weight, values, rows))

    def _adapt_weight(self, module: AdaptedModule, first: str, second: str) -> None:
        """Apply the factors of the kinds ``first`` and ``second``, and the bias of ``lora_B`` if there is one."""
        is_embedding = first == "embedding_a"
        a, b = self._pair(module, first, second)
        stray = next((module.tensors[kind] for kind in ("embedding_a", "embedding_b") if kind in module.tensors), None)
        if stray is not None and not is_embedding:
            raise InvalidInput(
                stray.full_name, found=f"{module.name} has it in addition to lora_A", expected="one kind of factors"
            )
        weight = self._weight(module, a)
        rank = self._config.rank_of(module.name)
        for factor, own_rank in ((a, a.shape[0]), (b, b.shape[-1])):
            if own_rank != rank:
                raise InvalidInput(
                    factor.full_name,
                    found=f"rank {own_rank}",
                    expected=f"rank {rank}, according to r and rank_pattern in {self._config.location}",
                )
        transposed = is_embedding or is_conv1d(self._base.config, module.name)
        product = (b.shape[0], a.shape[1])
        self._require_shape(a if is_embedding else b, product[::-1] if transposed else product, weight.shape, weight)
        scale, magnitude = self._config.scale_of(module.name), self._magnitude(module, b.shape[0])
        adapted = AdaptedWeight(weight.name, weight.dtype, weight.shape, weight, a, b, scale, magnitude, transposed)
        self._put(replace(adapted, round_change=is_embedding and magnitude is None))
        if is_embedding or (shift := module.tensors.get("b_bias")) is None:
            return
        if not self._config.lora_bias:
            raise InvalidInput(
                shift.full_name,
                found="the adapter has a bias of lora_B without lora_bias in its configuration, so PEFT ignores it",
                expected="lora_bias: true, or no such tensor",
                remedy=f"set lora_bias in {self._config.location} if the bias belongs to the adapter, or remove it",
            )
        bias = self._current(f"{module.name}.bias")
        if bias is None:
            raise InvalidInput(
                shift.full_name,
                found=f"the layer {module.name} has no bias",
                expected="a bias to which the bias of lora_B is added",
                remedy="remove the tensor. PEFT cannot merge it either",
            )
        self._require_shape(shift, shift.shape, bias.shape, bias)
        self._put(AdaptedBias(bias.name, bias.dtype, bias.shape, bias, shift, scale))

    def _parameters(self, module: str) -> list[str]:
        """Return the last name parts of the existing parameters of ``module`` that ``target_parameters`` matches.

        The check for existence is necessary because a bare ``down_proj`` matches the end of any name.
        """
        matches = dict.fromkeys(
            target.rpartition(".")[2]
            for target in self._config.parameters
            if f".{module}.{target.rpartition('.')[2]}".endswith(f".{target}")
        )
        return [end for end in matches if self._names.find_parameter(module, end)]

    def _adapt_parameter(self, module: str, wrapper: AdaptedModule) -> None:
        """Apply ``wrapper`` to the parameter of ``module`` with a matching shape, because no name identifies it."""
        a, b = self._pair(wrapper, "a", "b")
        stray = next((tensor for kind, tensor in wrapper.tensors.items() if kind not in ("a", "b")), None)
        if stray is not None:
            raise InvalidInput(
                stray.full_name,
                found="the adapter has it for a module of target_parameters",
                expected="only the factors lora_A and lora_B for such a module",
            )
        candidates = []
        for parameter in self._parameters(module):
            slices = self._names.find_parameter(module, parameter)
            if slices and (form := self._form(f"{module}.{parameter}", slices, a, b)) is not None:
                candidates.append((parameter, slices, form))
        if len(candidates) > 1:  # For example, a projection up and one down, each in one of the orientations.
            candidates = [candidate for candidate in candidates if candidate[2][1] == self._swaps_axes()]
        if len(candidates) != 1:
            raise InvalidInput(
                a.full_name,
                found=f"factors {list(a.shape)} and {list(b.shape)} fit {len(candidates)} parameters of {module}",
                expected="one parameter of target_parameters, with as many experts as the model has",
                remedy=self._unknown_name(),
            )
        parameter, slices, (experts, transposed) = candidates[0]
        scale = self._config.scale_of(f"{module}.{parameter}")
        for part in slices:
            tensor = self._tensors[part.tensor.name]
            weight = AdaptedWeight(tensor.name, tensor.dtype, tensor.shape, tensor, a, b, scale, None, transposed)
            expert, first_row = part.expert, part.first_row
            self._put(replace(weight, experts=experts, expert=expert, first_row=first_row, round_change=True))

    def _swaps_axes(self) -> bool:
        """Return whether PEFT treated experts as [experts, in, out] instead of [experts, out, in].

        PEFT before 0.19 does so for all families. PEFT 0.19.0 does the opposite of later versions, which do so for
        families that store experts in this way.
        """
        version = self._config.peft_version
        return () < version < (0, 19) or bool(self._kinds & _TRANSPOSED_EXPERTS) != (version == (0, 19, 0))

    def _form(
        self, name: str, slices: tuple[ExpertSlice, ...], a: StoredTensor, b: StoredTensor
    ) -> tuple[int, bool] | None:
        """Return the number of experts, and whether the parameter is stored as [in, out], or None for a mismatch.

        Raises:
            InvalidInput: The matrices of the experts are square, so both orientations match, and neither the family nor
                the version of PEFT says which one the adapter uses.
        """
        if len(a.shape) != 2 or len(b.shape) != 2:
            return None
        rank, shape = self._config.rank_of(name), slices[0].tensor.shape
        experts, straight = 1, shape
        if slices[0].expert is not None:
            numbers = {part.expert for part in slices}
            experts, rows = len(numbers), max(part.first_row + part.tensor.shape[0] for part in slices)
            straight = (rows, shape[1])
            widths = {part.tensor.shape[1] for part in slices}
            if numbers != set(range(experts)) or len(widths) != 1 or len(slices) % experts:
                return None
        elif len(shape) == 3:
            experts, rows = shape[0], max(part.first_row + part.tensor.shape[1] for part in slices)
            straight = (rows, shape[2])
        elif len(shape) != 2:
            return None
        if a.shape[0] != experts * rank or b.shape[1] != experts * rank:
            return None
        product = (b.shape[0], a.shape[1])
        if product not in (straight, straight[::-1]):
            return None
        if len(shape) == 2 and slices[0].expert is None:
            return (experts, False) if product == straight else None
        if straight[0] != straight[1]:
            return experts, product != straight
        is_transposed, version = bool(self._kinds & _TRANSPOSED_EXPERTS), self._config.peft_version
        is_known = self._names.is_known or any(family_defaults(kind) is not None for kind in self._kinds)
        if is_transposed or () < version < (0, 19) or (is_known and version):
            return experts, self._swaps_axes()
        raise InvalidInput(
            f"{self._config.location}: target_parameters",
            found=f"{name} is square, so its shape does not show whether PEFT treated it as [in, out] or [out, in]",
            expected="a family that mergegate knows, and peft_version, because PEFT 0.19 changed the orientation",
            remedy=f"set peft_version to the version that trained the adapter, or with that version, {USE_PEFT}",
        )

    def _pair(self, module: AdaptedModule, first: str, second: str) -> tuple[StoredTensor, StoredTensor]:
        a, b = module.tensors.get(first), module.tensors.get(second)
        if a is None or b is None:
            present = a or b or next(iter(module.tensors.values()))
            raise self._missing_factor_error(present, "both factors")
        for factor in (a, b):
            if len(factor.shape) != 2:
                raise InvalidInput(
                    factor.full_name,
                    found=f"shape {list(factor.shape)}",
                    expected="a matrix (convolutions are not supported)",
                    remedy=USE_PEFT,
                )
        return a, b

    def _magnitude(self, module: AdaptedModule, size: int) -> StoredTensor | None:
        magnitude = module.tensors.get("magnitude")
        if magnitude is None and self._config.dora:
            raise InvalidInput(
                f"{self._config.location}: use_dora",
                found=f"no lora_magnitude_vector for {module.name}",
                expected="one magnitude vector for each module",
            )
        if magnitude is not None and not self._config.dora:
            raise InvalidInput(
                magnitude.full_name,
                found="the adapter has a magnitude without use_dora in its configuration, so PEFT ignores it",
                expected="use_dora: true, or no such tensor",
            )
        if magnitude is not None and magnitude.numel != size:
            raise InvalidInput(
                magnitude.full_name,
                found=f"{magnitude.numel} numbers",
                expected=f"{size} numbers, one for each output",
            )
        return magnitude

    def _weight(self, module: AdaptedModule, factor: StoredTensor) -> AnyTensor:
        weight = self._current(f"{module.name}.weight")
        if weight is None:
            raise self._no_target_error(factor, f"{module.name}.weight")
        if weight.dtype.kind != "float":
            raise InvalidInput(
                factor.full_name,
                found=f"{weight.name} has the format {weight.dtype.code}",
                expected="a floating-point weight, to which a change can be added",
                remedy="name the unquantized model",
            )
        return weight

    def _current(self, name: str) -> AnyTensor | None:
        target = self._names.find(name)
        return self._tensors[target.name] if target is not None else None

    def _put(self, tensor: AdaptedWeight | AdaptedBias | TrainedRows) -> None:
        if tensor.name in self._changed:
            raise InvalidInput(
                f"{self._adapter.directory}: {tensor.name}",
                found="two modules of the adapter change this tensor",
                expected="one module for each tensor",
                remedy=_NAME_BASE,
            )
        self._changed.add(tensor.name)
        self._tensors[tensor.name] = tensor

    def _require_shape(
        self, own_tensor: StoredTensor, shape: tuple[int, ...], target_shape: tuple[int, ...], target: AnyTensor
    ) -> None:
        if tuple(shape) == tuple(target_shape):
            return
        same_width = len(shape) == len(target_shape) > 0 and shape[1:] == target_shape[1:]
        if has_vocabulary_rows(target.name) and same_width:
            raise self._vocabulary_error(own_tensor.full_name, shape[0], target)
        raise InvalidInput(
            own_tensor.full_name,
            found=f"it fits a shape of {list(shape)}",
            expected=f"{list(target_shape)}, the shape of {target.name} of {self._base.directory.name}",
            remedy=_NAME_BASE,
        )

    def _vocabulary_error(self, location: str, rows: int, target: AnyTensor) -> InvalidInput:
        """Return the error for an adapter that was trained after the vocabulary or its table was resized."""
        directory, found = self._base.directory.name, f"{rows} rows"
        remedy = f"resize {directory} with resize_token_embeddings({rows}), save it as a new model, and name that"
        if rows > target.shape[0]:
            found += f", for a vocabulary with more tokens than that of {directory}"
            remedy += f"; or {USE_PEFT}"
        else:
            remedy = f"if the rows beyond belong to no token, {remedy}. Otherwise, {_NAME_BASE}"
        expected = f"{target.shape[0]} rows, like {target.name} of {directory}"
        return InvalidInput(location, found=found, expected=expected, remedy=remedy)

    def _no_target_error(self, tensor: StoredTensor, name: str) -> InvalidInput:
        """Return the error for a tensor of the adapter without a target in the model.

        If the model lacks the layer, the adapter belongs to a different model. If it has the layer under other names,
        transformers renames the tensors of this family when it loads them.
        """
        directory, layer = self._base.directory.name, parse_layer_place(name)
        tied = is_head(name) and self._ties is not False
        module = name.removesuffix(".weight")
        parameters = (f"{module}.{target.rpartition('.')[2]}" for target in self._config.parameters)
        conversion = next(filter(None, map(self._names.conversion, (name, module, *parameters))), None)
        if conversion is not None:
            return InvalidInput(
                tensor.full_name,
                found=f"transformers computes the parameter from {conversion}, which mergegate cannot reverse",
                expected="a parameter that transformers renames, stacks, or splits by rows",
                remedy=USE_PEFT,
            )
        renamed = layer is None or layer.index < max(stacks(self._base.tensors).values(), default=0)
        found = f"the model {directory} has no tensor {name}"
        if tied:
            found += ": its head is tied to the embedding"
        elif renamed:
            found += ", or stores it under a name that mergegate does not know"
        return InvalidInput(
            tensor.full_name,
            found=found,
            expected="a tensor of the model for every tensor of the adapter",
            remedy=USE_PEFT if tied else self._unknown_name() if renamed else _NAME_BASE,
        )

    def _unknown_name(self) -> str:
        return f"if the adapter was trained on {self._base.directory.name}, {USE_PEFT}. Otherwise, {_NAME_BASE}"

    def _missing_factor_error(self, tensor: StoredTensor, expected: str) -> InvalidInput:
        return InvalidInput(tensor.full_name, found="its counterpart is missing in the adapter", expected=expected)
