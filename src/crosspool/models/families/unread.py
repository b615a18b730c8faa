"""Fields of a config that would change what a model computes, and that its family never looks at: refused by name.

What only adds, removes or reshapes tensors is left out: a checkpoint's inventory tells that.
"""

from collections.abc import Mapping
from typing import Any

from crosspool.errors import UnsupportedModelError
from crosspool.models.config_json import HFConfig

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # logits, embeddings and residuals
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "scale_emb": (1.0,),
    "scale_depth": (),
    # attention
    "clip_qkv": (),
    "sliding_window": (0,),
    "attention_chunk_size": (0,),
    "index_topk": (),
    "layer_types": ("full_attention",),
    "no_rope_layers": ([],),
    "rope_interleave": (False,),
    "rope_local_base_freq": (),
    # experts
    "moe_layer_freq": (1,),
    "norm_topk_prob": (True,),
    "routed_scaling_factor": (1.0,),
    "scoring_func": ("softmax",),
    "swiglu_alpha": (),
    "swiglu_limit": (),
    # weights
    "compression_config": (),
}
"""Each with the values, beside null, under which it changes nothing in a family that does not know it."""


def refuse_unread(config: HFConfig) -> None:
    """To be called once a family has read its config. Raises UnsupportedModelError for the first such field."""
    for name, neutral in NEUTRAL.items():
        value = None if name in config.asked else _stated(config, name)
        if value is not None and value not in neutral:
            known = ", ".join(["null", *(str(each).lower() for each in neutral)])
            raise UnsupportedModelError(
                f"{config.source}: {name} is {value!r}, which models of type {config.get('model_type')} do not obey "
                f"here; supported: {known}"
            )


def _stated(config: HFConfig, name: str) -> Any:
    """The field's value, of a list of words the first that is not neutral; None where another field turns it off."""
    value = config.values.get(name)
    if name == "sliding_window" and config.values.get("use_sliding_window") is False:
        return None
    if name == "layer_types" and isinstance(value, list):
        return next((kind for kind in value if kind not in NEUTRAL[name]), None)
    return value
