"""The README's tables out of ``results/*.json``: what stands between ``<!-- table: name -->`` and ``<!-- /table: name -->``.

``python -m benchmarks.tables`` fills them; ``--check`` only says whether they are as the results have them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import read

README = Path(__file__).resolve().parents[1] / "README.md"
MISSING = "*Not measured yet: `make bench` fills this in.*\n"
SYSTEM = "system"


def cases(result: Mapping[str, Any]) -> str:
    """TPOT of every system in every case."""
    cells = result["cells"]
    note = f"*Simulated*: mean ms a token [95 % interval], {result['conditions']['settings']['texts']} generated texts of "
    note += f"{result['conditions']['settings']['new_tokens']} new tokens. Bold: the fastest, bounds aside. A dash: it doesn't fit. "
    note += "†: with the target's own weights as its draft's, since copies of them don't fit.\n\n"
    return note + _tpots({name: cell["rows"] for name, cell in cells.items()})


def ratios(result: Mapping[str, Any]) -> str:
    """Who wins each case, by how much, and how near to the bounds."""
    head = [
        "case",
        "specter over specmoeoff_b1",
        "fastest rival",
        "specter_plus over it",
        "share of its schedule bound",
        "share of the oracle bound",
    ]
    lines = []
    for case, cell in result["cells"].items():
        rows = {row["system"]: row for row in cell["rows"]}
        ours = rows["specter_plus"]
        paper = rows["specter"]["speedups"].get("specmoeoff_b1")
        shares = [f"{ours[name]:.2f}" for name in ("share_of_schedule_bound", "share_of_bound")]
        ratio = {"mean": ours["speedup_vs_fastest_rival"], "ci95": ours["ci95"]}
        lines.append([case, _interval(paper), f"`{ours['fastest_rival']}`", _interval(ratio), *shares])
    six = [name for name in result["cells"] if name.partition("_")[0] in ("ds", "qwen", "phi")]
    found = [{row["system"]: row for row in result["cells"][name]["rows"]}["specter"]["speedups"].get("specmoeoff_b1") for name in six]
    means = [ratio["mean"] for ratio in found if ratio]
    note = "*Simulated*: ratios of mean TPOT [95 % interval]; above 1 the first is faster."
    if means:
        note += (
            f" The mean of specter over specmoeoff_b1 in the artifact's six cases: {sum(means) / len(means):.2f} (the paper says 1.50), "
        )
        note += f"best {max(means):.2f} (1.88)."
    return note + "\n\n" + _markdown(head, lines)


def figures(result: Mapping[str, Any]) -> str:
    """TPOT by device memory and prompt length."""
    columns = {}
    for name, cell in result["cells"].items():
        level, length = name.split("/")
        columns[f"{level} ({cell['memory_bytes'] / 1e6:.1f} MB), {length}"] = cell["rows"]
    settings = result["conditions"]["settings"]
    note = f"*Simulated*: the bundled model's own routing, replayed; mean ms a token [95 % interval] over {settings['prompts']} prompts, "
    note += f"{settings['new_tokens']} new tokens; columns: device memory, prompt tokens. Bold: the fastest, bounds aside. "
    note += "A dash: it doesn't fit.\n\n"
    return note + _tpots(columns)


def replay_speed(result: Mapping[str, Any]) -> str:
    """Seconds a replay takes."""
    lines = [[f"`{name}`", f"{seconds:.2f}"] for name, seconds in result["seconds"].items()]
    return f"Processor seconds of a simulated run and its figures: {result['what'].partition('; ')[2]}.\n\n" + _markdown(
        [SYSTEM, "s"], lines
    )


def calibration(result: Mapping[str, Any]) -> str:
    """How well the simulator predicts the throttled machine."""
    lines = [
        [f"`{name}`", f"{row['measured_ms']:.1f}", f"{row['predicted_ms']:.1f}", f"{100 * row['error']:+.0f} %"]
        for name, row in result["systems"].items()
    ]
    note = f"*Throttled* against *simulated*: median TPOT in ms over {result['conditions']['prompts']} prompts; rank correlation "
    return note + f"{result['rank_correlation']:.2f}.\n\n" + _markdown([SYSTEM, "measured", "predicted", "error"], lines)


def wall_clock(result: Mapping[str, Any]) -> str:
    """Who wins each link and memory on the wall clock."""
    head = [
        "link, MB/s",
        "device memory, MB",
        "fastest rival",
        "its ms",
        "`specter`, ms",
        "`specter_plus`, ms",
        "over the fastest rival",
        "identical",
    ]
    lines, ratios = [], []
    for name, cell in result["cells"].items():
        rows = {row["system"]: row for row in cell["rows"]}
        ours = rows["specter_plus"]
        ratios.append(ours["speedup_vs_fastest_rival"])
        times = [f"{rows[system]['tpot_ms']['mean']:.1f}" for system in (ours["fastest_rival"], "specter", "specter_plus")]
        ratio = _interval({"mean": ratios[-1], "ci95": ours["ci95"]})
        size = f"{cell['memory_bytes'] / 1e6:.1f}"
        lines.append(
            [name.partition("/")[0], size, f"`{ours['fastest_rival']}`", *times, ratio, "yes" if cell["identical_tokens"] else "no"]
        )
    settings = result["conditions"]["settings"]
    note = f"*Throttled*: wall clock, mean ms a token over {settings['prompts']} prompts of {settings['new_tokens']} new tokens, fp32; "
    note += f"ratios with 95 % intervals, above 1 `specter_plus` is faster. Mean {sum(ratios) / len(ratios):.2f}, "
    return note + f"worst {min(ratios):.2f}.\n\n" + _markdown(head, lines)


def draft_length(result: Mapping[str, Any]) -> str:
    """Draft length by bytes beside fixed lengths."""
    lengths = list(next(iter(result["cells"].values()))["tpot_ms"])
    lines = [
        [case, *(f"{cell['tpot_ms'][length]:.1f}" for length in lengths), f"{cell['over_best_fixed']:.2f}"]
        for case, cell in result["cells"].items()
    ]
    settings = result["conditions"]["settings"]
    note = "*Simulated*: mean ms a token of the residual plan by draft length, drafting ahead but for one column, "
    note += f"{settings['texts']} generated texts of {settings['new_tokens']} new tokens.\n\n"
    return note + _markdown(["case", *lengths, "bytes over best fixed"], lines)


def no_host(result: Mapping[str, Any]) -> str:
    """The cases without host compute on either side."""
    lines = [
        [case, f"`{cell['fastest_rival']}`", f"{cell['its_tpot_ms']:.1f}", cell["plan"], f"{cell['tpot_ms']:.1f}", f"{cell['speedup']:.2f}"]
        for case, cell in result["cells"].items()
    ]
    ratios = [cell["speedup"] for cell in result["cells"].values()]
    note = f"*Simulated*, without host compute on either side: mean ms a token. Mean ratio {sum(ratios) / len(ratios):.2f}, "
    head = ["case", "fastest rival", "its ms", "plan of specter_plus", "its ms", "over the rival"]
    return note + f"worst {min(ratios):.2f}.\n\n" + _markdown(head, lines)


def limits(result: Mapping[str, Any]) -> str:
    """How far each mechanism made perfect would bring us."""
    cells = result["cells"]
    lines = []
    for name in next(iter(cells.values()))["rows"]:
        ratios = [cell["rows"][name]["speedup"] for cell in cells.values()]
        lines.append([name, *(f"{ratio:.2f}" for ratio in ratios), f"{sum(ratios) / len(ratios):.2f}"])
    settings = result["conditions"]["settings"]
    note = "*Simulated* bounds: the fastest rival's mean ms a token over that of `specter_plus` with one mechanism made perfect, "
    note += f"{settings['texts']} generated texts of {settings['new_tokens']} new tokens, each by its best plan on these texts.\n\n"
    return note + _markdown(["perfect", *cells, "mean"], lines)


def parts(result: Mapping[str, Any]) -> str:
    """Experts in parts, which aren't built."""
    cells = result["cells"]
    lines = [[name, *(f"{cell['tpot_ms'][name]:.1f}" for cell in cells.values())] for name in next(iter(cells.values()))["tpot_ms"]]
    lines.append(["`fiddler` over the best of whole experts", *(f"{cell['speedup_whole']:.2f}" for cell in cells.values())])
    lines.append(["over the best of all", *(f"{cell['speedup']:.2f}" for cell in cells.values())])
    note = "*Simulated*, not built for real models: mean ms a token by plan and number of parts that each expert is split into.\n\n"
    return note + _markdown(["plan / parts", *cells], lines)


TABLES: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "cases": ("cases", cases), "ratios": ("cases", ratios), "figures": ("figures", figures),
    "replay_speed": ("replay_speed", replay_speed), "calibration": ("calibration", calibration),
    "wall_clock": ("wall_clock", wall_clock), "draft_length": ("draft_length", draft_length),
    "no_host": ("no_host", no_host), "limits": ("limits", limits), "parts": ("parts", parts),
}  # fmt: skip


def filled(text: str) -> str:
    """The document with each of its tables as the results have it; ``ValueError`` for a table that nobody makes."""

    def table(match: re.Match[str]) -> str:
        if match[1] not in TABLES:
            raise ValueError(f"A table is one of {', '.join(TABLES)}; the document has {match[1]!r}. Correct its marker.")
        source, make = TABLES[match[1]]
        result = read(source)
        return f"<!-- table: {match[1]} -->\n{make(result) if result else MISSING}<!-- /table: {match[1]} -->"

    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- /table: \1 -->", table, text, flags=re.DOTALL)


def _tpots(columns: Mapping[str, list[dict[str, Any]]]) -> str:
    """Systems down, columns across."""
    found: dict[str, dict[str, str]] = {}
    for column, rows in columns.items():
        fastest = min((row for row in rows if row["system"] != "oracle"), key=lambda row: row["tpot_ms"]["mean"])
        for row in rows:
            cell = _interval({"mean": row["tpot_ms"]["mean"], "ci95": row["tpot_ms_ci95"]}, ".1f")
            cell += "" if row.get("separate_draft", True) else " †"
            found.setdefault(row["system"], {})[column] = f"**{cell}**" if row is fastest else cell
    return _markdown([SYSTEM, *columns], [[f"`{name}`", *(cells.get(c, "-") for c in columns)] for name, cells in found.items()])


def _interval(cell: Mapping[str, Any] | None, form: str = ".2f") -> str:
    if cell is None or cell["mean"] is None:
        return "-"
    return format(cell["mean"], form) + (f" [{cell['ci95'][0]:{form}}, {cell['ci95'][1]:{form}}]" if cell["ci95"] else "")


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> int:
    """Fill the README's tables, or check them."""
    text = README.read_text("utf-8")
    new = filled(text)
    if "--check" in sys.argv[1:]:
        print(
            "The tables are as the results have them." if new == text else "The tables differ from the results: python -m benchmarks.tables"
        )
        return int(new != text)
    temporary = README.with_suffix(".tmp")
    temporary.write_text(new, "utf-8")
    temporary.replace(README)
    return 0


if __name__ == "__main__":
    sys.exit(main())
