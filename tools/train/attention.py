"""Causal attention over blocks of queries: bf16 matrix products where a backward pass is needed."""

import torch

BLOCK = 256


def _mask(rows, cols, first, dtype):
    """0 where the key is not after the query; query i stands at first + i."""
    late = torch.arange(cols)[None] > torch.arange(first, first + rows)[:, None]
    return torch.zeros(rows, cols, dtype=dtype).masked_fill_(late, float("-inf"))


class Attention(torch.autograd.Function):
    """q, k: [R, T, d], v: [R, T, e], same dtype. Keeps the probabilities of every block."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        t = q.shape[1]
        out, kept = torch.empty(q.shape[0], t, v.shape[2], dtype=v.dtype), []
        for a in range(0, t, BLOCK):
            b = min(a + BLOCK, t)
            s = torch.baddbmm(
                _mask(b - a, b, a, q.dtype)[None], q[:, a:b], k[:, :b].transpose(1, 2), alpha=scale
            )
            p = torch.softmax(s, -1)
            (
                torch.bmm(p, v[:, :b], out=out[:, a:b])
                if q.shape[0] == 1
                else out[:, a:b].copy_(torch.bmm(p, v[:, :b]))
            )
            kept.append(p)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, g):
        q, k, v, *kept = ctx.saved_tensors
        t = q.shape[1]
        wide = torch.float32 if q.dtype == torch.bfloat16 else q.dtype
        one = len(kept) == 1
        dq = torch.empty_like(q)
        dk, dv = torch.zeros(k.shape, dtype=wide), torch.zeros(v.shape, dtype=wide)
        for p, a in zip(kept, range(0, t, BLOCK)):
            b = min(a + BLOCK, t)
            gb = g[:, a:b]
            dp = torch.bmm(gb, v[:, :b].transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            dq[:, a:b] = torch.bmm(ds, k[:, :b]) * ctx.scale
            dvb, dkb = (
                torch.bmm(p.transpose(1, 2), gb),
                torch.bmm(ds.transpose(1, 2), q[:, a:b]) * ctx.scale,
            )
            if one:
                dk, dv = dkb, dvb
            else:
                dv[:, :b] += dvb
                dk[:, :b] += dkb
        return dq, dk.to(k.dtype), dv.to(v.dtype), None
