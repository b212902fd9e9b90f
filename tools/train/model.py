"""The K3 text model in PyTorch, for training: every feature on, any size, any dtype.

Token-wise work runs on [tokens, width]; only the short convolution, the KDA scan and attention know
about sequences. Experts of a layer are stacked in one tensor each for w1, w2 and w3.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn

import kda
import mxfp4
from attention import attention
from experts import Combine, Dispatch, Plan, balanced_bias

EPS, LATENT_EPS, L2_EPS = 1e-5, 1e-6, 1e-6
GATE_BOUND, SITU_BETA, SITU_LINEAR = -5.0, 4.0, 25.0


@dataclasses.dataclass
class Size:
    vocab: int = 1280
    hidden: int = 128
    layers: int = 8
    full: tuple = (4, 8)  # layers with full attention, from 1
    kda_heads: int = 4
    kda_dim: int = 32
    heads: int = 4
    nope: int = 32
    rope: int = 16
    rotate: bool = False  # these, by position: for comparisons, the family has no positions here
    vdim: int = 32
    q_lora: int = 64
    kv_lora: int = 64
    dense_inter: int = 256
    moe_inter: int = 64
    experts: int = 16
    topk: int = 2
    shared: int = 2
    latent: int = 64
    block: int = 4


# ---------------------------------------------------------------- token-wise functions (fused by compile)


def rms(x, eps=EPS):
    """Normalised, without the norm's weight: that is folded into the projections that follow."""
    wide = x.float() if x.dtype == torch.bfloat16 else x
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def situ(g, u):
    wide = g.float() if g.dtype == torch.bfloat16 else g
    up = SITU_LINEAR * torch.tanh(u.to(wide.dtype) / SITU_LINEAR)
    return (SITU_BETA * torch.tanh(wide / SITU_BETA) * torch.sigmoid(wide) * up).to(g.dtype)


def mix(sources, scores, prefix_product, low):
    """Attention Residuals over depth, then the sub-layer's norm without its weight.

    sources: block entries and the prefix; scores: of the entries; prefix_product: prefix times the query.
    """
    prefix = sources[-1]
    last = prefix_product * torch.rsqrt(prefix.pow(2).mean(-1) + EPS)
    p = torch.softmax(torch.stack(scores + [last], -1), -1)
    m = sources[0] * p[..., :1]
    for j in range(1, len(sources)):
        m = m + sources[j] * p[..., j : j + 1]
    return (m * torch.rsqrt(m.pow(2).mean(-1, keepdim=True) + EPS)).to(low)


def entry_scores(entry, products):
    """[N, mixes] scores of a block entry for every mix that follows it."""
    return products * torch.rsqrt(entry.pow(2).mean(-1, keepdim=True) + EPS)


def filtered(x, age, taps):
    """Causal depthwise filter over rows in time order. x: [N, C], age: [N] tokens of the sequence before
    this one, taps: [4, C], the last one for now."""
    y = x * taps[3]
    for back in (1, 2, 3):
        y = y + F.pad(x, (0, 0, back, 0))[: len(x)] * ((age >= back).to(x.dtype)[:, None] * taps[3 - back])
    return y


def filtered_backward(g, age, taps):
    dx = g * taps[3]
    for back in (1, 2, 3):
        now = g * (age >= back).to(g.dtype)[:, None]
        dx = dx + F.pad(now, (0, 0, 0, back))[back:] * taps[3 - back]
    return dx


class ShortConv(torch.autograd.Function):
    """`filtered` with w: [C, 4]."""

    @staticmethod
    def forward(ctx, x, age, w):
        taps = w.t().contiguous()
        ctx.save_for_backward(x, age, taps)
        return filtered(x, age, taps)

    @staticmethod
    def backward(ctx, g):
        x, age, taps = ctx.saved_tensors
        dw = [(g * x).sum(0)]
        for back in (1, 2, 3):
            part = g[back:] * x[:-back]
            edge = age[back:] < back
            part[edge] = 0
            dw.append(part.sum(0))
        return filtered_backward(g, age, taps), None, torch.stack(dw[::-1], 1)


def unit(x):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def kda_inputs(y, z, b, heads, chunk):
    """Filtered projections [N, 3 * width], gate input [N, width], b [N, H] to q, k, v, g [N / C, H, C, D] and
    beta [N / C, H, C, 1]."""
    part = lambda x: x.view(len(y) // chunk, chunk, heads, -1).transpose(1, 2)
    q, k, v = (part(x) for x in F.silu(y).chunk(3, -1))
    q, k = unit(q) * q.shape[3] ** -0.5, unit(k)
    g = GATE_BOUND * torch.sigmoid(part(z))
    same = torch.contiguous_format
    return (
        q.clone(memory_format=same),
        k.clone(memory_format=same),
        v.clone(memory_format=same),
        g.clone(memory_format=same),
        torch.sigmoid(part(b.to(y.dtype))).clone(memory_format=same),
    )


def kda_outputs(o, gate):
    """o: [N / C, H, C, D] -> [N, H * D] in the gate's dtype, without the norm's weight."""
    y = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + EPS)
    return (y.transpose(1, 2).reshape(gate.shape) * torch.sigmoid(gate.to(o.dtype))).to(gate.dtype)


def gated(o, gate):
    return (o.to(gate.dtype) * torch.sigmoid(gate)).to(gate.dtype)


FUSED = [
    "mix",
    "entry_scores",
    "situ",
    "filtered",
    "filtered_backward",
    "kda_inputs",
    "kda_outputs",
    "gated",
    "rms",
]


def compile_parts():
    """Fuses the token-wise functions; their shapes depend on the tokens per step only. The first step then
    takes minutes."""
    for name in FUSED:
        globals()[name] = torch.compile(globals()[name], dynamic=False)
    kda.factors = torch.compile(kda.factors, dynamic=False)


# ---------------------------------------------------------------- modules


class Weight(nn.Module):
    """A bare `weight`, so that parameter names are the published ones."""

    def __init__(self, *shape, std=None, fill=None):
        super().__init__()
        if fill is not None:
            self.weight = nn.Parameter(torch.full(shape, float(fill)))
        else:
            self.weight = nn.Parameter(
                torch.randn(*shape) * (std if std is not None else shape[-1] ** -0.5)
            )


def lin(x, modules, norm=None):
    """One product with the weights of several projections, after a norm whose weight is folded in."""
    w = torch.cat([m.weight for m in modules]) if isinstance(modules, tuple) else modules.weight
    return F.linear(x, (w if norm is None else w * norm.weight).to(x.dtype))


class Step:
    """What all layers of one forward call share."""

    def __init__(self, batch, time, age, keep, state, capacity_factor, quantised, real):
        self.batch, self.time, self.age, self.keep, self.state = batch, time, age, keep, state
        self.capacity_factor, self.quantised, self.real = capacity_factor, quantised, real
        self.loads, self.scores = {}, {}

    def seq(self, x):
        return x.view(self.batch, self.time, -1)


class Kda(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.z = z
        width = z.kda_heads * z.kda_dim
        self.q_proj, self.k_proj, self.v_proj = (Weight(width, z.hidden) for _ in range(3))
        taps = torch.tensor([0.1, 0.15, 0.25, 1.0])
        for s in "qkv":
            conv = Weight(width, 1, 4, std=0.15)
            conv.weight.data += taps
            setattr(self, s + "_conv1d", conv)
        self.A_log = nn.Parameter(torch.empty(z.kda_heads).uniform_(-0.3, 0.5))
        self.dt_bias = nn.Parameter(torch.empty(width).uniform_(-7.0, -1.5))
        self.f_a_proj = Weight(z.kda_dim, z.hidden)
        self.f_b_proj = Weight(width, z.kda_dim, std=0.5 * z.kda_dim**-0.5)
        self.b_proj, self.g_proj = Weight(z.kda_heads, z.hidden), Weight(width, z.hidden)
        self.o_norm = Weight(z.kda_dim, fill=1)
        self.o_proj = Weight(z.hidden, width, std=0.5 * width**-0.5)

    def forward(self, x, norm, c, i):
        z, width = self.z, self.z.kda_heads * self.z.kda_dim
        wide = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        parts = (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.f_a_proj, self.b_proj)
        qkv, gate, fa, b = lin(x, parts, norm).split([3 * width, width, z.kda_dim, z.kda_heads], -1)
        steep = torch.exp(self.A_log).repeat_interleave(z.kda_dim)
        f = F.linear(fa.to(wide), self.f_b_proj.weight * steep[:, None], self.dt_bias * steep)
        conv = torch.cat([m.weight[:, 0] for m in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        if c.state is None and c.time % kda.CHUNK == 0:
            y = ShortConv.apply(qkv.to(wide), c.age.reshape(-1), conv)
            q, k, v, g, beta = (
                p.view(c.batch, -1, *p.shape[1:]) for p in kda_inputs(y, f, b, z.kda_heads, kda.CHUNK)
            )
            o, _ = kda.by_chunks(q, k, v, g, beta, c.keep)
            o = o.flatten(0, 1)
        else:
            o = self.carried(c.seq(qkv.to(wide)), f, b, conv, c, i)
        out = kda_outputs(o, gate)
        weight = self.o_proj.weight * self.o_norm.weight.repeat(z.kda_heads)
        return F.linear(out, weight.to(out.dtype))

    def carried(self, qkv, f, b, conv, c, i):
        """The same for any length, with the state of earlier calls. Returns o [N, H, 1, D]."""
        state = {} if c.state is None else c.state
        past = state.get(("conv", i), qkv.new_zeros(c.batch, 3, qkv.shape[2]))
        qkv = torch.cat([past, qkv], 1)
        age = F.pad(c.age + (3 if c.state is not None else 0), (3, 0))
        state["conv", i] = qkv[:, -3:]
        y = ShortConv.apply(qkv.flatten(0, 1), age.reshape(-1), conv)
        y = y.view(c.batch, -1, y.shape[1])[:, 3:].reshape(c.batch * c.time, -1)
        parts = kda_inputs(y, f, b, self.z.kda_heads, 1)
        q, k, v, g, beta = (p.view(c.batch, c.time, self.z.kda_heads, -1) for p in parts)
        o, state["S", i] = kda.chunked(q, k, v, g, beta[..., 0], c.keep, state.get(("S", i)))
        return o.reshape(c.batch * c.time, self.z.kda_heads, 1, -1)


def rotated(x, first):
    """Rotary positions: x [R, T, d], its row t at position first + t."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half) / half)
    angle = torch.arange(first, first + x.shape[1])[:, None] * speed
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).to(x.dtype)


class Mla(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.z = z
        self.q_a_proj, self.q_a_layernorm = Weight(z.q_lora, z.hidden), Weight(z.q_lora, fill=1)
        self.q_b_proj = Weight(z.heads * (z.nope + z.rope), z.q_lora)
        self.kv_a_proj_with_mqa = Weight(z.kv_lora + z.rope, z.hidden)
        self.kv_a_layernorm = Weight(z.kv_lora, fill=1)
        self.kv_b_proj = Weight(z.heads * (z.nope + z.vdim), z.kv_lora)
        self.g_proj = Weight(z.heads * z.vdim, z.hidden)
        self.o_proj = Weight(z.hidden, z.heads * z.vdim, std=0.5 * (z.heads * z.vdim) ** -0.5)

    def forward(self, x, norm, c, i):
        z = self.z
        parts = lin(x, (self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj), norm)
        qa, latent, extra, gate = parts.split([z.q_lora, z.kv_lora, z.rope, z.heads * z.vdim], -1)
        q = lin(rms(qa, LATENT_EPS), self.q_b_proj, self.q_a_layernorm)
        latent, extra = c.seq(rms(latent, LATENT_EPS)), c.seq(extra)
        old = None if c.state is None else c.state.get(("latent", i))
        past = 0 if old is None else old[0].shape[1]
        if z.rotate:
            extra = rotated(extra, past)
        if c.state is None:
            kv = lin(latent, self.kv_b_proj, self.kv_a_layernorm)
        else:
            latent = latent * self.kv_a_layernorm.weight.to(latent.dtype)
            if old is not None:
                latent, extra = torch.cat([old[0], latent], 1), torch.cat([old[1], extra], 1)
            c.state["latent", i] = (latent, extra)
            kv = lin(latent, self.kv_b_proj)
        heads = lambda y, d: y.view(c.batch, -1, z.heads, d).transpose(1, 2)
        kv = heads(kv, z.nope + z.vdim)
        k = torch.cat([kv[..., : z.nope], extra[:, None].expand(-1, z.heads, -1, -1)], -1)
        v = kv[..., z.nope :]
        q = heads(q, z.nope + z.rope)
        flat = lambda y: y.reshape(c.batch * z.heads, -1, y.shape[-1])
        if z.rotate:
            q = flat(q)
            q = torch.cat([q[..., : z.nope], rotated(q[..., z.nope :], past)], -1)
        scale = (z.nope + z.rope) ** -0.5
        if c.state is None:
            o = attention(flat(q), flat(k), flat(v), scale)
        else:
            o = self.cached(flat(q), flat(k), flat(v), scale, past)
        o = o.view(c.batch, z.heads, c.time, z.vdim).transpose(1, 2).reshape(x.shape[0], -1)
        return lin(gated(o, gate), self.o_proj)

    @staticmethod
    def cached(q, k, v, scale, past, rows=512):
        out = []
        for a in range(0, q.shape[1], rows):
            part = q[:, a : a + rows]
            end = past + a + part.shape[1]
            s = torch.bmm(part, k[:, :end].transpose(1, 2)) * scale
            late = torch.arange(end)[None] > past + a + torch.arange(part.shape[1])[:, None]
            out.append(torch.bmm(torch.softmax(s.masked_fill_(late, float("-inf")), -1), v[:, :end]))
        return torch.cat(out, 1)


class Glu(nn.Module):
    def __init__(self, hidden, inter):
        super().__init__()
        self.gate_proj, self.up_proj = Weight(inter, hidden), Weight(inter, hidden)
        self.down_proj = Weight(hidden, inter)

    def forward(self, x, norm, c, i):
        return lin(situ(*lin(x, (self.gate_proj, self.up_proj), norm).chunk(2, -1)), self.down_proj)


class Moe(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.z = z
        self.gate = Weight(z.experts, z.hidden)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(z.experts))
        expert = lambda rows, cols: nn.Parameter(torch.randn(z.experts, rows, cols) * cols**-0.5)
        self.experts = nn.ParameterDict(
            {
                "w1": expert(z.moe_inter, z.latent),
                "w3": expert(z.moe_inter, z.latent),
                "w2": expert(z.latent, z.moe_inter),
            }
        )
        self.shared_experts = Glu(z.hidden, z.moe_inter * z.shared)
        self.routed_expert_down_proj = Weight(z.latent, z.hidden)
        self.routed_expert_norm = Weight(z.latent, fill=1)
        self.routed_expert_up_proj = Weight(z.hidden, z.latent, std=0.5 * z.latent**-0.5)

    def route(self, x, norm, c, i):
        """The plan and the weights [N, k]. Scores in full precision; the bias chooses, it does not weigh."""
        z, wide = self.z, x.float() if x.dtype == torch.bfloat16 else x
        scores = torch.sigmoid(F.linear(wide, self.gate.weight * norm.weight))
        with torch.no_grad():
            chosen = torch.topk(scores + self.gate.e_score_correction_bias, z.topk, dim=1).indices
            capacity = None
            if c.capacity_factor:
                capacity = -(-math.ceil(c.capacity_factor * x.shape[0] * z.topk / z.experts) // 16) * 16
            plan = Plan(chosen, z.experts, capacity, c.real)
            c.loads[i] = plan.counts
            c.scores[i] = scores.detach() if c.real is None else scores.detach()[c.real]
        weights = scores.gather(1, chosen)
        return plan, weights / (weights.sum(1, keepdim=True) + 1e-20)

    def forward(self, x, norm, c, i):
        z, shared = self.z, self.shared_experts
        plan, weights = self.route(x, norm, c, i)
        inter = z.moe_inter * z.shared
        parts = lin(x, (self.routed_expert_down_proj, shared.gate_proj, shared.up_proj), norm)
        latent, gate, up = parts.split([z.latent, inter, inter], -1)
        w1, w2, w3 = (self.experts[n] for n in ("w1", "w2", "w3"))
        if c.quantised:
            w1, w2, w3 = (mxfp4.straight_through(w) for w in (w1, w2, w3))
        rows = Dispatch.apply(latent, plan).view(z.experts, plan.capacity, z.latent)
        both = torch.bmm(rows, torch.cat([w1, w3], 1).to(x.dtype).transpose(1, 2))
        y = torch.bmm(situ(*both.chunk(2, -1)), w2.to(x.dtype).transpose(1, 2))
        total = rms(Combine.apply(y.view(-1, z.latent), weights, plan))
        return lin(total, self.routed_expert_up_proj, self.routed_expert_norm) + lin(
            situ(gate, up), shared.down_proj
        )


class Layer(nn.Module):
    def __init__(self, z, i):
        super().__init__()
        self.self_attn = Mla(z) if i + 1 in z.full else Kda(z)
        if i == 0:
            self.mlp = Glu(z.hidden, z.dense_inter)
        else:
            self.block_sparse_moe = Moe(z)
        self.input_layernorm, self.post_attention_layernorm = Weight(z.hidden, fill=1), Weight(
            z.hidden, fill=1
        )
        for name in ("self_attention_res", "mlp_res"):
            setattr(self, name + "_norm", Weight(z.hidden, fill=1))
            setattr(self, name + "_proj", Weight(1, z.hidden, fill=0))

    @property
    def ffn(self):
        return self.mlp if hasattr(self, "mlp") else self.block_sparse_moe


class Model(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.z = z
        m = nn.Module()
        m.embed_tokens = Weight(z.vocab, z.hidden, std=0.7)
        m.layers = nn.ModuleList(Layer(z, i) for i in range(z.layers))
        m.output_attn_res_norm, m.output_attn_res_proj = Weight(z.hidden, fill=1), Weight(
            1, z.hidden, fill=0
        )
        m.norm = Weight(z.hidden, fill=1)
        self.model = m
        self.lm_head = Weight(z.vocab, z.hidden)

    def forward(
        self,
        tokens,
        keep=None,
        state=None,
        low=None,
        capacity_factor=None,
        quantised=False,
        positions=None,
        real=None,
    ):
        """Logits of tokens [B, T], flat, and the Step.

        keep: [B, T / CHUNK], 0 = the KDA and conv state is lost before that chunk. state: a dict that carries
        a sequence between calls (no gradient). low: dtype of the big matrix products. positions: flat
        indices whose logits are wanted. real: [B * T], False for filling, which no expert sees.
        """
        m, (b, t) = self.model, tokens.shape
        age = torch.arange(t).expand(b, t)
        if keep is not None:
            start = torch.where(
                keep.repeat_interleave(kda.CHUNK, 1)[:, :t] == 0, age // kda.CHUNK * kda.CHUNK, 0
            )
            age = age - torch.cummax(start, 1).values
        c = Step(b, t, age, keep, state, capacity_factor, quantised, real)
        prefix = m.embed_tokens.weight[tokens.reshape(-1)]
        low = low or prefix.dtype
        queries = torch.stack([proj.weight[0] * norm.weight for proj, norm in self.depth_mixes()])
        blocks, scores, at = [], [], 0

        def mixed():
            nonlocal at
            product = torch.mv(prefix, queries[at])
            h = mix(blocks + [prefix], [s[at - len(queries)] for s in scores], product, low)
            at += 1
            return h

        for i, layer in enumerate(m.layers):
            h = mixed() if blocks else rms(prefix).to(low)
            pushed = i % self.z.block == 0
            if pushed:
                blocks = blocks + [prefix]
                scores.append(entry_scores(prefix, F.linear(prefix, queries[at:])).unbind(1))
            a = layer.self_attn(h, layer.input_layernorm, c, i).to(prefix.dtype)
            prefix = a if pushed else prefix + a
            prefix = prefix + layer.ffn(mixed(), layer.post_attention_layernorm, c, i).to(prefix.dtype)
        h = mixed()
        if positions is not None:
            h = h[positions]
        return lin(h, self.lm_head, m.norm), c

    def depth_mixes(self):
        """(proj, norm) of every mix over depth, in the order of use; layer 0 takes the embedding as it is."""
        m = self.model
        for i, layer in enumerate(m.layers):
            if i:
                yield layer.self_attention_res_proj, layer.self_attention_res_norm
            yield layer.mlp_res_proj, layer.mlp_res_norm
        yield m.output_attn_res_proj, m.output_attn_res_norm

    @torch.no_grad()
    def balance(self, step, keep=0.8):
        for i, scores in step.scores.items():
            bias = self.model.layers[i].block_sparse_moe.gate.e_score_correction_bias
            bias.copy_(balanced_bias(scores.to(bias.dtype), bias, self.z.topk, keep))
