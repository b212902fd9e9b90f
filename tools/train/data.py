"""Batches of dialogues: batch `number` of a run is the same whenever it is drawn."""

import json
import os
import random

import dialogues
from text import PIECE, vocabulary


def write_vocabulary(folder, merges, seed=1, dialogue_count=600):
    """Byte pairs learned from training dialogues. Returns the vocabulary's size.

    A name is to be the same tokens at the start of a line and after a blank, and a number its digits: only
    frequent whole words get a token with the blank in front, and digits are never joined.
    """
    os.makedirs(folder, exist_ok=True)
    rng = random.Random(seed)
    counts = {}
    structure = (
        ' role="user" message assistant system think response tools call argument key type string '
        "index tool thinking-effort tool-declare"
    )
    for _ in range(dialogue_count):
        messages, tools = dialogues.dialogue(rng, False, lambda t: len(t) // 3, rng.choice([256, 512]))
        told = [structure, vocabulary.CHAT_LITERALS["thinking_effort"]]
        if tools:
            told.append(
                vocabulary.CHAT_LITERALS["tools"] % json.dumps(tools, sort_keys=True, separators=(",", ":"))
            )
        for text in [m["content"] for m in messages] + told:
            for piece in PIECE.findall(text):
                if not piece.isdigit():
                    counts[piece] = counts.get(piece, 0) + 1
    bare = {}
    for piece, n in counts.items():
        key = piece[1:] if piece[0] == " " and len(piece) > 1 else piece
        bare[key] = bare.get(key, 0) + n
    spaced = merges // 4
    tokens = vocabulary.learn_pieces(bare, merges - spaced)
    known = set(tokens)
    words = [
        p
        for p in counts
        if p[0] == " " and len(p) > 2 and p[1:].encode() in known and p.encode() not in known
    ]
    words.sort(key=lambda p: (-counts[p], p))
    tokens += [p.encode() for p in words[:spaced]]
    return vocabulary.write_vocabulary(folder, "kimi_k3", 0, tokens) + vocabulary.RESERVED


def sample(tokenizer, rng, held, length, phase_one=False):
    """One dialogue of at most `length` tokens: ids and which of them the model writes; None if it came out
    too long."""
    messages, tools = dialogues.dialogue(rng, held, tokenizer.cost, length - 24, phase_one)
    thinking = rng.random() < 0.5
    ids, mine = tokenizer.render(messages, tools, thinking)
    while len(ids) > length and len(messages) > 3 and not tools:  # the last question goes
        messages = messages[:-2]
        ids, mine = tokenizer.render(messages, tools, thinking)
    return (ids, mine) if len(ids) <= length and any(mine) else None


SHORTEST = 64  # tokens: less room is left empty


def row(tokenizer, rng, held, length, phase_one):
    """Dialogues one after the other, the longest first; what went before is an older conversation."""
    ids, mine, failed = [], [], 0
    while length - len(ids) > SHORTEST and failed < 6:
        more = sample(tokenizer, rng, held, length - len(ids), phase_one)
        if more is None:
            failed += 1
        else:
            ids, mine = ids + more[0], mine + more[1]
    if not ids:
        return row(tokenizer, rng, held, length, phase_one)
    return ids + [tokenizer.pad] * (length - len(ids)), mine + [False] * (length - len(mine))


def batch(tokenizer, seed, number, rows, length, held=False, phase_one=False):
    """rows x length ids padded at the end, and the mask of what the model writes (lists)."""
    rng = random.Random("%d/%d/%d" % (seed, number, held))
    made = [row(tokenizer, rng, held, length, phase_one) for _ in range(rows)]
    return [r[0] for r in made], [r[1] for r in made]
