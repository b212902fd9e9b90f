#!/usr/bin/env python3
"""Writes questions on held-out texts for the tests: each with the token ids of its dialogue and the right
answer.

Questions come in pairs of which a hand-off would move the state at the same position, so that one can be
given the other's.
"""

import argparse
import json
import random

import eval as evaluation
from text import Tokenizer


def question(tokenizer, rng, length):
    """One text, one question, and where its answer begins in the ids."""
    while True:
        messages = evaluation.reading_once(tokenizer, rng, length)
        ids, mine = tokenizer.render(messages, thinking=False)
        begin, end = evaluation.turns_of(mine)[-1]
        if length * 0.6 <= len(ids) <= length:
            answer = messages[-1]["content"]
            return {"messages": messages[:-1], "answer": answer, "ids": ids[:end], "begin": begin}


def pairs(tokenizer, rng, length, count):
    """`count` questions, each two with the state at the same multiple of 64."""
    waiting, out = {}, []
    while len(out) < count:
        q = question(tokenizer, rng, length)
        at = (q["begin"] - 1) // evaluation.GRID
        if at in waiting:
            out += [waiting.pop(at), q]
        else:
            waiting[at] = q
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--vocabulary", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--counts", nargs="+", default=["512:32", "2048:8"], help="LENGTH:QUESTIONS")
    a = p.parse_args()
    tokenizer, out = Tokenizer(a.vocabulary), []
    for entry in a.counts:
        length, count = map(int, entry.split(":"))
        out += pairs(tokenizer, random.Random("questions.%d" % length), length, count)
    with open(a.out, "w", encoding="utf-8") as f:
        f.write("[\n" + ",\n".join(json.dumps(q, separators=(",", ":")) for q in out) + "\n]\n")


if __name__ == "__main__":
    main()
