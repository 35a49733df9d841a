"""What `test_regimes.py` starts under `torchrun`: one short training, its curve into the file named."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from selfspec import losses
from tests.unit import tiny, training_data


def main() -> None:
    """Train; the first process writes the curve."""
    torch.set_num_threads(1)
    model = tiny.llama().requires_grad_(False)
    model.generation_config.eos_token_id = None
    texts = training_data.completions(model, [(6, 9), (3, 5), (4, 7), (9, 12), (5, 6)])
    with tempfile.TemporaryDirectory() as folder:
        data = training_data.dataset(model, texts, Path(folder))
        objective = losses.Objective("lk_hybrid", eta=3.0, lambda_scope="batch", ce_weight=0.5)
        # Two of three batches hold two texts; the last one text, so that one process has nothing to do.
        trainer = training_data.trainer(model, data, objective=objective, epochs=4.0, eval_every=1.0)
        curve = trainer.run()
    if trainer.processes.first:
        curve.write(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
