"""Shared by all tests: a quiet, offline, repeatable environment."""

import os
import random

# Before anything imports torch or a hub client. One thread: tiny tensors gain nothing from a second,
# and lose tenfold while another job has its core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["SELFSPEC_DEVICE"] = "cpu"

import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# Examples take longer than hypothesis' 200 ms while a shared machine is busy; that is no failure.
settings.register_profile("selfspec", deadline=None, derandomize=True)
settings.load_profile("selfspec")


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state, whichever ran before it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries under test may draw from the global generator
    torch.manual_seed(0)
