"""Which sections of params.yaml a stage reads, read off the syntax tree of its script."""

from __future__ import annotations

import ast

from selfspec.config import Config

ALL = tuple(Config.model_fields)  # in the order of params.yaml


def sections_read(tree: ast.Module) -> set[str]:
    """The sections that a script's functions take from an argument annotated ``Config``.

    A config handed on whole, other than to a function of the same script, may be read in all of its
    sections. That is what the result then says.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    local = {function.name for function in functions}
    read: set[str] = set()
    for function in functions:
        configs = {arg.arg for arg in function.args.args if arg.annotation and ast.unparse(arg.annotation) == "Config"}
        accounted: set[ast.expr] = set()  # uses that name their section, or that are followed elsewhere
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in configs:
                read.add(node.attr)
                accounted.add(node.value)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in local:
                accounted.update(node.args)
                accounted.update(keyword.value for keyword in node.keywords)
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in configs and node not in accounted:
                read.update(ALL)
    return read
