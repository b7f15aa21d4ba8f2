"""Read chat templates in every form that transformers supports, select those of a merge, and write them.

A model can have several named templates. Libraries use ``default`` unless a caller names another template, except that
transformers selects ``tool_use`` if tools are passed. The built-in templates have mergekit's names, but their own text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from mergegate.merge_core.checkpoint.companions import TEMPLATE_FILE, TEMPLATE_FOLDER, Companions, is_template_file
from mergegate.merge_core.errors import InvalidInput, suggest
from mergegate.merge_core.parsing import JsonBounds

DEFAULT = "default"
ChatTemplates: TypeAlias = Mapping[str, str]
"""Jinja text by template name. Empty if a model has no chat template."""

_SETTINGS = "tokenizer_config.json"
_PROCESSOR_TEMPLATE = "chat_template.json"  # Processors read this file, tokenizers do not.
_MAX_TEMPLATE_BYTES = 1 << 20
_SETTINGS_BOUNDS = JsonBounds(size=96 << 20, values=4_000_000)
# A template name is also a file name, so it must not lead to another directory.
_NAME = re.compile(r"[^./\\\0][^/\\\0]{0,199}")


def _build_template(turn: str, *, start: str = "", prompt: str = "") -> str:
    """Return a template that renders ``start``, one ``turn`` per message, and the generation prompt."""
    generation_prompt = f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}" if prompt else ""
    return f"{start}{{% for message in messages %}}{turn}{{% endfor %}}{generation_prompt}"


KNOWN = {
    "alpaca": _build_template(
        "{% if message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
        "{% elif message['role'] == 'user' %}{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}"
        "{% else %}{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}{% endif %}",
        prompt="{{ '### Response:\\n' }}",
    ),
    "chatml": _build_template(
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}",
        prompt="{{ '<|im_start|>assistant\\n' }}",
    ),
    "exaone": _build_template(
        "{{ '[|' + message['role'] + '|]' + message['content'] }}"
        "{% if message['role'] == 'user' %}{{ '\\n' }}{% else %}{{ '[|endofturn|]\\n' }}{% endif %}",
        prompt="{{ '[|assistant|]' }}",
    ),
    "llama3": _build_template(
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
        "{{ message['content'] | trim + '<|eot_id|>' }}",
        start="{{ bos_token }}",
        prompt="{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
    ),
    "mistral": _build_template(
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
        "{% else %}{{ message['content'] + '\\n' }}{% endif %}",
        start="{{ bos_token }}",
    ),
}

# Token that ends a turn in these templates, if it is not the tokenizer's end-of-sequence token.
TURN_ENDS = {"chatml": "<|im_end|>", "exaone": "[|endofturn|]", "llama3": "<|eot_id|>"}


# Texts that end a thought in published models.
_THINK_ENDS = ("</think>", "[/THINK]", "</seed:think>", "<|END_THINKING|>")
# A template removes the thoughts of earlier turns by splitting them.
_SPLIT = re.compile(r"""\.split\(\s*(?P<quote>['"])(?P<text>.+?)(?P=quote)\s*\)""")


class ThinkingTemplate(NamedTuple):
    """How the chat template of a thinking model handles thoughts."""

    end: str  # text that ends a thought; empty if it is unknown
    has_switch: bool  # whether the template reads ``enable_thinking``


def find_thinking(template: str | None, tokens: Collection[str] = ()) -> ThinkingTemplate | None:
    """Return how a model handles thoughts, or None if its chat template and its ``tokens`` show no thinking model."""
    if template is None:
        return None
    has_switch = "enable_thinking" in template
    end = next((end for source in (template, tokens) for end in _THINK_ENDS if end in source), "")
    if has_switch and not end and (splits := [match["text"] for match in _SPLIT.finditer(template)]):
        end = splits[-1]
    return ThinkingTemplate(end, has_switch) if end or has_switch else None


def read_chat_templates(files: Companions) -> dict[str, str]:
    """Return the chat templates of a model by name, as ``AutoTokenizer`` of transformers would load them.

    ``chat_template.jinja`` is the default template, and ``additional_chat_templates/NAME.jinja`` are the others. Only
    without such files, ``chat_template`` in ``tokenizer_config.json`` counts, which is a text, a list of
    ``{name, template}`` or an object. ``chat_template.json`` is the last resort, because only processors read it.

    Raises:
        InvalidInput: A file has the wrong format, or its ``chat_template`` has an unknown form.
    """
    templates = {}
    for file in sorted(files, key=lambda file: file != TEMPLATE_FILE):
        if file == TEMPLATE_FILE or file.startswith(f"{TEMPLATE_FOLDER}/"):
            name = file.removeprefix(f"{TEMPLATE_FOLDER}/").removesuffix(".jinja") if file != TEMPLATE_FILE else DEFAULT
            text = files.text(file, _MAX_TEMPLATE_BYTES, "a chat template")
            templates[_require_valid_name(name, files.location(file))] = text
    for file in (_SETTINGS, _PROCESSOR_TEMPLATE):
        content = files.json(file, _SETTINGS_BOUNDS) if not templates else None
        value = content.get("chat_template") if content is not None else None
        if value is None:
            continue
        location = f"{files.location(file)}: chat_template"
        pairs: list[tuple[Any, Any]]
        if isinstance(value, str):
            pairs = [(DEFAULT, value)]
        elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
            pairs = [(entry.get("name"), entry.get("template")) for entry in value]
        elif isinstance(value, dict):
            pairs = list(value.items())
        else:
            raise InvalidInput(
                location,
                found=f"{value!r:.60}",
                expected="a Jinja text, or a list of {name: text, template: Jinja text}",
            )
        for name, template in pairs:
            if not isinstance(name, str) or not isinstance(template, str):
                raise InvalidInput(
                    location,
                    found=f"an entry with name {name!r:.40} and template {template!r:.40}",
                    expected="{name: text, template: Jinja text} in every entry",
                    remedy="save the tokenizer again with transformers, or correct the entry",
                )
        templates = {_require_valid_name(name, location): template for name, template in pairs}
    return templates


def _require_valid_name(name: str, location: str) -> str:
    if not _NAME.fullmatch(name):
        raise InvalidInput(
            location,
            found=f"a template with the name {name!r:.60}",
            expected="a name that can also be a file name, such as 'default' or 'tool_use'",
            remedy="rename the template",
        )
    return name


def select_chat_templates(choice: str, parents: Sequence[ChatTemplates], location: str) -> dict[str, str]:
    """Return the templates of the merge, according to the recipe's ``chat_template`` (``choice``).

    ``choice`` is ``auto``, a built-in name, or the text of the default template. ``auto`` selects the most common
    default template of ``parents`` (in a tie, that of the first parent), and the most common set of additional
    templates among the parents that have this default.

    Raises:
        InvalidInput: ``choice`` has another value, or it is ``auto`` and no parent has a template.
    """
    if choice in KNOWN:
        return {DEFAULT: KNOWN[choice]}
    if choice == "auto":
        available = [templates for templates in parents if templates]
        if not available:
            raise InvalidInput(location, found="auto", expected="at least one parent with a chat template")
        default = Counter(templates.get(DEFAULT) for templates in available).most_common(1)[0][0]
        sets = Counter(tuple(templates.items()) for templates in available if templates.get(DEFAULT) == default)
        return dict(sets.most_common(1)[0][0])
    if "{" not in choice:
        names = ("auto", *KNOWN)
        raise InvalidInput(
            location,
            found=f"{choice!r:.60}",
            expected="auto, the name of a built-in template, or a Jinja text",
            remedy=suggest(choice, names),
        )
    return {DEFAULT: choice}


def with_chat_templates(files: Companions, templates: ChatTemplates) -> Companions:
    """Return a copy of ``files`` in which ``templates`` replace all previous chat templates.

    They are written as ``.jinja`` files and, if it exists, into ``tokenizer_config.json``, because libraries differ in
    where they look. All other template files are removed.
    """
    changes: dict[str, bytes | None] = dict.fromkeys(filter(is_template_file, files))
    for name, template in templates.items():
        changes[TEMPLATE_FILE if name == DEFAULT else f"{TEMPLATE_FOLDER}/{name}.jinja"] = template.encode()
    if (settings := files.json(_SETTINGS, _SETTINGS_BOUNDS)) is not None:
        entries = [{"name": name, "template": template} for name, template in templates.items()]
        declaration = templates[DEFAULT] if list(templates) == [DEFAULT] else entries
        content = {**settings, "chat_template": declaration}
        changes[_SETTINGS] = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    return files.with_changes(changes)
