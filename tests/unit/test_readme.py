"""README.md says what reports/ says."""

from pathlib import Path

from tools.readme_figures import BLOCKS, filled

ROOT = Path(__file__).resolve().parents[2]


def test_every_block_is_there_and_up_to_date():
    readme = (ROOT / "README.md").read_text()
    for name in BLOCKS:
        assert f"<!-- figures: {name} -->" in readme
    assert filled(readme, ROOT / "reports") == readme, "run `python -m tools.readme_figures`"


def test_a_stale_figure_is_replaced():
    readme = (ROOT / "README.md").read_text()
    stale = readme.replace("held-out prompts came out", "held-out prompts, or so, came out")
    assert stale != readme
    assert filled(stale, ROOT / "reports") == readme
