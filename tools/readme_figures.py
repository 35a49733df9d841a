"""Write the figures of README.md from reports/ and recipes/, so that none is typed by hand: ``make readme``.

Blocks stand between ``<!-- figures: NAME -->`` and ``<!-- /figures -->``; a test holds them to their source.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from selfspec.reporting import text
from selfspec.reporting.measures import Measures, mode_name
from tools import recipe_costs

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"(<!-- figures: (?P<name>[a-z]+) -->\n).*?(<!-- /figures -->)", re.DOTALL)


def headline(measures: Measures, bench: dict[str, Any]) -> str:
    """What the default run bought, in a few lines under the figure."""
    mode = "greedy"
    k = measures.best_k(mode)
    prompts, tested = (measures.number(key) for key in ("bench.all.greedy.prompts", "accept.lossless.prompts"))
    same = measures.number("accept.lossless.identical")
    machine = bench["machine"]
    return (
        "![Speedup and tokens per round of the default run](reports/figures/headline.png)\n\n"
        f"The default run, K = {k} drafts a round: greedy decoding is "
        f"**{text.ratio(measures.get(f'bench.all.{mode}.speedup'))} times** as fast as the same engine without drafts "
        f"({text.count(prompts)} held-out prompts, one stream, {bench['dtype']}, {machine['cpu']}, "
        f"{machine['threads']} threads). {text.count(same)} of {text.count(tested)} held-out prompts came out "
        "token-identical to stock `generate` in float32.\n"
    )


def table(measures: Measures, bench: dict[str, Any]) -> str:
    """Acceptance and speed by domain, with the rival."""
    header = ["domain", "decoding", "first draft right", "tokens per round", "speedup", "prompt look-up, stock"]
    rows = []
    for mode in measures.modes("bench"):
        k = measures.best_k(mode)
        for domain in measures.domains("bench"):
            base = f"bench.{domain}.{mode}"
            lookups = [measures.get(f"{base}.prompt_lookup_{count}.speedup") for count in measures.lookup_counts()]
            best = max((found for found in lookups if found), key=lambda found: found.value, default=None)
            rows.append(
                [
                    domain,
                    mode_name(mode),
                    text.share(measures.get(f"{base}.k{k}.first_accepted")),
                    text.ratio(measures.get(f"{base}.k{k}.tokens_per_round")),
                    text.ratio(measures.get(f"{base}.k{k}.speedup")),
                    text.ratio(best),
                ]
            )
    ks = ", ".join(f"{measures.best_k(mode)} ({mode_name(mode)})" for mode in measures.modes("bench"))
    note = (
        f"Drafts a round: {ks}, the fastest of those timed on these same prompts, so slightly optimistic. In "
        "brackets: 95 % bootstrap interval over "
        f"{text.count(measures.number('bench.chat.greedy.prompts'))} prompts a domain, one interleaved run. "
        "The rival is the better of the look-up lengths tried, against stock vanilla decoding."
    )
    return text.Table(header, rows, note).markdown() + "\n"


def recipes(measures: Measures, bench: dict[str, Any]) -> str:
    """What every recipe needs; of counts alone, not of reports/."""
    return recipe_costs.table()


BLOCKS = {"headline": headline, "table": table, "recipes": recipes}


def filled(readme: str, reports: Path) -> str:
    """``readme`` with every block written anew from ``reports``."""
    measures = Measures(json.loads((reports / "metrics.json").read_text()))
    bench = json.loads((reports / "bench.json").read_text())
    return _BLOCK.sub(lambda found: found[1] + BLOCKS[found["name"]](measures, bench) + found[3], readme)


def main() -> None:
    """Rewrite README.md in place."""
    path = ROOT / "README.md"
    path.write_text(filled(path.read_text(), ROOT / "reports"))


if __name__ == "__main__":
    main()
