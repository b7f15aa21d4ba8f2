"""The recipes that mergegate and mergekit both read, word for word."""

from __future__ import annotations

# Two or three checkpoints of a family, without parameters per model.
_TWO = "models: [{model: one}, {model: two}]\n"
_THREE = "models: [{model: one}, {model: two}, {model: three}]\n"

# Weights (and densities) that differ from model to model, one of them negative.
_WEIGHTED = """
models:
  - {model: one, parameters: {weight: 0.7}}
  - {model: two, parameters: {weight: -0.2}}
  - {model: three, parameters: {weight: 0.4}}
"""
_DENSE = """
models:
  - {model: one, parameters: {weight: 0.7, density: 0.5}}
  - {model: two, parameters: {weight: 0.2, density: 0.31}}
  - {model: three, parameters: {weight: 0.4, density: 0.9}}
"""
# A gradient, filters with gradients, and a filter that matches nothing in its scope, so that the wider scope applies.
_VARIED = """
models:
  - {model: one, parameters: {weight: [0.1, 0.9, 0.3]}}
  - model: two
    parameters:
      weight:
        - {filter: self_attn, value: [1, 0.2]}
        - {filter: mlp, value: 0.35}
        - {value: 0.6}
  - {model: three, parameters: {weight: [{filter: down_proj, value: 0.05}]}}
parameters: {weight: 0.45}
"""
_SPARSE_VARIED = """
models:
  - {model: one, parameters: {weight: 1.0, density: [1, 0.7, 0.1]}}
  - {model: two, parameters: {weight: [0, 0.3, 0.7, 1], density: 0.5}}
  - {model: three, parameters: {weight: [{filter: mlp, value: 0.5}, {value: 0.1}], density: 0.33}}
"""
_T_BY_PART = """
parameters:
  t:
    - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}
    - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}
    - {value: 0.5}
"""
_BASED = "base_model: base\n"

# Layers cut, moved and repeated. Narrower parameters win at every level, and gradients restart in each slice.
_CUT = """
slices:
  - sources:
      - {model: one, layer_range: [0, 3], parameters: {weight: [0.2, 0.8]}}
      - {model: two, layer_range: [1, 4]}
    parameters: {weight: 0.3}
  - sources:
      - {model: three, layer_range: [2, 4], parameters: {weight: [{filter: mlp, value: 0.9}]}}
      - {model: two, layer_range: [0, 2]}
  - sources:
      - {model: one, layer_range: [3, 4]}
      - {model: three, layer_range: [1, 2]}
    parameters: {weight: [0.25, 0.75]}
parameters: {weight: 0.5}
"""
_CUT_OVER_BASE = """
base_model: base
slices:
  - sources:
      - {model: base, layer_range: [0, 2]}
      - {model: one, layer_range: [0, 2], parameters: {weight: [0.2, 0.8], density: 0.6}}
      - {model: two, layer_range: [2, 4], parameters: {weight: 0.4}}
    parameters: {density: 0.4, lambda: 0.9}
  - sources:
      - {model: base, layer_range: [1, 4]}
      - {model: three, layer_range: [1, 4], parameters: {density: [0.9, 0.3]}}
      - {model: one, layer_range: [0, 3]}
    parameters: {normalize: false}
parameters: {weight: 0.5, density: 0.7, normalize: true}
"""
_STACK = """
slices:
  - sources: [{model: one, layer_range: [0, 3]}]
  - sources: [{model: two, layer_range: [1, 4]}]
  - sources: [{model: one, layer_range: [2, 3]}]
"""
_MODULES = """
modules:
  default:
    models:
      - {model: one, parameters: {weight: [{filter: self_attn, value: 0.2}]}}
      - {model: two}
    parameters: {weight: [{filter: mlp, value: 0.7}]}
parameters: {weight: 0.4}
"""


def _method(name: str, body: str, parameters: str = "") -> str:
    """Return a recipe. ``parameters`` adds top-level parameters, so ``body`` must not have any."""
    tail = f"parameters: {{{parameters}}}\n" if parameters else ""
    return f"merge_method: {name}\n{body}{tail}"


_ONE = "models: [{model: one}]\n"
_UNEQUAL = "models: [{model: one, parameters: {weight: 0.3}}, {model: two, parameters: {weight: 0.9}}]\n"
_LISTED = "models: [{model: one}, {model: base}, {model: two}]\n"
_SLERP_CUT = """base_model: one
slices:
  - sources: [{model: one, layer_range: [0, 3]}, {model: two, layer_range: [1, 4]}]
  - sources: [{model: two, layer_range: [0, 2]}, {model: one, layer_range: [2, 4]}]
    parameters: {t: 0.9}
"""
_SCALE = "[{filter: down_proj, value: 0.5}, {filter: o_proj, value: 0}, {value: 1}]"

# The first word of a name is the method. A row has the body and the parameters for all models.
_DETERMINISTIC: dict[str, tuple[str, ...]] = {
    "linear weighted": (_WEIGHTED,), "linear not normalised": (_WEIGHTED, "normalize: false"),
    "linear varied": (_VARIED,), "linear with the base as one more": (_BASED + _TWO, "weight: 0.5"),
    "linear cut": (_CUT,), "linear of a module": (_MODULES,), "slerp": ("base_model: one\n" + _TWO, "t: 0.3"),
    "slerp from the second": ("base_model: two\n" + _TWO, "t: 0.3"),
    "slerp beyond the ends": ("base_model: one\n" + _TWO, "t: [-0.5, 1.6]"),
    "slerp by part": ("base_model: one\n" + _TWO + _T_BY_PART,), "slerp with the base alone": (_BASED + _ONE, "t: 0.8"),
    "slerp cut": (_SLERP_CUT, "t: [0.1, 0.6]"), "nuslerp": (_TWO, "weight: [0.2, 0.9]"),
    "nuslerp of unequal weights": (_UNEQUAL,), "nuslerp over a base": (_BASED + _UNEQUAL,),
    "nuslerp by rows": (_UNEQUAL, "nuslerp_flatten: false"),
    "nuslerp by columns": (_BASED + _UNEQUAL, "nuslerp_flatten: false, nuslerp_row_wise: true"),
    "multislerp": (_THREE, "weight: 1"), "multislerp weighted": (_VARIED,),
    "multislerp over a base": (_BASED + _VARIED,), "multislerp not normalised": (_WEIGHTED, "normalize_weights: false"),
    "karcher": (_THREE,), "karcher of two": (_TWO,),
    "karcher with the base as one more": (_BASED + _TWO, "max_iter: 3, tol: 1.0e-9"),
    "task_arithmetic": (_BASED + _WEIGHTED,),
    "task_arithmetic normalised": (_BASED + _WEIGHTED, "normalize: true, lambda: 0.6"),
    "task_arithmetic varied": (_BASED + _VARIED,),
    "task_arithmetic with the base listed": (_BASED + _LISTED, "weight: 0.8, lambda: [0.2, 1.4]"),
    "task_arithmetic cut": (_CUT_OVER_BASE,), "ties": (_BASED + _DENSE,),
    "ties of one density": (_BASED + _THREE, "weight: 1, density: 0.2"),
    "ties of everything": (_BASED + _THREE, "weight: 1"),
    "ties of next to nothing": (_BASED + _THREE, "weight: 1, density: 0.001"),
    "ties with a negative weight": (_BASED + _WEIGHTED, "density: 0.6, normalize: false"),
    "ties not normalised": (_BASED + _DENSE, "normalize: false, lambda: 1.7, int8_mask: true"),
    "ties rescaled": (_BASED + _DENSE, "rescale: true"),
    "ties varied": (_BASED + _SPARSE_VARIED, "normalize: true, int8_mask: true"), "ties cut": (_CUT_OVER_BASE,),
    "breadcrumbs": (_BASED + _DENSE, "gamma: 0.05"), "breadcrumbs by default": (_BASED + _DENSE,),
    "breadcrumbs without room below": (_BASED + _THREE, "weight: 1, density: 0.95, gamma: 0.1"),
    "breadcrumbs normalised": (_BASED + _DENSE, "gamma: [0, 0.2], normalize: true, lambda: 1.2"),
    "breadcrumbs rescaled": (_BASED + _DENSE, "gamma: 0.1, rescale: true"),
    "breadcrumbs_ties": (_BASED + _DENSE, "gamma: 0.05"),
    "breadcrumbs_ties normalised": (_BASED + _DENSE, "gamma: 0.02, normalize: true"),
    "breadcrumbs_ties cut": (_CUT_OVER_BASE,), "model_stock": (_BASED + _THREE,),
    "model_stock of two": (_BASED + _TWO,), "model_stock by rows": (_BASED + _THREE, "filter_wise: true"),
    "sce": (_BASED + _THREE,), "sce of the most varied": (_BASED + _THREE, "select_topk: 0.3"),
    "sce along the layers": (_BASED + _THREE, "select_topk: [0.9, 0.1], int8_mask: true"), "ram": (_BASED + _THREE,),
    "ram of large differences": (_BASED + _THREE, "epsilon: 0.02"), "ramplus_tl": (_BASED + _THREE,),
    "ramplus_tl of large differences": (_BASED + _THREE, "epsilon: 0.03, r: 0.4, alpha: 0.7"),
    "nearswap": (_BASED + _ONE, "t: 0.01"),
    "nearswap of little": (_BASED + "models: [{model: base}, {model: two}]\n", "t: 0.0005"),
    "nearswap along the layers": (_BASED + "models: [{model: three}]\n", "t: [0, 0.1]"),
    "arcee_fusion": (_BASED + "models: [{model: base}, {model: one}]\n",),
    "arcee_fusion with the base implied": (_BASED + "models: [{model: three}]\n",),
    "passthrough": ("models: [{model: two}]\n",),
    "passthrough scaled": (f"models: [{{model: two, parameters: {{scale: {_SCALE}}}}}]\n",),
    "passthrough stacked": (_STACK,),
}  # fmt: skip
DETERMINISTIC = {name: _method(name.split()[0], *row) for name, row in _DETERMINISTIC.items()}

# Methods that behave differently when fine-tunes are as close to the base as real ones are. arcee_fusion is left out:
# at that distance its KL divergences are below float32 resolution, and an eighth of mergekit's mask is rounding noise.
NEAR = (
    *("slerp", "slerp by part", "nuslerp over a base", "nuslerp by rows", "multislerp weighted", "karcher"),
    *("task_arithmetic", "model_stock", "model_stock by rows", "sce", "ram", "ramplus_tl", "nearswap"),
)

# Methods that draw random masks → their parameters besides weight and density.
RANDOM = {"dare_linear": "", "dare_ties": "", "della": "epsilon: 0.08", "della_linear": "epsilon: 0.08"}
DENSITY = 0.4


def random_of_one(method: str) -> str:
    """Return a recipe with one fine-tune, so that the result shows the random mask."""
    return _method(method, _BASED + "models: [{model: one}]\n", f"weight: 1, density: {DENSITY}" + _and(RANDOM[method]))


def random_of_three(method: str) -> str:
    """Return a recipe with three fine-tunes that have different weights and densities."""
    return _method(method, _BASED + _DENSE, "lambda: 0.9" + _and(RANDOM[method]))


def _and(parameters: str) -> str:
    return f", {parameters}" if parameters else ""


# The kinds of recipes in mergekit's examples, for the tiny models. Some are in block style, as mergekit shows them.
_SLERP_OF_LAYERS = (
    "slices:\n  - sources:\n"
    "      - model: one\n        layer_range: [0, 4]\n"
    "      - model: two\n        layer_range: [0, 4]\n"
    f"merge_method: slerp\nbase_model: one{_T_BY_PART}dtype: float16\n"
)


def _stack(*slices: tuple[str, int, int]) -> str:
    lines = (f"  - sources:\n    - model: {model}\n      layer_range: [{low}, {high}]\n" for model, low, high in slices)
    return f"slices:\n{''.join(lines)}merge_method: passthrough\ndtype: float16\n"


# Name → recipe.
_EXAMPLES = {
    "a weighted average in half precision": (
        "models:\n"
        "  - model: one\n    parameters:\n      weight: 1.0\n"
        "  - model: two\n    parameters:\n      weight: 0.3\n"
        "  - model: three\n    parameters:\n      weight: 0.5\n"
        "merge_method: linear\ndtype: float16\n"
    ),
    "slerp of all layers with gradients by part": _SLERP_OF_LAYERS,
    "ties with gradients of density and weight": (
        f"{_SPARSE_VARIED.lstrip()}merge_method: ties\nbase_model: base\n"
        "parameters:\n  normalize: true\n  int8_mask: true\ndtype: float16\n"
    ),
    "ties of two not normalised": (
        "models:\n"
        "  - model: one\n    parameters:\n      density: 0.5\n      weight: 0.5\n"
        "  - model: two\n    parameters:\n      density: 0.5\n      weight: 0.5\n"
        "merge_method: ties\nbase_model: base\nparameters:\n  normalize: false\n  int8_mask: true\ndtype: float16\n"
    ),
    "a stack of two models' layers": _stack(("one", 0, 3), ("two", 1, 4)),
    "embeddings of one model, layers of another, head of a third": _stack(
        *(("one", 0, 0), ("two", 0, 2), ("one", 1, 1), ("two", 2, 4), ("three", 4, 4))
    ),
    "a model without its last layers": _stack(("one", 0, 2)),
    "fusion of two of which one is the base": (
        "models:\n  - model: one\n  - model: two\nmerge_method: arcee_fusion\nbase_model: one\n"
        "dtype: bfloat16\nout_dtype: bfloat16\n"
    ),
    "an unnamed document that needs a named one": (
        "name: blend\nmerge_method: linear\nmodels: [{model: one}, {model: two}]\nparameters: {weight: 0.5}\n---\n"
        "merge_method: task_arithmetic\nbase_model: base\nmodels: [{model: blend}, {model: three}]\n"
        "parameters: {weight: 0.6}\n"
    ),
    "documents that all have names": (
        f"{_SLERP_OF_LAYERS}name: first-step\n---\n"
        "models:\n"
        "  - model: first-step\n    parameters:\n      density: [1, 0.7, 0.1]\n      weight: 1.0\n"
        "  - model: three\n    parameters:\n      density: 0.33\n      weight:\n"
        "        - filter: mlp\n          value: 0.5\n        - value: 0\n"
        "merge_method: ties\nbase_model: base\nparameters:\n  normalize: true\n  int8_mask: true\n"
        "dtype: float16\nname: second-step\n"
    ),
}
# Name → (recipe, name of the final document, if all have names).
EXAMPLES = {name: (text, "second-step" if "all have names" in name else None) for name, text in _EXAMPLES.items()}
