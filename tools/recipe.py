"""Write params.yaml from a recipe: ``make recipe NAME=minicpm-1b-shared``; without a name, list the recipes.

A recipe is laid over the default one (``recipes/smollm2-135m-shared.yaml``): sections merge, values and
lists replace. ``extends: FILE``, relative to recipes/, lays that file in between. The result is validated
before anything is written, and what changes is printed.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from selfspec import config
from selfspec.errors import SelfspecError

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
DEFAULT = "smollm2-135m-shared"
PARAMS = Path("params.yaml")
_NULL = "tag:yaml.org,2002:null"


class RecipeError(SelfspecError):
    """No such recipe, or writing it would lose something."""


def _yaml() -> YAML:
    """Reads and writes the default recipe without a changed byte."""
    handler = YAML()
    handler.preserve_quotes = True
    handler.width = 10_000
    handler.indent(mapping=2, sequence=4, offset=2)
    handler.representer.add_representer(type(None), lambda made, _: made.represent_scalar(_NULL, "null"))
    return handler


def names() -> list[str]:
    """The recipes, the default first."""
    found = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    return [DEFAULT, *(name for name in found if name != DEFAULT)]


def summary(name: str) -> str:
    """The first sentence of a recipe's comment."""
    lines = (RECIPES / f"{name}.yaml").read_text().splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines[:3] if line.startswith("#"))
    return comment.split(". ")[0].rstrip(".")


def build(name: str) -> Any:
    """The parameters of recipe ``name`` with the default's comments, as a ruamel mapping.

    Raises:
        RecipeError: there is no such recipe.
        ConfigError: the recipe breaks the schema.
    """
    if name not in names():
        raise RecipeError(f"NAME: got {name!r}, allowed: {', '.join(names())}")
    merged = _yaml().load((RECIPES / f"{DEFAULT}.yaml").read_text())
    if name != DEFAULT:
        overlay = _yaml().load((RECIPES / f"{name}.yaml").read_text())
        if extended := overlay.pop("extends", None):
            merge(merged, _yaml().load((RECIPES / extended).read_text()))
        merge(merged, overlay)
    config.parse(plain(merged))
    return merged


def merge(base: Any, overlay: dict[str, Any]) -> None:
    """Lay ``overlay`` over ``base`` in place; ``base`` keeps its comments, but for those inside what is replaced."""
    for key, value in overlay.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
            continue
        if isinstance(base, CommentedMap) and isinstance(value, list) and value and isinstance(value[0], dict):
            base.ca.items.pop(key, None)  # comments on the old entries; the new ones bring theirs
        base[key] = value


def plain(node: Any) -> Any:
    """What YAML without comments reads from ruamel's containers and scalars."""
    stream = io.StringIO()
    _yaml().dump(node, stream)
    return yaml.safe_load(stream.getvalue())


def differences(old: Any, new: Any) -> list[str]:
    """One line per parameter that differs; lists count as one value."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    return [
        f"{key}: {_shown(before.get(key))} -> {_shown(after.get(key))}"
        for key in dict.fromkeys([*after, *before])
        if before.get(key) != after.get(key)
    ]


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in (node or {}).items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"{len(value)} entries"
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def write(name: str, *, force: bool = False) -> list[str]:
    """Write params.yaml of the current folder; return what changed.

    Raises:
        RecipeError: params.yaml has edits that git does not hold (unless ``force``).
    """
    recipe = build(name)
    try:
        old = yaml.safe_load(PARAMS.read_text()) if PARAMS.exists() else {}
    except yaml.YAMLError:
        old = {}  # broken: everything is new, and git decides whether it may go
    changed = differences(old, plain(recipe))
    if not changed:
        return []
    if PARAMS.exists() and not force and _edited():
        raise RecipeError(f"{PARAMS}: has edits that git does not hold; commit or stash them, or add FORCE=1")
    partial = PARAMS.with_suffix(".yaml.new")
    with partial.open("w") as stream:
        _yaml().dump(recipe, stream)
    os.replace(partial, PARAMS)
    return changed


def _edited() -> bool:
    """Whether params.yaml differs from what git holds; so it does where there is no git."""
    done = subprocess.run(["git", "status", "--porcelain", "--", str(PARAMS)], capture_output=True, text=True)
    return done.returncode != 0 or bool(done.stdout.strip())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="one of the recipes; none: list them")
    parser.add_argument("--force", action="store_true", help="overwrite edits of params.yaml that git does not hold")
    options = parser.parse_args()
    if not options.name:
        for name in names():
            print(f"{name:24} {summary(name)}")
        return
    try:
        changed = write(options.name, force=options.force)
    except SelfspecError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print("\n".join(changed) if changed else f"{PARAMS} is recipe {options.name} already")


if __name__ == "__main__":
    main()
