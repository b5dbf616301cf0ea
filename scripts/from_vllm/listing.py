"""Lists what the installed vLLM has: the options of ``vllm serve``, the names of its metrics, and the fields
of its requests.

Run it with the Python that has vLLM, and without this repository on its path:

    python scripts/from_vllm/listing.py > scripts/from_vllm/vllm.json
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_NAME = re.compile(r"""["'](vllm:[a-z0-9_]+)["']""")
_NO_METRICS = {"vllm:spec_decode", "vllm:diffusion"}
_NOT_SERVING = {"benchmarks", "config", "kernels", "model_executor", "utils"}


_BODIES = {
    "/v1/completions": ("openai/completion", ("CompletionRequest",)),
    "/v1/chat/completions": ("openai/chat_completion", ("ChatCompletionRequest",)),
    "/v1/responses": ("openai/responses", ("ResponsesRequest",)),
    "/v1/messages": ("anthropic", ("AnthropicMessagesRequest",)),
    "/v1/messages/count_tokens": ("anthropic", ("AnthropicCountTokensRequest",)),
    "/tokenize": ("serve/tokenize", ("TokenizeCompletionRequest", "TokenizeChatRequest")),
    "/detokenize": ("serve/tokenize", ("DetokenizeRequest",)),
}
"""The classes of each path's body, and the folder of the file that has them."""
_OFFLINE = {"SamplingParams": "SamplingParams", "StructuredOutputsParams": "structured_outputs"}
"""The classes that programs and requests share, and the names of their lists."""


def options() -> list[dict[str, object]]:
    """The options in the order of its help, each with its group, spellings, number of values and choices."""
    parsing = importlib.import_module("vllm.utils.argparse_utils")
    launching = importlib.import_module("vllm.entrypoints.launchers.cli_args")
    parser: argparse.ArgumentParser = launching.make_arg_parser(parsing.FlexibleArgumentParser())
    return [
        {
            "names": list(action.option_strings),
            "group": "General" if group.title in ("options", "optional arguments") else group.title,
            "values": _values(action),
            "choices": sorted(str(choice) for choice in action.choices or () if choice is not None),
        }
        for group in parser._action_groups  # argparse has no other way to ask
        for action in group._group_actions
        if action.option_strings and action.dest != "help"
    ]


def metrics() -> list[str]:
    """The names of its metrics, without the suffix of counters, as they stand in its source."""
    root = _root()
    names = {
        name.removesuffix("_total")
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0] not in _NOT_SERVING and path.parent != root
        for name in _NAME.findall(path.read_text(encoding="utf-8"))
    }
    return sorted(names - _NO_METRICS)


def fields() -> list[dict[str, object]]:
    """The fields of the bodies by path, and of the classes that programs use, in the order of its source. The
    source is read and not run: to import it takes the whole of vLLM."""
    root = _root()
    entries: list[dict[str, object]] = []
    for path, (folder, classes) in _BODIES.items():
        own = _classes(root / "entrypoints" / folder / "protocol.py")
        names = dict.fromkeys(name for cls in classes for name in _fields(own[cls]))
        entries.append({"of": path, "names": list(names)})
    shared = _classes(root / "sampling_params.py")
    entries += [{"of": name, "names": _fields(shared[cls])} for cls, name in _OFFLINE.items()]
    return entries


def _classes(file: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields(cls: ast.ClassDef) -> list[str]:
    return [
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(node.annotation)
    ]


def _root() -> Path:
    found = find_spec("vllm")
    if found is None or found.origin is None:
        sys.exit("vllm is not installed for this Python")
    return Path(found.origin).parent


def _values(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "none"
    return "several" if action.nargs in ("+", "*") else "one"


if __name__ == "__main__":
    lists: dict[str, Sequence[object]] = {
        "options": options(),
        "metrics": metrics(),
        "fields": fields(),
    }
    print(f'{{"vllm": "{version("vllm").partition("+")[0]}"', end="")
    for name, entries in lists.items():
        lines = ",\n".join(json.dumps(entry) for entry in entries)
        print(f',\n"{name}": [\n{lines}\n]', end="")
    print("}")
