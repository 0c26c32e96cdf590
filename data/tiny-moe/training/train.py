"""Train a byte-level BPE tokenizer and a small Qwen3-MoE language model on the CPU; resumable.

    python train.py --corpus DIR --out DIR --minutes 72 --workers 2
    python train.py --corpus DIR --out DIR --minutes 72 --workers 2 --resume     after an interruption

``--corpus`` is what prep_corpus.py wrote. ``--out`` gets ``model/`` (checkpoint and tokenizer), ``train_log.jsonl`` and
``run_state.safetensors`` (see checkpointing.py; removed when the run ends).

``--workers N`` runs N single-threaded processes that average their gradients (gloo, file rendezvous). On a shared
machine this is faster and far steadier than one process with several OpenMP threads, whose barriers spin whenever
something else takes a core. The learning rate follows the clock, so a run ends on time whatever the machine; for the
same reason two runs are alike but not bit for bit equal.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from checkpointing import Progress, WindowOrder, load_run, save_run
from model_parts import (
    balance_loss,
    bits_per_byte,
    build_model,
    build_optimizer,
    bytes_of_tokens,
    encode,
    save_model,
    save_tokenizer,
    train_tokenizer,
    windows_at,
)
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

WARM_UP_STEPS = 150
SECONDS_BETWEEN_LOGS = 120.0
NOT_SETTINGS = ("corpus", "out", "rank", "resume", "save_every_s")


def read_arguments() -> argparse.Namespace:
    """The command line; the defaults are the bundled checkpoint's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.jsonl and heldout.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    parser.add_argument("--minutes", type=float, default=72, help="length of the whole run, pauses not counted")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=24, help="experts a layer")
    parser.add_argument("--experts-per-token", type=int, default=4)
    parser.add_argument("--expert-width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="sequences a step, all workers together")
    parser.add_argument("--sequence", type=int, default=256, help="tokens a sequence")
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--balance-weight", type=float, default=0.01, help="weight of the load-balancing loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--experts-implementation", default="grouped_mm")
    parser.add_argument("--save-every-s", type=float, default=300, help="seconds between saves of state and model")
    return parser.parse_args()


def read_rows(path: Path) -> list[dict[str, str]]:
    """The documents of a corpus file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def learning_rate_at(peak: float, step: int, fraction: float) -> float:
    """Linear warm-up over the first 150 steps, times a cosine from 1 to 0.05 over the run's clock (``fraction`` 0 to 1).

    >>> round(learning_rate_at(1.0, 149, 0.0), 3), round(learning_rate_at(1.0, 9000, 1.0), 3)
    (1.0, 0.05)
    """
    return peak * min(1, (step + 1) / WARM_UP_STEPS) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * fraction)))


def average_gradients(weights: list[Tensor], fraction: float, rank: int, workers: int) -> float:
    """Average the gradients of all workers in place; returns rank 0's ``fraction``, whose clock decides for all."""
    flat = torch.cat([weight.grad.reshape(-1) for weight in weights] + [torch.tensor([fraction if rank == 0 else 0.0])])
    dist.all_reduce(flat)
    fraction = flat[-1].item()
    flat /= workers
    start = 0
    for weight in weights:
        weight.grad.copy_(flat[start : start + weight.numel()].view_as(weight))
        start += weight.numel()
    return fraction


def start_workers(arguments: argparse.Namespace) -> list[subprocess.Popen]:
    """Start the other workers (from rank 0) and join them; every process then has one thread."""
    meeting = (arguments.out / "rendezvous").resolve()
    others = []
    if arguments.rank == 0:
        meeting.unlink(missing_ok=True)
        others = [subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank)]) for rank in range(1, arguments.workers)]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=arguments.rank, world_size=arguments.workers)
    return others


class TrainingLog:
    """``train_log.jsonl`` and the screen; on a resumed run the lines after ``keep_to_step`` are dropped first."""

    def __init__(self, path: Path, keep_to_step: int) -> None:
        old = path.read_text().splitlines(keepends=True) if keep_to_step and path.exists() else []
        path.write_text("".join(line for line in old if json.loads(line)["step"] <= keep_to_step))
        self.path = path

    def write(self, record: dict[str, float]) -> None:
        """Add one line."""
        print(json.dumps(record), flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def train(
    arguments: argparse.Namespace,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    order: WindowOrder,
    progress: Progress,
    train_ids: np.ndarray,
) -> Iterator[float]:
    """Step until rank 0's clock runs out; keeps ``progress`` up to date and yields the learning rate after each step."""
    weights = list(model.parameters())
    began_s = time.monotonic() - progress.elapsed_s
    while progress.fraction < 1:
        learning_rate = learning_rate_at(arguments.learning_rate, progress.step, progress.fraction)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        starts = order.next()[arguments.rank :: arguments.workers]  # every worker draws the same order
        batch = windows_at(train_ids, starts, order.window)
        output = model(input_ids=batch[:, :-1], output_router_logits=True, use_cache=False)
        loss = cross_entropy(output.logits.float().flatten(0, 1), batch[:, 1:].flatten())
        balance = balance_loss(output.router_logits, arguments.experts_per_token)
        (loss + arguments.balance_weight * balance).backward()
        progress.fraction = (time.monotonic() - began_s) / (60 * arguments.minutes)
        if arguments.workers > 1:
            progress.fraction = average_gradients(weights, progress.fraction, arguments.rank, arguments.workers)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        progress.elapsed_s = time.monotonic() - began_s
        progress.unlogged_losses.append([loss.item(), balance.item()])
        yield learning_rate


def main() -> None:
    """Tokenizer, model, training, and on rank 0 the log and the saves."""
    arguments = read_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    others = start_workers(arguments) if arguments.workers > 1 else []
    torch.set_flush_denormal(True)
    torch.manual_seed(arguments.seed)
    first = arguments.rank == 0
    model_folder, state_path = arguments.out / "model", arguments.out / "run_state.safetensors"

    train_rows, held_rows = (read_rows(arguments.corpus / name) for name in ("train.jsonl", "heldout.jsonl"))
    train_texts = [row["text"] for row in train_rows]
    if arguments.resume:
        tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(train_texts, arguments.vocabulary)
        if first:
            save_tokenizer(tokenizer, model_folder)
    token_bytes = bytes_of_tokens(tokenizer)
    train_ids = encode(tokenizer, train_texts)
    kinds = sorted({row["domain"] for row in held_rows})
    held_ids = {kind: encode(tokenizer, [row["text"] for row in held_rows if row["domain"] == kind]) for kind in kinds}

    model = build_model(arguments, tokenizer.get_vocab_size())
    optimizer = build_optimizer(model, arguments.learning_rate)
    order = WindowOrder(len(train_ids), arguments.sequence + 1, arguments.batch, arguments.seed)
    settings = {key: value for key, value in vars(arguments).items() if key not in NOT_SETTINGS}
    progress = load_run(state_path, model, optimizer, order, settings) if arguments.resume else Progress()
    if arguments.workers > 1:
        for weight in model.parameters():
            dist.broadcast(weight.data, 0)
    if first:
        parameters = sum(weight.numel() for weight in model.parameters())
        in_experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
        print(f"{len(train_ids)} training tokens, {parameters} parameters, {in_experts / parameters:.0%} of them in experts", flush=True)

    def held_out(sequences: int) -> dict[str, float]:
        return {
            f"bpb_{kind}": round(bits_per_byte(model, ids, token_bytes, sequences, arguments.sequence), 4) for kind, ids in held_ids.items()
        }

    log = TrainingLog(arguments.out / "train_log.jsonl", progress.step) if first else None
    next_save_s = progress.elapsed_s + arguments.save_every_s
    tokens_a_step = arguments.batch * arguments.sequence
    for learning_rate in train(arguments, model, optimizer, order, progress, train_ids):
        if log and progress.elapsed_s >= progress.next_log_s:
            loss, balance = np.mean(progress.unlogged_losses, 0).tolist()
            tokens = progress.step * tokens_a_step
            record = {"step": progress.step, "min": round(progress.elapsed_s / 60, 2), "tokens": tokens}
            record |= {"tok_s": round(tokens / progress.elapsed_s), "ce": round(loss, 4), "balance": round(balance, 4)}
            log.write({**record, "lr": round(learning_rate, 6), **held_out(24)})
            progress.unlogged_losses.clear()
            progress.next_log_s = progress.elapsed_s + SECONDS_BETWEEN_LOGS
        if log and progress.elapsed_s >= next_save_s:
            save_run(state_path, model, optimizer, order, progress, settings)
            save_model(model, model_folder)
            next_save_s = progress.elapsed_s + arguments.save_every_s
    if log:
        save_model(model, model_folder)
        record = {"step": progress.step, "min": round(progress.elapsed_s / 60, 2), "tokens": progress.step * tokens_a_step}
        log.write({**record, "final": True, **held_out(400)})
        state_path.unlink(missing_ok=True)
    for other in others:
        other.wait()
    if arguments.workers > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
