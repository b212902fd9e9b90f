"""Byte-pair vocabulary of the generated checkpoints, learned from text that this file builds itself.

The same seed and size give the same vocabulary on every machine: nothing is read from outside.
"""
import base64
import heapq
import json
import os
import random
import re

# The layout of the published vocabularies: byte pairs, then 256 reserved ids of which some have names.
RESERVED = 256
SPECIAL = {
    "kimi_k3": {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>",
                5: "<|sep|>", 6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]",
                18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
                21: "<|media_pad|>", 65: "<osagent_mode>", 254: "[UNK]", 255: "[PAD]"},
    "kimi_linear": {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>",
                    4: "<|im_assistant|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>",
                    9: "[EOT]", 10: "<|im_system|>", 11: "<|tool_calls_section_begin|>",
                    12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>",
                    14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>",
                    17: "<|im_middle|>", 254: "[UNK]", 255: "[PAD]"},
}
NOT_SPECIAL_WHEN_DECODING = {"<|open|>", "<|close|>", "<|sep|>"}

# Stand-in wording: the published texts are the publisher's and are not repeated here.
CHAT_LITERALS = {
    "tools": "The assistant may call these tools, given as JSON:\n\n```json\n%s\n```",
    "tools_dynamic": "From here on these tools may be called as well:\n\n```json\n%s\n```",
    "thinking_effort": "Thinking effort for the next answer: %s.",
    "tool_choice_required": "Answer with at least one tool call.",
    "tool_choice_none": "Answer without calling any tool.",
    "response_json_object": "Answer with one JSON object and nothing else.",
    "response_json_schema": "Answer with JSON that fits this schema:\n```json\n%s\n```",
}

COMMON = """the of and to in is that it for was on are as with they be at one have this from or had by
but not what all were we when your can said there use each which she do how their if will up other about
out many then them these so some her would make like him into time has look two more write go see number
no way could people my than first water been call who oil its now find long down day did get come made may
part over new sound take only little work know place year live me back give most very after thing our just
name good sentence man think say great where help through much before line right too mean old any same tell
boy follow came want show also around form three small set put end does another well large must big even such
because turn here why ask went men read need land different home us move try kind hand picture again change
off play spell air away animal house point page letter mother answer found study still learn should world
high every near add food between own below country plant last school father keep tree never start city earth
eye light thought head under story saw left few while along might close something seem next hard open example
begin life always those both paper together got group often run important until children side feet car mile
night walk white sea began grow took river four carry state once book hear stop without second later miss idea
enough eat face watch far really almost let above girl sometimes mountain cut young talk soon list song being
leave family music color question friend yes no please thank hello sorry today tomorrow morning
evening""".split()

STEMS = """attend batch block cache cancel chain check chunk client cluster collect combine compute connect
count decode deliver depend describe detect develop direct discover dispatch divide drain embed encode expect
expert explain export extend fail fetch filter finish fold forward gate generate handle hash head hold improve
index infer inspect join kernel label latent layer limit link load lock log manage match measure merge model
mount normal notice order pack page pair parse pass pattern plan pool predict prefer prefill present print
process produce project prompt protect queue random reach reason record reduce refer register reject release
remember render repeat report request reserve reset respond restart result return reveal reverse route sample
scale schedule score search select send separate sequence serve settle shape share shift signal sleep sort
split start store stream stretch suggest support switch target test thread token track train transfer
translate update validate value vector verify visit wait warn weigh wonder wrap""".split()
ENDINGS = ["", "s", "ed", "ing", "er", "ers"]

OTHER = [
    "中文句子由许多汉字组成，模型逐个词元地写出回答。今天天气很好，我们去河边散步，然后回家读书。",
    "请告诉我这座城市的历史。谢谢你的帮助，这个问题很有意思，让我想一想再回答你。",
    "日本語の文章も少しだけ入れておきます。質問があれば、いつでも聞いてください。",
    "한국어 문장도 조금 넣습니다. 질문이 있으면 언제든지 물어보세요.",
    "Немного русского текста: сегодня хорошая погода, и мы идём гулять к реке.",
    "Ein paar deutsche Sätze: Heute ist das Wetter schön, und wir gehen an den Fluss.",
    "Un peu de français : aujourd'hui il fait beau, et nous allons nous promener près de la rivière.",
    "Un poco de español: hoy hace buen tiempo y vamos a pasear cerca del río.",
]
CODE = [
    "for (int i = 0; i < n; ++i) {\n  sum += values[i];\n}\n",
    "def add(first, second):\n    return first + second\n\n",
    "if (status.ok()) {\n    return result;\n} else {\n    throw error;\n}\n",
    "class Node:\n    def __init__(self, name, next=None):\n        self.name = name\n",
    "import json\nimport os\n\nwith open(path) as f:\n    data = json.load(f)\n",
    "#include <vector>\n#include <string>\n\nint main() {\n  std::vector<std::string> names;\n}\n",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n',
    '{"role": "user", "content": "Hello!"}\n{"role": "assistant", "content": "Hi, how can I help?"}\n',
    '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}\n',
    "SELECT name, count FROM items WHERE count > 10 ORDER BY name;\n",
    "| column | value |\n|---|---|\n| first | 12.5 |\n\n* one\n* two\n\n## Heading\n\n",
]


def inflect(stem, ending):
    if ending == "s" and stem.endswith(("ch", "sh", "s", "x")):
        return stem + "es"
    return (stem[:-1] if stem.endswith("e") and ending not in ("", "s") else stem) + ending


def sentence(rng):
    words = []
    for _ in range(rng.randint(5, 14)):
        if rng.random() < 0.62:
            words.append(COMMON[min(int(rng.expovariate(0.012)), len(COMMON) - 1)])
        else:
            words.append(inflect(rng.choice(STEMS), rng.choice(ENDINGS)))
    if rng.random() < 0.15:
        words.insert(rng.randrange(len(words)), str(rng.randint(0, 2100)))
    if rng.random() < 0.2:
        words[rng.randrange(len(words))] += ","
    text = " ".join(words)
    if rng.random() < 0.1:
        text += rng.choice([" that's", " it's", " don't", " we'll", " you're"])
    return text[0].upper() + text[1:] + rng.choice([".", ".", ".", "?", "!", ":"])


def corpus(sentences=6000, seed=20):
    rng = random.Random(seed)
    lines = []
    for i in range(sentences):
        lines.append(sentence(rng) + (" " if rng.random() < 0.7 else "\n\n"))
        if i % 12 == 0:
            lines.append(rng.choice(CODE))
        if i % 20 == 0:
            lines.append(rng.choice(OTHER) + "\n")
    return "".join(lines)


# Close to the tokenizer's own cuts; a pair learned across a real cut would only stay unused.
PIECE = re.compile(r"[\u3400-\u9fff]+"
                   r"|[^\r\n\w]?[^\W\d_\u3400-\u9fff]+(?:'(?:s|t|re|ve|m|ll|d))?"
                   r"|\d{1,3}| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_order():
    """The 256 single bytes, printable ones first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printable + [b for b in range(256) if b not in set(printable)]


def learn(text, merges):
    """Token bytes by rank, learned from a text."""
    words = {}
    for piece in PIECE.findall(text):
        words[piece] = words.get(piece, 0) + 1
    return learn_pieces(words, merges)


def learn_pieces(words, merges):
    """Token bytes by rank, from counts of pieces. The most frequent pair first, ties to the smaller bytes."""
    tokens = [bytes([b]) for b in byte_order()]
    known = set(tokens)
    parts = [[bytes([b]) for b in w.encode()] for w in sorted(words)]
    weight = [words[w] for w in sorted(words)]
    count, users = {}, {}

    def change(i, sign):
        for pair in zip(parts[i], parts[i][1:]):
            count[pair] = count.get(pair, 0) + sign * weight[i]
            if sign > 0:
                users.setdefault(pair, set()).add(i)

    for i in range(len(parts)):
        change(i, 1)
    heap = [(-n, pair) for pair, n in count.items()]
    heapq.heapify(heap)
    while heap and len(tokens) < 256 + merges:
        n, pair = heapq.heappop(heap)
        if count.get(pair, 0) != -n or n == 0:          # an old entry
            if count.get(pair, 0) > 0:
                heapq.heappush(heap, (-count[pair], pair))
            continue
        new = pair[0] + pair[1]
        if new not in known:
            known.add(new)
            tokens.append(new)
        touched = set()
        for i in sorted(users.pop(pair)):
            change(i, -1)
            old, fresh, j = parts[i], [], 0
            while j < len(old):
                if j + 1 < len(old) and (old[j], old[j + 1]) == pair:
                    fresh.append(new)
                    j += 2
                else:
                    fresh.append(old[j])
                    j += 1
            parts[i] = fresh
            change(i, 1)
            touched.update(zip(fresh, fresh[1:]))
        for p in touched:
            heapq.heappush(heap, (-count[p], p))
    return tokens


def write_json(folder, name, value, **kw):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        json.dump(value, f, ensure_ascii=False, **kw)
        f.write("\n")


def write_vocabulary(folder, family, merges, tokens=None):
    """tiktoken.model, tokenizer_config.json and, for K3, chat_literals.json.

    `tokens`: bytes by rank; without them they are learned. Returns the first reserved id.
    """
    tokens = tokens or learn(corpus(), merges)
    with open(os.path.join(folder, "tiktoken.model"), "wb") as f:
        for rank, token in enumerate(tokens):
            f.write(base64.b64encode(token) + b" %d\n" % rank)
    base, names = len(tokens), SPECIAL[family]
    added = {str(base + k): {"content": name, "lstrip": False, "normalized": False, "rstrip": False,
                             "single_word": False, "special": name not in NOT_SPECIAL_WHEN_DECODING}
             for k, name in names.items()}
    plain = {"[BOS]", "[EOS]", "[UNK]", "[PAD]"}
    write_json(folder, "tokenizer_config.json", {
        "added_tokens_decoder": added,
        "additional_special_tokens": [n for n in names.values() if n not in plain],
        "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False, "extra_special_tokens": {},
        "tokenizer_class": "TikTokenTokenizer"}, indent=1)
    if family == "kimi_k3":
        write_json(folder, "chat_literals.json", CHAT_LITERALS, indent=1)
    return base
