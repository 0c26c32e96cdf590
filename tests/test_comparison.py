"""Side by side: equal memory, the token check, speed-ups and their intervals, refusals, the command line."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import specter_lab as sl
from specter_lab.__main__ import main
from specter_lab.observe.metrics import acceptance_by_position, merged, overlap_us, summarize
from specter_lab.rows import row_of
from tests.traces import make_trace

PROMPTS = ["The evening came", "def main():", "See also", "Once upon a time"]
KEYS = {
    "system", "ttft_ms", "tpot_ms", "tokens_per_step", "acceptance_rate", "hit_rate", "late_rate", "recall", "precision", "on_time",
    "moved_mb_per_token", "wasted_mb_per_token", "exposed_ms_per_token", "transfer_ms_per_token", "link_utilisation", "device_bytes",
    "speedup", "fastest_rival", "speedup_vs_fastest_rival", "ci95", "speedup_ci95", "speedups", "tpot_ms_ci95", "miss_rate", "host_rate",
    "share_of_schedule_bound", "share_of_bound", "acceptance_by_position", "recall_by_horizon", "precision_by_horizon",
    "on_time_by_horizon", "overlap", "draft_share", "verify_share", "stall_share", "prompts",
}  # fmt: skip


@pytest.fixture(scope="module")
def moe():
    with sl.load_moe("tiny-moe", dtype="float32") as attached:
        yield attached


@pytest.fixture(scope="module")
def comparison(moe):
    return sl.compare(
        ["on_demand", "next_layer_gate", "lookahead"], PROMPTS, target=moe, machine=sl.SimulatedMachine(0.05), memory="13MB",
        context_length=128, confidence=0.95, rivals={"on_demand", "next_layer_gate"}, max_new_tokens=12, do_sample=False,
    )  # fmt: skip


def test_rows_have_the_agreed_names_and_are_json(comparison):
    data = json.loads(json.dumps(comparison.as_dict()))
    assert all(set(row) >= KEYS for row in data["rows"])
    assert data["identical_tokens"] is True and data["machine"] == "simulated"
    assert all(set(row["tpot_ms"]) == {"mean", "median", "p95"} for row in data["rows"])
    assert all(set(row["device_bytes"]) == {"non_expert", "draft", "slots", "buffers", "kv", "total"} for row in data["rows"])
    on_demand, _, lookahead = data["rows"]
    assert on_demand["acceptance_rate"] is None and on_demand["recall"] is None  # what doesn't apply is null
    assert on_demand["recall_by_horizon"] is None and lookahead["recall_by_horizon"][0] > 0.8
    assert len(lookahead["acceptance_by_position"]) == 8
    low, high = lookahead["tpot_ms_ci95"]
    assert low < lookahead["tpot_ms"]["mean"] < high


def test_bounds_hold_and_are_the_same_for_all(comparison):
    for row in comparison.rows:
        assert 0 < row["share_of_schedule_bound"] <= 1 and 0 < row["share_of_bound"] <= 1
    bounds = [row["share_of_bound"] * row["tpot_ms"]["mean"] for row in comparison.rows]
    assert max(bounds) / min(bounds) < 1.1  # one bound; means of ratios differ a little from ratios of means


def test_a_plan_for_a_window_has_no_horizon(moe):
    with sl.baselines.specter(moe, machine=sl.SimulatedMachine(0.05), slots=6) as pipeline:
        row = row_of("specter", [pipeline.generate("Once upon a time", max_new_tokens=12, do_sample=False)])
    assert row["recall"] > 0 and row["recall_by_horizon"] is row["precision_by_horizon"] is row["on_time_by_horizon"] is None


def test_speed_up_is_over_what_does_not_look_ahead(moe):
    """Over the fastest without lookahead, over the fastest rival, and over each: three questions, three answers."""
    done = sl.compare(
        ["on_demand", "speculative_on_demand", "moe_speq", "lookahead"], PROMPTS[:3], target=moe, machine=sl.SimulatedMachine(0.5),
        memory="13MB", context_length=128, max_new_tokens=12, do_sample=False,
    )  # fmt: skip
    rows = {row["system"]: row for row in done.rows}
    tpot = {name: row["tpot_ms"]["mean"] for name, row in rows.items()}
    blind = min(tpot["on_demand"], tpot["speculative_on_demand"])
    rival = min(blind, tpot["moe_speq"])
    for name, row in rows.items():
        assert row["speedup"] == pytest.approx(blind / tpot[name])
        assert row["speedup_vs_fastest_rival"] == pytest.approx(rival / tpot[name])
        for other, cell in row["speedups"].items():
            assert cell["mean"] == pytest.approx(tpot[other] / tpot[name]) == pytest.approx(done.speedups.loc[name, other])
            assert cell["ci95"][0] <= cell["mean"] <= cell["ci95"][1]


def test_pipelines_and_names_side_by_side(moe):
    with sl.Pipeline(moe, machine=sl.SimulatedMachine(), memory="13MB", context_length=128, eviction=sl.LFU()) as mine:
        done = sl.compare(
            [mine, "on_demand"], ["Once"], target=moe, machine=sl.SimulatedMachine(), memory="13MB", context_length=128, max_new_tokens=4
        )
        assert mine.generate("Once", max_new_tokens=2).metrics["tokens"] == 2  # a pipeline of one's own stays open
    assert list(done.table.index) == ["pipeline 1", "on_demand"] and done.rows[0]["ci95"] is None


def test_who_does_not_fit_is_named_with_the_bytes_it_lacks(moe):
    options = {"target": moe, "machine": sl.SimulatedMachine(), "context_length": 128, "max_new_tokens": 4}
    systems = ["on_demand", "specter", "lookahead"]
    with pytest.raises(sl.BudgetError, match=r"same 7,000,000 bytes; specter lacks [\d,]+ .*; lookahead lacks") as refused:
        sl.compare(systems, ["Once"], memory="7MB", **options)
    done = sl.compare(systems, ["Once"], memory="7MB", skip_unfit=True, **options)
    assert [row["system"] for row in done.rows] == ["on_demand"]
    assert done.unfit == done.as_dict()["bytes_short"] == {"specter": refused.value.short, "lookahead": refused.value.short}
    with pytest.raises(sl.BudgetError, match="on_demand lacks"):  # one that no system fits
        sl.compare(systems, ["Once"], memory="1MB", skip_unfit=True, **options)


def test_speedups_are_against_the_fastest_rival(comparison):
    rows = {row["system"]: row for row in comparison.rows}
    fastest = min(("on_demand", "next_layer_gate"), key=lambda n: rows[n]["tpot_ms"]["mean"])
    assert {row["fastest_rival"] for row in comparison.rows} == {fastest}
    assert rows[fastest]["speedup"] == 1.0 and rows[fastest]["ci95"] == [1.0, 1.0]
    expected = rows[fastest]["tpot_ms"]["mean"] / rows["lookahead"]["tpot_ms"]["mean"]
    assert rows["lookahead"]["speedup"] == pytest.approx(expected)
    low, high = rows["lookahead"]["ci95"]
    assert low <= expected <= high and low < high
    assert comparison.speedup("lookahead", fastest) == pytest.approx((expected, low, high))


def test_memory_is_equal_and_shares_add_up(comparison):
    totals = [row["device_bytes"]["total"] for row in comparison.rows]
    assert max(totals) <= 13_000_000 and max(totals) - min(totals) < 98_304
    for row in comparison.rows:
        assert row["draft_share"] + row["verify_share"] + row["stall_share"] == pytest.approx(1.0)


def test_different_tokens_are_noticed(moe):
    done = sl.compare(["on_demand"], ["Once"], target=moe, machine=sl.SimulatedMachine(), references=[[1, 2, 3]], max_new_tokens=3)
    assert done.identical_tokens is False


def test_unequal_memory_is_refused(moe):
    machine = sl.SimulatedMachine()
    small, large = (sl.Pipeline(moe, machine=machine, slots=slots) for slots in (4, 5))
    with small, large, pytest.raises(ValueError, match="equal device memory"):
        sl.compare({"small": small, "large": large}, ["Once"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda moe: sl.compare([], ["Once"], target=moe), "needs systems and prompts"),
        (lambda moe: sl.compare(["on_demand"], [], target=moe), "needs systems and prompts"),
        (lambda moe: sl.compare(["on_demand"], ["a", "b"], target=moe, confidence=0.95), "at least 3; got 2"),
        (lambda moe: sl.compare(["on_demnd"], ["a"], target=moe), "Did you mean on_demand"),
        (lambda moe: sl.compare(["on_demand"], ["a"], target=moe, memory="1MB"), "smallest legal cache"),
    ],
)
def test_refusals(moe, call, message):
    with pytest.raises(ValueError, match=message):
        call(moe)
    with sl.Pipeline(moe, machine=sl.SimulatedMachine()) as pipeline:  # nothing was left attached or open
        assert pipeline.generate("Once", max_new_tokens=2).metrics["tokens"] == 2


def test_metrics_of_a_trace_by_hand():
    intervals = merged(make_trace(2).of_kind("transfer"))
    assert (np.diff(intervals, axis=1) > 0).all() and (intervals[1:, 0] > intervals[:-1, 1]).all()
    assert overlap_us(np.array([[0.0, 10.0], [20.0, 30.0]]), np.array([[5.0, 25.0]])) == 10.0
    metrics = summarize(make_trace(3))
    assert metrics["hit_rate"] + metrics["late_rate"] + metrics["miss_rate"] == pytest.approx(1.0)


def test_acceptance_by_position_counts_only_what_was_judged():
    rows = []
    for step, (drafted, accepted) in enumerate([(3, 3), (3, 1), (2, 0)], start=1):
        instant = ("control", "draft_length", 0.0, 0.0, step, -1, -1, -1, 0, 0, -1, "", "", float(drafted))
        rows += [instant, ("control", "commit", 0.0, 0.0, step, -1, -1, -1, accepted + 1, 0, -1, "", "step", float(accepted))]
    # position 0 judged three times, held twice; 1 judged twice (steps 1, 2), held once; 2 judged once, held once
    assert acceptance_by_position([sl.Trace.of(rows, "simulated")]) == pytest.approx([2 / 3, 1 / 2, 1.0])


def test_ablation_shares(moe):
    table = sl.ablate("specter", PROMPTS[:2], target=moe, machine=sl.SimulatedMachine(0.05), memory="13MB", max_new_tokens=8).table
    assert table.loc["whole", "share"] == pytest.approx(1.0) and table.loc["on_demand", "share"] == pytest.approx(0.0)
    assert {"without barrier", "without lookahead", "without speculation", "without prefetch timing", "speculation alone"} <= set(
        table.index
    )
    assert table.loc["without speculation", "tokens_per_step"] == 1.0


def test_the_demo_writes_json_timeline_and_trace(tmp_path, capsys):
    code = main(["demo", "--json", "--machine", "simulated", "--per-kind", "1", "--max-new-tokens", "6", "--out", str(tmp_path)])
    printed = json.loads(capsys.readouterr().out)
    assert code == 0 and printed["identical_tokens"] is True and len(printed["rows"]) == 4
    assert all(set(row) >= KEYS for row in printed["rows"])
    html = (tmp_path / "timeline.html").read_text()
    assert "plotly" in html and "<script src=" not in html and "<link" not in html.split("<script")[0]  # opens without a network
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("arguments", [["demo", "--memory", "1MB"], ["demo", "--per-kind", "0"], ["demo", "--max-new-tokens", "0"]])
def test_bad_input_gives_code_2_and_one_line(arguments, tmp_path, capsys):
    assert main([*arguments, "--machine", "simulated", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "specter_lab:" in error and "Traceback" not in error


def test_help_is_quick_and_unknown_commands_fail():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    helped = subprocess.run([sys.executable, "-m", "specter_lab", "demo", "--help"], capture_output=True, text=True, env=environment)
    assert helped.returncode == 0 and "--link-gb-s" in helped.stdout
    with pytest.raises(SystemExit) as unknown:
        main(["dem"])
    assert unknown.value.code == 2


def test_the_compare_command_prints_what_was_agreed(capsys):
    code = main(["compare", "--case", "ds_low", "--systems", "on_demand,specter", "--prompts", "3", "--max-new-tokens", "4", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert code == 0 and printed["machine"] == "simulated" and printed["bytes_short"] == {}
    for row in printed["rows"]:
        assert set(row) >= KEYS | {"case"} and row["case"] == "ds_low"
        assert len(row["ci95"]) == 2 and row["ci95"][0] <= row["speedup_vs_fastest_rival"] <= row["ci95"][1]
    assert main(["compare", "--systems", "on_demand,oracle", "--prompts", "1", "--max-new-tokens", "3"]) == 0
    assert "TPOT ms mean" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "ds_hihg"], "Did you mean ds_high"),
        (["--systems", "spectre"], "Did you mean specter"),
        (["--systems", "on_demand", "--memory", "1MB", "--prompts", "1"], "on_demand lacks"),
        (["--case", "ds_high", "--machine", "throttled"], "simulated; got --machine throttled"),
        (["--prompts", "0"], "got 0"),
    ],
)
def test_bad_input_to_the_compare_command(arguments, message, capsys):
    assert main(["compare", "--max-new-tokens", "2", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
