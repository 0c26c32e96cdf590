"""Build the training and held-out text of tiny-moe, and the held-out prompts.

    python prep_corpus.py --packages DIR --out DIR

``--packages`` holds eight packages of Debian 12 (bookworm), each unpacked into a folder of its own name
(``apt-get download NAME``, then ``dpkg -x NAME_*.deb DIR/NAME``); the code is the running interpreter's own standard
library, so run it with CPython 3.11.7 for the same text.

| package | text used | licence of the text |
| --- | --- | --- |
| r-cran-janeaustenr | six novels by Jane Austen | public domain (packaging MIT) |
| bible-kjv, bible-kjv-text | King James Bible | copyright expired |
| dict-devil | Bierce, The Devil's Dictionary | public domain |
| jargon-text | The Jargon File | public domain |
| sqlite3-doc | SQLite documentation | public domain |
| postgresql-doc-15 | PostgreSQL manual | PostgreSQL |
| python3.11-doc | Python documentation sources | PSF-2.0 (examples also 0BSD) |
| (interpreter) | CPython standard library | PSF-2.0 |

Written to ``--out``: ``train.jsonl`` and ``heldout.jsonl`` ({"domain", "name", "text"} a line), ``prompts.json`` (100
held-out prompts, which analyze.py reads), ``prompts.jsonl`` (48 of them with work and licence, bundled as
``data/prompts.jsonl``) and ``stats.json`` (documents and bytes by source).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import source_texts

HELD_OUT_NOVEL = "persuasion"
HELD_OUT_BOOKS = ("Ruth", "Jonah", "James", "Philippians")
HELD_OUT_PER_MILLE = 35
PIECE_CHARS = 40000
JARGON_PIECE_CHARS = 60000
PROMPTS_PER_KIND = 25
BUNDLED_PER_KIND = 12
KINDS = ("prose", "dialogue", "docs", "code")
# distutils left Python with 3.12; importlib.metadata._functools is a copy from a project with a notice of its own.
UNBUNDLED_SOURCES = r"^distutils/|^importlib/metadata/_functools\.py$"

Row = dict[str, str]


def document(domain: str, name: str, text: str) -> Row:
    """One line of the corpus."""
    return {"domain": domain, "name": name, "text": text}


def is_held_out(name: str, per_mille: int = HELD_OUT_PER_MILLE) -> bool:
    """Whether the document belongs to the held-out thousandths, by the SHA-1 of its name (stable between runs).

    >>> is_held_out("asyncio/tasks.py"), is_held_out("asyncio/events.py")
    (True, False)
    """
    return int(hashlib.sha1(name.encode()).hexdigest(), 16) % 1000 < per_mille


def pieces(text: str, characters: int) -> Iterator[tuple[int, str]]:
    """(number, piece) of a long text cut every ``characters`` characters.

    >>> list(pieces("abcde", 2))
    [(0, 'ab'), (1, 'cd'), (2, 'e')]
    """
    for number, start in enumerate(range(0, len(text), characters)):
        yield number, text[start : start + characters]


def novel_pieces(novel: list[str], characters: int = PIECE_CHARS) -> Iterator[str]:
    """Runs of whole paragraphs of just above ``characters`` characters, so that novels shuffle with the other documents.

    >>> list(novel_pieces(["abc", "de", "f"], characters=2))
    ['abc', 'de\\n\\nf']
    """
    current: list[str] = []
    for paragraph in novel:
        if sum(map(len, current)) > characters:
            yield "\n\n".join(current)
            current = []
        current.append(paragraph)
    yield "\n\n".join(current)


def prose_and_scripture(packages: Path) -> tuple[list[Row], list[Row], list[str]]:
    """(training rows, held-out rows, paragraphs of the held-out novel)."""
    train, held_out, held_out_novel = [], [], []
    for title, novel in source_texts.austen(packages):
        if HELD_OUT_NOVEL in title.lower():
            held_out_novel = novel
            held_out.append(document("prose", "austen/Persuasion", source_texts.clean("\n\n".join(novel))))
            continue
        for number, piece in enumerate(novel_pieces(novel)):
            train.append(document("prose", f"austen/{title}/{number}", source_texts.clean(piece)))
    for book, text in source_texts.king_james(packages):
        rows = held_out if book in HELD_OUT_BOOKS else train
        rows.append(document("scripture", f"kjv/{book}", source_texts.clean(text)))
    for number, piece in pieces(source_texts.devils_dictionary(packages), PIECE_CHARS):
        train.append(document("prose", f"bierce/{number}", source_texts.clean(piece)))
    return train, held_out, held_out_novel


def docs_and_code(packages: Path) -> Iterator[Row]:
    """Every document of the docs and code kinds, training and held-out."""
    for name, text in source_texts.python_docs(packages):
        yield document("docs", f"pydoc/{name}", text)
    for name, text in source_texts.sqlite_docs(packages):
        yield document("docs", f"sqlite/{name}", text)
    for name, text in source_texts.postgres_docs(packages):
        yield document("docs", f"postgres/{name}", text)
    for number, piece in pieces(source_texts.jargon_file(packages), JARGON_PIECE_CHARS):
        yield document("docs", f"jargon/{number:02d}", source_texts.clean(piece))
    for name, text in source_texts.standard_library():
        yield document("code", name, text)


def draw_prompts(held_out: list[Row], novel: list[str], rng: random.Random) -> list[Row]:
    """25 prompts of each kind, about 255 characters each, ending at a word ({"id", "domain", "prompt", "source"})."""
    prompts: list[Row] = []

    def add(kind: str, text: str, source: str) -> None:
        number = sum(prompt["domain"] == kind for prompt in prompts)
        prompts.append({"id": f"{kind}-{number:02d}", "domain": kind, "prompt": text, "source": source})

    speech = [i for i, text in enumerate(novel) if text.count('"') >= 2 and text.startswith('"') and 80 < len(text) < 600]
    narration = [i for i, text in enumerate(novel) if '"' not in text and len(text) > 400]
    for i in rng.sample(narration, PROMPTS_PER_KIND):
        add("prose", novel[i][:260].rsplit(" ", 1)[0], "Austen, Persuasion")
    for i in rng.sample([i for i in speech if i + 1 < len(novel)], PROMPTS_PER_KIND):
        lead = novel[i - 1][-200:].split(" ", 1)[1]
        add("dialogue", f"{lead}\n\n{novel[i][:120]}".rsplit(" ", 1)[0], "Austen, Persuasion")
    for kind in ("docs", "code"):
        rows = [row for row in held_out if row["domain"] == kind and len(row["text"]) > 2500]
        for number in range(PROMPTS_PER_KIND):
            row = rows[number % len(rows)]
            start = rng.randrange(400, len(row["text"]) - 1200)
            start = row["text"].index("\n", start) + 1
            add(kind, row["text"][start : start + 260].rsplit(" ", 1)[0].rstrip(), row["name"])
    return prompts


def work_and_licence(kind: str, source: str) -> tuple[str, str]:
    """Spell out where a prompt comes from, and the licence of its text.

    >>> work_and_licence("docs", "pydoc/library/os.rst.txt")
    ('Python 3.11 documentation: library/os.rst', 'PSF-2.0')
    """
    if kind in ("prose", "dialogue"):
        return "Jane Austen, Persuasion", "public domain"
    if kind == "code":
        return f"CPython 3.11 standard library: {source}", "PSF-2.0"
    collection, page = source.split("/", 1)
    work, licence = {
        "pydoc": ("Python 3.11 documentation", "PSF-2.0"),
        "sqlite": ("SQLite 3.40.1 documentation", "public domain"),
        "postgres": ("PostgreSQL 15 documentation", "PostgreSQL"),
        "jargon": ("The Jargon File 4.4.7", "public domain"),
    }[collection]
    return f"{work}: {page.removesuffix('.txt')}", licence


def choose_bundled(prompts: list[Row], per_kind: int = BUNDLED_PER_KIND) -> list[Row]:
    """``per_kind`` prompts of each kind at even steps, in docs and code the first of each file; nothing random."""
    chosen = []
    for kind in KINDS:
        candidates = [row for row in prompts if row["domain"] == kind and not re.search(UNBUNDLED_SOURCES, row["source"])]
        if kind in ("docs", "code"):
            first_of_file: dict[str, Row] = {}
            for prompt in candidates:
                first_of_file.setdefault(prompt["source"], prompt)
            candidates = list(first_of_file.values())
        for step in range(per_kind):
            prompt = candidates[step * len(candidates) // per_kind]
            work, licence = work_and_licence(kind, prompt["source"])
            chosen.append({"id": prompt["id"], "kind": kind, "text": prompt["prompt"], "source": work, "licence": licence})
    return chosen


def count_sources(train: list[Row], held_out: list[Row]) -> dict[str, dict[str, list[int]]]:
    """[documents, bytes] by split and source."""
    counts: dict[str, dict[str, list[int]]] = {}
    for split, rows in (("train", train), ("heldout", held_out)):
        for row in rows:
            source = row["domain"]
            if source in ("docs", "prose"):
                source += "/" + row["name"].split("/")[0]
            count = counts.setdefault(split, {}).setdefault(source, [0, 0])
            count[0] += 1
            count[1] += len(row["text"].encode())
    return counts


def write_lines(path: Path, rows: list[Row]) -> None:
    """Write one JSON object a line, UTF-8."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Read the packages, split, shuffle, draw prompts, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", type=Path, required=True, help="folder of unpacked Debian packages")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    train, held_out, novel = prose_and_scripture(arguments.packages)
    for row in docs_and_code(arguments.packages):
        name = row["name"]
        (held_out if is_held_out(name) else train).append(row)
    rng = random.Random(0)
    rng.shuffle(train)
    prompts = draw_prompts(held_out, novel, rng)

    write_lines(arguments.out / "train.jsonl", train)
    write_lines(arguments.out / "heldout.jsonl", held_out)
    write_lines(arguments.out / "prompts.jsonl", choose_bundled(prompts))
    (arguments.out / "prompts.json").write_text(json.dumps(prompts, indent=1, ensure_ascii=False), encoding="utf-8")
    stats = json.dumps(count_sources(train, held_out), indent=1)
    (arguments.out / "stats.json").write_text(stats, encoding="utf-8")
    print(stats)


if __name__ == "__main__":
    main()
