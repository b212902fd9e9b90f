#!/usr/bin/env python3
"""Writes questions on held-out texts for the tests.

--out: each with the token ids of its dialogue and the right answer. They come in pairs of which a hand-off
would move the state at the same position, so that one can be given the other's.
--texts-out: texts of several lengths, each with many questions of which every one is asked for itself, and a
quarter as many that it does not answer.
"""

import argparse
import json
import random

import dialogues
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


def write(path, entries):
    with open(path, "w", encoding="utf-8") as f:
        f.write("[\n" + ",\n".join(json.dumps(e, separators=(",", ":")) for e in entries) + "\n]\n")


ASKED = 60  # tokens of a question and its answer, about


def text(tokenizer, rng, length, count):
    """A text that fills a prompt of `length` tokens together with one of its `count` questions, or of those
    that it does not answer."""
    budget = length + ASKED * 3 * count
    while True:
        messages = dialogues.reading(rng, True, tokenizer.cost, budget, 1 - length / budget, 0.3)
        first = next(
            i for i, m in enumerate(messages) if m["role"] == "user" and m["content"].endswith("?")
        )
        before, gap, _ = messages[first]["content"].rpartition("\n\n")
        pairs = [
            {"question": m["content"].rpartition("\n\n")[2], "answer": then["content"]}
            for m, then in zip(messages[first::2], messages[first + 1 :: 2])
        ]
        pairs = [p for p in pairs if not p["question"].startswith("And ")]  # needs the question before it
        prompt, _ = tokenizer.render(messages[: first + 1], thinking=False, prompt=True)
        unsaid = [p for p in pairs if p["answer"].endswith(dialogues.UNSAID)]
        said = [p for p in pairs if p not in unsaid]
        enough = len(said) >= count and len(unsaid) >= count // 4
        if enough and length * 0.9 <= len(prompt) <= length:
            text_part = {"length": length, "messages": messages[:first], "before": before + gap}
            return {**text_part, "questions": said[:count], "unanswered": unsaid[: count // 4]}


TEXTS = ["512:20:4", "2048:6:12", "8192:3:24", "32768:1:40"]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--vocabulary", required=True)
    p.add_argument("--out", required=True)
    p.add_argument("--texts-out", required=True)
    p.add_argument("--texts", nargs="+", default=TEXTS, help="LENGTH:TEXTS:QUESTIONS")
    p.add_argument("--counts", nargs="+", default=["512:32", "2048:8"], help="LENGTH:QUESTIONS")
    a = p.parse_args()
    tokenizer, out = Tokenizer(a.vocabulary), []
    for entry in a.counts:
        length, count = map(int, entry.split(":"))
        out += pairs(tokenizer, random.Random("questions.%d" % length), length, count)
    write(a.out, out)
    out = []
    for entry in a.texts:
        length, texts, count = map(int, entry.split(":"))
        rng = random.Random("texts.%d" % length)
        out += [text(tokenizer, rng, length, count) for _ in range(texts)]
    write(a.texts_out, out)


if __name__ == "__main__":
    main()
