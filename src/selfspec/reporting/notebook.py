"""Run reports/report.ipynb under the interpreter at hand, and make its result the same bytes each time."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import nbformat
import papermill
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError

import selfspec
from selfspec.reporting.errors import ReportError

KERNEL = "selfspec-report"
SOURCE_ROOT = Path(selfspec.__file__).resolve().parent.parent


def execute(notebook: Path, parameters: Mapping[str, str], output: Path) -> None:
    """Run ``notebook`` with its folder as the working folder, and write it, results and all, to ``output``.

    Raises:
        ReportError: a cell failed; the message has the cell's number and its error.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, _own_kernel(Path(scratch)):
        raw = Path(scratch) / "executed.ipynb"
        try:
            papermill.execute_notebook(
                str(notebook),
                str(raw),
                parameters=dict(parameters),
                kernel_name=KERNEL,
                cwd=str(notebook.parent),
                progress_bar=False,
            )
        except PapermillExecutionError as error:
            raise ReportError(f"{notebook}: cell {error.cell_index} failed: {error.ename}: {error.evalue}") from None
        executed = nbformat.read(raw, as_version=4)
    _write(_stable(executed), output)


@contextmanager
def _own_kernel(scratch: Path) -> Iterator[None]:
    """A kernel spec of this interpreter that imports the tree it belongs to, whatever kernels a user has.

    A ``python3`` spec of the user's may name another interpreter, and an editable install may name
    another checkout: `dvc exp run --temp` would then report on code it did not run.
    """
    folder = scratch / "kernels" / KERNEL
    folder.mkdir(parents=True)
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=CRITICAL"],
        "display_name": KERNEL,
        "language": "python",
        "env": {"PYTHONPATH": str(SOURCE_ROOT), "IPYTHONDIR": str(scratch / "ipython"), "MPLBACKEND": "agg"},
    }
    (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    before = os.environ.get("JUPYTER_PATH")
    os.environ["JUPYTER_PATH"] = str(scratch)
    try:
        yield
    finally:
        if before is None:
            del os.environ["JUPYTER_PATH"]
        else:
            os.environ["JUPYTER_PATH"] = before


def _stable(executed: NotebookNode) -> NotebookNode:
    """Without times, machine and library versions; cell ids by position."""
    executed.metadata = NotebookNode(
        kernelspec=NotebookNode(display_name="Python 3", language="python", name="python3"),
        language_info=NotebookNode(name="python"),
    )
    for position, cell in enumerate(executed.cells):
        cell.id = f"cell-{position:02d}"
        cell.metadata = NotebookNode(tags=cell.metadata.get("tags", []))
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = NotebookNode()
    return executed


def _write(notebook: NotebookNode, path: Path) -> None:
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
