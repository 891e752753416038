"""Invented names and words, real words, and small damage to a user's typing.

Names are invented so freely that a model can only learn to copy them, not to know them.
"""

import random
import re
from collections.abc import Sequence

ONSETS = (
    "b c d f g h j k l m n p qu r s t v w y z bl br ch cl cr dr fl fr gl gr kl kr ph pl pr sch sh "
    "sk sl sm sn sp st str sw th tr tw wh x"
).split()
VOWELS = "a a a e e e i i i o o o u u y ai au ea ee ei ia ie io oa oo ou".split()
CODAS = (
    "b ck d f g k l ll m n nd ng nk nt p r rd rk rn rt s sh ss st t tch th v x z mb lm ft"
).split()
ENDINGS = (
    "a o e i y us is on an en in ia ie ina ella elle ette ston ton ville berg burg ham ford field "
    "son sen ski ov ova ez er ard bert fred mund wyn lyn ana ora ita"
).split()
SCRIPTS = (
    (0xE0, 0xF6), (0xF8, 0xFF), (0x101, 0x17F), (0x3B1, 0x3C9), (0x430, 0x44F), (0x5D0, 0x5EA),
    (0x3041, 0x3093), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x1F300, 0x1F5FF),
)  # fmt: skip
KNOWN_NAMES = (
    "Anna Ben Carla David Emma Frank Grace Henry Ida Jack Kate Leo Mia Noah Olivia Paul Rosa Sam "
    "Tom Uma Victor Wendy Alice Bob Maria John Sarah Michael Lisa Peter Laura Max Julia Daniel"
).split()
KNOWN_CITIES = (
    "Berlin|Paris|London|Rome|Madrid|Vienna|Hamburg|Oslo|New York|Tokyo|Boston|Chicago|Cairo|Lima|"
    "San Francisco|Los Angeles|Rio de Janeiro|Mumbai|Sydney|Dublin|Prague|Lisbon|Zurich|Munich"
).split("|")
COLOURS = (
    "red blue green yellow orange purple pink brown black white grey turquoise violet silver gold "
    "crimson teal navy beige magenta indigo olive"
).split()
FOODS = (
    "pizza|pasta|rice|soup|bread|sushi|apple pie|chocolate|cheese|salad|curry|noodles|pancakes|"
    "ice cream|potatoes|tomato soup|fish|beans|tacos|dumplings|honey|lasagna"
).split("|")
JOBS = (
    "teacher|baker|nurse|doctor|gardener|pilot|painter|programmer|farmer|cook|writer|carpenter|"
    "musician|student|engineer|driver|librarian|judge|sailor|tailor"
).split("|")
WORDS = (
    "apple banana orange window bridge river mountain garden yellow purple elephant tiger rabbit "
    "computer keyboard language memory server engine cache block token stream water turbine gate "
    "house kitchen bottle pencil paper flower summer winter autumn spring morning evening night "
    "monday friday january december beautiful wonderful important different question answer number "
    "letter alphabet dictionary library school teacher student doctor hospital music guitar piano "
    "violin orchestra chocolate strawberry potato tomato cucumber sandwich breakfast dinner coffee "
    "table chair lamp candle mirror carpet ceiling building street village city country island ocean "
    "desert forest valley planet universe galaxy star moon sun cloud thunder lightning rainbow snow "
    "bicycle airplane train station ticket journey travel holiday weather temperature degree friend "
    "family mother father brother sister daughter husband children people person history science "
    "physics chemistry biology mathematics geometry algebra philosophy psychology literature poetry "
    "hello world cat dog horse sheep chicken butter cheese bread sugar pepper salt spoon fork knife "
    "bookkeeper mississippi necessary accommodate rhythm success address tomorrow coffee balloon "
    "committee penstock python paged attention batching prefix hello goodbye jazz quiz zebra oxygen"
).split()
NEIGHBOURS = "qwertyuiop asdfghjkl zxcvbnm"


def syllable(rng: random.Random) -> str:
    """Return one invented syllable."""
    coda = rng.choice(CODAS) if rng.random() < 0.4 else ""
    return rng.choice(ONSETS) + rng.choice(VOWELS) + coda


def invented_word(rng: random.Random) -> str:
    """Return a lower-case word of one to four invented parts."""
    kind = rng.random()
    if kind < 0.12:
        letters = "abcdefghijklmnopqrstuvwxyz"
        return "".join(rng.choice(letters) for _ in range(rng.randint(2, 9)))
    word = "".join(syllable(rng) for _ in range(rng.choice((1, 1, 2, 2, 2, 3))))
    if rng.random() < 0.5:
        word += rng.choice(ENDINGS)
    if rng.random() < 0.15:
        word = rng.choice("aeiou") + word
    return word


def foreign_word(rng: random.Random) -> str:
    """Return letters of one other script, or accents inside an invented word."""
    low, high = rng.choice(SCRIPTS)
    if high < 0x180 and rng.random() < 0.8:
        word = list(invented_word(rng))
        word[rng.randrange(len(word))] = chr(rng.randint(low, high))
        return "".join(word)
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 4)))


def proper_name(rng: random.Random, known: Sequence[str] = KNOWN_NAMES) -> str:
    """Return a name: usually invented and capitalised, at times known, in two words or odd."""
    kind = rng.random()
    if kind < 0.08:
        name = rng.choice(known)
    elif kind < 0.13:
        name = foreign_word(rng).capitalize()
    elif kind < 0.22:
        name = f"{invented_word(rng).capitalize()} {invented_word(rng).capitalize()}"
    elif kind < 0.25:
        name = f"{invented_word(rng).capitalize()}-{invented_word(rng).capitalize()}"
    elif kind < 0.28:
        name = rng.choice(WORDS).capitalize()
    else:
        name = invented_word(rng).capitalize()
    if rng.random() < 0.12:
        return name.lower()
    return name.upper() if rng.random() < 0.02 else name


def choose_or_invent(rng: random.Random, known: Sequence[str]) -> str:
    """Return a known word or, often enough that copying is what counts, an invented one."""
    return rng.choice(known) if rng.random() < 0.55 else invented_word(rng)


def number_text(rng: random.Random) -> str:
    """Return a number of one to five digits."""
    return str(rng.randrange(10 ** rng.choice((1, 2, 2, 3, 4, 5))))


def _typo(rng: random.Random, word: str) -> str:
    if len(word) < 4 or not word.isalpha():
        return word
    at = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        return word[:at] + word[at + 1 :]
    if kind == 1:
        return word[:at] + word[at] + word[at:]
    if kind == 2:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    place = NEIGHBOURS.find(word[at].lower())
    return word[:at] + NEIGHBOURS[max(place - 1, 0)].strip() + word[at + 1 :]


def damage(rng: random.Random, template: str) -> str:
    """Return a user's template as somebody might type it; `{…}` fields stay whole."""
    words = template.split(" ")
    if rng.random() < 0.22:
        at = rng.randrange(len(words))
        if "{" not in words[at]:
            words[at] = _typo(rng, words[at])
    text = " ".join(words)
    if rng.random() < 0.5:
        text = re.sub(r"\bi\b", "I", text)
    kind = rng.random()
    if kind < 0.40:
        text = text[:1].upper() + text[1:]
    elif kind < 0.42:
        text = text if "{" in text else text.upper()
    return text


def punctuate(rng: random.Random, text: str, mark: str) -> str:
    """End a user's message with its mark, or carelessly."""
    kind = rng.random()
    if kind < 0.55:
        return text + mark
    if kind < 0.93:
        return text
    return text + rng.choice(("??", "!", " ?", " !", "...", ".", " :)", "!!"))
