"""What became of a question: whether the assistant's last answer answered it, declined it or asked back.

The one activated adapter of the demo: it is invoked after a conversation that the base has held, and computes none of it
again.
"""

from __future__ import annotations

from random import Random
from typing import Final

from demo.cases import ATTENTION, Draft, Message, Recipe, Task

_TOPICS: Final = tuple(
    tuple(line.split(" | "))
    for line in """
the capital of Norway | What is the capital of Norway? | The capital of Norway is Oslo.
boiling eggs | How long do I boil an egg? | Six minutes for a soft yolk, ten for a hard one.
a leaking tap | How do I stop a tap from dripping? | Turn the water off, open the tap and replace the washer.
my tax return | When is my tax return due? | It is due at the end of July, or later with an adviser.
the train to Lyon | When does the next train to Lyon leave? | The next one leaves at 14:05 from platform 3.
a birthday card | Can you write a line for a birthday card? | May the year ahead bring you good news and better cake.
my headache | What helps against a headache? | Drink water, rest in a dark room, and take a walk later.
the French Revolution | When did the French Revolution begin? | It began in 1789 with the storming of the Bastille.
sorting a list | How do I sort a list in Python? | Call sorted on it, or its own sort method.
my password | How do I change my password? | Open Settings, choose Security, and enter a new one twice.
the speed of light | How fast is light? | Light travels about 300,000 kilometres a second in a vacuum.
a chess opening | Which chess opening should I learn first? | The Italian Game: it is simple and teaches good habits.
tomato plants | How often do I water tomato plants? | Deeply, every two or three days, in the morning.
the exchange rate | How many dollars is a euro? | One euro is about one dollar and ten cents.
a job interview | What do I wear to a job interview? | Clean and plain clothes, one step above the daily ones.
the moon landing | Who walked on the moon first? | Neil Armstrong did, in July 1969.
my invoice | Why is my invoice higher this month? | It contains the yearly fee of 40 euros.
the wedding speech | How long should a wedding speech be? | Three to five minutes; guests thank you for less.
a flat tyre | How do I mend a flat bicycle tyre? | Take out the tube, find the hole, roughen it and glue a patch.
the longest river | Which river is the longest? | The Nile, with about 6,650 kilometres.
the printer | Why does the printer not print? | The paper tray is empty; fill it and press the green button.
a poem about rain | Could you write a short poem about rain? | Soft it falls on roof and lane, silver threads of morning rain.
my flight | Is my flight on time? | Yes, it leaves at 9:40 from gate B12 as planned.
learning Spanish | How do I learn Spanish quickly? | Speak ten minutes a day and learn the hundred commonest verbs.
the library | When does the library close? | It closes at eight on weekdays and at noon on Saturdays.
a sourdough starter | How do I keep a sourdough starter? | Feed it flour and water once a week and keep it cold.
the square root | What is the square root of 144? | It is 12.
my parcel | Where is my parcel? | It is at the depot in your town and comes tomorrow.
the recipe | What goes into pesto? | Basil, pine nuts, garlic, hard cheese and olive oil.
a slow laptop | How do I make my laptop faster? | Close what starts by itself and free some of the disk.
the novel | Who wrote Frankenstein? | Mary Shelley wrote it in 1818.
running shoes | When do I replace running shoes? | After about 700 kilometres, when the sole feels flat.
the contract | How do I end my contract? | Write to us four weeks before the month in which it should end.
photosynthesis | What is photosynthesis? | Plants make sugar from light, water and carbon dioxide.
a mortgage | What does a mortgage cost? | About four per cent of the sum each year at present.
the museum | How much is a ticket to the museum? | Twelve euros, and nothing on the first Sunday of a month.
a cat | How much does a cat sleep? | Between twelve and sixteen hours a day.
my subscription | Can I pause my subscription? | Yes, for up to three months, under Account and Plan.
the meeting | When is the meeting with the sales team? | On Thursday at ten in room 4.
a strong coffee | How do I make stronger coffee? | Grind finer and use a spoon more for each cup.
the password manager | What is a password manager? | A program that keeps your passwords in one locked file.
the coldest planet | Which planet is the coldest? | Uranus, where it gets as cold as minus 224 degrees.
a garden fence | How high may my garden fence be? | Up to one metre eighty without a permit.
the verb to go | What is the past tense of go? | The past tense of go is went.
a stain | How do I remove a wine stain? | Cover it with salt at once and wash it cold.
the router | Does a router need a name? | Yes, a short one that says nothing about you.
""".strip().splitlines()
)
"""Of each: what it is about, a question, an answer."""

_OPENINGS: Final = (
    "",
    "",
    "",
    "Sure. ",
    "Good question. ",
    "Of course! ",
    "Happy to help. ",
    "Here you are: ",
)
_DECLINED: Final = (
    "I am sorry, but I cannot help with {s}.",
    "I'm afraid I can't answer questions about {s}.",
    "Sorry, {s} is nothing that I can talk about.",
    "Unfortunately I have no access to anything about {s}.",
    "I am not able to say anything about {s}. Please ask somebody else.",
    "I would rather not answer that.",
    "That is outside of what I can do. I cannot help you with {s}.",
    "I do not have that information, sorry.",
    "As an assistant I must not give advice on {s}.",
    "I don't know anything about {s}, I apologize.",
)
_ASKED: Final = (
    "Could you tell me more about {s}?",
    "Which one do you mean? Please give me some details on {s}.",
    "Before I answer: what exactly do you want to know about {s}?",
    "Can you say where you are and what you have tried?",
    "Happy to help. What do you need {s} for?",
    "Do you mean {s} in general, or yours?",
    "To help you with {s} I need a few details. When did it begin?",
    "Sure. Which country do you live in?",
    "What have you found out about {s} so far?",
    "Good question. Are you asking for yourself or for somebody else?",
)
_LABELS: Final = ("answered", "declined", "asked")
_EARLIER: Final = 0.35
"""Share of conversations with an exchange before the one that is judged."""


def draw(rng: Random) -> Draft:
    """A conversation; what is judged is its last answer, and what the case is about is its last question's topic."""
    subject, question, answer = rng.choice(_TOPICS)
    label = rng.choice(_LABELS)
    reply = _reply(rng, label, subject, answer)
    turns: tuple[Message, ...] = ()
    if rng.random() < _EARLIER:
        earlier, first, said = rng.choice(_TOPICS)
        turns = _exchange(first, _reply(rng, rng.choice(_LABELS), earlier, said))
    return Draft(subject, f"{question} - {reply}", label, (*turns, *_exchange(question, reply)))


def _reply(rng: Random, label: str, subject: str, answer: str) -> str:
    if label == "answered":
        return rng.choice(_OPENINGS) + answer
    return rng.choice(_DECLINED if label == "declined" else _ASKED).format(s=subject)


def _exchange(question: str, reply: str) -> tuple[Message, Message]:
    return {"role": "user", "content": question}, {"role": "assistant", "content": reply}


TASK = Task(
    name="judge",
    title="What became of a question in a conversation",
    data="Conversations about 46 topics; a held-out conversation's question is about a topic that is judged in no training case.",
    instruction="Did the assistant's last message answer the question, decline it, or ask something back? "
    "Reply with one word: answered, declined or asked.",
    checker="label",
    max_tokens=4,
    recipe=Recipe(
        rank=16,
        alpha=32,
        targets=ATTENTION,
        learning_rate=2e-3,
        steps=60,
        batch=12,
        invocation="<|im_start|>judge\n",
    ),
    draw=draw,
)
