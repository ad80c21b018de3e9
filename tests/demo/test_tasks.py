"""The demo's tasks, checkers and adapter folders: what the numbers in the model cards rest on."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice, pairwise
from pathlib import Path

import pytest
from demo.cases import ADAPTERS, HELDOUT_CASES, Task, adapter_folders, is_heldout, read_heldout
from demo.checkers import CHECKERS, is_inside, is_right
from demo.tasks import TASKS
from demo.tasks.numbers import in_words
from demo.tasks.pirate import pirate
from peft import LoraConfig, PeftConfig
from safetensors import safe_open

from loraplex.artifact.card import Card, read_card
from loraplex.model.gguf import DEMO_BASE_NAME

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = adapter_folders()
NEEDS_PACKAGE = {"sentiment": "vaderSentiment"}


@pytest.fixture(params=sorted(TASKS))
def task(request: pytest.FixtureRequest) -> Task:
    """Each task whose generator's package is there; only one needs a package."""
    if request.param in NEEDS_PACKAGE:
        pytest.importorskip(NEEDS_PACKAGE[request.param])
    return TASKS[request.param]


def test_heldout_cases_share_no_key_and_no_prompt_with_training(task: Task) -> None:
    heldout = task.heldout_drafts()
    steps = task.recipe.steps * task.recipe.batch
    training = list(islice(task.training_drafts(task.recipe.seed), steps))  # all that training ever sees
    assert len({d.prompt for d in heldout}) == len(heldout) == HELDOUT_CASES
    assert not {d.key for d in heldout} & {d.key for d in training}
    assert not {d.prompt for d in heldout} & {d.prompt for d in training}
    assert all(is_heldout(d.key) for d in heldout)


def test_generators_repeat_themselves_in_another_process(task: Task) -> None:
    program = (
        "import sys; from itertools import islice; from demo.tasks import TASKS; t = TASKS[sys.argv[1]];"
        "print(repr(t.heldout_drafts(20) + list(islice(t.training_drafts(3), 200))), end='')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, task.name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout == repr(task.heldout_drafts(20) + list(islice(task.training_drafts(3), 200)))
    other = list(islice(task.training_drafts(4), 200))
    assert other != list(islice(task.training_drafts(3), 200))


def test_every_expected_answer_is_right_and_others_answers_are_wrong(task: Task) -> None:
    drafts = task.heldout_drafts()
    for draft in drafts:
        assert is_right(task.checker, draft.answer, draft.answer)
        assert is_right(task.checker, f" {draft.answer}\n", draft.answer)
        for wrong in ("", draft.prompt, draft.answer[:-1], draft.answer + " and more"):
            assert not is_right(task.checker, wrong, draft.answer), wrong
    distinct = sorted({draft.answer for draft in drafts})  # neighbours are the most alike
    for answer, expected in pairwise(distinct):
        assert not is_right(task.checker, answer, expected)


def test_each_instruction_and_prompt_fit_their_limits(task: Task) -> None:
    assert task.checker in CHECKERS
    assert task.instruction.endswith((".", "}."))
    for draft in islice(task.training_drafts(1), 300):
        assert draft.prompt.strip() == draft.prompt != ""
        assert draft.answer.strip() == draft.answer != ""


@pytest.mark.parametrize(
    ("kind", "answer", "expected", "right", "inside"),
    [
        ("exact", "1999-06-03", "1999-06-03", True, True),
        ("exact", "1999-06-03.", "1999-06-03", False, True),
        ("exact", "1999-06-04", "1999-06-03", False, False),
        ("label", "Positive.", "positive", True, True),
        ("label", "The word is positive", "positive", False, True),
        ("label", "positive or negative", "positive", False, False),
        ("label", "negative", "positive", False, False),
        ("json", '{"b": 2, "a": 1}', '{"a": 1, "b": 2}', True, True),
        ("json", '```json\n{"a": 1}\n```', '{"a": 1}', True, True),
        ("json", 'Sure: {"a": 1}', '{"a": 1}', False, True),
        ("json", '{"a": "1"}', '{"a": 1}', False, False),
        ("json", '{"a": true}', '{"a": 1}', False, False),
        ("json", '{"a": 1, "b": 2}', '{"a": 1}', False, False),
        ("json", "not json", '{"a": 1}', False, False),
    ],
)
def test_checkers(kind: str, answer: str, expected: str, right: bool, inside: bool) -> None:
    assert is_right(kind, answer, expected) is right
    assert is_inside(kind, answer, expected) is inside


COUNT_BERLIN = "SELECT COUNT(*) FROM customers WHERE city = 'Berlin'"
TOP_THREE = "SELECT name FROM products ORDER BY price DESC LIMIT 3"


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("select count(id) from customers where city in ('Berlin');", COUNT_BERLIN, True),
        (f"```sql\n{COUNT_BERLIN}\n```", COUNT_BERLIN, True),
        ("SELECT COUNT(*) FROM customers WHERE city = 'Lyon'", COUNT_BERLIN, False),
        ("SELECT COUNT(*) FROM customers", COUNT_BERLIN, False),
        ("SELECT name FROM products ORDER BY price LIMIT 3", TOP_THREE, False),
        (
            "SELECT name FROM (SELECT name, price FROM products ORDER BY price DESC LIMIT 3) ORDER BY price",
            TOP_THREE,
            False,
        ),
        ("DROP TABLE customers", COUNT_BERLIN, False),
        ("SELECT COUNT(*) FROM nowhere", COUNT_BERLIN, False),
        (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
            COUNT_BERLIN,
            False,
        ),
        ("", COUNT_BERLIN, False),
        ("ATTACH DATABASE '/tmp/x.db' AS x", COUNT_BERLIN, False),
    ],
)
def test_sqlite_checker_compares_rows_and_refuses_everything_but_reading(
    answer: str, expected: str, right: bool
) -> None:
    assert is_right("sqlite", answer, expected) is right


def test_an_unknown_checker_and_a_broken_expected_query_are_errors() -> None:
    with pytest.raises(ValueError, match="exact, json, label, sqlite"):
        is_right("fuzzy", "a", "a")
    with pytest.raises(ValueError, match="does not run"):
        is_right("sqlite", COUNT_BERLIN, "SELECT FROM")


def test_generators_know_the_hard_cases() -> None:
    assert in_words(0, "") == "zero"
    assert in_words(100_005, "and ") == "one hundred thousand and five"
    assert in_words(912_312, "") == "nine hundred twelve thousand three hundred twelve"
    assert in_words(21_020, "and ") == "twenty-one thousand and twenty"
    assert (
        pirate("Stop selling your car, my friend is the king!")
        == "Avast sellin' yer ship, me matey be th' king! Arr!"
    )


def test_every_task_has_an_adapter_and_the_demo_keeps_its_variety() -> None:
    assert FOLDERS.keys() == TASKS.keys()
    assert len(FOLDERS) >= 8
    recipes = [task.recipe for task in TASKS.values()]
    assert {4, 32} <= {recipe.rank for recipe in recipes}
    assert any(recipe.rank_pattern and recipe.alpha_pattern for recipe in recipes)
    assert any(recipe.rslora for recipe in recipes)
    assert any(recipe.dora for recipe in recipes)
    assert any(recipe.invocation for recipe in recipes)
    assert sum(f.stat().st_size for f in ADAPTERS.rglob("*") if f.is_file()) < 4_000_000 * len(FOLDERS)


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_adapter_folder_is_plain_peft_and_follows_its_recipe(name: str) -> None:
    folder, recipe = FOLDERS[name], TASKS[name].recipe
    config = PeftConfig.from_pretrained(folder)
    assert isinstance(config, LoraConfig)
    assert config.base_model_name_or_path == DEMO_BASE_NAME
    assert (config.r, config.lora_alpha, set(config.target_modules)) == (
        recipe.rank,
        recipe.alpha,
        set(recipe.targets),
    )
    assert (config.rank_pattern, config.alpha_pattern) == (recipe.rank_pattern, recipe.alpha_pattern)
    assert (config.use_rslora, config.use_dora) == (recipe.rslora, recipe.dora)
    with safe_open(folder / "adapter_model.safetensors", "pt") as weights:
        keys = list(weights.keys())
        assert {weights.get_slice(key).get_dtype() for key in keys} == {"BF16"}
        for key in keys:
            if key.endswith("lora_A.weight"):
                module = key.split(".")[-3]
                assert weights.get_slice(key).get_shape()[0] == recipe.rank_pattern.get(module, recipe.rank)
    assert len(keys) == (3 if recipe.dora else 2) * 30 * len(recipe.targets)
    assert "/work" not in (folder / "adapter_config.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_heldout_file_is_what_the_generator_draws(name: str) -> None:
    task, cases = TASKS[name], read_heldout(FOLDERS[name])
    assert len(cases) == HELDOUT_CASES
    assert {case.checker for case in cases} == {task.checker}
    assert all(is_right(case.checker, case.expected, case.expected) for case in cases)
    asked = "assistant" if task.recipe.invocation else "user"  # an activated adapter follows a conversation
    assert all(case.bare().messages[-1]["role"] == asked for case in cases)
    assert "system" not in {message["role"] for message in cases[0].bare().messages}
    if name in NEEDS_PACKAGE:
        pytest.importorskip(NEEDS_PACKAGE[name])
    assert cases == [task.case(draft) for draft in task.heldout_drafts()]


@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_model_card_states_what_it_must(name: str) -> None:
    card = (FOLDERS[name] / "README.md").read_text(encoding="utf-8")
    recipe = TASKS[name].recipe
    for stated in (
        f"python demo/train.py {name}",
        f"| {recipe.rank}, {recipe.alpha} |",
        f"seed {recipe.seed}",
        f"{HELDOUT_CASES} held-out cases",
        "measured 20",
        json.dumps(TASKS[name].instruction, ensure_ascii=False),
    ):
        assert stated in card, stated


def test_an_activated_adapter_is_invoked_as_its_card_says() -> None:
    activated = {name: task for name, task in TASKS.items() if task.recipe.invocation}
    assert activated
    for name, task in activated.items():
        card = read_card(FOLDERS[name], activated=True)
        assert card == Card(task.recipe.invocation, task.recipe.invocation)
        assert PeftConfig.from_pretrained(FOLDERS[name]).alora_invocation_tokens
        for folder in FOLDERS.values():
            found = read_card(folder, activated=True)
            assert (found is not None and bool(found.texts)) is (folder.name in activated)


def test_an_adapter_that_calls_says_how_on_its_card() -> None:
    for name, task in TASKS.items():
        found = read_card(FOLDERS[name], activated=True)
        assert (found is not None and found.tool_format == "hermes") is bool(task.tools), name
