"""Offloaded speculative decoding of mixture-of-experts models, in pieces that a notebook can replace.

Target and data: ``load_moe``, ``load_prompts``. Pieces: drafters, predictors, eviction policies, draft lengths,
machines. Assembled: ``Pipeline`` and ``baselines``. Looked at: ``compare``, ``plot_timeline``, ``prediction_scores``.
"""

from importlib.metadata import PackageNotFoundError, version

from specter_lab import baselines, experiments
from specter_lab.architectures import Architecture, architectures
from specter_lab.bounds import clairvoyant_loads, oracle_bound, schedule_bound
from specter_lab.bundled import Prompt, bundled_model, data_folder, load_prompts
from specter_lab.calibration import calibrate, costs_of
from specter_lab.cases import run_case
from specter_lab.comparison import Comparison, compare
from specter_lab.divergence import Divergence, divergence
from specter_lab.doctor import DoctorReport, doctor
from specter_lab.experiments import Experiment, ablate
from specter_lab.generation import Generation
from specter_lab.hardware import hardware
from specter_lab.loading.prepare import prepare_moe
from specter_lab.machines.cuda import CudaMachine
from specter_lab.machines.simulated import CostTable, LaneCosts, SimulatedMachine
from specter_lab.machines.throttled import ThrottledMachine
from specter_lab.memory import BudgetError, MemoryPlan
from specter_lab.models import MoE
from specter_lab.observe.analysis import critical_path, mispredictions
from specter_lab.observe.export import save_chrome_trace, to_chrome_trace
from specter_lab.observe.feedback import Feedback, feedback
from specter_lab.observe.metrics import prediction_scores, summarize
from specter_lab.observe.trace import Trace
from specter_lab.offload.eviction import LFU, LRU, ClairvoyantEviction, LookaheadLRU
from specter_lab.offload.expected_use import ExpectedUse
from specter_lab.offload.misses import AlwaysHost, SplitByFinish
from specter_lab.offload.slot_curves import divide_slots, miss_curves
from specter_lab.opening import load_moe
from specter_lab.pipeline import Pipeline
from specter_lab.planning import plan_memory
from specter_lab.plans import planned, try_plans
from specter_lab.plots.html import save_html
from specter_lab.plots.style import describe_colours
from specter_lab.plots.timeline import plot_timeline
from specter_lab.quantize import Dense, ExpertBank, Quanto, format_named
from specter_lab.quantize.compressed import CompressedBank
from specter_lab.quantize.residual import ResidualBank
from specter_lab.recorded import RecordedText, record_text
from specter_lab.records import (
    Conditions,
    DeviceBytes,
    DraftToken,
    ExpertKey,
    Geometry,
    LayerCall,
    Prediction,
    Routing,
    Transfer,
    Verification,
)
from specter_lab.replay import ReplayTarget, ShapeStore
from specter_lab.routing.activation import ActivationAware
from specter_lab.routing.chunked import ChunkedLookahead
from specter_lab.routing.log import RoutingLog
from specter_lab.routing.predictors import CutoffLookahead, DraftLookahead, NextLayerGate, NoPrediction, Oracle
from specter_lab.routing.recorder import RouterRecorder
from specter_lab.routing.synthetic import SyntheticRouting
from specter_lab.speculate.byte_length import ByteLength
from specter_lab.speculate.copied import CopiedDrafter
from specter_lab.speculate.draft_length import FixedLength, HeuristicLength
from specter_lab.speculate.drafters import PromptLookupDrafter, ResidentDrafter, SelfDrafter
from specter_lab.speculate.governor import Governor
from specter_lab.speculate.separate import SeparateDrafter
from specter_lab.speculate.verification import verify_greedy, verify_sampled

try:
    __version__ = version("specter-lab")
except PackageNotFoundError:  # a checkout that was put on the path without being installed
    __version__ = "0+uninstalled"

__all__ = [
    "LFU",
    "LRU",
    "ActivationAware",
    "AlwaysHost",
    "Architecture",
    "BudgetError",
    "ByteLength",
    "ChunkedLookahead",
    "ClairvoyantEviction",
    "Comparison",
    "CompressedBank",
    "Conditions",
    "CopiedDrafter",
    "CostTable",
    "CudaMachine",
    "CutoffLookahead",
    "Dense",
    "DeviceBytes",
    "Divergence",
    "DoctorReport",
    "DraftLookahead",
    "DraftToken",
    "ExpectedUse",
    "Experiment",
    "ExpertBank",
    "ExpertKey",
    "Feedback",
    "FixedLength",
    "Generation",
    "Geometry",
    "Governor",
    "HeuristicLength",
    "LaneCosts",
    "LayerCall",
    "LookaheadLRU",
    "MemoryPlan",
    "MoE",
    "NextLayerGate",
    "NoPrediction",
    "Oracle",
    "Pipeline",
    "Prediction",
    "Prompt",
    "PromptLookupDrafter",
    "Quanto",
    "RecordedText",
    "ReplayTarget",
    "ResidentDrafter",
    "ResidualBank",
    "RouterRecorder",
    "Routing",
    "RoutingLog",
    "SelfDrafter",
    "SeparateDrafter",
    "ShapeStore",
    "SimulatedMachine",
    "SplitByFinish",
    "SyntheticRouting",
    "ThrottledMachine",
    "Trace",
    "Transfer",
    "Verification",
    "ablate",
    "architectures",
    "baselines",
    "bundled_model",
    "calibrate",
    "clairvoyant_loads",
    "compare",
    "costs_of",
    "critical_path",
    "data_folder",
    "describe_colours",
    "divergence",
    "divide_slots",
    "doctor",
    "experiments",
    "feedback",
    "format_named",
    "hardware",
    "load_moe",
    "load_prompts",
    "mispredictions",
    "miss_curves",
    "oracle_bound",
    "plan_memory",
    "planned",
    "plot_timeline",
    "prediction_scores",
    "prepare_moe",
    "record_text",
    "run_case",
    "save_chrome_trace",
    "save_html",
    "schedule_bound",
    "summarize",
    "to_chrome_trace",
    "try_plans",
    "verify_greedy",
    "verify_sampled",
]
