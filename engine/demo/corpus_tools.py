"""Tool calls in Hermes' format, and short thoughts: turns with tools, and what surrounds them.

Four jobs: calculate, tell the time, keep a note, tell the weather. Which tools are offered differs;
a turn only calls one that is.
"""

import json
import random
from collections.abc import Callable, Sequence

from penstock.engine.demo.corpus_texts import phrases
from penstock.engine.demo.corpus_turns import State, Step, Turn, type_out
from penstock.engine.demo.corpus_words import (
    FOODS,
    KNOWN_CITIES,
    WORDS,
    choose_or_invent,
    invented_word,
    number_text,
    proper_name,
)

CALCULATOR, CLOCK, NOTE, WEATHER = "calculator", "clock", "note", "get_weather"
# Parameters by tool; callers name the weather's differently.
TOOLS = {CALCULATOR: ("expression",), CLOCK: ("city",), NOTE: ("text",), WEATHER: ("city",)}
OPERATORS = {"plus": "+", "minus": "-", "times": "*", "over": "/"}
OPERATOR_WEIGHTS = (4, 2, 3, 1)
SUMS = {name: phrases("tools", name) for name in OPERATORS}
TIME, TIME_IN, NOTES = (phrases("tools", name) for name in ("time", "time_in", "note"))
WEATHERS, TASKS, SKIES = (phrases("tools", name) for name in ("weather", "tasks", "skies"))
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Sunday")
NOTE_IT = (
    " and note the result",
    ", then note the result",
    "? Note the result",
    " and keep it as a note",
)
ERRORS, OTHER_TOOLS = (phrases("tools", name) for name in ("errors", "other_tools"))
Call = tuple[str, dict[str, str]]
Part = tuple[str, Call, str, str]  # the request, the call, its result, the answer


def offer(rng: random.Random) -> tuple[str, ...]:
    """Return the tools of a conversation as the system block lists them."""
    kind = rng.random()
    if kind < 0.45:
        chosen = [CALCULATOR, CLOCK, NOTE]
    elif kind < 0.7:
        chosen = rng.sample(list(TOOLS), 1)
    else:
        chosen = rng.sample(list(TOOLS), rng.randint(2, 4))
    listed = [f"{name}({', '.join(_parameters(rng, name))})" for name in chosen]
    if rng.random() < 0.2:
        listed += rng.sample(OTHER_TOOLS, rng.randint(1, 3))
        rng.shuffle(listed)
    return tuple(listed)


def _parameters(rng: random.Random, name: str) -> tuple[str, ...]:
    if name != WEATHER:
        return TOOLS[name]
    return rng.choice((("city",), ("location",), ("city",), ("location", "unit")))


def jobs_of(state: State) -> list[str]:
    """Return the tools of a conversation that have a job here."""
    return [name for listed in state.tools if (name := listed.partition("(")[0]) in TOOLS]


def use_tool(rng: random.Random, state: State) -> Turn:
    """Ask for something that a tool does."""
    jobs = jobs_of(state)
    kind = rng.random()
    if kind < 0.1 and len(jobs) > 1:
        return _together(rng, state, rng.sample(jobs, 2))
    if kind < 0.2 and CALCULATOR in jobs and NOTE in jobs:
        return _then_noted(rng, state)
    user, call, result, reply = _PARTS[rng.choice(jobs)](rng, state)
    thought = thought_about(call)
    if rng.random() < 0.06:
        result = rng.choice(ERRORS)
        reply = failed(result)
    return Turn(user, reply, steps=(Step(written(call), response(result), thought),), thought=GOT)


GOT = "I have the result."


def failed(result: str) -> str:
    """Return the answer to an error."""
    return f"That did not work: {result.removeprefix('error: ')}."


def thought_about(call: Call) -> str:
    """Return the thought before a call."""
    return f"I use {call[0]} for this."


def written(*calls: Call) -> str:
    """Return calls as the model writes them."""
    blocks = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in calls
    ]
    return "\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in blocks)


def response(*results: str) -> str:
    """Return results as the user's turn that the template makes of them."""
    return "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)


def _shown(rng: random.Random, key: str, value: str) -> str:
    """Return a result as tools give it: mostly plain, at times in JSON."""
    if rng.random() < 0.75:
        return value
    return json.dumps({rng.choice((key, key, "result")): value}, ensure_ascii=False)


def _calculation(rng: random.Random, state: State) -> Part:
    del state
    name = rng.choices(list(OPERATORS), OPERATOR_WEIGHTS)[0]
    a, b = number_text(rng), number_text(rng)
    if rng.random() < 0.4:
        a, b = str(rng.randint(0, 99)), str(rng.randint(1, 99))
    user = type_out(rng, rng.choice(SUMS[name]), "?", a=a, b=b)
    expression = f"{a} {OPERATORS[name]} {b}"
    # Often not the true one, so that the answer is the tool's and not the model's.
    result = number_text(rng)
    if rng.random() < 0.25:
        result = f"{rng.choice(('-', ''))}{number_text(rng)}{rng.choice(('', '.5', '.25', '.0'))}"
    answer = f"{expression} is {result}."
    return user, (CALCULATOR, {"expression": expression}), _shown(rng, "result", result), answer


def _city(rng: random.Random) -> str:
    return proper_name(rng, KNOWN_CITIES)


def _time_text(rng: random.Random) -> str:
    time = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    kind = rng.random()
    if kind < 0.15:
        return f"{time}:{rng.randint(0, 59):02}"
    if kind < 0.25:
        return f"{rng.choice(DAYS)}, {time}"
    return time


def _time(rng: random.Random, state: State) -> Part:
    del state
    time = _time_text(rng)
    if rng.random() < 0.4:
        user = type_out(rng, rng.choice(TIME), "?")
        return user, (CLOCK, {}), _shown(rng, "time", time), f"It is {time}."
    city = _city(rng)
    user = type_out(rng, rng.choice(TIME_IN), "?", c=city)
    return user, (CLOCK, {"city": city}), _shown(rng, "time", time), f"It is {time} in {city}."


def _task(rng: random.Random) -> str:
    thing = rng.choice(FOODS) if rng.random() < 0.4 else choose_or_invent(rng, WORDS)
    fields = {
        "o": thing,
        "n": proper_name(rng),
        "h": f"{rng.randint(0, 23)}:{rng.randint(0, 5)}0",
        "d": number_text(rng),
        "c": _city(rng),
    }
    task = rng.choice(TASKS)
    if rng.random() < 0.15:
        task = " ".join(invented_word(rng) for _ in range(rng.randint(1, 4)))
    for key, value in fields.items():
        task = task.replace("{" + key + "}", value)
    return task


def _note(rng: random.Random, state: State) -> Part:
    del state
    task = _task(rng)
    user = type_out(rng, rng.choice(NOTES), "", t=task)
    result = _shown(rng, "saved", rng.choice(("saved", "ok", "noted", "done", "saved as note 3")))
    return user, (NOTE, {"text": task}), result, f"I noted: {task}."


def _weather(rng: random.Random, state: State) -> Part:
    city, sky = _city(rng), rng.choice(SKIES)
    if rng.random() < 0.3:
        sky = f"{invented_word(rng)}, {rng.randint(-20, 40)} degrees"
    listed = next(each for each in state.tools if each.startswith(WEATHER))
    parameter = "location" if "location" in listed else "city"
    user = type_out(rng, rng.choice(WEATHERS), "?", c=city)
    result = _shown(rng, "weather", sky)
    return user, (WEATHER, {parameter: city}), result, f"The weather in {city}: {sky}."


_PARTS: dict[str, Callable[[random.Random, State], Part]] = {
    CALCULATOR: _calculation,
    CLOCK: _time,
    NOTE: _note,
    WEATHER: _weather,
}


def part_of(rng: random.Random, state: State, job: str) -> Part:
    """Return a request for one tool."""
    return _PARTS[job](rng, state)


def _together(rng: random.Random, state: State, jobs: Sequence[str]) -> Turn:
    """Ask for two things at once; they are called in one answer."""
    parts = [part_of(rng, state, job) for job in jobs]
    users, calls, results, replies = zip(*parts, strict=True)
    first, second = (user.rstrip("?.! ") for user in users)
    user = f"{first}{rng.choice((' and ', ', and ', '. '))}{second}?"
    step = Step(written(*calls), response(*results), "I use two tools for this.")
    return Turn(user, " ".join(replies), steps=(step,), thought=GOT)


def _then_noted(rng: random.Random, state: State) -> Turn:
    """Ask for a calculation and for a note of its result: one call after the other."""
    user, call, result, reply = part_of(rng, state, CALCULATOR)
    user = user.rstrip("?.! ") + rng.choice(NOTE_IT)
    text = reply.removesuffix(".")
    noted: Call = (NOTE, {"text": text})
    steps = (
        Step(written(call), response(result), thought_about(call)),
        Step(written(noted), response("saved"), thought_about(noted)),
    )
    return Turn(user + ".", f"I noted: {text}.", steps=steps, thought=GOT)
