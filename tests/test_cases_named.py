"""Faults that users of comparable projects ran into, by number: each has a test here that says which it covers."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

CASES: dict[int, str] = {
    1: "experts stay in full precision although four bits were asked for",
    3: "a quantised model fails in one of torch's modes without gradients",
    4: "a changed int4 kernel of torch breaks packing",
    6: "no compiler, or a wrong one",
    7: "a saved quantised model comes back unquantised",
    8: "what is quantised differs between save and load",
    10: "tied embeddings come back apart, or without values",
    11: "weights on disk taken for one another, since all of them have the address 0",
    13: "experts computed together never pass the hooks that would load them",
    15: "nothing was offloaded, and the comparison of outputs passed for that reason",
    16: "offloaded experts give other text for some architecture",
    18: "several owners of what is where; a block that returns another type than the next layer expects",
    19: "prefetches fill the slots, and what is needed waits for ever",
    20: "a prompt needs more experts than there are slots: fetched again and again, or out of memory",
    21: "a slot is reused while its old content is still promised to a layer",
    23: "memory is freed on the copy stream before the computation has read it",
    32: "greedy drafts judged as sampled ones: another distribution",
    34: "temperature and filters on one side only",
    36: "an accepted end token in the middle of a block is run past",
    37: "more tokens than asked for",
    38: "half precision called lossless",
    40: "one tokenizer, two padded vocabulary sizes",
    42: "draft and target on different devices",
    43: "a sliding window fills while drafting",
    44: "a recurrent or convolutional state that can't be taken back",
    45: "rejected drafts stay in the state",
    47: "a softmax of what were probabilities already",
    48: "routers that never show their scores",
    50: "a weight for every expert where one for each chosen expert is meant",
    52: "dense layers shift the numbering; shared experts counted as routed ones",
    53: "checkpoint layouts, and which half of a fused tensor is the gate",
    55: "packed gpt-oss experts unpacked without a word",
}


def named(source: str) -> dict[int, list[str]]:
    """Case number -> the test functions that have it in their names or docstrings."""
    found = defaultdict(list)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            text = f"{node.name.replace('_', ' ')} {ast.get_docstring(node) or ''}"
            for numbers in re.findall(r"\bcases?\s+(\d+(?:(?:,\s*|,?\s+and\s+)\d+)*)", text, re.IGNORECASE):
                for number in re.findall(r"\d+", numbers):
                    found[int(number)].append(node.name)
    return dict(found)


def test_each_case_has_a_test_that_names_it() -> None:
    covered: dict[int, list[str]] = defaultdict(list)
    for path in Path(__file__).parent.rglob("test_*.py"):
        if path != Path(__file__):
            for number, tests in named(path.read_text("utf-8")).items():
                covered[number] += tests
    assert {number: fault for number, fault in CASES.items() if not covered[number]} == {}


def test_names_are_found_in_names_and_docstrings_of_tests_alone() -> None:
    source = '''
"""Case 1."""
def helper():
    """Case 2."""
def test_case_3(): ...
def test_a():
    """Cases 4, 5 and 6: all of them. In case 7, too."""
'''
    assert named(source) == {3: ["test_case_3"], **{n: ["test_a"] for n in (4, 5, 6, 7)}}
