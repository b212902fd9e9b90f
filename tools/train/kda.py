"""Kimi Delta Attention over chunks: the recurrence as matrix products.

Within a chunk of C = 32 tokens the decays between two tokens factor into two matrices around a reference
in the middle of the chunk. The decay is bounded below by -5 per token, so both factors stay below
exp(80), which float32 holds; a chunk of 64 would not. Only the state moves from chunk to chunk.
"""

import torch

CHUNK = 32


def unit_lower_inverse(a):
    """(I + a)^-1 for a strictly lower triangular [n, C, C]."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    return torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        t = unit_lower_inverse(a)
        ctx.save_for_backward(t)
        return t

    @staticmethod
    def backward(ctx, g):
        (t,) = ctx.saved_tensors
        tt = t.transpose(1, 2)
        return -torch.tril(torch.bmm(torch.bmm(tt, g), tt), -1)


class _Scan(torch.autograd.Function):
    """S_{n+1} = decay_n * S_n + K_n^T (U_n - W_n S_n).

    w, u, k: [N, R, C, D], decay: [N, R, D], keep: [N, R] or None (0 forgets the state before chunk n),
    first: [R, D, D]. Returns the corrections U - W S [N, R, C, D], every S_n [N, R, D, D] and the last S.
    """

    @staticmethod
    def forward(ctx, w, u, k, decay, keep, first):
        n = w.shape[0]
        s = first.clone()
        states = torch.empty((n,) + first.shape, dtype=w.dtype)
        fixed = torch.empty_like(u)
        kt = k.transpose(2, 3)
        for i in range(n):
            if keep is not None:
                s = s * keep[i][:, None, None]
            states[i] = s
            torch.baddbmm(u[i], w[i], s, alpha=-1, out=fixed[i])
            s = torch.baddbmm(decay[i][:, :, None] * s, kt[i], fixed[i])
        ctx.save_for_backward(w, k, decay, keep, states, fixed)
        return fixed, states, s

    @staticmethod
    def backward(ctx, dfixed, dstates, dlast):
        w, k, decay, keep, states, fixed = ctx.saved_tensors
        n = w.shape[0]
        ds = dlast.clone()
        after = torch.empty_like(states)  # gradient of the state that leaves chunk i
        dfix = torch.empty_like(fixed)
        wt = w.transpose(2, 3)
        for i in range(n - 1, -1, -1):
            after[i] = ds
            torch.baddbmm(dfixed[i], k[i], ds, out=dfix[i])
            ds = torch.baddbmm(dstates[i] + decay[i][:, :, None] * ds, wt[i], dfix[i], alpha=-1)
            if keep is not None:
                ds = ds * keep[i][:, None, None]
        flat = lambda x: x.flatten(0, 1)
        dw = -torch.bmm(flat(dfix), flat(states).transpose(1, 2)).view_as(w)
        dk = torch.bmm(flat(fixed), flat(after).transpose(1, 2)).view_as(k)
        ddecay = (states * after).sum(-1)
        return dw, dfix, dk, ddecay, None, ds


def factors(q, k, g, beta):
    """Token-wise part. q, k, g: [M, C, D] (M = chunks times heads), beta: [M, C, 1], q scaled.

    Returns q and k decayed against the middle of the chunk (left), k against it from the other side
    (right), and what the scan needs: decay from the chunk's start for q and k, k to its end, the
    chunk's own decay.
    """
    total = torch.cumsum(g, 1)
    c = g.shape[1]
    middle = total[:, (c - 1) // 2 : (c - 1) // 2 + 1]
    end = total[:, -1:]
    left = torch.exp(total - middle)
    right = torch.exp(middle - total)
    from_start = torch.exp(total)
    to_end = torch.exp(end - total)
    return (
        q * left,
        k * left * beta,
        k * right,
        q * from_start,
        k * from_start * beta,
        k * to_end,
        torch.exp(end[:, 0]),
    )


def chunked(q, k, v, g, beta, keep=None, first=None, prepare=factors):
    """q, k, g: [B, T, H, D], v: [B, T, H, D], beta: [B, T, H]; q scaled, q and k normalised, g <= 0.

    keep: [B, T / C], 0 where the state before that chunk is to be forgotten. T is padded to whole chunks.
    Returns o [B, T, H, D] and the last state [B, H, D, D].
    """
    b, t, h, d = q.shape
    c = CHUNK
    short = -t % c
    if short:
        pad = lambda x: torch.nn.functional.pad(x, [0, 0] * (x.dim() - 2) + [0, short])
        q, k, v, g, beta = (pad(x) for x in (q, k, v, g, beta))
    n = (t + short) // c
    r = b * h

    def rows(x):  # [B, T, H, D] -> [N * B * H, C, D]
        return x.view(b, n, c, h, -1).permute(1, 0, 3, 2, 4).reshape(n * r, c, -1)

    q, k, v, g, beta = rows(q), rows(k), rows(v), rows(g), rows(beta)
    ql, kl, kr, qs, ks, ke, decay = prepare(q, k, g, beta)
    krt = kr.transpose(1, 2)
    inverse = _Inverse.apply(torch.tril(torch.bmm(kl, krt), -1))
    w, u = torch.bmm(inverse, ks), torch.bmm(inverse, v * beta)
    scores = torch.tril(torch.bmm(ql, krt))
    if first is None:
        first = torch.zeros(r, d, d, dtype=q.dtype)
    by_chunk = lambda x: x.view(n, r, *x.shape[1:])
    keep = None if keep is None else keep.t()[:, :, None].expand(n, b, h).reshape(n, r).to(q.dtype)
    fixed, states, last = _Scan.apply(
        by_chunk(w), by_chunk(u), by_chunk(ke), by_chunk(decay), keep, first.reshape(r, d, d)
    )
    o = torch.baddbmm(torch.bmm(scores, fixed.flatten(0, 1)), qs, states.flatten(0, 1))
    o = o.view(n, b, h, c, d).permute(1, 0, 3, 2, 4).reshape(b, n * c, h, d)[:, :t]
    return o, last.view(b, h, d, d)
