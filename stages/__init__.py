"""Thin pipeline stages: read params, call ``selfspec``, write outs.

An editable install points at one checkout, but ``dvc exp run --temp`` and ``--queue`` run a copy
of the tree: the copy's own ``src`` has to win, or an experiment would measure other code.
"""

import os
import sys
from pathlib import Path

# Before torch loads OpenMP. Threads that spin at every barrier stop all others when anything else runs on
# the machine; after a few microseconds they give their core up instead.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
