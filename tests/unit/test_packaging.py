"""The lock, the direct requirements and the package's own dependencies agree with each other and with the code."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = {"yaml": "pyyaml", "pydantic_core": "pydantic"}  # where the import is called otherwise
ELSEWHERE = {"vllm"}  # in an environment of its own


def _lines(name):
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line]


LOCKED = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in _lines("requirements.lock")}
DIRECT = [Requirement(line) for line in _lines("requirements.in")]
PACKAGE = [
    Requirement(text) for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
]


@pytest.mark.parametrize("line", _lines("requirements.lock"))
def test_the_lock_has_bare_pins_only(line):
    """No hosts, no paths, no local versions: it has to install anywhere."""
    assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)
    assert not line.lower().startswith(("nvidia", "cuda", "triton", "selfspec", "pip=="))


@pytest.mark.parametrize("requirement", [*DIRECT, *PACKAGE], ids=str)
def test_the_lock_satisfies_every_requirement(requirement):
    assert requirement.specifier.contains(LOCKED[canonicalize_name(requirement.name)])


def test_what_the_code_imports_is_declared():
    imported = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported.update(name.split(".")[0] for name in names)
    imported -= {*sys.stdlib_module_names, "selfspec", *ELSEWHERE}
    declared = {canonicalize_name(requirement.name) for requirement in PACKAGE}
    missing = {name for name in imported if canonicalize_name(DISTRIBUTIONS.get(name, name)) not in declared}
    assert not missing
    assert declared <= {canonicalize_name(requirement.name) for requirement in DIRECT}
