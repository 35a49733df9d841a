"""A copy of this repository, as it lies in the working tree, in which the pipeline can be run for real."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from tests.unit import tiny
from tools.recipe import DEFAULT, build, merge, plain

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = Path(__file__).with_name("tiny_params.yaml")
_WORDS = "river stone lamp winter engine garden paper copper window letter orange signal valley button harbour".split()
_TEXTS = {
    "chat": "Tell me about the {0} and the {1}, number {n}. What has a {2} to do with it?",
    "maths": "There are {n} {0}s in a {1}. Each costs {m} coins. What do they cost together?",
    "code": "Write a function {0}_{1}_{n}(x) that multiplies x by {m} and returns it.",
    "prose": "The {0} stood beside the {1}. In the year {n} a {2} was found there, and people came to look at it. ",
}


class Project:
    """The copy: its folder, and dvc and python run inside it."""

    def __init__(self, root: Path, home: Path) -> None:
        self.root = root
        scripts = Path(sys.executable).parent  # not resolved: the environment's python, not the one behind it
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "DVC_"))}
        self._environment |= {
            "PATH": os.pathsep.join([str(scripts), os.environ["PATH"]]),
            # Nobody's own settings, and an identity for the commits that experiments are.
            "HOME": str(home),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "DVC_GLOBAL_CONFIG_DIR": str(home),
            "DVC_SYSTEM_CONFIG_DIR": str(home),
            "DVC_SITE_CACHE_DIR": str(home / "site"),
            "DVC_NO_ANALYTICS": "1",
            # A tiny model gains nothing from a second thread, and loses tenfold while another job has the core.
            "OMP_NUM_THREADS": "1",
            "SELFSPEC_CACHE": str(home / "downloads"),
        }
        for role in ("AUTHOR", "COMMITTER"):
            self._environment |= {f"GIT_{role}_NAME": "test", f"GIT_{role}_EMAIL": "test@localhost"}
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            self._environment.pop(name, None)

    def run(
        self, *command: str, check: bool = True, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the copy; stdout and stderr come together in ``stdout``. ``env`` is added to its own."""
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self._environment | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert not check or done.returncode == 0, f"{' '.join(command)} exited {done.returncode}:\n{done.stdout}"
        return done

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command in the copy; what it prints is lost."""
        return subprocess.Popen(
            command, cwd=self.root, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def dvc(self, *arguments: str) -> str:
        """Run dvc and return what it printed."""
        return self.run("dvc", *arguments).stdout

    def json(self, path: str) -> dict:
        return json.loads((self.root / path).read_text())

    def params(self) -> dict:
        return yaml.safe_load((self.root / "params.yaml").read_text())


def stages_run(output: str) -> list[str]:
    """The stages that dvc says it ran, in order."""
    return re.findall(r"^Running stage '(\w+)'", output, flags=re.MULTILINE)


def stages_skipped(output: str) -> list[str]:
    """The stages that dvc says were up to date."""
    return re.findall(r"^Stage '(\w+)' didn't change, skipping", output, flags=re.MULTILINE)


def make(folder: Path, recipe: str = DEFAULT) -> Project:
    """Clone the repository into ``folder``, take uncommitted files over, and give it the tiny form of ``recipe``."""
    project = Project(folder / "project", folder / "home")
    (folder / "home").mkdir(parents=True)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(project.root)], check=True)
    _take_working_tree_over(project.root)
    tiny.save(folder / "backbone")
    take(project, recipe)
    return project


def take(project: Project, recipe: str) -> None:
    """Give ``project`` the tiny form of ``recipe``.

    Its sizes are shrunk, its backbone is a tiny random Llama (of which one layer is unfrozen, where any are, and which
    is its own teacher, where there is one) and its data are four small sources; head, optimisers and loss stay.
    """
    folder = project.root.parent
    params = plain(build(recipe))
    head = dict(params["head"])
    merge(params, yaml.safe_load(OVERLAY.read_text()))
    if recipe != DEFAULT:
        params["head"] = head
    params["train"]["unfrozen_layers"] = min(params["train"]["unfrozen_layers"], 1)
    params["backbone"]["uri"] = f"file:{folder / 'backbone'}"
    if params["train"]["teacher"]:
        params["train"]["teacher"] = dict(params["backbone"])
    params["shard"]["sources"] = [_source(folder, domain) for domain in _TEXTS]
    (project.root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))


def _take_working_tree_over(target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
        else:  # deleted, not committed yet
            (target / name).unlink(missing_ok=True)


def _source(folder: Path, domain: str) -> dict:
    """A source of 60 distinct records in a JSON lines file, described as params.yaml does."""
    path = folder / f"{domain}.jsonl"
    with path.open("w") as lines:
        for number in range(60):
            words = [_WORDS[(number * step + step) % len(_WORDS)] for step in (1, 2, 7)]
            text = _TEXTS[domain].format(*words, n=100 + number, m=number % 7 + 2)
            lines.write(json.dumps({"text": text * (3 if domain == "prose" else 1)}) + "\n")
    return {
        "name": f"tiny_{domain}",
        "loader": "dataset",
        "kind": "corpus" if domain == "prose" else "prompt",
        "domain": domain,
        "weight": 0.25,
        "split": "hash",
        "license": "CC0-1.0",
        "archives": [{"uri": f"file:{path}"}],
    }
