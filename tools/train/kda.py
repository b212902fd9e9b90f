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
    """S_{n+1} = decay_n * S_n + K_n^T (U_n - W_n S_n), n along the second dimension.

    w, u, k: [B, N, H, C, D], decay: [B, N, H, D], keep: [B, N] or None (0 forgets the state before chunk n),
    first: [B, H, D, D]. Returns the corrections U - W S [B, N, H, C, D], every S_n [B, N, H, D, D] and the
    last S.
    """

    @staticmethod
    def forward(ctx, w, u, k, decay, keep, first):
        b, n, h, c, d = w.shape
        s = first.reshape(b * h, d, d)
        states, fixed = w.new_empty(b, n, h, d, d), torch.empty_like(u)
        at = lambda x, i: x[:, i].reshape(b * h, *x.shape[3:])
        for i in range(n):
            if keep is not None:
                s = (s.view(b, h, d, d) * keep[:, i, None, None, None]).view(b * h, d, d)
            states[:, i] = s.view(b, h, d, d)
            f = torch.baddbmm(at(u, i), at(w, i), s, alpha=-1)
            fixed[:, i] = f.view(b, h, c, d)
            s = torch.baddbmm(at(decay, i)[:, :, None] * s, at(k, i).transpose(1, 2), f)
        ctx.save_for_backward(w, k, decay, keep, states, fixed)
        return fixed, states, s.view(b, h, d, d)

    @staticmethod
    def backward(ctx, dfixed, dstates, dlast):
        w, k, decay, keep, states, fixed = ctx.saved_tensors
        b, n, h, c, d = w.shape
        ds = dlast.reshape(b * h, d, d)
        after = torch.empty_like(states)  # gradient of the state that leaves chunk i
        dfix = torch.empty_like(fixed)
        at = lambda x, i: x[:, i].reshape(b * h, *x.shape[3:])
        for i in range(n - 1, -1, -1):
            after[:, i] = ds.view(b, h, d, d)
            f = torch.baddbmm(at(dfixed, i), at(k, i), ds)
            dfix[:, i] = f.view(b, h, c, d)
            into = torch.addcmul(at(dstates, i), at(decay, i)[:, :, None], ds)
            ds = torch.baddbmm(into, at(w, i).transpose(1, 2), f, alpha=-1)
            if keep is not None:
                ds = (ds.view(b, h, d, d) * keep[:, i, None, None, None]).view(b * h, d, d)
        flat = lambda x: x.flatten(0, 2)
        dw = torch.bmm(flat(dfix), flat(states).transpose(1, 2)).neg_().view_as(w)
        dk = torch.bmm(flat(fixed), flat(after).transpose(1, 2)).view_as(k)
        ddecay = (states * after).sum(-1)
        return dw, dfix, dk, ddecay, None, ds.view(b, h, d, d)


def factors(q, k, total, beta):
    """Token-wise part. q, k, total: [M, C, D] (M = chunks times heads; total = cumulated g), beta: [M, C, 1].

    Returns q and k decayed against the middle of the chunk (left), k against it from the other side
    (right), and what the scan needs: decay from the chunk's start for q and k, k to its end, the
    chunk's own decay.
    """
    c = total.shape[1]
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


def by_chunks(q, k, v, g, beta, keep=None, first=None):
    """q, k, v, g: [B, N, H, C, D], beta: [B, N, H, C, 1]; otherwise as `chunked`. Returns o like q, and the
    last state."""
    b, n, h, c, d = q.shape
    flat = lambda x: x.reshape(b * n * h, *x.shape[3:])
    sums = torch.ones(c, c, dtype=g.dtype).tril().expand(b * n * h, c, c)
    total = torch.bmm(sums, flat(g))
    ql, kl, kr, qs, ks, ke, decay = factors(flat(q), flat(k), total, flat(beta))
    krt = kr.transpose(1, 2)
    inverse = _Inverse.apply(torch.tril(torch.bmm(kl, krt), -1))
    w, u = torch.bmm(inverse, ks), torch.bmm(inverse, flat(v) * flat(beta))
    scores = torch.tril(torch.bmm(ql, krt))
    if first is None:
        first = q.new_zeros(b, h, d, d)
    whole = lambda x: x.view(b, n, h, *x.shape[1:])
    keep = None if keep is None else keep.to(q.dtype)
    fixed, states, last = _Scan.apply(whole(w), whole(u), whole(ke), whole(decay), keep, first)
    o = torch.baddbmm(torch.bmm(scores, flat(fixed)), qs, flat(states))
    return whole(o), last


def chunked(q, k, v, g, beta, keep=None, first=None):
    """q, k, v, g: [B, T, H, D], beta: [B, T, H]; q scaled, q and k normalised, g <= 0. Any T.

    keep: [B, T / C], 0 where the state before that chunk is to be forgotten; first: [B, H, D, D].
    Returns o [B, T, H, D] and the last state [B, H, D, D].
    """
    b, t, h, d = q.shape
    short = -t % CHUNK

    def rows(x):  # [B, T, H, D] -> [B, N, H, C, D]; what is added neither decays nor writes
        x = torch.nn.functional.pad(x, [0, 0, 0, 0, 0, short])
        return x.view(b, -1, CHUNK, h, x.shape[3]).transpose(2, 3)

    o, last = by_chunks(rows(q), rows(k), rows(v), rows(g), rows(beta[..., None]), keep, first)
    return o.transpose(2, 3).reshape(b, -1, h, d)[:, :t], last
