"""Code, docstrings and function stubs from the modules of Python wheels."""

from __future__ import annotations

import ast
import re
import textwrap
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Literal

from selfspec.corpus.records import Document, stable_hash, user
from selfspec.corpus.sources.base import Context, Loader

_PARSER_LOCK = threading.Lock()  # catch_warnings is global, and sources are read in threads
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_MATHS = re.compile(r":math:|\.\. math::|\\(?:frac|sum|int|sqrt|left|alpha|lambda|mathbb)\b|\$[^$\n]+\$")
_WORDINGS = (
    "Write the body of this Python function.",
    "Implement this Python function.",
    "Fill in the missing body.",
    "What could the body of this function be?",
)


class PythonFiles(Loader):
    """Pieces of the modules, file by file, in the order of a hash of the file names over all archives.

    ``code``: top-level definitions without their docstrings. ``docstrings``: docstrings as text.
    ``signatures``: a function's signature and docstring, as a request for its body. The group is the
    file, whichever part is read, so its code is never held out while its docstrings are trained on.
    """

    part: Literal["code", "docstrings", "signatures"]
    exclude: tuple[str, ...] = ("/tests/", "/test_", "/testing/", "/conftest", "/benchmarks/", "/_vendor/")
    maths: bool = False  # docstrings: only those with mathematical mark-up
    min_chars: int = 200
    max_chars: int = 20000
    per_file: int = 20  # pieces taken of one file, lest one large module crowds out the others

    def documents(self, context: Context) -> Iterator[Document]:
        with ExitStack() as stack:
            archives = [stack.enter_context(context.open(index)) for index in range(len(context.source.archives))]
            files = [(name, archive) for archive in archives for name in archive.names() if self._wanted(name)]
            for name, archive in sorted(files, key=lambda file: stable_hash(file[0])):
                source = archive.read(name).decode("utf-8", "replace")
                for qualified, piece in islice(self._pieces(source), self.per_file):
                    key = f"{name}:{qualified}"
                    if self.part == "signatures":
                        yield Document(key, name, messages=user(piece))
                    else:
                        yield Document(key, name, text=piece)

    def _wanted(self, name: str) -> bool:
        return name.endswith(".py") and not any(part in f"/{name}" for part in self.exclude)

    def _pieces(self, source: str) -> Iterator[tuple[str, str]]:
        try:
            with _PARSER_LOCK, warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return
        lines = source.splitlines()
        definitions = _definitions(tree) if self.part != "code" else _top_level(tree)
        unique: dict[str, Definition] = {}
        for qualified, node in definitions:
            unique.setdefault(qualified, node)  # later ones are overloads, setters and fallbacks
        for qualified, node in sorted(unique.items(), key=lambda found: stable_hash(found[0])):
            piece = self._piece(node, qualified, lines)
            if piece is not None and self.min_chars <= len(piece) <= self.max_chars:
                yield qualified, piece

    def _piece(self, node: Definition, qualified: str, lines: list[str]) -> str | None:
        if self.part == "code":
            return code_without_docstrings(node, lines)
        documentation = ast.get_docstring(node)
        if documentation is None:
            return None
        if self.part == "docstrings":
            return documentation if not self.maths or _MATHS.search(documentation) else None
        stub = function_stub(node, documentation, lines)
        wording = _WORDINGS[stable_hash(qualified) % len(_WORDINGS)]
        return None if stub is None else f"{wording}\n\n```python\n{stub}\n```"


def _top_level(tree: ast.Module) -> list[tuple[str, Definition]]:
    return [(node.name, node) for node in tree.body if isinstance(node, Definition)]


def _definitions(tree: ast.Module) -> list[tuple[str, Definition]]:
    """Top-level definitions and the methods of top-level classes."""
    found = _top_level(tree)
    for name, node in list(found):
        if isinstance(node, ast.ClassDef):
            found += [(f"{name}.{inner.name}", inner) for inner in node.body if isinstance(inner, Definition)]
    return found


def _docstring_node(node: ast.AST) -> ast.Expr | None:
    if not isinstance(node, Definition) or not isinstance(node.body[0], ast.Expr):
        return None
    value = node.body[0].value
    return node.body[0] if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def code_without_docstrings(node: Definition, lines: list[str]) -> str | None:
    """The definition's source lines less every docstring in it; None where nothing but one remains."""
    dropped: set[int] = set()
    for inner in ast.walk(node):
        docstring = _docstring_node(inner)
        if isinstance(inner, Definition) and docstring is not None:
            if len(inner.body) == 1:
                return None
            dropped.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    last = node.end_lineno or node.lineno
    return "\n".join(lines[number - 1] for number in range(first, last + 1) if number not in dropped)


def function_stub(node: Definition, documentation: str, lines: list[str]) -> str | None:
    """Signature and the docstring's opening paragraphs; None for classes and one-line bodies."""
    docstring = _docstring_node(node)
    if isinstance(node, ast.ClassDef) or docstring is None or node.name.startswith("_"):
        return None
    if (node.end_lineno or 0) - (docstring.end_lineno or 0) < 3:
        return None
    signature = textwrap.dedent("\n".join(lines[node.lineno - 1 : docstring.lineno - 1]))
    opening = documentation[:500].split("\n\n")
    text = "\n\n".join(opening if len(documentation) <= 500 else (opening[:-1] or opening))
    body = textwrap.indent(f'"""{text}\n"""', "    ")
    return f"{signature}\n{body}"
