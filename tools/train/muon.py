"""Optimiser of the recipe: Per-Head Muon for q, k, v, Muon for other matrices, AdamW for the rest."""

import torch

BY_HEAD = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
PLAIN = (
    "embed_tokens",
    "lm_head",
    "block_sparse_moe.gate",
    "b_proj",
    "_res_proj",
    "output_attn_res_proj",
    "norm",
    "conv1d",
    "A_log",
    "dt_bias",
)
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalised(g, steps=5):
    """Newton-Schulz: [n, r, c] to nearly orthogonal matrices with the same row and column spaces."""
    x = g.transpose(1, 2) if g.shape[1] > g.shape[2] else g
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = torch.bmm(x, x.transpose(1, 2))
        x = _A * x + torch.bmm(_B * a + _C * torch.bmm(a, a), x)
    return x.transpose(1, 2) if g.shape[1] > g.shape[2] else x


def _blocks(name, p, z):
    """How a parameter is cut into matrices: its shape as [n, rows, cols], or None for AdamW."""
    part = name[: -len(".weight")] if name.endswith(".weight") else name
    last = part.split(".")[-1]
    if last == "q_proj" or last in ("k_proj", "v_proj"):
        return z.kda_heads, z.kda_dim, p.shape[1]
    if last == "q_b_proj":
        return z.heads, z.nope + z.rope, p.shape[1]
    if last == "kv_b_proj":  # keys and values of a head are two matrices
        return (
            (2 * z.heads, z.nope, p.shape[1])
            if z.nope == z.vdim
            else (z.heads, z.nope + z.vdim, p.shape[1])
        )
    if p.dim() < 2 or any(s in part for s in PLAIN):
        return None
    return tuple(p.shape) if p.dim() == 3 else (1, *p.shape)


class Optimiser:
    def __init__(self, model, lr, plain_lr, decay, momentum=0.95):
        self.momentum, self.decay, self.lr = momentum, decay, lr
        self.groups, plain, names = {}, [], []
        for name, p in model.named_parameters():
            shape = _blocks(name, p, model.z)
            if shape is None:
                plain.append(p)
                names.append(name)
            else:
                self.groups.setdefault(shape[1:], []).append((p, shape[0]))
        self.speed = {s: torch.zeros(sum(n for _, n in ps), *s) for s, ps in self.groups.items()}
        self.plain = torch.optim.AdamW(plain, lr=plain_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.plain_lr = plain_lr

    @torch.no_grad()
    def step(self, factor):
        """One step at `factor` times the peak rates; then forgets the gradients."""
        for shape, ps in self.groups.items():
            speed = self.speed[shape]
            g = torch.cat([p.grad.view(n, *shape) for p, n in ps])
            speed.mul_(self.momentum).add_(g)
            move = orthogonalised(g + self.momentum * speed) * (-self.lr * factor * 0.2 * max(shape) ** 0.5)
            for (p, n), m in zip(ps, move.split([n for _, n in ps])):
                p.mul_(1 - self.lr * factor * self.decay).add_(m.view_as(p))
        for group in self.plain.param_groups:
            group["lr"] = self.plain_lr * factor
        self.plain.step()
        for ps in self.groups.values():
            for p, _ in ps:
                p.grad = None
        self.plain.zero_grad(set_to_none=True)

    def state(self):
        return {"speed": self.speed, "plain": self.plain.state_dict()}

    def load(self, state):
        self.speed = state["speed"]
        self.plain.load_state_dict(state["plain"])
