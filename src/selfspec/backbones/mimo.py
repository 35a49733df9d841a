"""MiMo backbones: Qwen2 by another name, which ``transformers`` knows through remote code alone.

XiaomiMiMo's ``modeling_mimo.py`` subclasses Qwen2's classes, adds a ``mtp_layers`` list that its forward pass
never runs, and changes nothing else. So Qwen2's own classes compute the same, and no code from the model's
repository has to be trusted. The head is read by ``heads/native.py``; here its tensors are passed over.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):
    """Qwen2's, under the name that is in the directory's ``config.json``, so that it is saved as it came."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2's, without a warning that the head's tensors were not used."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]  # noqa: RUF012 - declared so by its base class


def register() -> None:
    """Let the Auto classes of ``transformers`` find the two; more than once does no harm."""
    AutoConfig.register(MiMoConfig.model_type, MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
