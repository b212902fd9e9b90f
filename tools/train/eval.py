#!/usr/bin/env python3
"""Exact-answer accuracy on held-out dialogues by length, and what is left of it when a state is lost.

Words, names and numbers of three digits and more are none of the training's. An answer counts when every
token that the model writes in that turn is its first choice: greedy decoding gives exactly this answer.
"""

import argparse
import json
import random

import torch

import calls
import data
import dialogues
import export
import recipe
from text import Tokenizer

GRID = 64  # a hand-off covers whole blocks of this many tokens; the rest is computed from the state


def exact(logits, ids, turns, offset=0):
    """Whether each turn (from, to) comes out; logits[i] predicts ids[offset + i + 1]."""
    best = logits.argmax(-1).tolist()
    return [all(best[t - 1 - offset] == ids[t] for t in range(a, b)) for a, b in turns]


def turns_of(mine):
    edges = [i for i in range(1, len(mine)) if mine[i] != mine[i - 1]]
    return list(zip(edges[::2], edges[1::2] + [len(mine)]))


def reading_once(tokenizer, rng, length):
    """The messages of a held-out text with a single question about it at its end."""
    while True:
        messages = dialogues.reading(rng, True, tokenizer.cost, length - 24, 60 / length, 0.0, 1)
        if messages[-1]["content"] != dialogues.READY:
            return messages


def whole(tokenizer, rng, length, kinds=dialogues.TEXTS, share=None, questions=40):
    """A held-out dialogue about a text, as long as asked."""
    while True:
        share = share or (0.5 if length <= 512 else 0.2)
        messages = dialogues.reading(rng, True, tokenizer.cost, length - 24, share, 0.0, questions, kinds)
        ids, mine = tokenizer.render(messages, thinking=rng.random() < 0.5)
        if messages[1]["content"] == dialogues.READY:  # is no answer to a question
            a, b = turns_of(mine)[0]
            mine[a:b] = [False] * (b - a)
        if length * 0.6 <= len(ids) <= length:
            return ids, mine


def unanswered(tokenizer, rng, length, kind):
    """A held-out dialogue of which only the questions count that the text does not answer."""
    while True:
        share = 0.5 if length <= 512 else 0.2
        messages = dialogues.reading(
            rng, True, tokenizer.cost, length - 24, share, 0.5, 40, unknowns={kind: 1.0}
        )
        ids, mine = tokenizer.render(messages, thinking=rng.random() < 0.5)
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        for (a, b), answer in zip(turns_of(mine), answers):
            if not answer.endswith(dialogues.UNSAID):
                mine[a:b] = [False] * (b - a)
        if any(mine) and length * 0.6 <= len(ids) <= length:
            return ids, mine


def tool_dialogue(tokenizer, rng, length, known):
    """known: with the four tools of lasting names; else with names that training never said."""
    messages, tools = calls.calling(rng, True, tokenizer.cost, length - 24, float(known))
    return tokenizer.render(messages, tools, thinking=rng.random() < 0.5)


@torch.no_grad()
def calls_by_declared(model, tokenizer, length=512, count=150):
    """{tools declared: (right calls, calls)}, of tools that training never said."""
    rng, by = random.Random("by number"), {}
    for _ in range(count):
        messages, tools = calls.calling(rng, True, tokenizer.cost, length - 24, 0.0)
        ids, mine = tokenizer.render(messages, tools, thinking=False)
        logits, _ = model(torch.tensor([ids[:-1]]), state={})
        made = exact(logits, ids, turns_of(mine))[::2]  # then comes what the result is said to be
        right, asked = by.get(len(tools), (0, 0))
        by[len(tools)] = (right + sum(made), asked + len(made))
    return dict(sorted(by.items()))


@torch.no_grad()
def accuracy(model, tokenizer, length, count, seed=1, make=whole, **how):
    """(right, asked) over `count` dialogues."""
    rng = random.Random("%d.%d" % (seed, length))
    right = asked = 0
    for _ in range(count):
        ids, mine = make(tokenizer, rng, length, **how)
        logits, _ = model(torch.tensor([ids[:-1]]), state={})
        results = exact(logits, ids, turns_of(mine))
        right, asked = right + sum(results), asked + len(results)
    return right, asked


@torch.no_grad()
def busiest_experts(model, tokenizer, stage, batches=64, held=True):
    """{layer, from 1: tokens of the busiest expert over the mean} over batches as `stage` has them."""
    rng, loads = random.Random("loads"), {}
    for number in range(batches):
        length, rows = recipe.shape(rng, stage)
        ids = torch.tensor(data.batch(tokenizer, "loads", number, rows, length, held)[0])
        real = (ids != tokenizer.pad).view(-1)
        _, seen = model(ids, positions=torch.zeros(1, dtype=torch.long), real=real)
        for layer, tokens in seen.loads.items():
            loads[layer + 1] = loads.get(layer + 1, 0) + tokens
    return {layer: float(n.max() / n.float().mean()) for layer, n in loads.items()}


def corrupt(state, what, other):
    """The state a hand-off would leave behind: `what` is kept, kda, conv, latents or other."""
    if what == "kda":
        return {k: torch.zeros_like(v) if k[0] in ("S", "conv") else v for k, v in state.items()}
    if what == "latents":
        return {
            k: tuple(torch.zeros_like(x) for x in v) if k[0] == "latent" else v for k, v in state.items()
        }
    return dict(other) if what == "other" else dict(state)


@torch.no_grad()
def after_loss(model, tokenizer, length, count, seed=2):
    """{what is lost: right answers} when a single question follows a text and the state is handed over."""
    rng = random.Random("%d.%d" % (seed, length))
    right, other = {"nothing": 0, "kda": 0, "latents": 0, "other": 0}, None
    done = 0
    while done < count:
        ids, mine = whole(tokenizer, rng, length, share=60 / length, questions=1)
        a, b = turns_of(mine)[-1]
        at = (a - 1) // GRID * GRID
        if not at:
            continue
        state = {}
        model(torch.tensor([ids[:at]]), state=state)
        if other is not None:
            for what in right:
                logits, _ = model(torch.tensor([ids[at:b]]), state=corrupt(state, what, other))
                right[what] += exact(logits, ids, [(a, b)], at)[0]
            done += 1
        other = state
    return right


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", required=True, help="a file that train.py wrote")
    p.add_argument("--vocabulary", required=True)
    p.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192, 32768])
    p.add_argument(
        "--dialogues", type=int, default=24, help="of each length up to 2048; fewer of longer ones"
    )
    p.add_argument(
        "--as-trained", action="store_true", help="do not round the weights to the published types"
    )
    p.add_argument("--kinds", action="store_true", help="also notes, tables, logs and trees by themselves")
    p.add_argument("--threads", type=int, default=2)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    model, saved = export.load(a.checkpoint)
    if not a.as_trained:
        export.as_published(model)
    tokenizer = Tokenizer(a.vocabulary)
    print(json.dumps({"step": saved["step"], "tokens": saved["tokens"]}))
    for length in a.lengths:
        count = max(2, a.dialogues * 2048 // max(length, 2048))
        right, asked = accuracy(model, tokenizer, length, count)
        row = {"length": length, "answers": asked, "accuracy": round(right / asked, 4)}
        if a.kinds:
            for kind in dialogues.TEXTS:
                some, of = accuracy(model, tokenizer, length, count, kinds=[kind])
                row[kind[0].__name__] = round(some / of, 3)
        if length <= 8192:
            lost = after_loss(model, tokenizer, length, 2 * count)
            row["kept when lost"] = {k: round(v / (2 * count), 3) for k, v in lost.items()}
        print(json.dumps(row), flush=True)
    for kind in dialogues.UNANSWERED:
        for length in (n for n in a.lengths if n <= 8192):
            count = max(2, a.dialogues * 1024 // max(length, 1024))
            right, asked = accuracy(model, tokenizer, length, count, make=unanswered, kind=kind)
            row = {"not answered by the text": kind, "length": length, "questions": asked}
            print(json.dumps({**row, "accuracy": round(right / asked, 4)}), flush=True)
    for names, known in (("known", True), ("unseen", False)):
        right, asked = accuracy(model, tokenizer, 512, 2 * a.dialogues, make=tool_dialogue, known=known)
        row = {"tools": names, "turns": asked, "accuracy": round(right / asked, 4)}
        print(json.dumps(row), flush=True)
    print(json.dumps({"right calls, calls by unseen tools declared": calls_by_declared(model, tokenizer)}))
    for side, held in (("trained", False), ("held out", True)):
        busiest = busiest_experts(model, tokenizer, recipe.STAGES[-1], held=held)
        row = {layer: round(x, 2) for layer, x in busiest.items()}
        print(json.dumps({f"busiest expert over the mean, {side} words": row}), flush=True)


if __name__ == "__main__":
    main()
