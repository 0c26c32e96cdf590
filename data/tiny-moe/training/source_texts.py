"""Read the training texts out of unpacked Debian packages and the interpreter's own standard library.

Each reader yields ``(name, text)`` pairs (``austen`` yields paragraphs). ``packages`` is always the folder below which
each package was unpacked with ``dpkg -x PACKAGE.deb packages/PACKAGE``.
"""

from __future__ import annotations

import gzip
import re
import struct
import subprocess
import sysconfig
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

BLOCKS = "p|div|li|tr|h1|h2|h3|h4|h5|h6|br|dt|dd|table|ul|ol|pre|blockquote|section|title|td|th"
SKIPPED_TAGS = frozenset({"script", "style", "head", "nav", "svg"})
PLAIN_MARKS = {
    "\r": "",
    "\xa0": " ",
    "\u2019": "'",
    "\u2018": "'",
    "\u201c": '"',
    "\u201d": '"',
    "\u2014": "--",
    "\u2013": "-",
    "\u2026": "...",
}

SQLITE_INDEXES = (
    r"/(releaselog|matrix|session|syntax)/|toc|keyword_index|sitemap|changes\.html|hlr\d|crossref|c3ref_list|sqlite3\.html|/see"
)
POSTGRES_INDEXES = r"release|bookindex|features-sql|sql-keywords|acronyms|legalnotice|errcodes"
SKIPPED_MODULES = r"site-packages|(^|/)tests?/|idle_test|lib2to3|pydoc_data|encodings/|ensurepip|__pycache__|config-"
R_STRING_VECTOR = rb"\x00\x00[\x00-\x0f]\x10"
R_STRING_TYPE = 9


class PageText(HTMLParser):
    """Collects the readable text of one HTML page in ``pieces``, a line break around each block element."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.skipped_depth = 0
        self.preformatted_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open a tag: note skipped and preformatted regions, separate blocks and table cells."""
        if tag in SKIPPED_TAGS:
            self.skipped_depth += 1
        if tag == "pre":
            self.preformatted_depth += 1
        if tag in ("td", "th"):
            self.pieces.append(" ")
        elif re.fullmatch(BLOCKS, tag):
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        """Close a tag: leave its region, end its block."""
        if tag in SKIPPED_TAGS and self.skipped_depth:
            self.skipped_depth -= 1
        if tag == "pre" and self.preformatted_depth:
            self.preformatted_depth -= 1
        if re.fullmatch(BLOCKS, tag) and tag not in ("td", "th"):
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        """Keep text outside skipped regions; squeeze white space outside ``pre``."""
        if not self.skipped_depth:
            self.pieces.append(data if self.preformatted_depth else re.sub(r"\s+", " ", data))


def clean(text: str) -> str:
    """Plain ASCII punctuation, no trailing blanks, at most one empty line in a row, one line break at the end.

    >>> clean("\\u201cYes\\u201d  \\n\\n\\n\\nNo")
    '"Yes"\\n\\nNo\\n'
    """
    for mark, plain in PLAIN_MARKS.items():
        text = text.replace(mark, plain)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def html_to_text(page: str) -> str:
    """The readable text of an HTML page, cleaned.

    >>> html_to_text("<head><title>x</title></head><p>a <b>b</b></p><p>c</p>")
    'a b\\n\\nc\\n'
    """
    parser = PageText()
    parser.feed(page)
    return clean("".join(parser.pieces))


def longest_r_strings(raw: bytes) -> list[str]:
    """The longest vector of more than 1000 strings in ``raw``, one serialised R object (XDR, big-endian); [] if none."""
    longest: list[str] = []
    for header in re.finditer(R_STRING_VECTOR, raw):
        start = header.end()
        if start + 4 > len(raw):
            continue
        count = struct.unpack(">i", raw[start : start + 4])[0]
        if not 1000 < count < 100000 or count <= len(longest):
            continue
        start += 4
        strings: list[str] = []
        for _ in range(count):
            if start + 8 > len(raw):
                break
            flags, length = struct.unpack(">ii", raw[start : start + 8])
            if flags & 0xFF != R_STRING_TYPE or not -1 <= length < 10000:
                break
            start += 8
            length = max(length, 0)
            strings.append(raw[start : start + length].decode("utf-8", "replace"))
            start += length
        if len(strings) == count:
            longest = strings
    return longest


def paragraphs(lines: list[str]) -> list[str]:
    """Join lines into paragraphs, which empty lines separate.

    >>> paragraphs(["a ", "b", "", "", "c"])
    ['a b', 'c']
    """
    found: list[str] = []
    current: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            current.append(line.strip())
        elif current:
            found.append(" ".join(current))
            current = []
    return found


def austen(packages: Path) -> Iterator[tuple[str, list[str]]]:
    """(title, paragraphs) of each of Jane Austen's six novels, from r-cran-janeaustenr's zlib-packed R database."""
    raw = (packages / "r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    position = 0
    while position + 4 < len(raw):
        unpacker = zlib.decompressobj()
        body = unpacker.decompress(raw[position + 4 :])
        position = len(raw) - len(unpacker.unused_data)
        lines = longest_r_strings(body)
        if lines:
            novel = paragraphs(lines)
            yield novel[0][:40], novel


def verses_by_book(listing: str) -> dict[str, list[str]]:
    """Split the ``bible`` program's listing ("Genesis 1", then numbered verses) into verses of each book.

    >>> verses_by_book("Ruth 1\\n\\n  1 Now it came to pass\\n  2 And the name")
    {'Ruth': ['Now it came to pass', 'And the name']}
    """
    book, books = None, {}
    for line in listing.splitlines():
        heading = re.match(r"^([1-3A-Z][A-Za-z0-9 ]+?) (\d+)$", line.strip())
        if heading and not line.startswith("  "):
            book = heading.group(1)
        elif line.strip() and book:
            books.setdefault(book, []).append(re.sub(r"^\d+\s+", "", line.strip()))
    return books


def king_james(packages: Path) -> Iterator[tuple[str, str]]:
    """(book, text) of the King James Bible, printed by the program of bible-kjv. Raises ``ValueError`` if it prints nothing."""
    program = packages / "bible-kjv/usr/bin/bible"
    data_folder = packages / "bible-kjv-text/usr/lib"
    # The program finds its data by search path and bare name only; -d with an absolute path fails.
    command = [str(program), "-l9999", "-p", str(data_folder), "-d", "bible.data", "gen1:1-rev22:21"]
    listing = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    books = verses_by_book(listing.stdout)
    if len(books) < 66:
        raise ValueError(
            f"The King James Bible has 66 books; {program} printed {len(books)} ({listing.stderr.strip()!r}). "
            f"Unpack bible-kjv and bible-kjv-text below {packages}, each in a folder of its own name."
        )
    for book, verses in books.items():
        yield book, "\n".join(verses)


def devils_dictionary(packages: Path) -> str:
    """Ambrose Bierce, The Devil's Dictionary, as one text (not cleaned)."""
    with gzip.open(packages / "dict-devil/usr/share/dictd/devil.dict.dz", "rt", errors="replace") as file:
        return file.read()


def jargon_file(packages: Path) -> str:
    """The Jargon File 4.4.7 as one text (not cleaned)."""
    with gzip.open(packages / "jargon-text/usr/share/doc/jargon-text/jargon.txt.gz", "rt", errors="replace") as file:
        return file.read()


def python_docs(packages: Path) -> Iterator[tuple[str, str]]:
    """(path, reST source) of each page of python3.11-doc, without distutils and included fragments."""
    root = packages / "python3.11-doc/usr/share/doc/python3.11/html/_sources"
    for path in sorted(root.glob("**/*.rst.txt"), key=str):
        if "/distutils/" not in str(path) and "/includes/" not in str(path):
            yield str(path.relative_to(root)), clean(path.read_text(encoding="utf-8", errors="replace"))


def sqlite_docs(packages: Path) -> Iterator[tuple[str, str]]:
    """(file name, text) of the pages of sqlite3-doc above 1500 characters, without indexes and release logs."""
    root = packages / "sqlite3-doc/usr/share/doc/sqlite3"
    for path in sorted(root.glob("**/*.html"), key=str):
        if re.search(SQLITE_INDEXES, f"/{path.relative_to(root)}"):
            continue
        text = html_to_text(path.read_text(encoding="utf-8", errors="replace"))
        text = re.sub(r"\A.*?Search Documentation Search Changelog\s*", "", text, flags=re.S)
        text = re.sub(r"Small\. Fast\. Reliable\.|Choose any three\.|\u25ba|\u25bc", "", text)
        if len(text) > 1500:
            yield path.name, clean(text)


def postgres_docs(packages: Path) -> Iterator[tuple[str, str]]:
    """(file name, text) of the pages of postgresql-doc-15 above 1500 characters, without indexes and navigation."""
    root = packages / "postgresql-doc-15/usr/share/doc/postgresql-doc-15/html"
    for path in sorted(root.glob("*.html"), key=str):
        if re.search(POSTGRES_INDEXES, path.name):
            continue
        text = html_to_text(path.read_text(encoding="utf-8", errors="replace"))
        text = re.sub(r"\A(.*?\n)?.*?\bPrev\b.*?\bNext\b\s*", "", text, count=1, flags=re.S)
        text = re.split(r"\n\s*Prev\b", text)[0]
        if len(text) > 1500:
            yield path.name, clean(text)


def standard_library() -> Iterator[tuple[str, str]]:
    """(path, source) of the running interpreter's standard library modules of 800 to 300,000 characters, without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.glob("**/*.py"), key=str):
        name = str(path.relative_to(root))
        if re.search(SKIPPED_MODULES, name):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if 800 < len(text) < 300000:
            yield name, clean(text)
