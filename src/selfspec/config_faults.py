"""One line per fault of params.yaml: the parameter, the value it got, what is allowed, what to do.

What is allowed is read off the schema itself (as JSON schema), so that a message cannot drift from
the rule it reports.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

Path = tuple[int | str, ...]


def rule(field: str, value: object, allowed: str, action: str) -> PydanticCustomError:
    """The error that a validator over several fields raises; ``field`` is relative to its section."""
    return PydanticCustomError("rule", "{allowed}", {"field": field, "value": value, "allowed": allowed, "do": action})


def lines(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """The faults of ``error``, raised while validating ``model``, one line each."""
    schema = model.model_json_schema()
    faults = error.errors(include_url=False)
    typos = {fault["loc"]: _intended(fault["loc"], schema) for fault in faults if fault["type"] == "extra_forbidden"}
    result = []
    for fault in faults:
        path = fault["loc"]
        if fault["type"] == "too_short" and any(_inside(other["loc"], path) for other in faults):
            continue  # pydantic counts valid items only; the invalid ones are faults of their own
        if path in typos:
            result.append(_unknown(path, fault["input"], typos[path], schema))
        elif fault["type"] == "missing":
            # Its misspelt name has been reported already.
            if dotted(path) not in typos.values():
                result.append(f"{dotted(path)}: missing; allowed: {_allowed(path, schema)}; add it to params.yaml")
        elif fault["type"] == "rule":
            result.append(_broken_rule(fault))
        elif fault["type"] == "invalid_key" or path[-1:] == ("[key]",):  # a key that YAML read as a number, say
            owner = path[: -1 if fault["type"] == "invalid_key" else -2]
            result.append(
                f"{dotted(owner)}: got the key {_shown(fault['input'])}; allowed: {_allowed(owner, schema)}; quote it"
            )
        else:
            result.append(
                f"{dotted(path)}: got {_shown(fault['input'])}; allowed: {_allowed(path, schema)}; {_do(path)}"
            )
    return result


def dotted(path: Path) -> str:
    """``("shard", "sources", 0, "weight")`` as ``shard.sources[0].weight``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "params.yaml"


def _inside(path: Path, outer: Path) -> bool:
    return len(path) > len(outer) and path[: len(outer)] == outer


def _broken_rule(fault: ErrorDetails) -> str:
    context = fault["ctx"]
    name = dotted((*fault["loc"], context["field"]) if context["field"] else fault["loc"])
    return f"{name}: got {_shown(context['value'])}; allowed: {context['allowed']}; {context['do']}"


def _unknown(path: Path, value: object, intended: str | None, schema: Mapping[str, Any]) -> str:
    line = f"{dotted(path)}: got {_shown(value)}; no such parameter"
    if intended:
        return f"{line}, did you mean {intended}? Rename it in params.yaml or remove it"
    return f"{line}; allowed: {', '.join(_node(path[:-1], schema)['properties'])}; remove it from params.yaml"


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()  # as YAML spells them
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]} … {text[-17:]}"


def _do(path: Path) -> str:
    if not path:
        return "restore params.yaml from git"
    if any(isinstance(part, int) for part in path):  # `-S` cannot reach into a list
        return "set it in params.yaml"
    return f"set it in params.yaml or with -S {dotted(path)}=…"


def _node(path: Path, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema at ``path``; an empty one where it says nothing (inside free-form options)."""
    node = _resolved(schema, schema)
    for part in path:
        child = node.get("items", {}) if isinstance(part, int) else node.get("properties", {}).get(part, {})
        node = _resolved(child, schema)
    return node


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" in node:
        target: Mapping[str, Any] = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        return target
    return node


def _allowed(path: Path, schema: Mapping[str, Any]) -> str:
    return _description(_node(path, schema), schema)


def _description(node: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    node = _resolved(node, schema)
    if "anyOf" in node:
        return " or ".join(_description(option, schema) for option in node["anyOf"])
    if "enum" in node or "const" in node:
        return " or ".join(node.get("enum", [node.get("const")]))
    kind = node.get("type")
    if kind == "string":
        return str(node.get("description", "text"))
    if kind in ("integer", "number"):
        noun = "a whole number" if kind == "integer" else "a finite number"
        return f"{noun} {_bounds(node)}".strip()
    if kind == "array":
        size = "a list" if not node.get("minItems") else f"a list of at least {node['minItems']}"
        return f"{size}, each {_description(node.get('items', {}), schema)}"
    if kind == "object":
        names = ", ".join(node.get("properties", ()))
        return f"a mapping with {names}" if names else "a mapping whose keys are text"
    return "null" if kind == "null" else "what the schema in src/selfspec/config.py says"


def _bounds(node: Mapping[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    return " and ".join(f"{sign} {node[key]:.12g}" for key, sign in signs.items() if key in node)


def _intended(path: Path, schema: Mapping[str, Any]) -> str | None:
    """The parameter that an unknown one was probably meant to be: a near name, or the same name elsewhere."""
    name = str(path[-1])
    siblings: Sequence[str] = list(_node(path[:-1], schema).get("properties", ()))
    near = difflib.get_close_matches(name, siblings, n=1)
    if near:
        return dotted((*path[:-1], near[0]))
    elsewhere = [other for other in _names(schema, schema, ()) if other[-1] == name]
    return " or ".join(dotted(other) for other in elsewhere) or None


def _names(node: Mapping[str, Any], schema: Mapping[str, Any], path: Path) -> Iterator[Path]:
    for name, child in _resolved(node, schema).get("properties", {}).items():
        yield (*path, name)
        yield from _names(child, schema, (*path, name))
