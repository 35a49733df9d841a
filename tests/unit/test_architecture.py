"""Imports point one way, and dvc.yaml names what each stage reads."""

import ast
from pathlib import Path

import pytest
import yaml

from selfspec.config import Config
from tools.imports import closure, imported, module_name
from tools.sections import sections_read
from tools.sync_deps import CODE, code_deps, params, script, synced

ROOT = Path(__file__).resolve().parents[2]
DVC = (ROOT / "dvc.yaml").read_text()
STAGES = yaml.safe_load(DVC)["stages"]

# A part may import the parts of the rows above its own, and itself.
LAYERS = [
    {"errors"},
    {"config_faults"},
    {"config"},
    {"resources"},
    {"backbones"},
    {"heads", "losses", "acceptance", "corpus", "distill"},
    {"training", "decoding", "benchmark", "export", "reporting"},
    {"__main__"},
]
# … and these of its own row: (who, whom).
SIDEWAYS = {
    ("distill", "corpus"),  # prompts are read from the shards
    ("benchmark", "decoding"),  # it times what decoding does
}
SOURCES = sorted(path.relative_to(ROOT) for path in (ROOT / "src").rglob("*.py"))


def _part(module):
    """`selfspec.heads.shared` belongs to `heads`; the root package itself to none."""
    return module.split(".")[1] if module.startswith("selfspec.") else None


def _level(part):
    return next(index for index, layer in enumerate(LAYERS) if part in layer)


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_point_one_way(path):
    own = _part(module_name(path))
    for name in sorted(imported(ROOT, path)):
        assert not name.startswith("stages"), f"{path} imports {name}: src/ knows nothing of the stages"
        other = _part(name)
        if own is None or other is None or own == other:
            continue
        allowed = _level(other) < _level(own) or (own, other) in SIDEWAYS
        assert allowed, f"{path} imports {name}, which is not below it: see LAYERS"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_every_module_has_its_place(path):
    part = _part(module_name(path))
    assert part is None or any(part in layer for layer in LAYERS), f"{path}: give {part} a place in LAYERS"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_the_library_knows_nothing_of_dvc_or_the_tests(path):
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] not in {"dvc", "dvclive", "tests", "tools"}, f"{path}:{node.lineno}: {name}"


def test_stages_share_only_their_runner():
    for path in sorted((ROOT / "stages").glob("*.py")):
        others = {name for name in imported(ROOT, path.relative_to(ROOT)) if name.startswith("stages.")}
        assert others <= {"stages._run"}, path


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_the_code_it_imports_and_no_other(name):
    stage = STAGES[name]
    assert script(stage), f"{name}: cmd has to be `python -m stages.{name}`"
    assert script(stage).stem == name
    assert (ROOT / script(stage)).is_file()
    wanted = code_deps(ROOT, stage)
    declared = [Path(dep) for dep in stage["deps"] if dep.startswith(CODE)]
    uncovered = {file for file in wanted if not any(Path(file).is_relative_to(dep) for dep in declared)}
    superfluous = {str(dep) for dep in declared if not any(Path(file).is_relative_to(dep) for file in wanted)}
    assert (uncovered, superfluous) == (set(), set()), "`make deps` corrects dvc.yaml"


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_declares_the_sections_it_reads(name):
    assert set(STAGES[name]["params"]) == params(ROOT, script(STAGES[name])), "`make deps` corrects dvc.yaml"


def test_every_stage_says_what_it_does_and_every_script_is_a_stage():
    assert all(stage.get("desc") for stage in STAGES.values())
    scripts = {path.stem for path in (ROOT / "stages").glob("[!_]*.py")}
    assert scripts == set(STAGES)


class TestSectionsRead:
    def _read(self, text):
        return sections_read(ast.parse(text))

    def test_attributes_of_the_config(self):
        assert self._read("def f(c: Config): g(c.seed, c.loss.eta)") == {"seed", "loss"}

    def test_keys_of_the_head(self):
        """Only keys that params.yaml has; the section, where it is used as a whole as well."""
        assert self._read("def f(c: Config): g(c.head.depths, c.loss.eta)") == {"head.depths", "loss"}
        assert self._read("def f(c: Config): f(c.head.depths)") == {"head.depths"}
        assert self._read("def f(c: Config): g(c.head.depths, c.head)") == {"head"}
        assert self._read("def f(c: Config): g(c.head.model_dump(), c.head.options)") == {"head"}

    def test_a_local_function_is_followed(self):
        assert self._read("def f(c: Config): g(c)\ndef g(d: Config): d.seed") == {"seed"}

    def test_a_config_handed_on_is_read_whole(self):
        assert self._read("def f(c: Config): elsewhere(c)") == set(Config.model_fields)

    def test_other_arguments_do_not_count(self):
        assert self._read("def f(c: Config, d: dict): d.loss; c.seed") == {"seed"}


class TestImports:
    """The walk over imports, on a repository of its own."""

    @pytest.fixture
    def root(self, tmp_path):
        files = {
            "stages/__init__.py": '"""Stages."""\nimport sys\n',
            "stages/one.py": "from selfspec.a import f\n"
            "def one(config: Config): f(config.seed, config.loss, config.head.depths)\n",
            "stages/two.py": "import selfspec.b.c\n",
            "src/selfspec/__init__.py": '"""Package."""\n__version__ = "1"\n',
            "src/selfspec/a.py": "import os\ndef f():\n    from selfspec.b import d\n",
            "src/selfspec/b/__init__.py": '"""Only words."""\n',
            "src/selfspec/b/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from selfspec import a\n",
            "src/selfspec/b/d.py": "from . import e\nfrom .e import name\n",
            "src/selfspec/b/e.py": "name = 1\n",
            "src/selfspec/b/templates/card.txt": "text",
            "src/selfspec/unused.py": "",
        }
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    def _closure(self, root, start):
        return {path.as_posix().removeprefix("src/selfspec/") for path in closure(root, Path(start))}

    def test_imports_inside_functions_and_relative_ones_count(self, root):
        expected = {"stages/one.py", "a.py", "b/d.py", "b/e.py", "b/templates/card.txt"}
        assert self._closure(root, "stages/one.py") == expected

    def test_imports_for_type_checkers_do_not(self, root):
        assert self._closure(root, "stages/two.py") == {"stages/two.py", "b/c.py", "b/templates/card.txt"}

    def test_an_init_that_does_something_counts(self, root):
        (root / "src/selfspec/b/__init__.py").write_text("from selfspec.unused import *\n")
        assert {"b/__init__.py", "unused.py"} <= self._closure(root, "stages/two.py")

    def test_a_notebook_is_followed(self, root):
        cells = '{"cells": [{"cell_type": "code", "source": ["%matplotlib inline\\n", "from selfspec import unused"]}]}'
        (root / "report.ipynb").write_text(cells)
        assert self._closure(root, "report.ipynb") == {"unused.py"}

    def test_dvc_yaml_is_corrected_in_place(self, root):
        before = (
            "stages:\n"
            "  one:\n"
            "    cmd: python -m stages.one\n"
            "    deps:\n"
            "      - stages/one.py   # the script\n"
            "      - src/selfspec/unused.py\n"
            "      - data/text       # stays\n"
            "    params: [seed, head, accept]\n"
        )
        after = (
            "stages:\n"
            "  one:\n"
            "    cmd: python -m stages.one\n"
            "    deps:\n"
            "      - stages/one.py   # the script\n"
            "      - src/selfspec/a.py\n"
            "      - src/selfspec/b/d.py\n"
            "      - src/selfspec/b/e.py\n"
            "      - src/selfspec/b/templates/card.txt\n"
            "      - data/text       # stays\n"
            "    params: [seed, head.depths, loss]\n"
        )
        assert synced(root, before) == after
        assert synced(root, after) == after
