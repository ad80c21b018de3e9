"""Questions about a small shop to SQLite queries."""

from __future__ import annotations

from random import Random

from demo.cases import ATTENTION, MLP, Draft, Recipe, Task
from demo.checkers import CATEGORIES, CITIES, SHOP_TABLES, STATUSES


def _forms(rng: Random) -> list[tuple[tuple[str, ...], str]]:
    """(wordings, query) pairs with freshly drawn values."""
    city, category, status = rng.choice(CITIES), rng.choice(CATEGORIES), rng.choice(STATUSES)
    age, price, few, year = (
        rng.randrange(20, 75),
        rng.randrange(5, 190),
        rng.randrange(2, 12),
        rng.randrange(2018, 2027),
    )
    stock = rng.randrange(5, 90)
    join = "JOIN orders ON orders.customer_id = customers.id"
    goods = "JOIN products ON products.id = orders.product_id"
    return [
        (
            (f"How many customers live in {city}?", f"Number of customers from {city}"),
            f"SELECT COUNT(*) FROM customers WHERE city = '{city}'",
        ),
        (
            (f"Names of customers older than {age}", f"Which customers are over {age} years old?"),
            f"SELECT name FROM customers WHERE age > {age}",
        ),
        (
            (f"Average age of customers in {city}", f"How old are customers from {city} on average?"),
            f"SELECT AVG(age) FROM customers WHERE city = '{city}'",
        ),
        (
            (f"The {few} most expensive products", f"Show the {few} products with the highest price"),
            f"SELECT name FROM products ORDER BY price DESC LIMIT {few}",
        ),
        (
            (
                f"Products in {category} under {price} euros",
                f"Which {category} products cost less than {price}?",
            ),
            f"SELECT name FROM products WHERE category = '{category}' AND price < {price}",
        ),
        (
            (
                f"Which products have fewer than {stock} pieces in stock?",
                f"Products with stock below {stock}",
            ),
            f"SELECT name FROM products WHERE stock < {stock}",
        ),
        (
            (f"How many orders are {status}?", f"Count the {status} orders"),
            f"SELECT COUNT(*) FROM orders WHERE status = '{status}'",
        ),
        (
            (f"Orders per status in {year}", f"For each status, how many orders were there in {year}?"),
            f"SELECT status, COUNT(*) FROM orders WHERE year = {year} GROUP BY status",
        ),
        (
            (f"Customers with {status} orders", f"Who has an order that is {status}?"),
            f"SELECT DISTINCT customers.name FROM customers {join} WHERE orders.status = '{status}'",
        ),
        (
            (
                f"How many {category} pieces were ordered in {year}?",
                f"Total quantity of {category} sold in {year}",
            ),
            f"SELECT SUM(orders.quantity) FROM orders {goods} WHERE products.category = '{category}' AND orders.year = {year}",
        ),
        (
            (f"Average price of {category}", f"What does a product in {category} cost on average?"),
            f"SELECT AVG(price) FROM products WHERE category = '{category}'",
        ),
        (
            (f"Customers from {city} older than {age}", f"Who lives in {city} and is over {age}?"),
            f"SELECT name FROM customers WHERE city = '{city}' AND age > {age}",
        ),
        (
            (f"Cities with more than {few} customers", f"In which cities do more than {few} customers live?"),
            f"SELECT city FROM customers GROUP BY city HAVING COUNT(*) > {few}",
        ),
        (
            (f"How many orders from {city} are {status}?", f"Count {status} orders of customers in {city}"),
            f"SELECT COUNT(*) FROM customers {join} WHERE customers.city = '{city}' AND orders.status = '{status}'",
        ),
    ]


def draw(rng: Random) -> Draft:
    """One of fourteen kinds of question in one of two wordings."""
    wordings, query = rng.choice(_forms(rng))
    return Draft(query, rng.choice(wordings), query)


TASK = Task(
    name="sql",
    title="Questions about a shop to SQLite queries",
    data="Fourteen kinds of question with drawn values; held-out queries never occur in training. "
    "An answer is right if it returns the expected rows on six generated databases.",
    instruction="Write one SQLite query for the question. Tables: "
    + ", ".join(f"{table}({columns})" for table, columns in SHOP_TABLES.items())
    + ". Answer with the query only.",
    checker="sqlite",
    max_tokens=64,
    recipe=Recipe(rank=16, alpha=32, targets=ATTENTION + MLP, steps=160),
    draw=draw,
)
