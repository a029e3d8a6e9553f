"""Arithmetic word problems with worked answers, written by a seeded generator: text of our own,
without end."""

import itertools
import random
from collections.abc import Callable, Iterator

from profilers.text.files import Document

Question = tuple[
    str, list[str], int
]  # the question, the steps of its answer, the number they come to


def words(text: str) -> list[str]:
    return text.split("|")


NAMES = words(
    "Ada|Ben|Clara|Dev|Emma|Farid|Grace|Hugo|Iris|Jamal|Kira|Leo|Mina|Noah|Olga|Priya|Quinn|Rosa|"
    "Sam|Tara|Uma|Viktor|Wen|Yara|Zoe"
)
THINGS = words(
    "apples|pencils|stickers|marbles|books|cards|shells|stamps|buttons|coins|cookies|oranges|beads|tickets|balloons"
)
BOXES = words("boxes|bags|crates|baskets|shelves|jars|rows|trays")
PLACES = words(
    "the market|the school fair|the library|the bakery|the farm|the beach|the museum|the station"
)
DAYS = words("Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday")
JOBS = words(
    "washing cars|walking dogs|mowing lawns|delivering papers|painting fences|teaching chess"
)
VEHICLES = words("train|bus|car|bicycle|boat|van")
PLANTS = words("roses|tulips|tomatoes|carrots|beans|sunflowers|lemons")


def shopping(r: random.Random) -> Question:
    name = r.choice(NAMES)
    one, other = r.sample(THINGS, 2)
    a = r.randint(2, 12)
    b = r.randint(2, 9)
    p = r.randint(1, 9)
    q = r.randint(2, 15)
    paid = (a * p + b * q) // 10 * 10 + r.choice([10, 20, 50])
    question = (
        f"{name} goes to {r.choice(PLACES)} and buys {a} {one} for {p} dollars each and {b} "
        f"{other} for {q} dollars each. {name} pays with {paid} dollars. How much change does "
        f"{name} get?"
    )
    steps = [
        f"The {one} cost {a} * {p} = {a * p} dollars.",
        f"The {other} cost {b} * {q} = {b * q} dollars.",
        f"Together they cost {a * p} + {b * q} = {a * p + b * q} dollars.",
        f"The change is {paid} - {a * p + b * q} = {paid - a * p - b * q} dollars.",
    ]
    return question, steps, paid - a * p - b * q


def sharing(r: random.Random) -> Question:
    name = r.choice(NAMES)
    thing = r.choice(THINGS)
    box = r.choice(BOXES)
    boxes = r.randint(2, 12)
    each = r.randint(2, 20)
    friends = r.randint(2, 9)
    total = boxes * each
    question = (
        f"There are {boxes} {box} with {each} {thing} in each. "
        f"{name} shares all the {thing} equally among {friends} friends "
        f"and keeps what is left over. How many {thing} does {name} keep?"
    )
    steps = [
        f"There are {boxes} * {each} = {total} {thing} in all.",
        f"Each friend gets {total} / {friends} = {total // friends} {thing}, rounded down.",
        f"The friends get {friends} * {total // friends} = {friends * (total // friends)} {thing}.",
        f"{name} keeps {total} - {friends * (total // friends)} = {total % friends} {thing}.",
    ]
    return question, steps, total % friends


def wages(r: random.Random) -> Question:
    name = r.choice(NAMES)
    job = r.choice(JOBS)
    first, second = r.sample(DAYS, 2)
    rate = r.randint(5, 25)
    a = r.randint(2, 8)
    b = r.randint(2, 8)
    spent = r.randint(1, 15)
    question = (
        f"{name} earns {rate} dollars an hour {job}. On {first} {name} works {a} hours and on "
        f"{second} {b} hours, then spends {spent} dollars on lunch. How many dollars are left?"
    )
    steps = [
        f"In all {name} works {a} + {b} = {a + b} hours.",
        f"That earns {a + b} * {rate} = {(a + b) * rate} dollars.",
        f"After lunch {(a + b) * rate} - {spent} = {(a + b) * rate - spent} dollars are left.",
    ]
    return question, steps, (a + b) * rate - spent


def travel(r: random.Random) -> Question:
    name = r.choice(NAMES)
    vehicle = r.choice(VEHICLES)
    speed = 10 * r.randint(2, 9)
    hours = r.randint(2, 6)
    slower = 5 * r.randint(1, 3)
    more = r.randint(1, 5)
    first = speed * hours
    second = (speed - slower) * more
    question = (
        f"A {vehicle} with {name} on board goes at {speed} kilometres an hour for {hours} hours. "
        f"Then it slows down by {slower} kilometres an hour "
        f"and goes on for {more} hours. How far does {name} travel?"
    )
    steps = [
        f"The first part is {speed} * {hours} = {first} kilometres.",
        f"The new speed is {speed} - {slower} = {speed - slower} kilometres an hour.",
        f"The second part is {speed - slower} * {more} = {second} kilometres.",
        f"In all it is {first} + {second} = {first + second} kilometres.",
    ]
    return question, steps, first + second


def ages(r: random.Random) -> Question:
    one, two, three = r.sample(NAMES, 3)
    age = r.randint(4, 15)
    times = r.randint(2, 4)
    younger = r.randint(1, 3)
    years = r.randint(2, 12)
    total = age + age * times + age - younger + 3 * years
    question = (
        f"{one} is {age} years old. {two} is {times} times as old as {one}, "
        f"and {three} is {younger} years younger than {one}. "
        f"What will be the sum of their ages in {years} years?"
    )
    steps = [
        f"{two} is {times} * {age} = {age * times} years old.",
        f"{three} is {age} - {younger} = {age - younger} years old.",
        f"Today the sum is {age} + {age * times} + {age - younger} = {total - 3 * years}.",
        f"In {years} years it is {total - 3 * years} + 3 * {years} = {total}.",
    ]
    return question, steps, total


def reading(r: random.Random) -> Question:
    name = r.choice(NAMES)
    day = r.choice(DAYS)
    daily = r.randint(5, 40)
    days = r.randint(2, 9)
    more = r.randint(2, 20)
    left = r.randint(10, 90)
    read = daily * days + daily + more
    pages = daily * days + daily + more + left
    question = (
        f"{name} has a book of {pages} pages and reads {daily} pages a day for {days} days. "
        f"On {day} {name} reads {more} pages more than usual. "
        f"How many pages are still to be read?"
    )
    steps = [
        f"In {days} days {name} reads {daily} * {days} = {daily * days} pages.",
        f"On {day} it is {daily} + {more} = {daily + more} pages.",
        f"So far that is {daily * days} + {daily + more} = {read} pages.",
        f"There are {pages} - {read} = {left} pages left.",
    ]
    return question, steps, left


def garden(r: random.Random) -> Question:
    name = r.choice(NAMES)
    plant = r.choice(PLANTS)
    length = r.randint(3, 25)
    width = r.randint(2, 20)
    price = r.randint(2, 9)
    fence = 2 * (length + width)
    question = (
        f"{name} has a garden for {plant} that is {length} metres long and {width} metres wide. "
        f"A fence costs {price} dollars a metre. "
        f"What does a fence around the garden cost?"
    )
    steps = [
        f"Length and width together are {length} + {width} = {length + width} metres.",
        f"The fence is 2 * {length + width} = {fence} metres long.",
        f"It costs {fence} * {price} = {fence * price} dollars.",
    ]
    return question, steps, fence * price


def comparing(r: random.Random) -> Question:
    one, two = r.sample(NAMES, 2)
    thing = r.choice(THINGS)
    percent = r.choice([10, 20, 25, 50, 75])
    base = 20 * r.randint(1, 15)
    lost = r.randint(1, 9)
    more = base * percent // 100
    question = (
        f"{one} has {base} {thing}. {two} has {percent} percent more {thing} than {one} but loses "
        f"{lost} of them. How many {thing} do {one} and {two} have together?"
    )
    steps = [
        f"{percent} percent of {base} is {more}.",
        f"{two} had {base} + {more} = {base + more} {thing}.",
        f"After the loss {two} has {base + more} - {lost} = {base + more - lost}.",
        f"Together they have {base} + {base + more - lost} = {2 * base + more - lost} {thing}.",
    ]
    return question, steps, 2 * base + more - lost


KINDS: tuple[Callable[[random.Random], Question], ...] = (
    shopping,
    sharing,
    wages,
    travel,
    ages,
    reading,
    garden,
    comparing,
)
STYLES = (  # what stands between the steps, and all around them
    ("\n", "{question}\n{steps}\n#### {answer}\n"),
    (" ", "Question: {question}\nAnswer: {steps} The answer is {answer}.\n"),
    (" ", "{question} {steps}\nAnswer: {answer}\n"),
)


def problem(r: random.Random) -> str:
    question, steps, answer = r.choice(KINDS)(r)
    between, around = r.choice(STYLES)
    return around.format(question=question, steps=between.join(steps), answer=answer)


def word_problems(*, seed: int, per_document: int = 20) -> Iterator[Document]:
    """Documents of `per_document` problems each, without end."""
    r = random.Random(seed)
    for number in itertools.count():
        yield Document(
            f"problems-{seed}-{number}", "\n".join(problem(r) for _ in range(per_document))
        )
