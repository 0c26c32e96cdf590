"""What comes with the package: a small trained MoE model and held-out prompts, both usable without a download."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """A short text that the bundled model never saw in training; ``source`` is its work, ``licence`` that of the text.

    >>> Prompt("docs-99", "docs", "See also", "a manual", "public domain").kind
    'docs'
    """

    id: str
    kind: str
    text: str
    source: str
    licence: str


def data_folder() -> Path:
    """The folder of bundled data: ``specter_lab/_data`` in an installed wheel, ``data`` beside the package in a checkout.

    Raises ``FileNotFoundError`` if neither is there.

    >>> (data_folder() / "README.md").exists()
    True
    """
    package = Path(__file__).resolve().parent
    candidates = (package / "_data", package.parent / "data")
    for folder in candidates:
        if (folder / "prompts.jsonl").exists() and (folder / "tiny-moe" / "config.json").exists():
            return folder
    raise FileNotFoundError(
        "The bundled data is specter_lab/_data in an installed wheel and data/ in a checkout; "
        f"neither {candidates[0]} nor {candidates[1]} holds prompts.jsonl and tiny-moe/config.json. "
        "Install specter_lab again from a wheel, or from a whole checkout with `pip install -e .`."
    )


def bundled_model() -> Path:
    """The folder of "tiny-moe", a trained 10 M parameter Qwen3-MoE; it opens with transformers' ``from_pretrained``.

    >>> bundled_model().name
    'tiny-moe'
    """
    return data_folder() / "tiny-moe"


def load_prompts(kinds: Sequence[str] | str | None = None, per_kind: int | None = None) -> list[Prompt]:
    """The bundled prompts of these kinds (all by default), the first ``per_kind`` of each (all by default).

    They always come in the order of the file, whatever the order of ``kinds``. Raises ``ValueError`` for an unknown
    kind, for more prompts than there are, and for a line that is not a prompt.

    >>> [prompt.id for prompt in load_prompts(kinds=["code"], per_kind=2)]
    ['code-00', 'code-01']
    """
    prompts = _read_prompts(data_folder() / "prompts.jsonl")
    known = list(dict.fromkeys(prompt.kind for prompt in prompts))
    wanted = known if kinds is None else [kinds] if isinstance(kinds, str) else list(kinds)
    if unknown := [kind for kind in wanted if kind not in known]:
        raise ValueError(f"A bundled prompt is of one of {len(known)} kinds; got {unknown}. Choose among {', '.join(known)}.")
    by_kind = {kind: [prompt for prompt in prompts if prompt.kind == kind] for kind in known if kind in wanted}
    fewest = min(map(len, by_kind.values()), default=0)
    if per_kind is not None and by_kind and not 1 <= per_kind <= fewest:
        raise ValueError(
            f"per_kind lies between 1 and {fewest}, the bundled prompts of a kind; got {per_kind}. "
            "Leave it out for all of them, or bring your own texts."
        )
    return [prompt for of_kind in by_kind.values() for prompt in of_kind[:per_kind]]


def _read_prompts(path: Path) -> list[Prompt]:
    """One ``Prompt`` for each line of a JSONL file with exactly its fields; ``ValueError`` names a line that differs."""
    expected = {field.name for field in fields(Prompt)}
    prompts = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                values = json.loads(line)
            except json.JSONDecodeError:
                values = None
            if not isinstance(values, dict) or set(values) != expected or not all(isinstance(value, str) for value in values.values()):
                raise ValueError(
                    f"A line of {path.name} is a JSON object of texts named {', '.join(sorted(expected))}; "
                    f"line {number} of {path} is {line[:60].rstrip()!r}. Correct or remove it, or restore the file from a checkout."
                )
            prompts.append(Prompt(**values))
    return prompts
