#!/usr/bin/env python3
"""Writes a trained model as a checkpoint in the published layout: what the engine loads."""

import argparse
import dataclasses
import os
import re
import shutil
import sys

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import make_checkpoint as published  # noqa: E402
import mxfp4  # noqa: E402
import vocabulary  # noqa: E402
from model import Model, Size  # noqa: E402

F32 = re.compile(r"A_log|dt_bias|_conv1d|o_norm|e_score_correction_bias")
FIELDS = {"kda_heads", "kda_dim"}


def shape_for_config(z):
    """The size as tools/make_checkpoint.py names it."""
    d = dataclasses.asdict(z)
    d["full"] = list(z.full)
    return d


def tensors(model):
    """(name, stored type, array) in layer order."""
    out = []

    def add(name, x, kind):
        convert = {"BF16": published.to_bf16, "F32": lambda v: v.astype("<f4"), "U8": lambda v: v}[kind]
        out.append(("language_model." + name, kind, convert(x)))

    for name, x in model.state_dict().items():
        x = x.detach().float()
        expert = re.match(r"(.*experts)\.(w[123])$", name)
        if expert:
            for e, w in enumerate(mxfp4.rounded(x)):
                codes, scales = published.to_mxfp4(w.numpy())
                add(f"{expert[1]}.{e}.{expert[2]}.weight_packed", codes, "U8")
                add(f"{expert[1]}.{e}.{expert[2]}.weight_scale", scales, "U8")
            continue
        x = x.numpy()
        if name.endswith("A_log"):  # stored padded to a multiple of 128
            padded = published.np.zeros(-(-len(x) // 128) * 128, "f4")
            padded[: len(x)] = x
            x = padded
        add(name, x, "F32" if F32.search(name) else "BF16")
    return out


def export(model, vocabulary_folder, out, note):
    """Writes the folder `out`. `note` goes into deltamesh.json."""
    os.makedirs(out, exist_ok=True)
    z = model.z
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_literals.json"):
        shutil.copyfile(os.path.join(vocabulary_folder, name), os.path.join(out, name))
    total = published.write_shards(out, tensors(model), 1)
    published.write_configs(out, "kimi_k3", shape_for_config(z), z.vocab - vocabulary.RESERVED)
    vocabulary.write_json(
        out, "deltamesh.json", {"random_weights": False, "generator": "tools/train", **note}, indent=1
    )
    return total


@torch.no_grad()
def as_published(model):
    """The model with every weight rounded to what the checkpoint stores, in place."""
    for name, x in model.state_dict().items():
        if re.search(r"experts\.w[123]$", name):
            x.copy_(mxfp4.rounded(x))
        elif not F32.search(name):
            x.copy_(x.bfloat16().to(x.dtype))
    return model


def load(path):
    """(model, saved dict) of a training checkpoint."""
    saved = torch.load(path, weights_only=False, map_location="cpu")
    model = Model(Size(**saved["size"]))
    model.load_state_dict(saved["model"])
    return model, saved


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--checkpoint", required=True, help="a file that train.py wrote")
    p.add_argument("--vocabulary", required=True, help="the folder with tiktoken.model that training used")
    p.add_argument("--out", required=True, help="folder to write")
    a = p.parse_args()
    model, saved = load(a.checkpoint)
    total = export(model, a.vocabulary, a.out, {"steps": saved["step"], "seed": saved["seed"]})
    print(f"{a.out}: {total / 1e6:.2f} MB after {saved['step']} steps")


if __name__ == "__main__":
    main()
