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
from attention import Attention
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


def rms(x, w, eps=EPS):
    wide = x.float() if x.dtype == torch.bfloat16 else x
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * w).to(x.dtype)


def situ(g, u):
    wide = g.float() if g.dtype == torch.bfloat16 else g
    up = u.to(wide.dtype)
    y = (
        SITU_BETA
        * torch.tanh(wide / SITU_BETA)
        * torch.sigmoid(wide)
        * (SITU_LINEAR * torch.tanh(up / SITU_LINEAR))
    )
    return y.to(g.dtype)


def mix(sources, query, norm_weight, out_weight):
    """Attention Residuals over depth, then the sub-layer's norm."""
    wq = query * norm_weight
    scores = torch.stack([(s * wq).sum(-1) * torch.rsqrt(s.pow(2).mean(-1) + EPS) for s in sources], -1)
    p = torch.softmax(scores, -1)
    m = sources[0] * p[..., :1]
    for j in range(1, len(sources)):
        m = m + sources[j] * p[..., j : j + 1]
    return m * torch.rsqrt(m.pow(2).mean(-1, keepdim=True) + EPS) * out_weight


class ShortConv(torch.autograd.Function):
    """x: [B, T, C] in time order, masks: three [B, T, 1], 1 where the input so many tokens back belongs to
    the sequence, or None where nothing is cut. w: [C, 4], last tap now."""

    @staticmethod
    def forward(ctx, x, masks, w):
        taps = w.t().contiguous()
        ctx.save_for_backward(x, taps, *masks)
        y = x * taps[3]
        for back, mask in enumerate(masks, 1):
            part = x[:, :-back] * taps[3 - back]
            y[:, back:] += part if mask is None else part.mul_(mask[:, back:])
        return y

    @staticmethod
    def backward(ctx, g):
        x, taps, *masks = ctx.saved_tensors
        dx = g * taps[3]
        dw = [torch.sum(g * x, (0, 1))]
        for back, mask in enumerate(masks, 1):
            now = g[:, back:] if mask is None else g[:, back:] * mask[:, back:]
            dx[:, :-back] += now * taps[3 - back]
            dw.append(torch.sum(now * x[:, :-back], (0, 1)))
        return dx, None, torch.stack(dw[::-1], 1)


def unit(x):
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def kda_inputs(y, z, b, heads):
    """Filtered projections to q, k, v, g, beta. y: [N, 3 * width], z: scaled gate input."""
    y = F.silu(y)
    shape = (len(y), heads, y.shape[1] // (3 * heads))
    q, k, v = (part.reshape(shape) for part in y.chunk(3, -1))
    q, k = unit(q) * shape[2] ** -0.5, unit(k)
    return (
        q,
        k,
        v.contiguous(),
        (GATE_BOUND * torch.sigmoid(z)).reshape(shape),
        torch.sigmoid(b.to(y.dtype)),
    )


def kda_outputs(o, gate, norm):
    """o: [N, H, D] -> [N, H * D] in the gate's dtype."""
    y = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + EPS) * norm
    return (y.flatten(1) * torch.sigmoid(gate.to(o.dtype))).to(gate.dtype)


def gated(o, gate):
    return (o.to(gate.dtype) * torch.sigmoid(gate)).to(gate.dtype)


FUSED = ["mix", "situ", "kda_inputs", "kda_outputs", "gated", "rms"]


def compile_parts():
    """Fuses the token-wise functions; the first step of every new shape then takes minutes."""
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


def lin(x, m):
    return F.linear(x, m.weight.to(x.dtype))


class Step:
    """What all layers of one forward call share."""

    def __init__(self, batch, time, age, keep, state, low, capacity_factor, quantised):
        self.batch, self.time, self.age, self.keep, self.state = batch, time, age, keep, state
        self.low, self.capacity_factor, self.quantised = low, capacity_factor, quantised
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
        self.f_a_proj, self.f_b_proj = Weight(z.kda_dim, z.hidden), Weight(
            width, z.kda_dim, std=0.5 * z.kda_dim**-0.5
        )
        self.b_proj, self.g_proj = Weight(z.kda_heads, z.hidden), Weight(width, z.hidden)
        self.o_norm = Weight(z.kda_dim, fill=1)
        self.o_proj = Weight(z.hidden, width, std=0.5 * width**-0.5)

    def forward(self, x, c, i):
        z, width = self.z, self.z.kda_heads * self.z.kda_dim
        w = torch.cat(
            [
                m.weight
                for m in (self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.f_a_proj, self.b_proj)
            ]
        ).to(x.dtype)
        all_ = F.linear(x, w)
        qkv, gate, fa, b = all_.split([3 * width, width, z.kda_dim, z.kda_heads], -1)
        f = lin(fa, self.f_b_proj)
        conv = torch.cat([m.weight[:, 0] for m in (self.q_conv1d, self.k_conv1d, self.v_conv1d)])
        qkv, age, first = c.seq(qkv), c.age, None
        if c.state is not None:
            past = c.state.get(("conv", i), qkv.new_zeros(c.batch, 3, 3 * width))
            qkv = torch.cat([past, qkv], 1)
            age = F.pad(age, (3, 0), value=3)
            c.state["conv", i] = qkv[:, -3:]
            first = c.state.get(("S", i))
        wide = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        masks = [None if c.keep is None else (age >= back).to(wide)[..., None] for back in (1, 2, 3)]
        y = ShortConv.apply(qkv.to(wide), masks, conv)[:, -c.time :].reshape(x.shape[0], -1)
        gate_in = (f.to(wide) + self.dt_bias) * torch.exp(self.A_log).repeat_interleave(z.kda_dim)
        q, k, v, g, beta = (
            p.view(c.batch, c.time, *p.shape[1:]) for p in kda_inputs(y, gate_in, b, z.kda_heads)
        )
        o, last = kda.chunked(q, k, v, g, beta, c.keep, first, kda.factors)
        if c.state is not None:
            c.state["S", i] = last
        o = o.reshape(x.shape[0], z.kda_heads, z.kda_dim)
        return lin(kda_outputs(o, gate, self.o_norm.weight), self.o_proj)


class Mla(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.z = z
        self.q_a_proj, self.q_a_layernorm = Weight(z.q_lora, z.hidden), Weight(z.q_lora, fill=1)
        self.q_b_proj = Weight(z.heads * (z.nope + z.rope), z.q_lora)
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = Weight(z.kv_lora + z.rope, z.hidden), Weight(
            z.kv_lora, fill=1
        )
        self.kv_b_proj = Weight(z.heads * (z.nope + z.vdim), z.kv_lora)
        self.g_proj = Weight(z.heads * z.vdim, z.hidden)
        self.o_proj = Weight(z.hidden, z.heads * z.vdim, std=0.5 * (z.heads * z.vdim) ** -0.5)

    def forward(self, x, c, i):
        z = self.z
        w = torch.cat([m.weight for m in (self.q_a_proj, self.kv_a_proj_with_mqa, self.g_proj)]).to(x.dtype)
        qa, latent, extra, gate = F.linear(x, w).split([z.q_lora, z.kv_lora, z.rope, z.heads * z.vdim], -1)
        q = lin(rms(qa, self.q_a_layernorm.weight, LATENT_EPS), self.q_b_proj)
        latent = rms(latent, self.kv_a_layernorm.weight, LATENT_EPS)
        latent, extra = c.seq(latent), c.seq(extra)
        past = 0
        if c.state is not None:
            old = c.state.get(("latent", i))
            if old is not None:
                past = old[0].shape[1]
                latent, extra = torch.cat([old[0], latent], 1), torch.cat([old[1], extra], 1)
            c.state["latent", i] = (latent, extra)
        heads = lambda y, d: y.view(c.batch, -1, z.heads, d).transpose(1, 2)
        kv = heads(lin(latent, self.kv_b_proj), z.nope + z.vdim)
        k = torch.cat([kv[..., : z.nope], extra[:, None].expand(-1, z.heads, -1, -1)], -1)
        v = kv[..., z.nope :]
        q = heads(q, z.nope + z.rope)
        flat = lambda y: y.reshape(c.batch * z.heads, -1, y.shape[-1])
        scale = (z.nope + z.rope) ** -0.5
        if c.state is None:
            o = Attention.apply(flat(q), flat(k), flat(v), scale)
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

    def forward(self, x, c=None, i=None):
        g, u = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight]).to(x.dtype)).chunk(2, -1)
        return lin(situ(g, u), self.down_proj)


class Moe(nn.Module):
    def __init__(self, z):
        super().__init__()
        self.z = z
        self.gate = Weight(z.experts, z.hidden)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(z.experts))
        self.experts = nn.ParameterDict(
            {
                "w1": nn.Parameter(torch.randn(z.experts, z.moe_inter, z.latent) * z.latent**-0.5),
                "w3": nn.Parameter(torch.randn(z.experts, z.moe_inter, z.latent) * z.latent**-0.5),
                "w2": nn.Parameter(torch.randn(z.experts, z.latent, z.moe_inter) * z.moe_inter**-0.5),
            }
        )
        self.shared_experts = Glu(z.hidden, z.moe_inter * z.shared)
        self.routed_expert_down_proj = Weight(z.latent, z.hidden)
        self.routed_expert_norm = Weight(z.latent, fill=1)
        self.routed_expert_up_proj = Weight(z.hidden, z.latent, std=0.5 * z.latent**-0.5)

    def forward(self, x, c, i):
        z = self.z
        wide = x.float() if x.dtype == torch.bfloat16 else x
        scores = torch.sigmoid(F.linear(wide, self.gate.weight))
        with torch.no_grad():
            biased = scores + self.gate.e_score_correction_bias
            chosen = torch.topk(biased, z.topk, dim=1).indices
            capacity = None
            if c.capacity_factor:
                capacity = -(-math.ceil(c.capacity_factor * x.shape[0] * z.topk / z.experts) // 16) * 16
            plan = Plan(chosen, z.experts, capacity)
            c.loads[i], c.scores[i] = plan.counts, scores.detach()
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
        w1, w2, w3 = (self.experts[n] for n in ("w1", "w2", "w3"))
        if c.quantised:
            w1, w2, w3 = (mxfp4.straight_through(w) for w in (w1, w2, w3))
        rows = Dispatch.apply(lin(x, self.routed_expert_down_proj), plan).view(
            z.experts, plan.capacity, z.latent
        )
        up = torch.bmm(rows, torch.cat([w1, w3], 1).to(x.dtype).transpose(1, 2))
        y = torch.bmm(situ(*up.chunk(2, -1)), w2.to(x.dtype).transpose(1, 2))
        total = Combine.apply(y.view(-1, z.latent), weights, plan)
        total = rms(total, self.routed_expert_norm.weight)
        return lin(total, self.routed_expert_up_proj) + self.shared_experts(x)


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
        self, tokens, keep=None, state=None, low=None, capacity_factor=None, quantised=False, positions=None
    ):
        """tokens: [B, T]. keep: [B, T / CHUNK], 0 = the KDA and conv state is lost before that chunk.
        state: a dict that carries a sequence between calls (no gradient). low: dtype of the big matrix
        products. positions: flat indices whose logits are wanted. Returns logits and the Step."""
        m, (b, t) = self.model, tokens.shape
        if keep is None:
            age = torch.arange(t).expand(b, t)
            if state is not None:
                age = age + 3  # the carried inputs are there, or zeros
        else:
            at = torch.arange(t)
            start = torch.where(
                keep.repeat_interleave(kda.CHUNK, 1)[:, :t] == 0, at // kda.CHUNK * kda.CHUNK, 0
            )
            age = at - torch.cummax(start, 1).values
        c = Step(b, t, age, keep, state, low, capacity_factor, quantised)
        down = (lambda x: x.to(low)) if low is not None else (lambda x: x)
        prefix = m.embed_tokens.weight[tokens.reshape(-1)]
        blocks = []
        for i, layer in enumerate(m.layers):
            if blocks:
                h = mix(
                    blocks + [prefix],
                    layer.self_attention_res_proj.weight[0],
                    layer.self_attention_res_norm.weight,
                    layer.input_layernorm.weight,
                )
            else:
                h = rms(prefix, layer.input_layernorm.weight)
            pushed = i % self.z.block == 0
            if pushed:
                blocks = blocks + [prefix]
            a = layer.self_attn(down(h), c, i).to(prefix.dtype)
            prefix = a if pushed else prefix + a
            h = mix(
                blocks + [prefix],
                layer.mlp_res_proj.weight[0],
                layer.mlp_res_norm.weight,
                layer.post_attention_layernorm.weight,
            )
            prefix = prefix + layer.ffn(down(h), c, i).to(prefix.dtype)
        h = mix(
            blocks + [prefix],
            m.output_attn_res_proj.weight[0],
            m.output_attn_res_norm.weight,
            m.norm.weight,
        )
        if positions is not None:
            h = h[positions]
        return lin(down(h), self.lm_head), c

    @torch.no_grad()
    def balance(self, step, keep=0.8):
        for i, scores in step.scores.items():
            bias = self.model.layers[i].block_sparse_moe.gate.e_score_correction_bias
            bias.copy_(balanced_bias(scores.to(bias.dtype), bias, self.z.topk, keep))
