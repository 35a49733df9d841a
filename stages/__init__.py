"""Thin pipeline stages: read params, call ``selfspec``, write outs.

An editable install points at one checkout, but ``dvc exp run --temp`` and ``--queue`` run a copy
of the tree: the copy's own ``src`` has to win, or an experiment would measure other code.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
