"""Words and made-up names for the generated dialogues, split: what training says, evaluation never does.

A word or name belongs to the evaluation iff its hash says so, so both sides share spelling habits and
not one word. Structural words of the questions and answers are shared, of course.
"""

import zlib

ADJECTIVES = """old small large heavy copper iron silver golden wooden broken round narrow wide quiet bright
dark spare northern southern eastern western dusty polished folded hollow plain striped painted
rusty clean warm cold crooked slender thick light ancient modern hidden borrowed lost square
tall short double winter summer evening morning travel garden marble velvet cotton leather
paper glass stone clay brass steel""".split()
NOUNS = """lamp table chair key box map clock kettle ladder bucket basket bottle mirror carpet curtain
hammer saw drill rope anchor boat wagon bicycle drum violin flute trumpet piano guitar book letter
notebook parcel crate barrel candle lantern torch compass telescope camera radio printer scanner router
cable battery engine pump valve pipe ladle spoon plate cup bowl pan oven stove fridge blanket pillow
coat hat scarf glove boot umbrella bag suitcase wallet coin medal statue vase painting globe bell
whistle net tent stool bench shelf cabinet drawer desk sofa helmet shield saddle bridle plough rake
shovel spade wheel axle spring lever pulley magnet prism lens scale thermometer barometer kite puppet
doll marble puzzle dice chessboard ribbon needle thimble loom spindle anvil chisel rasp bolt screw nail
brush broom mop sponge towel soap jar tin sack cork funnel sieve grater whisk""".split()
PLACES = """kitchen cellar attic garage garden hall library office workshop stable barn tower chapel
bathroom bedroom corridor pantry shed courtyard balcony greenhouse laundry studio harbour warehouse
station market bakery museum theatre hospital school archive vault laboratory lobby basement terrace
porch den nursery dairy mill forge quarry orchard vineyard bakehouse lighthouse boathouse gatehouse
armoury infirmary refectory ballroom cloakroom""".split()
COLOURS = """red blue green yellow white black grey brown orange purple pink crimson violet turquoise beige
ivory scarlet amber teal maroon navy olive indigo magenta lilac ochre khaki emerald bronze
coral""".split()
JOBS = """baker carpenter doctor teacher farmer pilot sailor painter writer singer actor lawyer judge nurse
plumber mason tailor weaver potter smith miller fisher hunter gardener cook waiter driver guard soldier
clerk librarian chemist engineer architect surveyor dentist barber butcher grocer jeweller printer
editor reporter translator banker broker miner welder roofer glazier cooper tanner saddler brewer
cheesemaker beekeeper shepherd""".split()
FOODS = """bread cheese soup rice apples pears plums cherries grapes honey butter noodles beans lentils
carrots potatoes onions mushrooms spinach cabbage pancakes waffles dumplings salad porridge
walnuts almonds raisins figs dates olives peaches melons lemons oranges pickles sausages salmon
trout herring shrimp omelettes pudding biscuits chocolate toast jam yoghurt pumpkin turnips
radishes celery""".split()
COLUMNS = """city code colour price size owner team room weight status level score rank shift floor unit
grade phone target origin region batch model limit stock""".split()
FILE_STEMS = """notes report draft plan budget index main setup config readme list table chart log data
photo invoice summary agenda letter schedule outline memo script module parser buffer header footer
layout theme style""".split()
EXTENSIONS = "txt md py cc csv json html log png pdf toml sh".split()
EVENTS = [
    "started",
    "stopped",
    "failed",
    "restarted",
    "connected",
    "went offline",
    "finished its backup",
    "lost its disk",
    "was updated",
    "was locked",
]
STATES = "open closed ready busy late done paused broken".split()
# What a declared tool tells, and of what.
MATTERS = """temperature depth height speed balance address rating distance humidity pressure voltage altitude
population language currency capital birthday salary author title version delay platform fare length width
volume capacity mileage latitude horizon calibre density profit rent fee deadline nickname barcode
postcode wavelength""".split()
KINDS = """lake person machine train ship river book order user sensor mountain bridge country flight account
parcel village tunnel island planet actor festival museum stadium tenant device reactor channel pond
satellite""".split()
MONTHS = """January February March April May June July August September October November December""".split()

_ONSETS = (
    """b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh sk st t th tr v w y z bl cr gl""".split()
)
_VOWELS = "a e i o u a e i o ai ea ou io".split()
_CODAS = ["", "", "", "", "n", "r", "l", "s", "m", "t", "nd", "rk", "x", "sh", "ck", "lt"]


# Words of the generator's sentences: training says them, whatever their hash.
SHARED = set("""again appear arrive ask backup busy bytes can cost costs disk expect february file fits
floor game grade hands has job june leads list long look lost mesh name offline origin other owner
project restarted shop should sit some status story talked target tell thank the trade weigh what when
work you""".split())
_SPELLED = [ADJECTIVES, NOUNS, PLACES, COLOURS, JOBS, FOODS]
_KNOWN = {w for bag in _SPELLED for w in bag}


def a(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


def is_held_out(word):
    """One in six words is the evaluation's."""
    return zlib.crc32(word.lower().encode()) % 6 == 0 and word.lower() not in SHARED


_SPLIT = {}


def pick(rng, words, held):
    """A word of that side of the split."""
    key = (id(words), held)
    if key not in _SPLIT:
        _SPLIT[key] = [w for w in words if is_held_out(w) == held]
    return rng.choice(_SPLIT[key])


def made_up(rng, held):
    """A name nobody has; lower case. Short: what is copied is what goes wrong."""
    while True:
        parts = []
        for _ in range(2 if rng.random() < 0.85 else 3):
            parts.append(rng.choice(_ONSETS) + rng.choice(_VOWELS))
        word = "".join(parts) + rng.choice(_CODAS)
        if rng.random() < 0.25:
            word = rng.choice("aeiou") + word
        if 4 <= len(word) <= 11 and is_held_out(word) == held:
            return word


def coined(rng, held):
    """A word made of the halves of two: spelled like English, and too many of them to know by heart."""
    while True:
        a, b = (rng.choice(rng.choice(_SPELLED)) for _ in range(2))
        word = a[: max(2, (len(a) + 1) // 2)] + b[len(b) // 2 :]
        if 4 <= len(word) <= 10 and is_held_out(word) == held and word not in _KNOWN:
            return word


def pick_or_coin(rng, words, held):
    """Half of the values and of the things are coined, so that a model copies what stands there instead of
    choosing from a list it knows."""
    return pick(rng, words, held) if rng.random() < 0.5 else coined(rng, held)


def similar(rng, word, held):
    """A word of that side which differs from this one in a letter or two."""
    while True:
        at = rng.randrange(len(word))
        new = word[:at] + rng.choice("aeiou" if word[at] in "aeiou" else "bdfgklmnprstvw") + word[at + 1 :]
        if rng.random() < 0.3:
            new += rng.choice("aeionrlst")
        new = new.capitalize() if word[0].isupper() else new
        if new != word and is_held_out(new) == held:
            return new


def name(rng, held):
    return made_up(rng, held).capitalize()


def person(rng, held):
    return name(rng, held) if rng.random() < 0.9 else name(rng, held) + " " + name(rng, held)


def code(rng, held):
    """An identifier with letters and digits; drawn again until it is on its side."""
    while True:
        kind = rng.randrange(4)
        letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(rng.randint(1, 2)))
        digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 3)))
        text = (letters + digits, letters + "-" + digits, digits + letters, digits + "-" + letters)[kind]
        if is_held_out(text) == held:
            return text


def number(rng, held, low, high):
    while True:
        n = str(rng.randint(low, high))
        if len(n) < 3 or is_held_out(n) == held:  # too few short numbers to divide
            return n


def clock(rng):
    return "%02d:%02d" % (rng.randint(0, 23), rng.randint(0, 59))


def date(rng):
    return "%d %s" % (rng.randint(1, 28), rng.choice(MONTHS))
