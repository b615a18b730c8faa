"""Kernel parameters, field by field as `csrc` declares them; a test compares the sizes."""

import ctypes

import torch

from crosspool.backends.cuda.channels.transport_params import MAX_PEERS, Meeting

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float
MAX_PARTIALS = 8


class GemvParams(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("weight", "x", "norm_weight", "bias", "residual", "y")),
        *((name, _L) for name in ("weight_group_stride", "x_group_stride", "y_group_stride", "x_stride", "y_stride")),
        *((name, _I) for name in ("rows", "k", "tokens", "y_is_float")),
        ("norm_eps", _F),
    ]


class AbsorbParams(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("weight", "x", "norm_weight", "key_up", "y", "q_latent")),
        *((name, _I) for name in ("rows", "heads", "k")),
        ("norm_eps", _F),
    ]


class NormParams(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("residual_in", "token_ids", "embed")),
        ("partials", _P * MAX_PARTIALS),
        *((name, _P) for name in ("norm_weight", "residual_out", "normed")),
        *((name, _I) for name in ("hidden", "num_partials", "partials_are_float")),
        ("eps", _F),
    ]


class CacheView(ctypes.Structure):
    _fields_ = [
        ("frames", _P),
        ("frame_table", _P),
        *((name, _L) for name in ("frame_bytes", "layer_offset_bytes", "table_row_stride", "page_share")),
        *((name, _I) for name in ("table_page_stride", "page_tokens", "token_bytes")),
    ]


class RopeTableParams(ctypes.Structure):
    _fields_ = [*((name, _P) for name in ("inv_freq", "positions", "cos_sin")), ("factor", _F), ("half", _I)]


class RopeView(ctypes.Structure):
    _fields_ = [("cos_sin", _P), ("rope_dim", _I), ("interleaved", _I)]


class GqaInput(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("qkv", "q_norm", "k_norm")),
        ("rope", RopeView),
        *((name, _I) for name in ("heads", "kv_heads", "head_dim", "norm_full")),
        ("eps", _F),
    ]


class MlaInput(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("q_latent", "q", "kv_a", "kv_a_norm")),
        ("rope", RopeView),
        ("q_stride", _L),
        ("kv_a_stride", _L),
        *((name, _I) for name in ("heads", "latent", "nope")),
        ("eps", _F),
    ]


class GqaRopeParams(ctypes.Structure):
    _fields_ = [
        ("input", GqaInput),
        *((name, _P) for name in ("positions", "table_rows", "q")),
        ("cache", CacheView),
    ]


class MlaRopeParams(ctypes.Structure):
    _fields_ = [
        ("input", MlaInput),
        *((name, _P) for name in ("positions", "table_rows", "q")),
        ("cache", CacheView),
    ]


class AttentionParams(ctypes.Structure):
    _fields_ = [
        ("gqa", GqaInput),
        ("mla", MlaInput),
        ("q", _P),
        ("cache", CacheView),
        *((name, _P) for name in ("lengths", "table_rows", "partial_o", "partial_ml")),
        *((name, _L) for name in ("key_head_bytes", "value_offset_bytes", "value_head_bytes")),
        *((name, _I) for name in ("heads", "kv_heads", "splits", "window", "few_splits")),
        *((name, _I) for name in ("merge_blocks", "key_dim", "value_dim")),
        ("scale_log2", _F),
    ]


class WideAttentionParams(ctypes.Structure):
    _fields_ = [("map", _L * 16), ("attention", AttentionParams), ("has_map", _I)]
    _fields_ += [("padding", ctypes.c_ubyte * (-(ctypes.sizeof(AttentionParams) + 8) % 64))]


class CombineParams(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("partial_o", "partial_ml", "sinks", "lengths", "out")),
        *((name, _I) for name in ("window", "few_splits", "merge_blocks", "tile", "heads", "splits", "value_dim")),
    ]


class CombineUpParams(ctypes.Structure):
    _fields_ = [("merge", CombineParams), ("weight", _P), ("y", _P), ("rows", _I)]


class RouterParams(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("weight", "logit_bias", "choice_bias", "x", "logits", "ticket", "shared_scale")),
        *((name, _P) for name in ("topk_ids", "topk_weights", "num_unique", "unique_ids")),
        *((name, _P) for name in ("unique_offsets", "expert_pairs")),
        *((name, _I) for name in ("tokens", "experts", "hidden", "top_k")),
        *((name, _I) for name in ("score", "num_groups", "topk_groups", "group_top2", "renormalise")),
        ("renormalise_eps", _F),
        ("scale", _F),
        ("arrival", Meeting),
    ]


class RoutePutParams(ctypes.Structure):
    _fields_ = [
        ("route", RouterParams),
        ("departure", Meeting),
        *((name, _P * MAX_PEERS) for name in ("ids", "weights", "scales")),
    ]


class MoeParams(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("x", "gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, _P) for name in ("shared_gate", "shared_up", "shared_down", "shared_scale", "topk_weights")),
        *((name, _P) for name in ("num_unique", "unique_ids", "unique_offsets", "expert_pairs")),
        *((name, _P) for name in ("act", "shared_act", "act_words", "out")),
        *((name, _I) for name in ("tokens", "hidden", "width", "shared_width", "top_k", "activation")),
        *((name, _I) for name in ("out_form", "max_unique", "near_values")),
        ("departure", Meeting),
    ]


class FusedParams(ctypes.Structure):
    _fields_ = [
        ("route", RouterParams),
        ("moe", MoeParams),
        ("meetings", _P),
        ("logits", _P),
        ("choices", _P),
        ("rows", _I),
        ("work_bytes", _I),
    ]


def address(tensor: torch.Tensor | None) -> int | None:
    """Device address, or a null pointer."""
    return None if tensor is None else tensor.data_ptr()


def check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless `tensor` is contiguous with this shape and dtype."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}{'' if tensor.is_contiguous() else ', not contiguous'}; "
            f"the kernel needs contiguous {dtype} {shape}"
        )
