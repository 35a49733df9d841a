"""The executed notebook as one HTML file that opens offline: results only, nothing fetched, no scripts."""

from __future__ import annotations

from pathlib import Path

import jinja2
import nbformat
from nbconvert import HTMLExporter

TEMPLATE = Path(__file__).parent / "templates" / "page.html.j2"


def render(executed: Path, title: str) -> str:
    """The page for the notebook at ``executed``.

    nbconvert's own page styles are left out: they are large, fixed to light colours and unfit for
    a phone. Its ``*_url`` traits name scripts on public hosts and are emptied.
    """
    exporter = HTMLExporter(template_name="basic", exclude_input=True, embed_images=True, exclude_anchor_links=True)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    for name in exporter.trait_names():
        if name.endswith("_url"):
            setattr(exporter, name, "")
    body, _ = exporter.from_notebook_node(nbformat.read(executed, as_version=4))
    template = jinja2.Template(TEMPLATE.read_text(encoding="utf-8"), keep_trailing_newline=True)
    return template.render(title=title, body=body)
