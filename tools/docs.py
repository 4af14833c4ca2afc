"""The documentation: ``python tools/docs.py`` (``make docs``) builds it into site/, in seconds and without a network.

zensical reads mkdocs.yml. Before that, the pages are laid out in build/pages: docs/ as it is, README as the first page,
the files that stand elsewhere as pages of their own, and what is generated: the command line, from its parsers. Links
between files of this repository become links between pages. Afterwards the built pages are read once more: a link or an
anchor that leads nowhere, and anything that a page would load from elsewhere, is an error.
"""

from __future__ import annotations

import base64
import io
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "bench/README.md": "results/costs.md",
}
"""Files outside docs/ that are pages, and where."""
FENCED = re.compile(r"(^ *(`{3,}|~{3,}).*?^ *\2 *$)", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def pages(root: Path = ROOT) -> dict[str, str]:
    """Every source file of the site and the page that it becomes."""
    found = {path.relative_to(root).as_posix(): path for path in sorted((root / "docs").rglob("*")) if path.is_file()}
    places = {source: source.removeprefix("docs/").replace(".ipynb", ".md") for source in found}
    places |= {f"examples/{path.name}": f"examples/{path.stem}.md" for path in (root / "examples").glob("*.py")}
    return places | ELSEWHERE


def lay_out(target: Path, root: Path = ROOT) -> None:
    """Write all pages to ``target``."""
    places = pages(root)
    for source, place in places.items():
        path = target / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.endswith(".md"):
            path.write_text(relinked((root / source).read_text(), source, places, root))
        elif source.endswith(".ipynb"):
            path.write_text(relinked(notebook(root / source, path), source, places, root))
        elif source.startswith("examples/"):
            path.write_text(f"# {posixpath.basename(source)}\n\n```python\n{(root / source).read_text()}```\n")
        else:
            shutil.copyfile(root / source, path)
    with (target / "reference" / "command-line.md").open("a") as page:
        page.write(command_line())


def relinked(text: str, source: str, places: dict[str, str], root: Path = ROOT) -> str:
    """``text`` of the file ``source``, with its links to other files as links between pages. A file that is no page is
    named, and not linked. A figure is a link to its file: on a narrow screen that is how to read it.

    >>> relinked("[its text](../LICENSE), [how](a.md#b)", "docs/c.md", {"docs/c.md": "c.md", "docs/a.md": "x/a.md"})
    'its text, [how](x/a.md#b)'
    >>> relinked("![a line](b.png)", "docs/c.md", {"docs/c.md": "c.md", "docs/b.png": "b.png"})
    '[![a line](b.png)](b.png)'
    """
    here = posixpath.dirname(places[source]) or "."

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match.groups(default="")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if file in places:
            return f"[{words}]({posixpath.relpath(places[file], here)}{anchor})"
        return words if (root / file).exists() else match[0]

    fences = [match[0] for match in FENCED.finditer(text)]
    prose = [FIGURE.sub(r"[\g<0>](\1)", LINK.sub(link, part)) for part in FENCED.split(text)[::3]]
    return "".join(part + fence for part, fence in zip(prose, [*fences, ""]))


def notebook(source: Path, page: Path) -> str:
    """A notebook's cells and what they said; its pictures are written beside the page."""
    parts = []
    for number, cell in enumerate(json.loads(source.read_text())["cells"]):
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif "image/png" in output.get("data", {}):
                picture = page.with_name(f"{page.stem}-{number}.png")
                picture.write_bytes(base64.b64decode("".join(output["data"]["image/png"])))
                parts.append(f"![What the cell above draws]({picture.name})")
    return "\n\n".join(parts) + "\n"


def command_line() -> str:
    """What ``--help`` says, of every command."""
    from prsgd.cli import COMMANDS, main

    lines = [""]
    for name in ("", *COMMANDS):
        said = io.StringIO()
        with redirect_stdout(said), suppress(SystemExit):
            main([*name.split(), "--help"])
        lines += [f"## {f'prsgd {name}'.strip()}", "", "```text", said.getvalue().rstrip(), "```", ""]
    return "\n".join(lines)


def build(root: Path = ROOT) -> list[str]:
    """Build ``root``/site as ``root``/mkdocs.yml says; returns what is wrong with it."""
    target = root / "build" / "pages"
    shutil.rmtree(target, ignore_errors=True)
    lay_out(target)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict"],
        cwd=root, capture_output=True, text=True, check=False, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    if done.returncode:
        said = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
        return [said.split("Traceback")[0] if "issue" in said else said]
    return wrong(root / "site")


class _Page(HTMLParser):
    """The anchors of a page, where it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(found.get("href", ""))
        elif "src" in found:
            self.loads.append(found["src"])


def wrong(site: Path) -> list[str]:
    """Links and anchors of the built pages that lead nowhere, and what they would load from elsewhere."""
    read = {path.relative_to(site).as_posix(): _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = []
    for name, page in read.items():
        if name == "404.html":  # its links are absolute: it is shown at any place
            continue
        for link in [*page.links, *page.loads]:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                found += [f"{name} loads {link}"] if link in page.loads and address.scheme != "data" else []
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(address.path)))
            target = name if not address.path else "index.html" if target == "." else target
            if not (site / target).is_file():
                found.append(f"{name}: no file {link}")
            elif address.fragment and target in read and unquote(address.fragment) not in read[target].anchors:
                found.append(f"{name}: no anchor {link}")
    for path in sorted(site.rglob("*.css")):
        found += [f"{path.name} loads {url}" for url in re.findall(r"url\([\"']?(https?:[^)]*)", path.read_text())]
    return found


if __name__ == "__main__":
    problems = build()
    print("\n".join(problems) or "site/index.html")
    sys.exit(1 if problems else 0)
