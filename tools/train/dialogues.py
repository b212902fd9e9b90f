"""Dialogues about texts: made of templates, names and numbers, always the same from the same seed.

A dialogue is a text (notes, list, table, log, file tree), questions whose answers stand in it, and the
answers: one English sentence each, decided by the question alone. `Fact` is the unit: one statement in
several wordings, the questions it answers, the answer.
"""

import dataclasses
import re

import words
from calls import calling
from text import say

READY = "I have read it. What do you want to know?"
UNSAID = "... the text does not say."  # where the value of an answer would stand
NO_TEXT = "I have no text to read."  # also what a model is to say that has lost its state


@dataclasses.dataclass
class Fact:
    subject: str
    relation: str
    says: str  # as a sentence of a text
    asks: list  # questions that this fact answers
    answer: str
    value: str = ""
    follow: str = ""  # the subject as a follow-up names it: "And Mirel?"


def _cap(text):
    return text[0].upper() + text[1:]


# relation: (wordings, questions, answer, value maker). Every wording says the subject before the value: a
# model of this size finds what follows a name, and hardly what stands before it.
PEOPLE = {
    "city": (
        ["{s} lives in {v}.", "{s} has a house in {v}.", "The home of {s} is in {v}."],
        ["Where does {s} live?", "In which city does {s} live?"],
        "{s} lives in {v}.",
        lambda r, h: words.name(r, h),
    ),
    "job": (
        ["{s} works as {a}.", "{s} is {a}.", "By trade {s} is {a}."],
        ["What is the job of {s}?", "What does {s} work as?"],
        "{s} works as {a}.",
        lambda r, h: words.pick_or_coin(r, words.JOBS, h),
    ),
    "age": (
        ["{s} is {v} years old.", "The age of {s} is {v}."],
        ["How old is {s}?", "What is the age of {s}?"],
        "{s} is {v} years old.",
        lambda r, h: words.number(r, h, 11, 99),
    ),
    "food": (
        ["{s} likes {v} best.", "The favourite food of {s} is {v}."],
        ["What does {s} like best?", "What is the favourite food of {s}?"],
        "{s} likes {v} best.",
        lambda r, h: words.pick_or_coin(r, words.FOODS, h),
    ),
    "number": (
        ["The phone number of {s} is {v}.", "{s} can be called at {v}."],
        ["What is the phone number of {s}?"],
        "The phone number of {s} is {v}.",
        lambda r, h: words.number(r, h, 1000, 9999),
    ),
    "room": (
        ["{s} sits in room {v}.", "{s} uses room {v}."],
        ["In which room does {s} sit?"],
        "{s} sits in room {v}.",
        lambda r, h: words.code(r, h),
    ),
    "friend": (
        ["{s} is a friend of {v}.", "{s} often visits {v}."],
        ["Who is a friend of {s}?", "Who does {s} know?"],
        "{s} is a friend of {v}.",
        lambda r, h: words.name(r, h),
    ),
    "date": (
        ["{s} arrives on {v}.", "We expect {s} on {v}."],
        ["When does {s} arrive?"],
        "{s} arrives on {v}.",
        lambda r, h: words.date(r),
    ),
    "meeting": (
        ["The meeting with {s} is at {v}.", "We meet {s} at {v}."],
        ["When is the meeting with {s}?", "At what time do we meet {s}?"],
        "The meeting with {s} is at {v}.",
        lambda r, h: words.clock(r),
    ),
}
THINGS = {
    "place": (
        ["{s} is in the {v}.", "{s} was left in the {v}.", "{s} stands in the {v}."],
        ["Where is {s}?", "In which room is {s}?"],
        "{s} is in the {v}.",
        lambda r, h: words.pick_or_coin(r, words.PLACES, h),
    ),
    "colour": (
        ["{s} is {v}.", "The colour of {s} is {v}.", "{s} was painted {v}."],
        ["What colour is {s}?", "What is the colour of {s}?"],
        "{s} is {v}.",
        lambda r, h: words.pick_or_coin(r, words.COLOURS, h),
    ),
    "owner": (
        ["{s} belongs to {v}.", "{s} is the property of {v}."],
        ["Who owns {s}?", "To whom does {s} belong?"],
        "{s} belongs to {v}.",
        lambda r, h: words.name(r, h),
    ),
    "price": (
        ["{s} costs {v} coins.", "The price of {s} is {v} coins."],
        ["How much does {s} cost?", "What is the price of {s}?"],
        "{s} costs {v} coins.",
        lambda r, h: words.number(r, h, 2, 999),
    ),
    "weight": (
        ["{s} weighs {v} kilos.", "The weight of {s} is {v} kilos."],
        ["How heavy is {s}?", "What does {s} weigh?"],
        "{s} weighs {v} kilos.",
        lambda r, h: words.number(r, h, 2, 999),
    ),
    "origin": (
        ["{s} comes from {v}.", "{s} was made in {v}."],
        ["Where does {s} come from?"],
        "{s} comes from {v}.",
        lambda r, h: words.name(r, h),
    ),
}
PROJECTS = {
    "code": (
        ["The code of {s} is {v}.", "{s} has the code {v}."],
        ["What is the code of {s}?"],
        "The code of {s} is {v}.",
        lambda r, h: words.code(r, h),
    ),
    "lead": (
        ["{s} is led by {v}.", "{s} is in the hands of {v}."],
        ["Who leads {s}?"],
        "{s} is led by {v}.",
        lambda r, h: words.name(r, h),
    ),
    "due": (
        ["{s} is due on {v}.", "{s} must be ready on {v}."],
        ["When is {s} due?"],
        "{s} is due on {v}.",
        lambda r, h: words.date(r),
    ),
    "password": (
        ["The password of {s} is {v}.", "To open {s}, say {v}."],
        ["What is the password of {s}?"],
        "The password of {s} is {v}.",
        lambda r, h: words.made_up(r, h),
    ),
    "budget": (
        ["The budget of {s} is {v}.", "{s} may spend {v}."],
        ["What is the budget of {s}?"],
        "The budget of {s} is {v}.",
        lambda r, h: words.number(r, h, 100, 9999),
    ),
}
GROUPS = [PEOPLE, THINGS, PROJECTS]
PROJECT_KINDS = ["project", "team", "plan"]


def _subject(rng, held, group):
    if group is PEOPLE:
        return words.person(rng, held)
    if group is THINGS:
        noun = words.pick_or_coin(rng, words.NOUNS, held)
        if rng.random() < 0.5:
            return "the " + noun + " of " + words.name(rng, held)
        return "the " + words.pick_or_coin(rng, words.ADJECTIVES, held) + " " + noun
    return rng.choice(PROJECT_KINDS) + " " + words.name(rng, held)


class _Unique:
    """Subjects and values that have not been used in this text."""

    def __init__(self):
        self.used = set()

    def __call__(self, make, tries=20):
        for _ in range(tries):
            x = make()
            if x not in self.used:
                self.used.add(x)
                return x
        return None


def _sentence_fact(rng, held, group, relation, subject):
    wordings, asks, answer, maker = group[relation]
    value = maker(rng, held)
    fill = lambda t: _cap(t.replace("{s}", subject).replace("{v}", value).replace("{a}", words.a(value)))
    return Fact(
        subject,
        relation,
        fill(rng.choice(wordings)),
        [fill(t) for t in asks],
        fill(answer),
        value,
        subject,
    )


def prose_facts(rng, held):
    """An endless stream of facts about subjects that share relations, so that both must be matched."""
    unique = _Unique()
    groups = rng.sample(GROUPS, rng.choice([1, 1, 2, 3]))
    chosen = {id(g): rng.sample(sorted(g), min(len(g), rng.randint(1, 4))) for g in groups}
    while True:
        group = rng.choice(groups)
        subject = unique(lambda: _subject(rng, held, group))
        if subject is None:  # all short ones are taken
            subject = _subject(rng, held, group) + " of " + words.name(rng, held)
        relations = chosen[id(group)]
        for relation in rng.sample(relations, rng.randint(1, len(relations))):
            yield _sentence_fact(rng, held, group, relation, subject)


def filler(rng, held):
    """A sentence without a fact."""
    name = lambda: words.pick(rng, words.NOUNS, held)
    return rng.choice(
        [
            "Nothing else happened that day.",
            "The weather was calm and the road was empty.",
            "Somebody should look at the %s again." % name(),
            "We talked for a long time and went home late.",
            "There was some noise about a %s, but it passed." % name(),
            "It rained a little in the afternoon.",
            "The rest can wait until next week.",
            "Everyone agreed that the %s needs care." % name(),
            "A long letter came and nobody read it.",
            "The %s and the %s were not discussed." % (name(), name()),
            "Lunch was late again.",
            "Please keep this page in a safe place.",
        ]
    )


# ---------------------------------------------------------------- texts: yield (piece, Fact or None)


def notes(rng, held):
    quiet = rng.choice([0, 0, 0.2, 0.5])
    style = rng.choice(["{} ", "{} ", "{}\n", "- {}\n", "* {}\n"])
    for fact in prose_facts(rng, held):
        if rng.random() < quiet:
            yield style.format(filler(rng, held)), None
        yield style.format(fact.says), fact


def _cell(rng, held, column):
    if column in ("city", "origin", "region", "owner", "team"):
        return words.name(rng, held)
    if column == "colour":
        return words.pick_or_coin(rng, words.COLOURS, held)
    if column in ("code", "model", "batch", "room", "unit"):
        return words.code(rng, held)
    if column == "status":
        return rng.choice(words.STATES)
    return words.number(rng, held, 10, 999)


def _cell_fact(subject, column, value):
    return Fact(
        subject,
        column,
        "",
        ["What is the %s of %s?" % (column, subject)],
        "The %s of %s is %s." % (column, subject, value),
        value,
        subject,
    )


def table(rng, held):
    """A table, a list of settings, or lines of fields: several facts share a line."""
    unique = _Unique()
    style = rng.choice(["table", "table", "comma", "fields", "dots", "block"])
    columns = rng.sample(words.COLUMNS, rng.randint(1, 2 if style in ("table", "comma") else 4))
    if style == "table":
        yield "| name | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1) + "\n", None
    elif style == "comma":
        yield "name," + ",".join(columns) + "\n", None
    while True:
        subject = unique(lambda: words.name(rng, held))
        cells = [(c, _cell(rng, held, c)) for c in columns]
        facts = [_cell_fact(subject, c, v) for c, v in cells]
        if style == "table":
            line = "| " + subject + " | " + " | ".join(v for _, v in cells) + " |\n"
        elif style == "comma":
            line = subject + "," + ",".join(v for _, v in cells) + "\n"
        elif style == "fields":
            line = subject + ": " + ", ".join(c + " " + v for c, v in cells) + "\n"
        elif style == "dots":
            line = "".join("%s.%s = %s\n" % (subject, c, v) for c, v in cells)
        else:
            line = subject + "\n" + "".join("  %s: %s\n" % (c, v) for c, v in cells)
        yield line, facts


def _error_fact(node, error):
    asks, answer = ["Which error did %s report?" % node], "The node %s reported error %s." % (node, error)
    return Fact(node, "error", "", asks, answer, error, node)


def log(rng, held):
    unique = _Unique()
    minute = rng.randint(0, 400)
    style = rng.choice(["{t} {s} {e}\n", "[{t}] {s} {e}\n", "{s} {e} at {t}\n", "The node {s} {e} at {t}.\n"])
    while True:
        minute = (minute + rng.randint(1, 9)) % 1440
        t = "%02d:%02d" % divmod(minute, 60)
        s = unique(lambda: words.made_up(rng, held))
        e = rng.choice(words.EVENTS)
        if rng.random() < 0.4:
            v = words.code(rng, held)
            e = "reported error " + v
            fact = _error_fact(s, v)
        elif rng.random() < 0.5 and not style.startswith(("{t}", "[")):
            asks = ["When was %s last seen?" % s, "At what time does %s appear?" % s]
            fact = Fact(s, "when", "", asks, "The node %s appears at %s." % (s, t), t, s)
        else:
            asks = ["What happened to %s?" % s]
            fact = Fact(s, "what", "", asks, "The node %s %s." % (s, e), e, s)
        yield style.format(t=t, s=s, e=e), fact


def tree(rng, held):
    """Folders with files and their sizes; a file's size or the first file of a folder is asked for."""
    unique = _Unique()
    stems = _Unique()
    flat = rng.random() < 0.4
    while True:
        folder = unique(lambda: words.made_up(rng, held))
        facts = []
        if not flat:
            yield folder + "/\n", None
        for place in range(rng.randint(1, 5)):
            stem = None
            if rng.random() < 0.2:
                stem = stems(lambda: words.pick_or_coin(rng, words.FILE_STEMS, held))
            file = (stem or unique(lambda: words.made_up(rng, held))) + "." + rng.choice(words.EXTENSIONS)
            n = words.number(rng, held, 10, 999)
            facts = [
                Fact(
                    file,
                    "size",
                    "",
                    ["How large is %s?" % file, "What is the size of %s?" % file],
                    "The size of %s is %s bytes." % (file, n),
                    n,
                    file,
                )
            ]
            if place == 0:
                facts.append(
                    Fact(
                        folder,
                        "first",
                        "",
                        ["Which file comes first in %s?" % folder, "What is the first file in %s?" % folder],
                        "The first file in %s is %s." % (folder, file),
                        file,
                        folder,
                    )
                )
            yield (folder + "/" if flat else "  ") + file + " " + n + " bytes\n", facts


TEXTS = [(notes, 4), (table, 3), (log, 1.5), (tree, 1.5)]
TITLES = {
    notes: ["Here are my notes:", "Read this:", "These are the facts:", "Notes of today:"],
    table: ["Here is a table:", "Here is the list:", "Read this:"],
    log: ["Here is the log:", "This is today's log:"],
    tree: ["These are the files:", "Here is the file tree:"],
}


def _group(fact):
    """The relations that this fact's subject may have; None for what a table, a log or a tree says."""
    return next((g for g in GROUPS if fact.relation in g), None) if fact.says else None


def _like(rng, held, fact):
    """Another subject of the same kind."""
    if fact.says:
        return _subject(rng, held, _group(fact))
    new = words.made_up(rng, held)
    if "." in fact.subject:
        return new + "." + rng.choice(words.EXTENSIONS)
    return new.capitalize() if fact.subject[0].isupper() else new


def _near(rng, held, fact):
    """A subject that is easily taken for this one: one of its words is another."""
    found = [m for m in re.finditer("[A-Za-z]+", fact.subject) if m[0] not in ("the", "of")]
    m = rng.choice(found)
    if m[0] in PROJECT_KINDS and len(found) > 1:
        new = rng.choice(PROJECT_KINDS)
    elif m.start() and fact.subject[m.start() - 1] == ".":
        new = rng.choice(words.EXTENSIONS)
    elif rng.random() < 0.6:
        new = words.similar(rng, m[0], held)
    elif m[0][0].isupper():
        new = words.name(rng, held)
    elif fact.subject.startswith("the "):
        two = len(found) > 1 and found[1][0][0].islower()
        new = words.pick_or_coin(rng, words.ADJECTIVES if two and m is found[0] else words.NOUNS, held)
    else:
        new = words.made_up(rng, held)
    return fact.subject[: m.start()] + new + fact.subject[m.end() :]


def _unsaid(fact, other):
    """The answer about `other` to the question that `fact` answers: as far as the value, which is unsaid."""
    value = words.a(fact.value) if fact.relation == "job" else fact.value
    begin = fact.answer.rpartition(value)[0].rstrip()
    if begin.lower().startswith(fact.subject.lower()):
        return _cap(other) + begin[len(fact.subject) :] + UNSAID
    return begin.replace(fact.subject, other) + UNSAID


def _missing(rng, held, facts, fact):
    """A question about what the text does not say of this subject, and the answer; None where it says all."""
    told = {f.relation for f in facts if f.subject == fact.subject}
    group = _group(fact)
    if group:
        rest = [r for r in sorted(group) if r not in told]
        if not rest:
            return None
        new = _sentence_fact(rng, held, group, rng.choice(rest), fact.subject)
    elif told <= set(words.COLUMNS):
        new = _cell_fact(fact.subject, rng.choice([c for c in words.COLUMNS if c not in told]), "?")
    elif told & {"what", "when"}:
        new = _error_fact(fact.subject, "?")
    else:
        return None
    return rng.choice(new.asks), _unsaid(new, new.subject)


UNANSWERED = {"similar": 0.3, "missing": 0.3, "other": 0.4}  # kinds of questions that a text does not answer


def unanswered(rng, held, facts, text, kinds=UNANSWERED, last=None):
    """A question that the text does not answer, and what to say: about a name like one of it, about a name
    that is not in it, or about something else of a name that is. `last`: may follow on the question about
    that fact. None where there is no such question."""
    text, names = text.lower(), {f.subject.lower() for f in facts}
    for _ in range(20):
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        fact = rng.choice(facts)
        if kind == "missing":
            pair = _missing(rng, held, facts, fact)
            if pair:
                return pair
            continue
        follows = last and rng.random() < 0.15
        if follows:
            fact = last
        other = (_near if kind == "similar" else _like)(rng, held, fact)
        if other.lower() in text or other.lower() in names:
            continue
        question = "And %s?" % other if follows else rng.choice(fact.asks).replace(fact.subject, other)
        return question, _unsaid(fact, other)
    return None


def _questions(rng, facts, count, unknown=0.0, ask_unknown=None):
    """Pairs of question and answer: single ones and follow-ups that keep the relation of the last one;
    `unknown` of them have no answer in the text, and ask_unknown(last fact) makes these."""
    out, last = [], None
    for fact in rng.sample(facts, min(count, len(facts))):
        while unknown and rng.random() < unknown:  # and not at most one: its place must not tell
            pair = ask_unknown(last)
            if pair is None:
                break
            out.append(pair)
            last = last if pair[0].startswith("And ") else None
        same = [
            f
            for f in facts
            if last and f.relation == last.relation and f is not last and f.follow != last.follow
        ]
        if same and rng.random() < 0.15:
            fact = rng.choice(same)
            out.append(("And %s?" % fact.follow, fact.answer))
            last = None  # a follow-up of a follow-up is not asked
            continue
        out.append((rng.choice(fact.asks), fact.answer))
        last = fact
    return out


def reading(
    rng,
    held,
    cost,
    budget,
    share=0.35,
    unknown=0.2,
    most_questions=200,
    kinds=TEXTS,
    unknowns=UNANSWERED,
):
    """A text that fills about 1 - share of `budget` tokens, then questions for the rest.

    cost(text): tokens. unknown: share of the questions that the text does not answer.
    Returns messages."""
    make = rng.choices([k for k, _ in kinds], [w for _, w in kinds])[0]
    pieces, facts, used = [], [], 0
    room = budget * (1 - share) - 30
    for piece, fact in make(rng, held):
        used += cost(piece)
        if used > room and len(facts) >= 2:
            break
        pieces.append(piece)
        for f in fact if isinstance(fact, list) else [fact] if fact else []:
            facts.append(f)
    text = "".join(pieces).strip("\n ")
    title = rng.choice(TITLES[make])
    messages, left = [], budget - used - 30
    ask_unknown = lambda last: unanswered(rng, held, facts, text, unknowns, last)
    pairs = _questions(rng, facts, most_questions, unknown, ask_unknown)
    opening = rng.choice([0, 0, 1, 2, 2])
    if opening == 0:
        messages += [say("system", title + "\n" + text)]
    elif opening == 1:
        messages += [say("user", title + "\n" + text), say("assistant", READY)]
        left -= 40
    first = opening >= 2
    for number, (question, answer) in enumerate(pairs):
        left -= cost(question) + cost(answer) + 36
        if left < 0 and number:
            break
        if first:
            question = title + "\n" + text + "\n\n" + question
        messages += [say("user", question), say("assistant", answer)]
        first = False
        if left < 0:
            break
    return messages


def repeating(rng, held, cost, budget):
    """Says a short text again, whole or one line of each: the first thing a reader learns."""
    lines, used = [], 0
    for fact in prose_facts(rng, held):
        used += 2 * cost(fact.says)
        if used > budget - 90 and lines:
            break
        lines.append(fact.says)
    ask = rng.choice(["Please repeat this text:", "Say this again:", "Repeat after me:"])
    return [say("user", ask + "\n" + " ".join(lines)), say("assistant", " ".join(lines))]


SMALL_TALK = [
    (["Hello!", "Hi.", "Good morning.", "Hello there."], "Hello! Give me a text and ask me about it."),
    (
        ["What can you do?", "How can you help me?", "What are you?"],
        "I am a small model. I read a text that you give me and answer questions about it.",
    ),
    (["Thank you.", "Thanks a lot!", "That helps, thanks."], "You are welcome."),
    (
        [
            "What is a mesh?",
            "Who won the game?",
            "Tell me a story.",
            "What is the capital of the moon?",
            "Write a poem.",
        ],
        "I only know what stands in the text that you give me.",
    ),
]


def chatting(rng, held, cost, budget):
    messages = []
    for _ in range(rng.randint(1, 3)):
        asks, answer = rng.choice(SMALL_TALK)
        messages += [say("user", rng.choice(asks)), say("assistant", answer)]
    return messages


def without_text(rng, held, cost, budget):
    """A question about a text that was never given."""
    fact = next(prose_facts(rng, held))
    return [say("user", rng.choice(fact.asks)), say("assistant", NO_TEXT)]


def dialogue(rng, held, cost, budget, phase_one=False, fresh=True):
    """(messages, tools) of about `budget` tokens, or fewer. fresh: nothing was said before."""
    kind = rng.random()
    if phase_one and kind < 0.5:
        return repeating(rng, held, cost, budget), None
    if budget <= 512 and kind > 0.98:
        kinds = [chatting, without_text] if fresh else [chatting]
        return rng.choice(kinds)(rng, held, cost, budget), None
    if budget >= 256 and kind > 0.68:
        return calling(rng, held, cost, min(budget, rng.choice([488, 800, 1200])))
    share = rng.choice([0.5, 0.7] if budget <= 256 else [0.4, 0.7] if budget <= 1024 else [0.2, 0.5, 0.7])
    return reading(rng, held, cost, budget, share), None
