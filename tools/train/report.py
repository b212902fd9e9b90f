#!/usr/bin/env python3
"""What a run's log says: loss and accuracy by length, expert load, speed; over windows of the training."""

import argparse
import json
import os


def mean(rows, key):
    return sum(r[key] for r in rows) / len(rows)


def windows(rows, count):
    """[(rows of a window)], equal parts of the steps."""
    size = max(1, -(-len(rows) // count))
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def table(rows, count):
    """Lines of a Markdown table: a window and a length each."""
    out = [
        "| tokens | stage | length | loss | of reading | tokens right | answers right | load max/mean |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for part in windows(rows, count):
        for length in sorted({r["length"] for r in part}):
            some = [r for r in part if r["length"] == length]
            out.append(
                f"| {some[-1]['tokens'] / 1e6:.2f} M | {some[-1]['stage']} | {length} "
                f"| {mean(some, 'loss'):.3f} "
                f"| {mean(some, 'read_loss'):.3f} | {mean(some, 'token_accuracy'):.1%} "
                f"| {mean(some, 'answer_accuracy'):.1%} | {mean(some, 'load'):.2f} |"
            )
    return out


def steps_of(run):
    """The log's rows in order; steps after a stop may stand there twice."""
    with open(os.path.join(run, "log.jsonl"), encoding="utf-8") as f:
        by_step = {r["step"]: r for r in map(json.loads, f)}
    return [by_step[s] for s in sorted(by_step)]


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--run", required=True)
    p.add_argument("--windows", type=int, default=10)
    a = p.parse_args()
    rows = steps_of(a.run)
    print("\n".join(table(rows, a.windows)))
    seconds, cpu = sum(r["seconds"] for r in rows), sum(r["cpu_seconds"] for r in rows)
    tokens = rows[-1]["tokens"] / 1e6
    print(f"\n{len(rows)} steps, {tokens:.2f} M tokens, {seconds / 3600:.2f} h, {cpu / 3600:.2f} h of CPU")


if __name__ == "__main__":
    main()
