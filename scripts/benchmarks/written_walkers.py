"""The written walkers, for scripts that serve whatever model they are given."""

from __future__ import annotations

from transformers import PreTrainedModel

from flex_engine import WrittenWalker
from gemma4_flex_inference import Gemma4Walker, text_model
from qwen3_flex_inference import Qwen3Walker
from qwen3_moe_flex import FlexMoEInference

__all__ = ["WALKERS", "text_model", "walker_class_of"]

WALKERS: tuple[type[WrittenWalker], ...] = (Qwen3Walker, Gemma4Walker, FlexMoEInference)


def walker_class_of(model: PreTrainedModel) -> type[WrittenWalker]:
    """The walker that takes this type of model. Raises ValueError if none does."""
    for walker_class in WALKERS:
        if model.config.model_type in walker_class.model_types:
            return walker_class
    raise ValueError(f"no written walker takes {model.config.model_type}; use --walker hf")
