"""Causal attention whose keys and values have widths of their own."""

import torch.nn.functional as F


def attention(q, k, v, scale):
    """q, k: [R, T, d], v: [R, T, e], e <= d, same dtype. Returns [R, T, e]."""
    assert v.shape[-1] <= q.shape[-1], "wider values than keys"
    # PyTorch's fused attention, which keeps no [T, T], wants one width; a column of zeros adds nothing.
    wide = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    out = F.scaled_dot_product_attention(q[None], k[None], wide[None], is_causal=True, scale=scale)
    return out[0][..., : v.shape[-1]]
