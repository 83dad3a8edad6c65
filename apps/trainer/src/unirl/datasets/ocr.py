"""Prompts that ask for written words, in double quotes, as the OCR scorers read them. Generated.

Words, numbers and times to judge by do not occur in the training file, alone or in a phrase.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unirl.datasets.records import PromptSet, Row, generated
from unirl.datasets.splitting import distinct, drawn, first_by_hash, is_held_out, several_drawn

WORDS = (
    "go in on up ok joe sun tea ice run win fly map key red zoo art bar gym spa inn law pie jam hot new "
    "open sale stop exit menu cafe milk fish park bank home love cake taxi time pool yoga club moon star rain snow "
    "wind fire gold blue fresh bread pizza sushi salad apple lemon mango honey sugar juice water coffee hello smile "
    "dream peace happy lucky quiet please danger caution closed welcome library bakery florist butcher grocery "
    "pharmacy hospital station airport harbour ferry bridge tunnel market museum gallery theatre cinema concert "
    "festival carnival holiday birthday wedding summer winter autumn spring morning midnight monday friday sunday "
    "january october teacher student captain doctor pilot farmer artist writer dancer singer engineer architect "
    "mountain river forest desert island ocean valley garden meadow canyon volcano glacier thunder rainbow sunrise "
    "sunset comet planet galaxy rocket robot engine battery camera guitar violin piano trumpet drummer orchestra "
    "bicycle tractor scooter railway express journey voyage passport luggage adventure explore discover imagine "
    "create believe remember forever tomorrow together friendship freedom courage wisdom harmony justice science "
    "physics biology chemistry history geography grammar alphabet dictionary encyclopedia newspaper magazine "
    "breakfast lunch dinner dessert chocolate vanilla cinnamon pepper ginger noodle dumpling pancake sandwich "
    "restaurant laundry barber tailor jeweller optician dentist electric hardware furniture antiques souvenirs "
    "reserved private delivery recycle emergency information reception elevator platform departure arrival customs "
    "congratulations extraordinary international refrigerator photography architecture thermometer constellation"
).split()
"""From two letters to fifteen."""
TEMPLATES = (
    'A shop front with a large sign that says "{}"',
    'A neon sign in a dark window that reads "{}"',
    'A chalkboard outside a cafe with "{}" written on it in white chalk',
    'A wooden signpost on a hiking trail with the carved text "{}"',
    'A birthday cake with "{}" in red icing',
    'A paper coffee cup printed with "{}"',
    'A book cover with the title "{}" in bold letters',
    'A white t-shirt with "{}" printed across the chest',
    'A road sign beside a highway that says "{}"',
    'Graffiti on a brick wall that spells "{}"',
    'A vintage travel poster with the headline "{}"',
    'A laptop screen that shows "{}" in the middle',
    'A postage stamp with "{}" along its lower edge',
    'A theatre marquee at night that announces "{}"',
    'A hand-painted banner between two trees that says "{}"',
    'A brass name plate on a door engraved with "{}"',
    'A yellow sticky note on a fridge with "{}" in blue ink',
    'A glass bottle with a paper label that reads "{}"',
    'A hot air balloon in the sky with "{}" on its side',
    'A stone gate with "{}" chiselled above the arch',
    'Sand on a beach with "{}" drawn into it by a stick',
    'A football scarf with "{}" knitted into it',
    'A departure board in a station that shows "{}"',
    'A delivery truck with "{}" painted on its side',
)
CATEGORIES = ("one word", "two words", "phrase", "number")
HELD_OUT = 0.12
NUM_TRAIN, NUM_HELD_OUT = 4000, 400
"""Prompts in all, the same number of each category."""


def rows(*, held_out: bool) -> Iterator[Row]:
    """Prompts by category, each category in the order of the hashes."""
    limit = (NUM_HELD_OUT if held_out else NUM_TRAIN) // len(CATEGORIES)
    words = [word for word in WORDS if is_held_out(word, HELD_OUT) == held_out]
    for category, texts in {
        "one word": _phrases(words, 1, limit),
        "two words": _phrases(words, 2, limit),
        "phrase": _phrases(words, 3, limit // 2) + _phrases(words, 4, limit // 2),
        "number": _numbers(held_out, limit),
    }.items():
        found = distinct((_row(text, category, number) for number, text in enumerate(texts)), lambda row: row["prompt"])
        yield from first_by_hash(found, limit, lambda row: row["prompt"])


def _row(text: str, category: str, number: int) -> Row:
    template = drawn(TEMPLATES, f"ocr template {category} {text} {number}")
    return {"prompt": template.format(text), "category": category, "text": text}


def _phrases(words: Sequence[str], num_words: int, num: int) -> list[str]:
    """More than are needed, as some of their prompts are the same; upper, lower and title case by hash."""
    texts = []
    for number in range(3 * num):
        key = f"ocr {num_words} words {number}"
        text = " ".join(several_drawn(words, num_words, key))
        texts.append(drawn((text.upper(), text.title(), text.capitalize(), text), f"{key} case"))
    return texts


def _numbers(held_out: bool, num: int) -> list[str]:
    """Numbers of one to four digits with what stands next to them on signs, and times of the day."""
    numbers = [str(value) for value in range(1, 10_000) if is_held_out(f"number {value}", HELD_OUT) == held_out]
    minutes = [
        f"{hour}:{minute:02}"
        for hour in range(24)
        for minute in range(0, 60, 5)
        if is_held_out(f"time {hour}:{minute}", HELD_OUT) == held_out
    ]
    by_length = {
        length: fitting for length in (1, 2, 3, 4) if (fitting := [text for text in numbers if len(text) == length])
    }
    forms = ("{}", "No. {}", "Room {}", "Gate {}", "Route {}", "{} km", "${}", "{}%", "#{}", "Est. {}")
    texts = []
    for number in range(2 * num):
        key = f"ocr number {number}"
        length = drawn(tuple(by_length), f"{key} length")
        text = drawn(forms, f"{key} form").format(drawn(by_length[length], key))
        texts.append(drawn(minutes, key) if drawn(range(5), f"{key} time") == 0 else text)
    return texts


OCR = PromptSet(
    name="ocr",
    what="prompts that ask for written words, numbers and phrases in double quotes",
    made="templates; the words, numbers and times to judge by do not occur in the training file",
    outputs=generated(rows, num_train=NUM_TRAIN, num_held_out=NUM_HELD_OUT),
)
