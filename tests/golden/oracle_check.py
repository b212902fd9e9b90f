#!/usr/bin/env python3
"""Compares what `deltamesh logits --states` wrote with the float64 oracle.

  compare DIR FILE.npy --tokens 1,2,3          worst errors; exit 1 beyond the bounds
          --float32-margin 10                  bounds: so many times the errors of the oracle in float32
  mutations DIR FILE.npy --tokens .. --mutations a,b   exit 1 unless the unmutated oracle is the closest
"""
import argparse
import importlib.util
import os
import sys

import numpy as np

LOGIT_ERROR = 1e-3     # model.md 19, float32 engines
STATE_ERROR = 1e-4


def oracle():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "reference.py")
    sys.dont_write_bytecode = True
    spec = importlib.util.spec_from_file_location("reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def worst(a, b):
    if a.shape != b.shape:
        sys.exit(f"shapes differ: {a.shape} here, {b.shape} in the oracle")
    return float(np.max(np.abs(a.astype(np.float64) - b), initial=0.0))


def compare(ref, folder, file, tokens, margin):
    logits, state = ref.Model(folder).run(tokens)
    if margin:
        low_logits, low = ref.Model(folder, "float32").run(tokens)
    bad = False

    def check(name, found, right, narrow, bound):
        """found, right, narrow: arrays of a kind; narrow is the oracle's in float32."""
        nonlocal bad
        error = max(map(worst, found, right))
        if margin:
            bound = margin * max(map(worst, narrow, right))
        bad |= not error <= bound
        print(f"{name} {error:.1e} of {bound:.1e}", end="  ")

    check("logits", [np.load(file)], [logits], [low_logits] if margin else [], LOGIT_ERROR)
    for name, kept in (("S", "S"), ("conv", "conv"), ("latent", "latent"), ("k_rope", "krope")):
        right = getattr(state, kept)
        if right:
            found = [np.load(f"{file}.states/{name}.{i}.npy") for i in right]
            narrow = [getattr(low, kept)[i] for i in right] if margin else []
            check(name, found, right.values(), narrow, STATE_ERROR)
    print(f"(std of the logits {logits.std():.2f})")
    return 1 if bad else 0


def mutations(ref, folder, file, tokens, names):
    ours = np.load(file).astype(np.float64)
    truth = np.median(np.abs(ours - ref.Model(folder).run(tokens)[0]))
    worse = []
    print(f"distance to the oracle: median {truth:.2e}")
    for name in names:
        if not ref.applicable(name, ref.Config(folder)):
            continue
        if ref.expected_inert(name, ref.Config(folder)):
            continue
        far = np.median(np.abs(ours - ref.Model(folder, mut=name).run(tokens)[0]))
        print(f"  {name:28s} median {far:.2e}")
        if not far > 100 * truth:
            worse.append(name)
    if worse:
        print("as close to a wrong model as to the right one:", " ".join(worse))
    return 1 if worse else 0


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("command", choices=["compare", "mutations"])
    ap.add_argument("folder")
    ap.add_argument("file")
    ap.add_argument("--tokens", required=True)
    ap.add_argument("--mutations", default="")
    ap.add_argument("--float32-margin", type=float, default=0)
    a = ap.parse_args()
    tokens = [int(t) for t in a.tokens.split(",")]
    ref = oracle()
    if a.command == "compare":
        return compare(ref, a.folder, a.file, tokens, a.float32_margin)
    names = ref.MUTATIONS if a.mutations == "" else a.mutations.split(",")
    return mutations(ref, a.folder, a.file, tokens, names)


if __name__ == "__main__":
    sys.exit(main())
