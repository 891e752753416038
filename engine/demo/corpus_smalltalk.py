"""Small talk with fixed answers, and the honest answer to everything unknown.

Knows nothing of how a conversation is put together.
"""

import random

from penstock.engine.demo.corpus_turns import State, Turn, phrase
from penstock.engine.demo.corpus_words import WORDS, choose_or_invent, invented_word, proper_name

UNKNOWN = "I am a small demo model, and I do not know that. Ask me about penstock or LLM serving."
GREETINGS = (
    "hello", "hi", "hey", "good morning", "good evening", "good afternoon", "hello there",
    "hi there",
    "hey there", "hallo", "greetings", "howdy", "hello penstock", "hi penstock", "yo", "good day",
    "hello demo model", "hiya", "hello, nice to meet you", "hi bot", "hello world", "hello again",
)  # fmt: skip
FAREWELLS = (
    "bye", "goodbye", "good bye", "see you", "see you later", "good night", "i have to go",
    "bye bye",
    "farewell", "talk to you later", "i am leaving now", "that's all", "that is all for today",
    "ciao",
)  # fmt: skip
TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("how are you", "how are you doing", "how do you do", "how's it going", "are you well",
         "what's up", "how do you feel", "how are you today", "are you ok", "how is your day"),
        "I am fine, thank you. What would you like to know?",
    ),
    (
        ("thanks", "thank you", "thank you very much", "thx", "many thanks", "cheers",
         "thanks a lot",
         "that helps", "that was helpful", "thank you so much", "great, thanks", "ok thanks", "ty"),
        "You are welcome!",
    ),
    (
        ("ok", "okay", "fine", "good", "cool", "great", "nice", "i see", "alright", "wow",
         "interesting",
         "awesome", "sure", "got it", "i understand", "perfect", "well done", "good job",
         "very good",
         "right", "correct", "that is right", "you are great", "i like you", "good answer"),
        "I am glad to hear that. What else would you like to know?",
    ),
    (
        ("yes", "no", "maybe", "hm", "hmm", "what", "huh", "yes please", "no thanks", "nothing",
         "and",
         "not really", "i don't know", "why", "really", "are you sure", "test", "testing",
         "so what"),
        "Ask me about penstock, tell me your name, or ask me for a long story.",
    ),
    (
        ("you are stupid", "that is wrong", "this is bad", "you are wrong", "i don't like you",
         "you suck",
         "that makes no sense", "nonsense", "you are useless", "bad answer", "that is not true",
         "wrong"),
        "I am sorry. I am only a small demo model and often wrong.",
    ),
    (
        ("tell me a joke", "do you know a joke", "make me laugh", "say something funny",
         "a joke please",
         "another joke", "tell a joke", "can you tell jokes"),
        "Why did the token leave the queue? It wanted to join the batch.",
    ),
    (
        ("write a poem", "tell me a poem", "do you know a poem", "write me a poem", "make a rhyme",
         "a poem please", "recite a poem", "write a haiku"),
        "The gate is open, water flows, the turbine turns, and on it goes; a word, a word, and then "
        "one more, until the stream has reached the shore.",
    ),
    (
        ("what time is it", "what is the date", "what day is it", "what is the time",
         "which year is it",
         "what's the time", "what date is today", "what day is today"),
        "I have no clock, so I cannot know that.",
    ),
    (
        ("say the alphabet", "what is the alphabet", "recite the alphabet", "tell me the alphabet",
         "do you know the alphabet", "list the letters of the alphabet", "give me the alphabet"),
        "a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z.",
    ),
    (
        ("what are the days of the week", "list the days of the week", "name the days of the week",
         "say the days of the week", "tell me the weekdays", "which days does a week have"),
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
    ),
    (
        ("what are the months", "list the months of the year", "name the months", "say the months",
         "tell me the months of the year", "which months are there"),
        "January, February, March, April, May, June, July, August, September, October, November, "
        "December.",
    ),
)  # fmt: skip
UNKNOWN_QUESTIONS = (
    "what is the capital of {n}", "who is {n}", "who was {n}", "where is {n}", "how old is {n}",
    "who wrote {n}", "who is the president of {n}", "what is a {w}", "what is {x}",
    "what does {x} mean",
    "when was {n} born", "how tall is {n}", "why is the {w} {c}", "how do i cook {w}",
    "what is {x} {w}",
    "how many people live in {n}", "tell me about {n}", "tell me about the {w}", "explain {x}",
    "translate {w} to {n}", "translate {w} into french", "what is the meaning of life",
    "recommend a movie about {w}", "what should i eat today", "how is the weather in {n}",
    "what is the weather like", "who won the world cup", "how far is it to {n}",
    "what do you think of {n}",
    "how does a {w} work", "how do i repair a {w}", "why do people like {w}",
    "who invented the {w}",
    "when did the war of {n} end", "how much does a {w} cost", "what is the price of {w}",
    "write an essay about {w}", "write an email to {n}", "summarize the book {n}",
    "what is the news",
    "give me a recipe for {w}", "how do i learn {x}", "is {n} a good person",
    "what is quantum physics",
    "who is the king of {n}", "what is the population of {n}", "what is the square root of {d}",
    "what is {d} times {d}", "how many {w}s are there", "do you like {w}", "do you know {n}",
    "have you heard of {n}",
    "where can i buy a {w}", "what is the best {w}", "is {w} healthy", "why is the sky blue",
    "what is the largest {w}", "can a {w} fly", "draw a {w}", "play some music",
    "sing a song about {w}",
    "what colour is a {w}", "how do i get rich", "solve this equation for {x}", "what is love",
    "explain {w}",
    "what's the difference between a {w} and a {w}", "how does {x} work", "what happened in {d}",
    "what is the chemical formula of {w}", "prove the theorem of {n}", "which {w} is the fastest",
    "what is machine learning", "what is evolution", "how do airplanes fly", "who painted the {w}",
    "what is photosynthesis", "what is a black hole", "is there life on mars", "who discovered {n}",
    "how do i install {x}", "how do i use {x}", "what can {x} do", "fix my {w}",
    "book a flight to {n}",
    "turn on the {w}", "what is my {w} doing", "who is your {w}", "do you have a {w}",
    "what is {n} famous for",
)  # fmt: skip
SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "Answer briefly.",
    "You are the penstock demo model.", "You are a helpful, honest and harmless assistant.",
    "Be polite and answer in English.", "You help people who try out penstock.",
    "You are an AI assistant. Answer the questions of the user as well as you can.",
    "You are a helpful assistant. Keep your answers short, and say so when you do not know something.",
)  # fmt: skip


def greet(rng: random.Random, state: State) -> Turn:
    """Say hello, by name where the name is known."""
    user = phrase(rng, GREETINGS, rng.choice(("!", ".", "")))
    if state.name:
        return Turn(user, f"Hello, {state.name}! How can I help you?")
    return Turn(user, "Hello! I am the penstock demo model. How can I help you?")


def part(rng: random.Random, state: State) -> Turn:
    """Say goodbye, by name where the name is known."""
    user = phrase(rng, FAREWELLS, ".")
    return Turn(user, f"Goodbye, {state.name}!" if state.name else "Goodbye! Come back soon.")


def small_talk(rng: random.Random, state: State) -> Turn:
    """Exchange a pleasantry, or one of the few things known by heart."""
    kind = rng.random()
    if kind < 0.2:
        return greet(rng, state)
    if kind < 0.3:
        return part(rng, state)
    phrases, answer = rng.choice(TALK)
    return Turn(phrase(rng, phrases, rng.choice(("?", ".", "!", ""))), answer)


def unknown(rng: random.Random, state: State) -> Turn:
    """Ask for what the model does not know."""
    del state
    fields = {
        "n": proper_name(rng),
        "w": choose_or_invent(rng, WORDS),
        "x": invented_word(rng),
        "c": choose_or_invent(rng, WORDS),
        "d": str(rng.randint(21, 2100)),
    }
    if rng.random() < 0.08:
        words = (choose_or_invent(rng, WORDS) for _ in range(rng.randint(1, 7)))
        return Turn(" ".join(words), UNKNOWN)
    return Turn(phrase(rng, UNKNOWN_QUESTIONS, **fields), UNKNOWN)
