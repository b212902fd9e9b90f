"""Dialogues with declared tools: a question, the call that it needs, the tool's result, the answer.

Which tool a question needs stands in the descriptions. Names of tools and of their arguments are mostly made
up, so that a model copies what was declared; four tools with lasting names are among them.
"""

import dataclasses
import json
import re

import words
from text import say


@dataclasses.dataclass
class Tool:
    name: str
    key: str  # its argument
    about: str  # its description
    asks: list
    subject: object  # maker of what is asked about, as words.name
    result: object  # maker of the values that it returns
    wire: str  # how it returns them
    answer: str
    hint: str = ""  # the description of its argument
    required: bool = True

    def declaration(self):
        about_key = {"type": "string", **({"description": self.hint} if self.hint else {})}
        parameters = {"type": "object", "properties": {self.key: about_key}}
        if self.required:
            parameters["required"] = [self.key]
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.about, "parameters": parameters},
        }


KNOWN = [
    Tool(
        "get_weather",
        "city",
        "Current weather of a city",
        ["What is the weather in {x}?", "How is the weather in {x}?"],
        words.name,
        lambda r, h: (r.choice(["sunny", "rainy", "cloudy", "windy", "foggy"]), words.number(r, h, 1, 39)),
        "{0}, {1} degrees",
        "It is {0} in {x}, with {1} degrees.",
    ),
    Tool(
        "get_price",
        "item",
        "Price of an item in the shop",
        ["What is the price of {x}?", "How much is {x} in the shop?"],
        words.made_up,
        lambda r, h: (words.number(r, h, 2, 999),),
        "{0}",
        "In the shop {x} costs {0} coins.",
    ),
    Tool(
        "find_phone",
        "name",
        "Phone number of a person",
        ["Find the phone number of {x}.", "Please look up the number of {x}."],
        words.person,
        lambda r, h: (words.number(r, h, 1000, 9999),),
        "{0}",
        "The number of {x} is {0}.",
    ),
    Tool(
        "get_time",
        "place",
        "Local time of a place",
        ["What time is it in {x}?"],
        words.name,
        lambda r, h: (words.clock(r),),
        "{0}",
        "In {x} it is {0} now.",
    ),
]
VERBS = ["get", "find", "fetch", "read", "show", "check", "query", "lookup"]
KEYS = ["city", "item", "name", "place", "key", "id", "query", "what", "target", "of"]
ABOUTS = ["{A} of {ak}", "Current {a} of {ak}", "Gives the {a} of {ak}", "Looks up the {a} of any {k}"]
HINTS = ["Name of the {k}", "The {k}", "Which {k}"]
ASKS = [
    "What is the {a} of {x}?",
    "Tell me the {a} of {x}.",
    "Please look up the {a} of {x}.",
    "I need the {a} of {x}.",
    "Which {a} does {x} have?",
]
WIRES = ["{0}", "{0}", "{a}: {0}", "the {a} of {x} is {0}", '{{"{a}": "{0}"}}']
ANSWER = "The {a} of {x} is {0}."
SUBJECTS = [words.name, words.name, words.person, words.made_up, words.code]
RESULTS = [
    lambda r, h: words.number(r, h, 2, 9999),
    lambda r, h: words.number(r, h, 2, 999),
    words.code,
    words.name,
    words.coined,
    lambda r, h: words.clock(r),
    lambda r, h: words.date(r),
]


def _abbreviation(rng):
    """Of either side: what is held out is the word that stands in a name beside it."""
    letters = "".join(rng.choice("bcdfghjklmnpqrstvwxz") for _ in range(rng.randint(2, 4)))
    return letters.upper() if rng.random() < 0.4 else letters


def _identifier(rng, parts):
    """These words as programmers join them."""
    style = rng.random()
    if style < 0.6:
        return "_".join(parts)
    if style < 0.8:
        big = [p[0].upper() + p[1:] for p in parts]
        return "".join(big if style > 0.75 else parts[:1] + big[1:])
    return ("-" if style < 0.9 else ".").join(parts)


def _made_up_name(rng, held, matter):
    """Of a tool. Always with a word of the right side, so that the evaluation's names are its own."""
    word = matter if matter and rng.random() < 0.4 else rng.choice([words.coined, words.made_up])(rng, held)
    verb = rng.choice(VERBS)
    two = [[verb, word], [verb, word], [word, verb], [word, words.made_up(rng, held)]]
    parts = rng.choice([*two, [word]])
    if rng.random() < 0.2:
        parts.insert(rng.randrange(len(parts) + 1), _abbreviation(rng))
    if rng.random() < 0.12:
        parts.append(rng.choice(["", "v"]) + str(rng.randint(1, 99)))
    return _identifier(rng, parts)


def _made_up_key(rng, held, kind):
    chance = rng.random()
    if kind and chance < 0.3:
        return kind
    return words.coined(rng, held) if chance < 0.7 else rng.choice(KEYS)


def _tool(rng, held, known):
    """A tool of a lasting name with probability `known`; else its name is made up, mostly with its matter."""
    if rng.random() < known:
        return rng.choice(KNOWN)
    if rng.random() < 0.25:
        tool, matter, kind = rng.choice(KNOWN), "", ""
        changes = {}
    else:
        tool = KNOWN[0]
        matter = words.pick_or_coin(rng, words.MATTERS, held)
        kind = words.pick_or_coin(rng, words.KINDS, held)
        own = {"{a}": matter, "{A}": matter.capitalize(), "{k}": kind, "{ak}": words.a(kind)}
        of = lambda t: re.sub(r"\{\w+\}", lambda m: own.get(m[0], m[0]), t)
        result = rng.choice(RESULTS)
        changes = {
            "about": of(rng.choice(ABOUTS)),
            "asks": [of(t) for t in ASKS],
            "subject": rng.choice(SUBJECTS),
            "result": lambda r, h: (result(r, h),),
            "wire": of(rng.choice(WIRES)),
            "answer": of(ANSWER),
            "hint": of(rng.choice(HINTS)) if rng.random() < 0.3 else "",
        }
    return dataclasses.replace(
        tool,
        name=_made_up_name(rng, held, matter),
        key=_made_up_key(rng, held, kind),
        required=rng.random() < 0.8,
        **changes,
    )


def _declared(rng, held, cost, room, known):
    """Tools for different questions whose declarations fit in `room` tokens, and these; one at least."""
    tools, used = [], 0
    for _ in range(rng.choice([1, 1, 2, 2, 3, 4])):
        tool = _tool(rng, held, known)
        used += cost(json.dumps(tool.declaration(), sort_keys=True, separators=(",", ":"))) + 2
        if tools and used > room:
            break
        if all(t.about != tool.about and t.asks != tool.asks and t.name != tool.name for t in tools):
            tools.append(tool)
    return tools, [t.declaration() for t in tools]


def calling(rng, held, cost, budget, known=0.3):
    """One or more questions that a declared tool answers. Returns (messages, tools)."""
    tools, declarations = _declared(rng, held, cost, budget * 0.55, known)
    declared = cost(json.dumps(declarations, sort_keys=True, separators=(",", ":")))
    messages, left, last = [], budget - 50 - declared, None
    while not messages or left > 170:
        follows = last is not None and rng.random() < 0.15
        tool = last if follows else rng.choice(tools)
        x, values = tool.subject(rng, held), tool.result(rng, held)
        fill = lambda t: t.replace("{x}", x).format(*values)
        turn = [
            say("user", "And %s?" % x if follows else fill(rng.choice(tool.asks))),
            say(
                "assistant",
                "",
                tool_calls=[
                    {"id": tool.name + ":0", "function": {"name": tool.name, "arguments": {tool.key: x}}}
                ],
            ),
            say("tool", fill(tool.wire), tool_call_id=tool.name + ":0", name=tool.name),
            say("assistant", fill(tool.answer)),
        ]
        left -= 100 + 3 * cost(tool.name) + cost(tool.key) + cost(x) + sum(cost(m["content"]) for m in turn)
        messages += turn
        last = tool
    return messages, declarations
