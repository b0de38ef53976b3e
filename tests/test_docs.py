"""README and docs/ name what exists: pages, links, files, variables, make targets, Python names; snippets compile.

That the site is built from them, strictly, is `make docs`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from pycomm import errors
from pycomm.config import Config

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = sorted((ROOT / "docs").glob("*.md"))
PAGES: Final = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("tests/*/*.md")),
    *DOCS,
]
FENCED: Final = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(text: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "``", FENCED.sub("", text))


@cache
def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ +(.+?)\s*$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links and pictures whose file or heading does not exist."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    page = ROOT / "docs/ddp.md"
    text = (
        "[a](errors.md) [b](gone.md) ![c](gone.png) [d](errors.md#gone) [e](#what-stays) [f](#gone)"
    )
    assert broken_links(page, text) == ["gone.md", "gone.png", "errors.md#gone", "#gone"]


def test_every_page_is_in_the_contents_and_exists() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"([\w/]+\.md)$", nav, re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in DOCS)
    assert len(named) == len(set(named)) > 5


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name_of)
def test_files_variables_and_targets_exist(page: Path) -> None:
    """Those that the page names as code."""
    text = page.read_text()
    code = "\n".join([*re.findall(r"`([^`\n]+)`", text), *(m[2] for m in FENCED.finditer(text))])
    files = re.findall(
        r"(?<![\w/.-])((?:csrc|pycomm|tests|tools|docker|examples|benchmarks)/[\w/.]*\w)", code
    )
    assert [f for f in files if not (ROOT / f).exists()] == []
    variables = set(re.findall(r"PYCOMM_[A-Z_0-9]+", text))
    assert variables - set(Config.variables()) == set()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"\bmake ([a-z][\w-]*)", code))
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_snippets_are_python(page: Path) -> None:
    for language, code in FENCED.findall(page.read_text()):
        if language == "python":
            compile(code, page.name, "exec")


def resolve(dotted: str) -> Any:
    """The module, class or function of this name."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)


def test_the_api_page_names_what_exists_and_is_described() -> None:
    text = (ROOT / "docs/api.md").read_text()
    names = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    assert len(names) > 10
    for name in names:
        assert inspect.getdoc(resolve(name)), name
    for name, members in re.findall(
        r"^::: ([\w.]+)\n(?: .*\n)*? +members: \[(.*)\]$", text, re.MULTILINE
    ):
        for member in members.split(", "):
            assert inspect.getdoc(getattr(resolve(name), member)), (name, member)


def test_every_error_says_what_to_do() -> None:
    kinds = [k for k in vars(errors).values() if inspect.isclass(k) and issubclass(k, errors.Error)]
    assert len(kinds) == 8
    for kind in kinds:
        assert re.search(r"What to do: [\w`]", kind.__doc__ or ""), kind
