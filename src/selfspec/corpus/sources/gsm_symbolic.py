"""Word problems from the templates of GSM-Symbolic (arXiv:2410.05229), as reasoning-gym ships them."""

from __future__ import annotations

import ast
import sys
import zipimport
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

from pydantic import field_validator

from selfspec.corpus.records import CorpusError, Document, stable_hash, user
from selfspec.corpus.sources.base import Context, Loader
from selfspec.resources import fetch

_PACKAGE = "reasoning_gym/arithmetic/gsm_symbolic"
Generator = Callable[[Random], dict[str, Any]]


class GsmSymbolic(Loader):
    """``instances`` questions from each of the templates ``templates[0]`` to ``templates[1]`` (inclusive).

    The group is the template. Templates that the package itself lists as broken are left out. Instances
    come in rounds, one of each template a round, so that any first N cover all templates evenly.
    """

    templates: tuple[int, int]
    instances: int

    @field_validator("templates")
    @classmethod
    def _ordered(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= value[0] <= value[1] <= 99:
            raise ValueError("[first, last] with 0 <= first <= last <= 99")
        return value

    def documents(self, context: Context) -> Iterator[Document]:
        wheel = fetch(context.source.archives[0], context.root)
        generators, sound = load_generators(wheel)
        first, last = self.templates
        chosen = sorted((t for t in sound if first <= t <= last), key=lambda t: stable_hash(f"template/{t}"))
        if not chosen:
            raise CorpusError(
                f"shard.sources.{context.source.name}.options.templates: {list(self.templates)} holds no usable "
                f"template; the package's usable ones are {sorted(sound)}"
            )
        for instance in range(self.instances):
            for template in chosen:
                draw = Random(stable_hash(f"gsm_symbolic/{context.seed}/{template}/{instance}"))
                question = generators[template](draw)["question"]
                yield Document(f"{template:02d}-{instance}", group_of(template), messages=user(question))


def group_of(template: int) -> str:
    """The group of all instances of a template."""
    return f"gsm_symbolic/template/{template:02d}"


def load_generators(wheel: Path) -> tuple[dict[int, Generator], frozenset[int]]:
    """The template functions, and the numbers of the sound ones, straight from the wheel.

    Two modules and the helper they import are loaded by themselves: importing the package would load
    every other task family and its dependencies.
    """
    helper_name = "reasoning_gym.utils"
    before = sys.modules.get(helper_name)
    try:
        sys.modules[helper_name] = _load(wheel, "reasoning_gym", "utils", helper_name)
        modules = [_load(wheel, _PACKAGE, name, name) for name in ("generators_00_49", "generators_50_99")]
        source = zipimport.zipimporter(f"{wheel}/{_PACKAGE}").get_source("gsm_symbolic")
    except (ImportError, SyntaxError) as error:
        raise CorpusError(f"{wheel.name}: no gsm_symbolic generators ({error}); use the pinned archive") from None
    finally:
        sys.modules.pop(helper_name, None)
        if before is not None:
            sys.modules[helper_name] = before
    generators = {
        int(name.removeprefix("generate_")): function
        for module in modules
        for name, function in vars(module).items()
        if name.startswith("generate_")
    }
    for node in ast.parse(source or "").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "tasks_ok":
            return generators, frozenset(ast.literal_eval(node.value))
    raise CorpusError(f"{wheel.name}: gsm_symbolic names no sound templates; use the pinned archive")


def _load(wheel: Path, folder: str, name: str, module_name: str) -> ModuleType:
    importer = zipimport.zipimporter(f"{wheel}/{folder}")
    module = ModuleType(module_name)
    exec(importer.get_code(name), module.__dict__)
    return module
