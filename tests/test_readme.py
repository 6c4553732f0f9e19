from __future__ import annotations

import inspect
import re
from pathlib import Path

from yatt_jax.controller import online

ROOT = Path(__file__).parent.parent


def test_the_readme_shows_the_loop_as_it_is() -> None:
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert shown is not None
    body = inspect.getsource(online.train)
    assert shown.group(1).strip() == body[body.index("    algo, hyper") :].replace("\n    ", "\n").strip()


def test_every_link_leads_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
