"""Routed experts in the latent: rows sorted by expert into equal slots, so that all shapes are fixed."""

import torch


class Plan:
    """Where each chosen (token, expert) pair goes: `source` token of every slot, `slot` of every pair.

    Slots beyond an expert's capacity do not exist: such a pair contributes nothing (training only). Neither
    does a token that is not `real` (the filling at the end of a row).
    The last row of a padded table (index -1 after padding) stands for nothing.
    """

    def __init__(self, chosen, experts, capacity, real=None):
        tokens, k = chosen.shape
        if real is not None:
            chosen = torch.where(real[:, None], chosen, experts)
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=experts + 1)
        start = torch.cumsum(counts, 0) - counts
        place = torch.arange(tokens * k) - start[flat[order]]  # within the expert
        counts = counts[:experts]
        if capacity is None:
            capacity = int(counts.max())
        fits = (place < capacity) & (flat[order] < experts)
        where = flat[order] * capacity + place
        nothing = experts * capacity
        self.capacity, self.counts = capacity, counts
        self.source = torch.full((nothing + 1,), tokens, dtype=torch.long)
        self.source[torch.where(fits, where, nothing)] = order // k
        self.source = self.source[:nothing]
        pair = torch.full((nothing + 1,), tokens * k, dtype=torch.long)
        pair[torch.where(fits, where, nothing)] = order
        self.pair = pair[:nothing]
        slot = torch.empty(tokens * k, dtype=torch.long)
        slot[order] = torch.where(fits, where, nothing)
        self.slot = slot.view(tokens, k)


def _with_zero(x):
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


def _sum_slots(rows, slot):
    rows = _with_zero(rows)
    total = rows[slot[:, 0]]
    for j in range(1, slot.shape[1]):
        total = total + rows[slot[:, j]]
    return total


class Dispatch(torch.autograd.Function):
    """[tokens, width] -> [experts * capacity, width]. Both ways are gathers."""

    @staticmethod
    def forward(ctx, x, plan):
        ctx.plan = plan
        return _with_zero(x)[plan.source]

    @staticmethod
    def backward(ctx, g):
        return _sum_slots(g, ctx.plan.slot), None


class Combine(torch.autograd.Function):
    """Rows back to their tokens, weighted and summed. rows: [slots, width], weights: [tokens, k]."""

    @staticmethod
    def forward(ctx, rows, weights, plan):
        ctx.plan = plan
        ctx.save_for_backward(rows, weights)
        padded = _with_zero(rows)
        total = 0
        for j in range(weights.shape[1]):
            total = total + padded[plan.slot[:, j]] * weights[:, j : j + 1].to(rows.dtype)
        return total

    @staticmethod
    def backward(ctx, g):
        rows, weights = ctx.saved_tensors
        plan = ctx.plan
        of_slot = torch.cat([weights.reshape(-1), weights.new_zeros(1)])[plan.pair]
        drows = _with_zero(g)[plan.source] * of_slot[:, None].to(g.dtype)
        padded = _with_zero(rows)
        dweights = torch.stack([(padded[plan.slot[:, j]] * g).sum(1) for j in range(weights.shape[1])], 1)
        return drows, dweights.to(weights.dtype), None


def balanced_bias(scores, bias, topk, keep=0.0):
    """Quantile Balancing: the bias that would have given every expert its share of these tokens.

    A token's bar is its (k+1)-th largest biased score; expert j is chosen where its bias exceeds
    bar - score, so its bias is the k/n quantile of that difference. `keep` is the moving average's memory.
    """
    experts = scores.shape[1]
    if topk >= experts:
        return bias
    bar = torch.topk(scores + bias, topk + 1, dim=1).values[:, -1:]
    wanted = torch.quantile(bar - scores, topk / experts, dim=0)
    fresh = keep * bias + (1 - keep) * wanted
    return fresh - fresh.mean()
