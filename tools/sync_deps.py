"""Correct dvc.yaml from the stages' scripts: `make deps`.

The code dependencies of a stage become what its script imports, its params the sections it reads.
Comments, order and layout stay; dependencies on data stay; a stage whose script does not exist is
left alone and named.
"""

from __future__ import annotations

import ast
import io
import re
import sys
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from tools.imports import closure
from tools.sections import place, sections_read

CODE = ("src/", "stages/")


def script(stage: CommentedMap) -> Path | None:
    """The script behind ``cmd: python -m stages.x``; None for another kind of command."""
    match = re.fullmatch(r"python -m stages\.(\w+)", str(stage["cmd"]).strip())
    return Path(f"stages/{match[1]}.py") if match else None


def code_deps(root: Path, stage: CommentedMap) -> set[str]:
    """What the stage's dependencies on code have to be: its script, notebooks and all they import."""
    entry = script(stage)
    starts = [entry] if entry else []
    starts += [Path(str(dep)) for dep in stage.get("deps", ()) if str(dep).endswith(".ipynb")]
    return {path.as_posix() for path in closure(root, *starts)}


def params(root: Path, entry: Path) -> set[str]:
    """What the params of the stage with that script have to be."""
    return sections_read(ast.parse((root / entry).read_text(encoding="utf-8")))


def synced(root: Path, text: str) -> str:
    """The text of a dvc.yaml with the code dependencies and the params of every stage corrected."""
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    document = yaml.load(text)
    for name, stage in document["stages"].items():
        entry = script(stage)
        if entry is None or not (root / entry).is_file():
            print(f"{name}: no script {entry}; left as it is", file=sys.stderr)
            continue
        _correct(stage.setdefault("deps", CommentedSeq()), code_deps(root, stage), first=entry.as_posix())
        _correct_params(stage.setdefault("params", CommentedSeq()), params(root, entry))
    stream = io.StringIO()
    yaml.dump(document, stream)
    return stream.getvalue()


def _correct(deps: CommentedSeq, wanted: set[str], first: str) -> None:
    """Delete and insert in place, which keeps the comments on the lines that stay."""
    for index in reversed(range(len(deps))):
        if str(deps[index]).startswith(CODE) and str(deps[index]) not in wanted:
            del deps[index]
    for path in sorted(wanted - {str(dep) for dep in deps}, key=lambda path: (path != first, path)):
        later = (index for index, dep in enumerate(deps) if _rank(str(dep), first) > _rank(path, first))
        deps.insert(next(later, len(deps)), path)


def _correct_params(declared: CommentedSeq, wanted: set[str]) -> None:
    for index in reversed(range(len(declared))):
        if declared[index] not in wanted:
            del declared[index]
    for name in sorted(wanted - set(declared), key=place):
        later = (index for index, other in enumerate(declared) if place(other) > place(name))
        declared.insert(next(later, len(declared)), name)


def _rank(dep: str, first: str) -> tuple[int, str]:
    """The script, then the other code by name, then data in the order it was written."""
    return (0, "") if dep == first else (1, dep) if dep.startswith(CODE) else (2, "")


def main() -> None:
    """Correct dvc.yaml of the current folder and say whether it changed."""
    path = Path("dvc.yaml")
    before = path.read_text(encoding="utf-8")
    after = synced(Path(), before)
    if after != before:
        path.write_text(after, encoding="utf-8")
    print(f"{path}: {'rewritten' if after != before else 'up to date'}")


if __name__ == "__main__":
    main()
