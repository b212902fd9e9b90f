#!/usr/bin/env python3
"""Writes a small checkpoint with random weights in the published layout of Kimi K3 or Kimi-Linear.

For trying the mesh before a trained model is at hand, and for tests: it answers with noise. Sharded
safetensors with an index, config with the family's keys, MXFP4 experts (K3), a byte-pair vocabulary.
The same options give the same files. `deltamesh.json` in the folder marks the weights as random.
"""
import argparse
import json
import math
import os
import struct
import sys
import time

import numpy as np

from vocabulary import RESERVED, write_json, write_vocabulary

DEFAULTS = {
    "kimi_k3": dict(hidden=256, layers=9, full=[4, 8, 9], kda_heads=4, kda_dim=64, heads=4, nope=32,
                    rope=32, vdim=64, q_lora=96, kv_lora=128, dense_inter=512, moe_inter=128,
                    experts=16, topk=4, shared=2, latent=128, block=4, merges=2304, shards=3),
    "kimi_linear": dict(hidden=256, layers=8, full=[4, 8], kda_heads=4, kda_dim=64, heads=4, nope=32,
                        rope=32, vdim=64, q_lora=0, kv_lora=128, dense_inter=512, moe_inter=128,
                        experts=16, topk=4, shared=1, latent=0, block=0, merges=2304, shards=3),
}
CONTEXT = 1 << 20
GATE_BOUND, SITU_BETA, SITU_LINEAR = -5.0, 4.0, 25.0
MX_COLUMNS = 32
MX_GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def to_bf16(x):
    """Round to nearest, ties to even; finite input."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def to_mxfp4(x):
    """[rows, cols] -> codes [rows, cols / 2] (low nibble = even column), scales [rows, cols / 32]."""
    rows, cols = x.shape
    groups = x.astype(np.float32).reshape(rows, cols // MX_COLUMNS, MX_COLUMNS)
    largest = np.abs(groups).max(-1)
    exponent = np.floor(np.log2(np.maximum(largest, 2.0 ** -100))).astype(np.int32) - 2
    scaled = np.abs(groups) * np.exp2(-exponent.astype(np.float32))[..., None]
    codes = np.abs(scaled[..., None] - MX_GRID).argmin(-1).astype(np.uint8)
    codes |= np.signbit(groups).astype(np.uint8) << 3
    codes = codes.reshape(rows, cols)
    return codes[:, 0::2] | codes[:, 1::2] << 4, (exponent + 127).astype(np.uint8)


class Builder:
    """Collects (name, dtype, array) of one model. Gains keep every sub-layer's output below the stream
    it is added to, and gates, decays and biases inside their active range."""

    def __init__(self, family, size, vocab, seed):
        self.k3 = family == "kimi_k3"
        self.z, self.vocab = size, vocab
        self.rng = np.random.default_rng([seed, 3 if self.k3 else 1])
        self.prefix = "language_model." if self.k3 else ""
        self.items = []
        self.gate_gain, self.up_gain = (1.6, 8.0) if self.k3 else (1.6, 1.5)
        self.out_gain = 0.45 if self.k3 else 0.35
        self.down_gain = self.out_gain / self.activation_rms()

    def activation_rms(self):
        a, b = np.random.default_rng(7).standard_normal((2, 20000))
        gate, up = self.gate_gain * a, self.up_gain * b
        gated = gate / (1 + np.exp(-gate))
        if self.k3:
            gated = SITU_BETA * np.tanh(gate / SITU_BETA) / (1 + np.exp(-gate))
            up = SITU_LINEAR * np.tanh(up / SITU_LINEAR)
        return math.sqrt(float(np.mean((gated * up) ** 2)))

    def normal(self, *shape):
        return self.rng.standard_normal(shape, np.float32)

    def add(self, name, x, dtype="BF16"):
        data = {"BF16": to_bf16, "F32": lambda v: np.ascontiguousarray(v, "<f4"), "U8": np.ascontiguousarray}
        self.items.append((self.prefix + name, dtype, data[dtype](x)))

    def fine(self, name, x):
        """Tensors that K3 stores in F32 and Kimi-Linear in BF16."""
        self.add(name, x, "F32" if self.k3 else "BF16")

    def linear(self, name, rows, cols, gain=1.0):
        self.add(name + ".weight", self.normal(rows, cols) * (gain / math.sqrt(cols)))

    def norm(self, name, n):
        self.add(name + ".weight", self.rng.uniform(0.6, 1.4, n))

    def residual(self, name):
        self.norm(name + "_norm", self.z["hidden"])
        self.linear(name + "_proj", 1, self.z["hidden"])

    def kda(self, p):
        z, hidden = self.z, self.z["hidden"]
        heads, dim = z["kda_heads"], z["kda_dim"]
        width = heads * dim
        for s in "qkv":
            self.linear(f"{p}{s}_proj", width, hidden)
            self.fine(f"{p}{s}_conv1d.weight", 0.7 * self.normal(width, 1, 4))
        if self.k3:                                   # padded with zeros to a multiple of 128
            a_log = np.zeros(-(-heads // 128) * 128)
            a_log[:heads] = self.rng.uniform(-0.5, 1.0, heads)
            self.add(p + "A_log", a_log, "F32")
            self.add(p + "dt_bias", self.rng.uniform(-3.5, 0.0, width), "F32")
        else:
            self.add(p + "A_log", np.log(self.rng.uniform(1, 4, (1, 1, heads, 1))), "F32")
            step = np.exp(self.rng.uniform(math.log(0.01), math.log(0.4), width))
            self.add(p + "dt_bias", step + np.log(-np.expm1(-step)), "F32")
        self.linear(p + "f_a_proj", dim, hidden)
        self.linear(p + "f_b_proj", width, dim)
        self.linear(p + "b_proj", heads, hidden, 1.2)
        if self.k3:
            self.linear(p + "g_proj", width, hidden, 1.2)
        else:
            self.linear(p + "g_a_proj", dim, hidden)
            self.linear(p + "g_b_proj", width, dim, 1.2)
        self.fine(p + "o_norm.weight", self.rng.uniform(0.6, 1.4, dim))
        self.linear(p + "o_proj", hidden, width, 2 * self.out_gain)

    def mla(self, p):
        z, hidden = self.z, self.z["hidden"]
        query = z["heads"] * (z["nope"] + z["rope"])
        if z["q_lora"]:
            self.linear(p + "q_a_proj", z["q_lora"], hidden)
            self.norm(p + "q_a_layernorm", z["q_lora"])
            self.linear(p + "q_b_proj", query, z["q_lora"], 1.3)
        else:
            self.linear(p + "q_proj", query, hidden, 1.3)
        self.linear(p + "kv_a_proj_with_mqa", z["kv_lora"] + z["rope"], hidden)
        self.norm(p + "kv_a_layernorm", z["kv_lora"])
        self.linear(p + "kv_b_proj", z["heads"] * (z["nope"] + z["vdim"]), z["kv_lora"], 1.2)
        if self.k3:
            self.linear(p + "g_proj", z["heads"] * z["vdim"], hidden, 1.2)
        self.linear(p + "o_proj", hidden, z["heads"] * z["vdim"], 3 * self.out_gain)

    def glu(self, p, inter):
        self.linear(p + "gate_proj", inter, self.z["hidden"], self.gate_gain)
        self.linear(p + "up_proj", inter, self.z["hidden"], self.up_gain)
        self.linear(p + "down_proj", self.z["hidden"], inter, self.down_gain)

    def expert(self, name, rows, cols, gain):
        if not self.k3:
            return self.linear(name, rows, cols, gain)
        codes, scales = to_mxfp4(self.normal(rows, cols) * (gain / math.sqrt(cols)))
        self.add(name + ".weight_packed", codes, "U8")
        self.add(name + ".weight_scale", scales, "U8")

    def moe(self, p):
        z = self.z
        width, inter = z["latent"] or z["hidden"], z["moe_inter"]
        self.linear(p + "gate", z["experts"], z["hidden"], 1.2)
        self.fine(p + "gate.e_score_correction_bias", 0.2 * self.normal(z["experts"]))
        for e in range(z["experts"]):
            self.expert(f"{p}experts.{e}.w1", inter, width, self.gate_gain)
            self.expert(f"{p}experts.{e}.w2", width, inter, self.down_gain)
            self.expert(f"{p}experts.{e}.w3", inter, width, self.up_gain)
        if z["shared"]:
            self.glu(p + "shared_experts.", inter * z["shared"])
        if z["latent"]:
            self.linear(p + "routed_expert_down_proj", width, z["hidden"])
            if self.k3:
                self.norm(p + "routed_expert_norm", width)
            self.linear(p + "routed_expert_up_proj", z["hidden"], width, self.out_gain)

    def layer(self, i):
        p = f"model.layers.{i}."
        if i + 1 in self.z["full"]:
            self.mla(p + "self_attn.")
        else:
            self.kda(p + "self_attn.")
        if i == 0:
            self.glu(p + "mlp.", self.z["dense_inter"])
        else:
            self.moe(p + "block_sparse_moe.")
        self.norm(p + "input_layernorm", self.z["hidden"])
        self.norm(p + "post_attention_layernorm", self.z["hidden"])
        if self.z["block"]:
            self.residual(p + "self_attention_res")
            self.residual(p + "mlp_res")

    def build(self):
        self.add("model.embed_tokens.weight", self.normal(self.vocab, self.z["hidden"]))
        for i in range(self.z["layers"]):
            self.layer(i)
        if self.z["block"]:
            self.residual("model.output_attn_res")
        self.norm("model.norm", self.z["hidden"])
        self.linear("lm_head", self.vocab, self.z["hidden"], 2.5)
        return self.items


def text_config(family, z, base):
    k3 = family == "kimi_k3"
    linear = {"full_attn_layers": z["full"],
              "kda_layers": [i for i in range(1, z["layers"] + 1) if i not in z["full"]],
              "num_heads": z["kda_heads"], "head_dim": z["kda_dim"], "short_conv_kernel_size": 4}
    t = {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "dtype": "bfloat16",
         "vocab_size": base + RESERVED, "bos_token_id": base, "eos_token_id": base + 2,
         "pad_token_id": base + RESERVED - 1, "hidden_size": z["hidden"],
         "num_hidden_layers": z["layers"], "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
         "linear_attn_config": linear, "num_attention_heads": z["heads"],
         "num_key_value_heads": z["heads"], "q_lora_rank": z["q_lora"] or None,
         "kv_lora_rank": z["kv_lora"], "qk_nope_head_dim": z["nope"], "qk_rope_head_dim": z["rope"],
         "v_head_dim": z["vdim"], "mla_use_nope": True, "hidden_act": "situ" if k3 else "silu",
         "intermediate_size": z["dense_inter"], "first_k_dense_replace": 1, "moe_layer_freq": 1,
         "num_experts": z["experts"], "num_experts_per_token": z["topk"],
         "num_shared_experts": z["shared"], "moe_intermediate_size": z["moe_inter"],
         "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1,
         "topk_group": 1, "use_grouped_topk": True, "routed_scaling_factor": 1.0 if k3 else 2.446,
         "num_nextn_predict_layers": 0, "use_cache": True}
    if not k3:
        t.update(model_max_length=CONTEXT, rope_scaling=None, rope_theta=10000.0)
        return t
    linear.update(use_full_rank_gate=True, gate_lower_bound=GATE_BOUND)
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": MX_COLUMNS,
               "symmetric": True, "dynamic": False, "scale_dtype": "torch.uint8"}
    t.update(max_position_embeddings=CONTEXT, mla_use_output_gate=True, topk_method="noaux_tc",
             activation_situ_beta=SITU_BETA, activation_situ_linear_beta=SITU_LINEAR,
             attn_res_block_size=z["block"] or None, routed_expert_hidden_size=z["latent"] or None,
             latent_moe_use_norm=bool(z["latent"]),
             quantization_config={"quant_method": "compressed-tensors",
                                  "format": "mxfp4-pack-quantized", "kv_cache_scheme": None,
                                  "config_groups": {"group_0": {"targets": ["Linear"],
                                                                "input_activations": None,
                                                                "weights": weights}}})
    return t


def write_configs(folder, family, z, base):
    t = text_config(family, z, base)
    ids = {k: t[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if family == "kimi_k3":
        top = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"],
               "dtype": "bfloat16", "tie_word_embeddings": False, "text_config": t, **ids}
        generation = {"max_length": CONTEXT, "eos_token_id": base + 2}
    else:
        top, generation = t, {"_from_model_config": True, **ids}
    write_json(folder, "config.json", top, indent=2)
    write_json(folder, "generation_config.json", generation, indent=2)


def write_shards(folder, items, shards):
    """Consecutive tensors, about equal bytes per file, and the index."""
    total = sum(x.nbytes for _, _, x in items)
    parts, done = [[] for _ in range(shards)], 0
    for item in items:
        parts[min(shards - 1, done * shards // total)].append(item)
        done += item[2].nbytes
    where = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{shards:06d}.safetensors"
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name, dtype, x in part:
            header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
            at += x.nbytes
            where[name] = file
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(os.path.join(folder, file), "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            for _, _, x in part:
                f.write(x.tobytes())
    write_json(folder, "model.safetensors.index.json",
               {"metadata": {"total_size": total}, "weight_map": where})
    return total


def check_size(family, z):
    """Says what is wrong before anything is written."""
    problems = []
    if any(not 1 <= i <= z["layers"] for i in z["full"]):
        problems.append(f"--full {z['full']}: layers are 1 to {z['layers']}")
    if not 1 <= z["topk"] <= z["experts"]:
        problems.append(f"--topk {z['topk']}: use 1 to --experts ({z['experts']})")
    if family == "kimi_k3":
        for key, width in (("moe-inter", z["moe_inter"]), ("latent", z["latent"] or z["hidden"])):
            if width % MX_COLUMNS:
                problems.append(f"--{key}: {width} is no multiple of {MX_COLUMNS}, which MXFP4 needs")
    elif z["latent"] or z["q_lora"] < 0:
        problems.append("--latent: Kimi-Linear has none; use 0")
    if z["shards"] < 1:
        problems.append("--shards: use at least 1")
    if problems:
        sys.exit("make_checkpoint: " + "; ".join(problems))


def make(family, out, seed, size):
    check_size(family, size)
    os.makedirs(out, exist_ok=True)
    base = write_vocabulary(out, family, size["merges"])
    items = Builder(family, size, base + RESERVED, seed).build()
    total = write_shards(out, items, size["shards"])
    write_configs(out, family, size, base)
    write_json(out, "deltamesh.json", {"random_weights": True, "generator": "tools/make_checkpoint.py",
                                       "family": family, "seed": seed}, indent=1)
    return base + RESERVED, total, len(items)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    p.add_argument("--family", choices=sorted(DEFAULTS), default="kimi_k3")
    p.add_argument("--out", required=True, help="folder to write; created if needed")
    p.add_argument("--seed", type=int, default=1)
    for key, value in DEFAULTS["kimi_k3"].items():
        if key == "full":
            p.add_argument("--full", type=lambda s: sorted({int(i) for i in s.split(",")}),
                           help="full-attention layers, 1-based, such as 4,8,9")
        else:
            p.add_argument("--" + key.replace("_", "-"), type=int, help="K3 default %d" % value)
    a = p.parse_args()
    size = {k: v if getattr(a, k) is None else getattr(a, k) for k, v in DEFAULTS[a.family].items()}
    start = time.monotonic()
    vocab, total, tensors = make(a.family, a.out, a.seed, size)
    print(f"{a.out}: {a.family} with RANDOM weights, {tensors} tensors, {total / 1e6:.1f} MB, "
          f"vocabulary {vocab}, {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main()
