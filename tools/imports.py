"""Which files of this repository a stage executes, read off the syntax tree.

DVC does not follow imports: a stage's ``deps`` have to name every module whose change could change
its outputs. This module finds them; ``tools.sync_deps`` writes them into dvc.yaml and
``tests/unit/test_architecture.py`` holds dvc.yaml to them.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

SOURCE_ROOTS = {"selfspec": Path("src/selfspec"), "stages": Path("stages")}


def closure(root: Path, *starts: Path) -> set[Path]:
    """Every file under src/ and stages/ that running ``starts`` may execute, relative to ``root``.

    ``starts`` are scripts or notebooks, relative to ``root``; scripts are part of the result.
    A package's ``__init__`` counts unless it only documents the package, and so do the files that are
    not Python (templates, say) in the folder of a module that counts.
    """
    found: set[Path] = set()
    queue = list(starts)
    while queue:
        path = queue.pop()
        if path in found:
            continue
        found.add(path)
        for name in imported(root, path):
            queue.extend(file for file in _files(root, name) if not _only_documents(root / file))
    found = {path for path in found if path.suffix == ".py"}
    return found | {data for path in found for data in _data_beside(root, path)}


def imported(root: Path, path: Path) -> set[str]:
    """Dotted names of the repository's own modules that ``path`` imports, at any depth of its code.

    Imports under ``if TYPE_CHECKING:`` are left out: they never run.
    """
    names: set[str] = set()
    for node in _executed(_tree(root / path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, path)
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return {name for name in names if name.split(".")[0] in SOURCE_ROOTS and _module(root, name)}


def module_name(path: Path) -> str:
    """``src/selfspec/heads/shared.py`` as ``selfspec.heads.shared``."""
    parts = list(path.with_suffix("").parts)
    if parts[0] == "src":
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _tree(path: Path) -> ast.Module:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        lines = "\n".join("".join(cell["source"]) for cell in cells).splitlines()
        text = "\n".join("" if line.startswith(("%", "!")) else line for line in lines)
    return ast.parse(text, filename=str(path))


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for alternative in child.orelse:
                yield from _executed(alternative)
            continue
        yield child
        yield from _executed(child)


def _absolute(node: ast.ImportFrom, path: Path) -> str:
    if not node.level:
        return node.module or ""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def _module(root: Path, name: str) -> Path | None:
    first, *rest = name.split(".")
    stem = SOURCE_ROOTS[first].joinpath(*rest)
    for candidate in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
        if (rest or candidate.name == "__init__.py") and (root / candidate).is_file():
            return candidate
    return None


def _files(root: Path, name: str) -> Iterator[Path]:
    """The module ``name`` and the ``__init__`` of each package above it: importing runs them all."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        path = _module(root, ".".join(parts[:length]))
        if path is not None:
            yield path


def _only_documents(path: Path) -> bool:
    """Whether the module holds nothing beyond a docstring and constants like ``__version__``."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        constant = isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        if not (docstring or constant):
            return False
    return path.name == "__init__.py"


def _data_beside(root: Path, path: Path) -> Iterator[Path]:
    """Files that are not Python in the folder of a package's module, and below it up to the next package."""
    package = path.parent
    if package in SOURCE_ROOTS.values() or package.parts[0] != "src":
        return
    inner = [init.parent for init in (root / package).glob("*/**/__init__.py")]
    for file in sorted((root / package).rglob("*")):
        if file.is_file() and file.suffix not in (".py", ".pyc") and not any(file.is_relative_to(p) for p in inner):
            yield file.relative_to(root)
