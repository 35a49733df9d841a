"""Which sections of params.yaml a stage reads, and keys of some, read off the syntax tree of its script."""

from __future__ import annotations

import ast

from pydantic import BaseModel

from selfspec.config import Config

ALL = tuple(Config.model_fields)  # in the order of params.yaml
BY_KEY = ("distill", "head")
"""Declared by the keys that a stage reads: `distill` reads one of the head's, and training one of `distill`'s."""


def place(name: str) -> tuple[int, str]:
    """Sorts sections and their keys (``head.depths``) as dvc.yaml lists them."""
    section, _, key = name.partition(".")
    return ALL.index(section), key


def sections_read(tree: ast.Module) -> set[str]:
    """The sections that a script's functions take from an argument annotated ``Config``.

    Of a section in ``BY_KEY``, the keys, unless it is used as a whole. A config handed on whole, other than to
    a function of the same script, may be read in all of its sections. That is what the result then says.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    local = {function.name for function in functions}
    read: set[str] = set()
    for function in functions:
        configs = {arg.arg for arg in function.args.args if arg.annotation and ast.unparse(arg.annotation) == "Config"}
        accounted: set[ast.expr] = set()  # uses that name their section, or that are followed elsewhere
        of_keys: set[ast.expr] = set()  # sections inside uses that name their key
        for node in ast.walk(function):  # what is around comes before what is inside
            if isinstance(node, ast.Attribute) and node not in of_keys and (name := _named(node, configs)):
                read.add(name)
                of_keys.add(node.value)
                accounted.update(part for part in ast.walk(node) if isinstance(part, ast.Name))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in local:
                accounted.update(node.args)
                accounted.update(keyword.value for keyword in node.keywords)
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in configs and node not in accounted:
                read.update(ALL)
    return {name for name in read if "." not in name or name.split(".")[0] not in read}


def _named(node: ast.Attribute, configs: set[str]) -> str | None:
    """``loss`` for ``cfg.loss``, ``head.depths`` for ``cfg.head.depths``; None for what is no parameter."""
    owner = node.value
    if isinstance(owner, ast.Name):
        return node.attr if owner.id in configs else None
    if not isinstance(owner, ast.Attribute) or (section := _named(owner, configs)) not in BY_KEY:
        return None
    return f"{section}.{node.attr}" if node.attr in _keys(section) else None


def _keys(section: str) -> set[str]:
    model = Config.model_fields[section].annotation
    return set(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else set()
