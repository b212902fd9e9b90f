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


GRID = 64  # tokens: where a state can be handed over, and be lost
SHORTEST = 64  # tokens: less room is left empty


def lost(tokenizer, rng, messages, thinking):
    """The dialogue of a model whose recurrent state is lost before one of its answers: (messages, tokens up
    to that answer), or None where there is no such answer."""
    turns = [
        i
        for i, m in enumerate(messages)
        if m["role"] == "assistant" and m["content"] != dialogues.READY
    ]
    if not turns or messages[turns[0]]["content"] == dialogues.NO_TEXT:
        return None
    turn = rng.choice(turns)
    ids, _ = tokenizer.render(messages[:turn], thinking=thinking, prompt=True)
    changed = [
        dialogues.say("assistant", dialogues.NO_TEXT) if i >= turn and m["role"] == "assistant" else m
        for i, m in enumerate(messages)
    ]
    return changed, len(ids)


def sample(tokenizer, rng, held, length, phase_one=False, losing=0.0, fresh=True):
    """One dialogue of at most `length` tokens: ids, which of them the model writes, and where its state is
    lost (tokens before that answer) or None. None instead of all if it came out too long."""
    messages, tools = dialogues.dialogue(rng, held, tokenizer.cost, length - 24, phase_one, fresh)
    thinking, at = rng.random() < 0.5, None
    ids, mine = tokenizer.render(messages, tools, thinking)
    asked = lambda: sum(m["role"] == "assistant" and m["content"] != dialogues.READY for m in messages)
    while len(ids) > length and asked() > 1 and not tools:  # the last question goes
        messages = messages[:-2]
        ids, mine = tokenizer.render(messages, tools, thinking)
    if rng.random() < losing and not tools:
        changed = lost(tokenizer, rng, messages, thinking)
        if changed and changed[1] > 2 * GRID:
            at = changed[1]
            ids, mine = tokenizer.render(changed[0], None, thinking)
    return (ids, mine, at) if len(ids) <= length and any(mine) else None


def row(tokenizer, rng, held, length, phase_one, losing):
    """Dialogues one after the other, the longest first; what went before is an older conversation."""
    ids, mine, resets, failed = [], [], [], 0
    while length - len(ids) > SHORTEST and failed < 6:
        more = sample(tokenizer, rng, held, length - len(ids), phase_one, losing, not ids)
        if more is None:
            failed += 1
            continue
        if more[2] is not None:
            resets.append((len(ids) + more[2] - 1) // GRID * GRID)
        ids, mine = ids + more[0], mine + more[1]
    if not ids:
        return row(tokenizer, rng, held, length, phase_one, losing)
    return ids + [tokenizer.pad] * (length - len(ids)), mine + [False] * (length - len(mine)), resets


def batch(tokenizer, seed, number, rows, length, held=False, phase_one=False, losing=0.0):
    """rows x length ids padded at the end, the mask of what the model writes, and the positions (multiples of
    GRID) before which each row's recurrent state is lost."""
    rng = random.Random("%s/%d/%d" % (seed, number, held))
    made = [row(tokenizer, rng, held, length, phase_one, losing) for _ in range(rows)]
    return [r[0] for r in made], [r[1] for r in made], [r[2] for r in made]
