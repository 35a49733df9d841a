"""The notebook runs under this interpreter and this tree, and the page needs no network."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

from selfspec.config import load
from selfspec.reporting import notebook
from selfspec.reporting.errors import ReportError
from selfspec.reporting.publish import publish
from tests.unit.reporting_synthetic import write_inputs

ROOT = Path(__file__).parents[2]
MADE = ("metrics.json", "MODEL_CARD.md", "executed.ipynb", "report.html")


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """One real run of the notebook, with a user-wide `python3` kernel that must not be taken."""
    folder = tmp_path_factory.mktemp("published")
    write_inputs(folder)
    shutil.copy(ROOT / "reports/report.ipynb", folder / "reports")
    trap = folder / "home/kernels/python3"
    trap.mkdir(parents=True)
    (trap / "kernel.json").write_text(json.dumps({"argv": ["/bin/false"], "display_name": "x", "language": "python"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_DATA_DIR", str(folder / "home"))
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
        publish(load(folder / "params.yaml"), folder / "reports", folder / "params.yaml")
        assert "JUPYTER_PATH" not in os.environ
    return folder / "reports"


def test_everything_is_written(published):
    assert all((published / name).stat().st_size > 0 for name in MADE)
    assert len(list((published / "figures").glob("*.png"))) == 6


def test_a_second_run_changes_no_byte(published, tmp_path):
    """In another folder and another process, with another hash seed."""
    again = tmp_path / "elsewhere"
    shutil.copytree(published.parent, again)
    for name in MADE:
        (again / "reports" / name).unlink()
    shutil.rmtree(again / "reports/figures")
    code = "import stages.report as r; from stages._run import run; run(r.report)"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=again,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "3"},
        check=True,
    )
    first, second = (
        {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (published, again / "reports")
    )
    assert first.keys() == second.keys()
    assert [str(name) for name in first if first[name] != second[name]] == []


def test_executed_notebook_holds_nothing_of_the_machine(published):
    text = (published / "executed.ipynb").read_text(encoding="utf-8")
    assert str(published.parent) not in text
    assert sys.prefix not in text
    executed = nbformat.reads(text, as_version=4)
    assert executed.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert [cell.id for cell in executed.cells] == [f"cell-{i:02d}" for i in range(len(executed.cells))]
    assert all(set(cell.metadata) <= {"tags"} for cell in executed.cells)
    assert all(cell.execution_count for cell in executed.cells if cell.cell_type == "code")


class _Fetches(HTMLParser):
    """Everything a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.alts: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "iframe", "object", "embed", "base"):
            self.found.append(tag)
        for name, value in attrs:
            if name in ("src", "srcset", "href", "data", "action", "poster") and not (value or "").startswith(
                ("data:image/png;base64,", "#")
            ):
                self.found.append(f"{tag} {name}={value}")
            if name.startswith("on"):
                self.found.append(f"{tag} {name}")
        if tag == "img":
            self.alts.append(dict(attrs).get("alt"))


def test_page_fetches_and_runs_nothing(published):
    page = (published / "report.html").read_text(encoding="utf-8")
    fetches = _Fetches()
    fetches.feed(page)
    assert fetches.found == []
    assert len(fetches.alts) == 6
    assert all(fetches.alts)
    without_images = re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)
    assert not re.search(r"https?:|url\(|@import|//cdn", without_images)


def test_page_shows_the_metrics_and_no_code(published):
    page = (published / "report.html").read_text(encoding="utf-8")
    found = json.loads((published / "metrics.json").read_text())
    low, value, high = (found[f"bench.all.greedy.speedup{end}"] for end in ("_low", "", "_high"))
    assert f"{value:.2f} [{low:.2f}, {high:.2f}]" in page
    assert "from_notebook" not in page
    assert "SYNTHETIC report" in page


def test_a_failing_cell_is_one_line(tmp_path):
    cells = [nbformat.v4.new_code_cell("x = 1", metadata={"tags": ["parameters"]}), nbformat.v4.new_code_cell("1 / 0")]
    path = tmp_path / "bad.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(ReportError, match=r"bad\.ipynb: cell \d failed: ZeroDivisionError: division by zero$"):
        notebook.execute(path, {}, tmp_path / "out.ipynb")
    assert not (tmp_path / "out.ipynb").exists()


def test_source_notebook_is_clean_and_its_parameters_are_the_inputs():
    source = nbformat.read(ROOT / "reports/report.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in source.cells)
    tagged = [cell for cell in source.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    names = re.findall(r"^(\w+) =", tagged[0].source, flags=re.MULTILINE)
    from selfspec.reporting.inputs import InputPaths

    assert names == ["params", *InputPaths.__dataclass_fields__]
