#!/usr/bin/env python3
"""Compares architectures trained alike: loss by tokens, accuracy on held-out questions by length, memory.

Each --run is NAME=FOLDER of a run of train.py --comparison. Prints a Markdown table and draws --plot.
"""

import argparse
import os

import matplotlib
import torch

import eval as evaluation
import export
from report import steps_of
from text import Tokenizer

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

TRAINED_TO = 2048  # tokens: the longest dialogue of these runs
LOSS_WINDOW = 24  # steps that a point of the loss curve is the mean of


def tensors(value):
    return [value] if torch.is_tensor(value) else [t for v in value for t in tensors(v)]


@torch.no_grad()
def memory(model):
    """(bytes that a conversation keeps whatever its length, bytes for each token), as float32."""
    sizes = []
    for tokens in (64, 128):
        state = {}
        model(torch.zeros(1, tokens, dtype=torch.long), state=state)
        sizes.append(4 * sum(t.numel() for v in state.values() for t in tensors(v)))
    each = (sizes[1] - sizes[0]) // 64
    return sizes[0] - 64 * each, each


def measured(run, lengths, dialogues):
    model, _ = export.load(os.path.join(run, "latest.pt"))
    tokenizer = Tokenizer(os.path.join(run, "vocabulary"))
    rows, kept = steps_of(run), memory(model)
    right = {}
    for length in lengths:
        count = max(4, dialogues * 512 // max(length, 512))
        right[length] = evaluation.accuracy(model, tokenizer, length, count)
    last = rows[-len(rows) // 20 :]
    return {
        "rows": rows,
        "parameters": sum(p.numel() for p in model.parameters()),
        "fixed": kept[0],
        "each": kept[1],
        "loss": sum(r["loss"] for r in last) / len(last),
        "right": right,
    }


def table(runs, lengths):
    """Lines of Markdown, a run each."""
    out = [
        "| | parameters | kept, whatever the length | kept a token | loss at the end | "
        + " | ".join(f"right at {n}" for n in lengths)
        + " |",
        "|---|---|---|---|---|" + "---|" * len(lengths),
    ]
    for name, m in runs.items():
        right = " | ".join(f"{r / n:.2f} of {n}" for r, n in (m["right"][x] for x in lengths))
        out.append(
            f"| {name} | {m['parameters'] / 1e6:.2f} M | {m['fixed'] / 1024:.0f} KiB | {m['each']} bytes "
            f"| {m['loss']:.3f} | {right} |"
        )
    return out


def plot(runs, lengths, path):
    plt.rcParams["svg.hashsalt"] = "deltamesh"  # the same picture from the same figures
    figure, (loss, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for name, m in runs.items():
        rows = m["rows"]
        parts = [rows[i : i + LOSS_WINDOW] for i in range(0, len(rows), LOSS_WINDOW)]
        means = [sum(r["loss"] for r in p) / len(p) for p in parts]
        loss.plot([p[-1]["tokens"] / 1e6 for p in parts], means, label=name)
        right.plot(lengths, [m["right"][n][0] / m["right"][n][1] for n in lengths], marker="o", label=name)
    loss.set(xlabel="million tokens", ylabel="loss on answers", yscale="log")
    right.set(xlabel="tokens of context", ylabel="answers right", xscale="log", ylim=(0, 1))
    right.set_xticks(lengths, lengths, minor=False)
    right.axvline(TRAINED_TO, color="grey", linestyle=":")
    right.text(TRAINED_TO, 0.02, " longest trained", color="grey")
    right.minorticks_off()
    loss.legend()
    figure.savefig(path, metadata={"Date": None})


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--run", nargs="+", required=True, help="NAME=FOLDER")
    p.add_argument("--plot", required=True, help="SVG file to write")
    p.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    p.add_argument("--dialogues", type=int, default=64, help="of each length up to 512; fewer of longer ones")
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    runs = {}
    for entry in a.run:
        name, _, folder = entry.partition("=")
        runs[name] = measured(folder, a.lengths, a.dialogues)
    print("\n".join(table(runs, a.lengths)))
    plot(runs, a.lengths, a.plot)


if __name__ == "__main__":
    main()
