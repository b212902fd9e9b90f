"""Writes random strings and their pieces according to the oracle's split_text, as JSON.

Usage: split_oracle.py REFERENCE.py COUNT OUT.json. Characters are those whose category has been the same
since Unicode 3.2, so that the tables of any two libraries agree on them.
"""
import importlib.util
import json
import random
import sys
import unicodedata

spec = importlib.util.spec_from_file_location("reference", sys.argv[1])
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)

old = unicodedata.ucd_3_2_0
stable = [chr(c) for c in range(0x110000)
          if not 0xD800 <= c < 0xE000 and old.category(chr(c)) not in ("Cn", "Co")
          and old.category(chr(c)) == unicodedata.category(chr(c))]
by_kind = {}
for ch in stable:
    by_kind.setdefault((unicodedata.category(ch), reference._kind(ch) & (4 | 8)), []).append(ch)
kinds = sorted(by_kind)
common = list("abcXYZ019 \t\n\r'.,;!_-") + ["'s", "'T", "'Ll", "'\u017f", "'re", "\u0301", "\u3001", "\u30fb",
                                         "\u4e2d", "\u6587", "\u3005", "\u00a0", "\u3000", "\u180e", "\u0085"]
rng = random.Random(20240611)


def char():
    r = rng.random()
    if r < 0.55:
        return rng.choice(common)
    if r < 0.9:
        return rng.choice(by_kind[rng.choice(kinds)])
    return rng.choice(stable)


def text():
    out = []
    for _ in range(rng.randrange(1, 25)):
        out.append(char() * (rng.randrange(2, 6) if rng.random() < 0.15 else 1))
    return "".join(out)


cases = []
for _ in range(int(sys.argv[2])):
    s = text()
    cases.append([s, reference.split_text(s)])
with open(sys.argv[3], "w", encoding="utf-8") as f:
    json.dump(cases, f, ensure_ascii=False)
