"""The command line: ``python -m specter_lab demo``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version

from rich.console import Console
from rich.table import Table

OK, TOKENS_DIFFER, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 tokens differed, 2 bad input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("Interrupted; nothing was left half-written.", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, TypeError, OSError) as error:
        print(f"specter_lab: {error}", file=sys.stderr)
        return BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specter_lab", description="Offloaded speculative decoding of mixture-of-experts models, piece by piece.",
        epilog="Exit codes: 0 done, 1 a system's tokens differed from the model's own, 2 bad input, 130 interrupted.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"specter_lab {version('specter-lab')}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo", formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        help="four pipelines on the bundled model, compared at equal memory",
        description="Run four pipelines on the bundled model over the same prompts at the same device memory, check that all give the "
        "model's own tokens, print the figures, and write a timeline (HTML) and a trace for Perfetto.",
    )  # fmt: skip
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of text and table")
    demo.add_argument(
        "--machine", default="throttled", choices=("throttled", "simulated"), help="wall clock with a paced link, or a virtual clock"
    )
    demo.add_argument("--link-gb-s", type=float, default=0.05, help="bandwidth of the link in GB/s (10^9 bytes)")
    demo.add_argument("--memory", default="13MB", help="device memory of every system, for instance 13MB or 12MiB")
    demo.add_argument("--per-kind", type=int, default=2, help="prompts of each kind of text")
    demo.add_argument("--max-new-tokens", type=int, default=32, help="tokens to generate for each prompt")
    demo.add_argument("--draft-length", type=int, default=8, help="tokens to draft in a step")
    demo.add_argument("--out", default="demo-output", help="folder for timeline.html and trace.json")
    demo.set_defaults(run=_demo)
    doctor = commands.add_parser("doctor", help="what this machine can do, and what it cannot")
    doctor.set_defaults(run=_doctor)
    many = commands.add_parser(
        "compare", formatter_class=argparse.ArgumentDefaultsHelpFormatter, help="systems of the literature at equal memory",
        description="Compare systems on the bundled model (case tiny, throttled or simulated machine), or replay a case of the "
        "literature on modelled hardware (simulated machine only).",
    )  # fmt: skip
    many.add_argument("--case", default="tiny", help="tiny, a case of data/hardware.toml (ds_high, ...), or all of those")
    many.add_argument("--systems", default="all", help="names, comma-separated, or all")
    many.add_argument("--machine", default="simulated", choices=("throttled", "simulated"), help="for case tiny; other cases are simulated")
    many.add_argument("--link-gb-s", type=float, default=0.05, help="for case tiny; other cases bring their link")
    many.add_argument("--memory", default="13MB", help="for case tiny; other cases bring their budget")
    many.add_argument("--prompts", type=int, default=8, help="prompts (tiny: of all kinds in turn) or generated texts")
    many.add_argument("--max-new-tokens", type=int, default=32, help="tokens to generate for each prompt")
    many.add_argument("--json", action="store_true", help="print one JSON object (for all: a list)")
    many.set_defaults(run=_compare)
    types = commands.add_parser(
        "architectures", help="which model types of the installed transformers work, and why others don't",
        description="Build a tiny random model of every causal-LM type with routed experts that the installed transformers knows, and "
        "say whether it is supported, how its router works, and how its experts are stored. Takes some 20 seconds.",
    )  # fmt: skip
    form = types.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--markdown", action="store_true", help="print the page notebooks/architectures.md")
    types.set_defaults(run=_architectures)
    return parser


def _doctor(options: argparse.Namespace) -> int:
    from specter_lab.doctor import doctor

    print(doctor())
    return OK


def _compare(options: argparse.Namespace) -> int:
    from specter_lab.baselines import SYSTEMS
    from specter_lab.cases import compare_tiny, run_case
    from specter_lab.hardware import hardware

    systems = list(SYSTEMS) if options.systems == "all" else options.systems.split(",")
    sizes = {"prompts": options.prompts, "max_new_tokens": options.max_new_tokens, "progress": True, "skip_unfit": options.systems == "all"}
    if options.case == "tiny":
        done = [compare_tiny(systems, machine=options.machine, link_gb_s=options.link_gb_s, memory=options.memory, **sizes)]
    elif options.machine == "throttled":
        raise ValueError(f"Cases on modelled hardware are simulated; got --machine throttled for {options.case}. Use --case tiny.")
    else:
        names = list(hardware().cases) if options.case == "all" else [options.case]
        done = [run_case(name, systems, **sizes) for name in names]
    if options.json:
        print(json.dumps([one.as_dict() for one in done] if options.case == "all" else done[0].as_dict()))
    else:
        for one in done:
            size = one.rows[0]["device_bytes"]["total"] / 1e6
            title = f"{one.rows[0]['case']}: {one.machine}, {size:,.0f} MB of device memory each"
            Console(width=max(80, 16 * (1 + len(one.rows)))).print(_table(one.rows, title))
    return OK if all(one.identical_tokens for one in done) else TOKENS_DIFFER


def _architectures(options: argparse.Namespace) -> int:
    from specter_lab.architectures import architectures, as_json, as_markdown

    rows = architectures()
    if options.json:
        print(json.dumps(as_json(rows)))
    elif options.markdown:
        print(as_markdown(rows), end="")
    else:
        table = Table("type", "drafts", "router", "why not")
        for row in rows:
            drafts = "yes" if row.supported else "no" if row.without_drafter else "refused"
            table.add_row(row.model_type, drafts, row.router, row.reason)
        Console().print(table)
    return OK


def _demo(options: argparse.Namespace) -> int:
    from specter_lab.demo import run_demo  # heavy imports only when they are needed, so that --help is quick

    result = run_demo(
        machine=options.machine, link_gb_s=options.link_gb_s, memory=options.memory, per_kind=options.per_kind,
        max_new_tokens=options.max_new_tokens, draft_length=options.draft_length, out=options.out, progress=True,
    )  # fmt: skip
    comparison = result.comparison
    if options.json:
        print(json.dumps(comparison.as_dict()))
        return OK if comparison.identical_tokens else TOKENS_DIFFER
    console = Console()
    first = comparison.generations["lookahead"][0]
    console.rule("the text after the first prompt")
    console.print(first.text, markup=False, highlight=False)
    console.print(_table(comparison.rows, f"{comparison.machine}, {options.link_gb_s:g} GB/s, {options.memory} of device memory each"))
    console.print("TPOT: time per output token over the prompts. MB and ms are per generated token, after the first.", style="dim")
    if comparison.identical_tokens:
        console.print("All systems produced identical tokens, equal to the model's own greedy generate (fp32).", style="green")
    else:
        console.print("The systems' tokens DIFFER from the model's own: this is a defect, please report it.", style="bold red")
    console.print(f"Timeline: {result.timeline}   Trace for Perfetto: {result.trace}", highlight=False)
    return OK if comparison.identical_tokens else TOKENS_DIFFER


_COLUMNS = {
    "TTFT ms": ("ttft_ms", ".0f"), "tokens / step": ("tokens_per_step", ".2f"), "accepted": ("acceptance_rate", ".2f"),
    "hit": ("hit_rate", ".2f"),
    "recall": ("recall", ".2f"), "precision": ("precision", ".2f"), "on time": ("on_time", ".2f"),
    "MB moved": ("moved_mb_per_token", ".2f"),
    "MB wasted": ("wasted_mb_per_token", ".2f"), "ms exposed": ("exposed_ms_per_token", ".1f"), "speed-up": ("speedup", ".2f"),
    "vs fastest rival": ("speedup_vs_fastest_rival", ".2f"), "share of bound": ("share_of_bound", ".2f"),
}  # fmt: skip


def _table(rows: Sequence[dict[str, object]], title: str) -> Table:
    """Figures down, systems across: it fits an 80-column terminal."""
    table = Table(title=title)
    table.add_column("")
    for row in rows:
        table.add_column(str(row["system"]).replace("_", " "), justify="right")
    tpots = [row["tpot_ms"] for row in rows]
    for name in ("mean", "median", "p95"):
        table.add_row(f"TPOT ms {name}", *(_cell(t[name], ".1f") for t in tpots))  # type: ignore[index]
    for title, (key, form) in _COLUMNS.items():
        table.add_row(title, *(_cell(row[key], form) for row in rows))
    return table


def _cell(value: object, form: str) -> str:
    return "-" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
