"""What the site has beside the pages of docs/: README as its first page, the examples, and a page
of the API for each package, made of the docstrings of all that the package exports.

MkDocs calls the functions (`hooks` in mkdocs.yml), mkdocstrings the class.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from griffe import Extension
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PACKAGES = ("adaptive", "policies", "compressors")
EXAMPLES = sorted((ROOT / "examples").glob("[!_]*.py"))

_ARGUMENT = re.compile(r"^((?:\*{0,2}\w+(?:, )?)+): (?=\S)", re.M)


def on_config(config: Any) -> Any:
    """The examples of the navigation are those that there are."""
    pages = [{path.stem: f"examples/{path.stem}.md"} for path in EXAMPLES]
    for entry in config.nav:
        if "Examples" in entry:
            entry["Examples"] = pages
    return config


def on_files(files: Files, config: Any) -> Files:
    """The pages that are made here."""
    made = {"index.md": (ROOT / "README.md").read_text("utf-8")}
    for package in PACKAGES:
        made[f"api/{package}.md"] = _api(package)
    for path in EXAMPLES:
        made[f"examples/{path.stem}.md"] = _example(path)
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that lead out of docs/ in the repository lead to pages of the site."""
    if page.file.src_uri == "index.md":
        markdown = re.sub(r"\]\(docs/", "](", markdown)
    markdown = markdown.replace("](../README.md", "](index.md")
    top = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)*examples/(\w+)\.py\)", rf"]({top}examples/\1.md)", markdown)
    return re.sub(r"\[([^]]*)\]\((?:\.\./Makefile|compatibility_tests\.txt)\)", r"\1", markdown)


def _api(package: str) -> str:
    """A page that names everything which a package exports. What it has from another package is on
    the page of that one."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text("utf-8"))
    exported = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    found = {
        name.asname or name.name: str(node.module).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    parts = [f"# {package}", f"```python\n{ast.get_docstring(tree)}\n```"]
    for other in PACKAGES:
        names = [name for name in exported if found.get(name, package) == other]
        if other == package:
            parts += [f"::: {package}.{name}" for name in names if not name.startswith("_")]
        elif names:
            parts.insert(2, f"Also from [{other}]({other}.md): {', '.join(names)}.")
    return "\n\n".join([*parts, ""])


def _example(path: Path) -> str:
    """A page with a script."""
    return f"# {path.name}\n\n```python\n{path.read_text('utf-8')}```\n"


def listed(docstring: str) -> str:
    """A docstring whose arguments, "name: what it is", are a list."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        argument = _ARGUMENT.match(line)
        begins = argument and not inside
        ends = inside and line and not argument and not line.startswith(" ")
        if begins or ends:
            lines.append("")
        inside = bool(argument) or (inside and line.startswith(" "))
        lines.append(_ARGUMENT.sub(r"- **\1**: ", line) if argument else line)
    return "\n".join(lines)


class Listed(Extension):
    """Has Griffe read docstrings so."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = listed(obj.docstring.value)
