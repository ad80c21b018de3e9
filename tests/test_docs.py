"""Citations lead somewhere: section codes, quoted rulings, module paths, tests, links between pages.

Each rule is a function from text to what leads nowhere; it runs over the repository and over a text with
planted faults.
"""

import io
import re
import tokenize
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.named_tests import NAMED, missing

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
LIBRARY = ROOT / "src" / "loraplex"
CHAPTERS = sorted((DOCS / "specification").glob("*.md"))
DECISIONS = sorted((DOCS / "decisions").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
SOURCES = sorted(
    path
    for folder in (LIBRARY, ROOT / "tests")
    for suffix in ("*.py", "*.cpp", "*.h")
    for path in folder.rglob(suffix)
    if path.name != "test_docs.py"
)
CITED_PAGES = ("rulings", "interface", "architecture")

CODE = re.compile(r"\b0x0[1-9A-E](?:[A-Z](?:[A-Z]|\d)?)?\b")
RANGE = re.compile(r"\b(0x0[1-9A-E])([A-Z]) to \1([A-Z])\b")
QUOTED = re.compile(rf'\b({"|".join(CITED_PAGES)}) ("[^"]+"(?:, "[^"]+")*)')
SECTION = re.compile(r"^##+ (0x.*)$", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`([\w./-]+(?:\.(?:py|cpp|h|md)|/))`")


def prose(source: str, suffix: str) -> str:
    """A file without its numbers: a hexadecimal constant is no citation. In C++, its comments."""
    if suffix != ".py":
        return "\n".join(line.partition("//")[2] for line in source.splitlines())
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join(token.string for token in tokens if token.type != tokenize.NUMBER)


def codes(text: str) -> set[str]:
    """Section codes that a text cites, ranges spelt out."""
    found = set(CODE.findall(text))
    for chapter, first, last in RANGE.findall(text):
        found |= {chapter + chr(letter) for letter in range(ord(first), ord(last) + 1)}
    return found


def headings(text: str) -> list[str]:
    return HEADING.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchor(heading: str) -> str:
    """A heading's anchor, as the usual renderers make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def sections() -> dict[str, str]:
    """Code -> link from the index, for every section of the specification."""
    return {
        heading.split()[0]: f"specification/{chapter.name}#{anchor(heading)}"
        for chapter in CHAPTERS
        for heading in SECTION.findall(chapter.read_text(encoding="utf-8"))
    }


def unknown_codes(text: str, known: Iterable[str]) -> set[str]:
    return codes(text) - set(known)


def unknown_titles(text: str, titles: dict[str, set[str]]) -> set[str]:
    """`page "Title"` citations whose page has no such heading; line breaks and comment marks do not count."""
    flat = re.sub(r"\s*\n\s*(?://|#)?\s*", " ", text)
    return {
        f'{page} "{title}"'
        for page, quoted in QUOTED.findall(flat)
        for title in re.findall(r'"([^"]+)"', quoted)
        if title not in titles[page]
    }


def missing_paths(text: str, library: Path) -> set[str]:
    """Back-quoted paths that are neither in the library, nor in the repository, nor a file name of the
    library.
    """
    names = {path.name for path in library.rglob("*")}
    return {
        path
        for path in PATH.findall(text)
        if not ((library / path).exists() or (ROOT / path).exists() or ("/" not in path and path in names))
    }


def broken_links(page: Path, text: str) -> set[str]:
    """Links to files that are not there, or to headings that they do not have."""
    broken = set()
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, wanted = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (
            wanted and wanted not in map(anchor, headings(path.read_text(encoding="utf-8")))
        ):
            broken.add(target)
    return broken


def titles() -> dict[str, set[str]]:
    return {page: set(headings((DOCS / f"{page}.md").read_text(encoding="utf-8"))) for page in CITED_PAGES}


@pytest.mark.parametrize("suffix", sorted({path.suffix for path in SOURCES}))
def test_every_cited_section_is_in_the_specification(suffix: str) -> None:
    known = sections()
    lost = {
        str(path.relative_to(ROOT)): unknown
        for path in SOURCES
        if path.suffix == suffix
        and (unknown := unknown_codes(prose(path.read_text(encoding="utf-8"), suffix), known))
    }
    assert not lost


def test_every_quoted_ruling_is_a_heading_of_its_page() -> None:
    known = titles()
    lost = {
        str(path.relative_to(ROOT)): unknown
        for path in (*SOURCES, *PAGES)
        if (unknown := unknown_titles(path.read_text(encoding="utf-8"), known))
    }
    assert not lost


def test_the_index_lists_every_section_and_nothing_else() -> None:
    index = (DOCS / "specification.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| \[(0x\w+)\]\(([^)]+)\)", index, re.MULTILINE)) == sections()


def test_the_index_lists_every_decision_and_nothing_else() -> None:
    index = (DOCS / "decisions.md").read_text(encoding="utf-8")
    decisions = {
        f"decisions/{page.name}#{anchor(heading)}"
        for page in DECISIONS
        for heading in re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert {link for link in LINK.findall(index) if "#" in link} == decisions


@pytest.mark.parametrize(
    "page",
    [DOCS / "terms.md", DOCS / "architecture.md", *DECISIONS],
    ids=lambda page: page.name,
)
def test_every_module_that_a_page_names_is_there(page: Path) -> None:
    assert not missing_paths(page.read_text(encoding="utf-8"), LIBRARY)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    assert not broken_links(page, page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_is_there(page: Path) -> None:
    names = NAMED.findall(page.read_text(encoding="utf-8"))
    assert [fault for name in names if (fault := missing(name))] == []


def test_no_page_cites_a_paper_that_is_not_here() -> None:
    absent = re.compile(
        r"\b(?:DESIGN|STYLE|FAULTS|WORKLOADS|DEPENDENCIES|COVERAGE)(?:\.md\b| \d)|\bseed\.txt\b"
    )
    found = {
        str(path.relative_to(ROOT)): absent.findall(text)
        for path in (*SOURCES, *PAGES)
        if absent.search(text := path.read_text(encoding="utf-8"))
    }
    assert not found


def test_the_rules_see_planted_faults() -> None:
    source = 'MASK = 0x0F\n"""Specification: 0x02E, 0x02Z, 0x03A to 0x03H; rulings\n"Tenants", "Moods"."""\n'
    text = prose(source, ".py")
    assert unknown_codes(text, sections()) == {"0x02Z", "0x03H"}
    assert prose("int x = 0x0C;  // 0x02Y", ".cpp").strip() == "0x02Y"
    assert unknown_titles(text, titles()) == {'rulings "Moods"'}
    assert missing_paths(
        "`core/plan.py`, `plan.py`, `core/`, `core/plans.py`, `plans.py`, `cores/`", LIBRARY
    ) == {
        "core/plans.py",
        "plans.py",
        "cores/",
    }
    named = "`tests/test_docs.py::test_moods`, `tests/test_moods.py::test_a`, `tests/test_docs.py::a`"
    mutant = "`tests/sim/test_mutants.py::test_a_checker_sees_it[moody]`"
    assert [str(missing(name)).partition(": ")[2] for name in NAMED.findall(f"{named} {mutant}")] == [
        "no such function",
        "no such file",
        "no name of a test",
        "no such case",
    ]
    links = "[a](terms.md#pages), [b](terms.md#moods), [c](mood.md), [d](https://example.org/x)"
    assert broken_links(DOCS / "rulings.md", links) == {"terms.md#moods", "mood.md"}
