"""Text to token ids: the published split and byte-pair rules for ASCII text, and the K3 chat format."""

import base64
import json
import os
import re
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import vocabulary  # noqa: E402

_SUFFIX = r"(?:'(?i:s|t|re|ve|m|ll|d))?"
PIECE = re.compile(
    r"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+"
    + _SUFFIX
    + r"|[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*"
    + _SUFFIX
    + r"|[0-9]{1,3}| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def say(role, content, **more):
    """A message of a conversation."""
    return {"role": role, "content": content, **more}


class Tokenizer:
    """The vocabulary of a folder. ASCII text only: that is all the generator writes."""

    def __init__(self, folder):
        self.ranks = {}
        with open(os.path.join(folder, "tiktoken.model"), "rb") as f:
            for line in f:
                token, rank = line.split()
                self.ranks[base64.b64decode(token)] = int(rank)
        with open(os.path.join(folder, "chat_literals.json"), encoding="utf-8") as f:
            self.literals = json.load(f)
        base = len(self.ranks)
        self.size = base + vocabulary.RESERVED
        named = {name: base + k for k, name in vocabulary.SPECIAL["kimi_k3"].items()}
        self.open, self.close, self.sep, self.end = (
            named[n] for n in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
        )
        self.pad = named["[PAD]"]
        self.bytes = {v: k for k, v in self.ranks.items()}
        self.bytes.update({v: k.encode() for k, v in named.items()})
        self.cache = {}

    def _piece(self, piece):
        parts = [bytes([b]) for b in piece.encode()]
        while len(parts) > 1:
            ranks = [self.ranks.get(a + b) for a, b in zip(parts, parts[1:])]
            known = [r for r in ranks if r is not None]
            if not known:
                break
            at = ranks.index(min(known))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self.ranks[p] for p in parts]

    def encode(self, text):
        out = []
        for piece in PIECE.findall(text):
            ids = self.cache.get(piece)
            if ids is None:
                if len(self.cache) > 300000:
                    self.cache.clear()
                ids = self.cache[piece] = self._piece(piece)
            out += ids
        return out

    def cost(self, text):
        return len(self.encode(text))

    def decode(self, ids):
        return b"".join(self.bytes.get(i, b"?") for i in ids).decode("utf-8", "replace")

    def _opened(self, tag, **attributes):
        out = [self.open] + self.encode(tag)
        for key, value in attributes.items():
            value = str(value).replace("&", "&amp;").replace('"', "&quot;")
            out += self.encode(" " + key) + self.encode('="') + self.encode(value) + self.encode('"')
        return out + [self.sep]

    def _closed(self, tag):
        return [self.close] + self.encode(tag) + [self.sep]

    def _message(self, body, **attributes):
        return (
            self._opened("message", **attributes) + self.encode(body) + self._closed("message") + [self.end]
        )

    def render(self, messages, tools=None, thinking=True, prompt=False):
        """Ids of a conversation and, for each, whether the model writes it. `prompt`: ends where the model
        is to go on."""
        ids, mine = [], []

        def put(part, written=False):
            ids.extend(part)
            mine.extend([written] * len(part))

        if tools:
            put(
                self._message(
                    self.literals["tools"] % json.dumps(tools, sort_keys=True, separators=(",", ":")),
                    role="system",
                    type="tool-declare",
                )
            )
        if thinking:
            put(
                self._message(
                    self.literals["thinking_effort"] % "max", role="system", type="thinking-effort"
                )
            )
        for m in messages:
            if m["role"] == "tool":
                put(self._message(m["content"], role="tool", tool=m["name"], index=1))
            elif m["role"] != "assistant":
                put(self._message(m["content"], role=m["role"]))
            else:
                put(
                    self._opened("message", role="assistant")
                    + self._opened("think" if thinking else "response")
                )
                if thinking:
                    put(self._closed("think") + self._opened("response"), True)
                put(self.encode(m["content"]) + self._closed("response"), True)
                if m.get("tool_calls"):
                    put(self._opened("tools"), True)
                    for j, call in enumerate(m["tool_calls"], 1):
                        put(self._opened("call", tool=call["function"]["name"], index=j), True)
                        for key, value in call["function"]["arguments"].items():
                            put(
                                self._opened("argument", key=key, type="string")
                                + self.encode(value)
                                + self._closed("argument"),
                                True,
                            )
                        put(self._closed("call"), True)
                    put(self._closed("tools"), True)
                put(self._closed("message") + [self.end], True)
        if prompt:
            put(
                self._opened("message", role="assistant")
                + self._opened("think" if thinking else "response")
            )
        return ids, mine
