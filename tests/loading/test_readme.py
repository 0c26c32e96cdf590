"""What the README shows of loading runs, in the order in which it is shown."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_examples_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (source,) = re.findall(r"^```pycon\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    examples = doctest.DocTestParser().get_doctest(source, {}, "README.md", str(README), 0)
    assert len(examples.examples) == 5
    failures, tried = doctest.DocTestRunner().run(examples)
    assert (failures, tried) == (0, 5)
