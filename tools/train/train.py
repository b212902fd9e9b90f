#!/usr/bin/env python3
"""Trains the small model. Stopped at any moment, the same command goes on from the last checkpoint.

SIGTERM and Ctrl-C end it after the step, saved. Writes into --run: vocabulary/, latest.pt, a checkpoint at
the end of each stage, log.jsonl.
"""

import argparse
import dataclasses
import json
import os
import random
import signal
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import data
import model as models
import recipe
from kda import CHUNK
from muon import Optimiser
from text import Tokenizer

SAVE_EVERY = 50


def targets(ids, mine):
    """Flat next-token targets, and which of them the model writes; the last of a row has none."""
    ids, mine = torch.tensor(ids), torch.tensor(mine)
    return ids, F.pad(ids[:, 1:], (0, 1)).reshape(-1), F.pad(mine[:, 1:], (0, 1)).reshape(-1)


def kept(resets, length):
    """[rows, chunks] for the model: 0 where a row's state is lost before that chunk; None if none is."""
    if not any(resets):
        return None
    keep = torch.ones(len(resets), -(-length // CHUNK))
    for row, positions in enumerate(resets):
        for at in positions:
            keep[row, at // CHUNK] = 0
    return keep


def answers_right(right, mine):
    """Share of the model's turns in which every token is right. Flat booleans at the written positions."""
    turn = torch.cumsum(mine & ~F.pad(mine[:-1], (1, 0)), 0)[mine] - 1
    wrong = torch.zeros(int(turn.max()) + 1).index_add_(0, turn, (~right).float())
    return float((wrong == 0).float().mean())


class Trainer:
    def __init__(
        self, run, seed, stages=None, tokens_per_step=recipe.TOKENS_PER_STEP, size=None, low=torch.bfloat16
    ):
        self.run, self.seed, self.stages, self.per_step, self.low = run, seed, stages, tokens_per_step, low
        os.makedirs(run, exist_ok=True)
        folder = os.path.join(run, "vocabulary")
        if not os.path.exists(os.path.join(folder, "chat_literals.json")):
            data.write_vocabulary(folder, recipe.MERGES)
        self.tokenizer = Tokenizer(folder)
        torch.manual_seed(seed)
        self.model = models.Model(dataclasses.replace(size or models.Size(), vocab=self.tokenizer.size))
        self.optimiser = Optimiser(self.model, recipe.MUON_RATE, recipe.ADAM_RATE, recipe.DECAY)
        self.step = self.tokens = 0
        self.yielding = self.stopping = False
        self.latest = os.path.join(run, "latest.pt")
        if os.path.exists(self.latest):
            saved = torch.load(self.latest, weights_only=False)
            if saved.get("products", "bfloat16") != str(low).removeprefix("torch."):
                raise SystemExit(
                    f"train: {self.latest} was made with --products {saved.get('products', 'bfloat16')}; use "
                    "that, or another --run"
                )
            if saved["seed"] != seed:
                raise SystemExit(
                    f"train: {self.latest} was made with --seed {saved['seed']}; use that, or another --run"
                )
            mine = dataclasses.asdict(self.model.z)
            if {**mine, **saved["size"]} != mine:
                raise SystemExit(
                    f"train: {self.latest} has the architecture {saved['size']}, and flags or code ask for "
                    f"{mine}; use the flags that it was begun with, or another --run"
                )
            self.model.load_state_dict(saved["model"])
            self.optimiser.load(saved["optimiser"])
            self.step, self.tokens = saved["step"], saved["tokens"]
            print(f"going on after step {self.step}", flush=True)

    def save(self, path):
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimiser": self.optimiser.state(),
                "step": self.step,
                "tokens": self.tokens,
                "seed": self.seed,
                "products": str(self.low).removeprefix("torch."),
                "size": dataclasses.asdict(self.model.z),
            },
            path + ".partial",
        )
        os.replace(path + ".partial", path)

    def one_step(self, stage, progress):
        rng = random.Random("%d.%d" % (self.seed, self.step))
        length, rows = recipe.shape(rng, stage, self.per_step)
        ids, mine, resets = data.batch(
            self.tokenizer, self.seed, self.step, rows, length, phase_one=stage.first, losing=stage.losing
        )
        ids, target, mine = targets(ids, mine)
        keep = kept(resets, length)
        draw = torch.rand(len(target), generator=torch.Generator().manual_seed(self.step))
        quiet = (draw < recipe.QUIET_SHARE) & ~mine & (target != self.tokenizer.pad)
        written, read = mine.nonzero()[:, 0], quiet.nonzero()[:, 0]
        at = torch.cat([written, read])
        logits, seen = self.model(
            ids,
            keep,
            low=self.low,
            capacity_factor=recipe.CAPACITY,
            quantised=stage.quantised,
            positions=at,
            real=(ids != self.tokenizer.pad).view(-1),
        )
        each = F.cross_entropy(logits.float(), target[at], reduction="none")
        answer_loss, quiet_loss = each[: len(written)].mean(), each[len(written) :].mean()
        (answer_loss + stage.quiet * quiet_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        rate = stage.rate[0] + (stage.rate[1] - stage.rate[0]) * progress
        if torch.isfinite(norm):
            self.optimiser.step(rate * min(1.0, (self.step + 1) / recipe.WARM_UP))
            self.model.balance(seen, stage.memory)
        self.model.zero_grad(set_to_none=True)  # what is not finite must not stay for the next step
        right = logits[: len(written)].argmax(-1) == target[written]
        load = max(float(n.max() / n.float().mean()) for n in seen.loads.values())
        return {
            "length": length,
            "loss": answer_loss.item(),
            "read_loss": quiet_loss.item(),
            "token_accuracy": float(right.float().mean()),
            "answer_accuracy": answers_right(right, mine),
            "load": load,
            "gradient": float(norm),
        }

    @torch.no_grad()
    def settle(self, stage, batches=recipe.SETTLING, rounds=recipe.ROUNDS):
        """The router bias that gives every expert its share of texts that were not trained on: a step's few
        texts are too alike for that."""
        for texts in ["settle.%d" % self.seed] + ["settle.%d.%d" % (self.seed, n) for n in range(1, rounds)]:
            self._settle(stage, batches, texts)

    def _settle(self, stage, batches, texts):
        rng, scores = random.Random(texts), {}
        for number in range(batches):
            length, rows = recipe.shape(rng, stage, self.per_step)
            ids = torch.tensor(data.batch(self.tokenizer, texts, number, rows, length)[0])
            real = (ids != self.tokenizer.pad).view(-1)
            _, seen = self.model(
                ids,
                low=self.low,
                capacity_factor=recipe.CAPACITY,
                quantised=stage.quantised,
                positions=torch.zeros(1, dtype=torch.long),
                real=real,
            )
            for layer, some in seen.scores.items():
                scores.setdefault(layer, []).append(some)
        for _ in range(8):  # each moves the bars that the next one starts from
            self.model.balance(SimpleNamespace(scores={i: torch.cat(s) for i, s in scores.items()}), 0.0)

    def train(self, until_step=None, quiet=False):
        """Steps until the stages are done, or `until_step`; returns the log's rows."""
        with open(os.path.join(self.run, "log.jsonl"), "a", encoding="utf-8") as log:
            return self._train(log, until_step, quiet)

    def _train(self, log, until_step, quiet):
        stage, progress = recipe.stage_at(self.tokens, self.stages)
        rows = []
        while stage is not None and (until_step is None or self.step < until_step) and not self.stopping:
            if self.yielding and self.step % 10 == 0:
                torch.set_num_threads(2 if os.getloadavg()[0] < os.cpu_count() - 0.5 else 1)
            start, used = time.monotonic(), time.process_time()
            row = self.one_step(stage, progress)
            self.step += 1
            self.tokens += max(self.per_step, row["length"])
            row = {
                "step": self.step,
                "tokens": self.tokens,
                "stage": stage.name,
                **row,
                "seconds": time.monotonic() - start,
                "cpu_seconds": time.process_time() - used,
            }
            rows.append(row)
            log.write(
                json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}) + "\n"
            )
            log.flush()
            if not quiet and self.step % 10 == 0:
                print(
                    json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}),
                    flush=True,
                )
            before = stage
            stage, progress = recipe.stage_at(self.tokens, self.stages)
            if stage is None:
                self.settle(before)  # before it counts as done: stopped here, the last steps come again
            if stage is not before:
                self.save(os.path.join(self.run, f"after-{before.name}.pt"))
            if self.step % SAVE_EVERY == 0 or stage is not before:
                self.save(self.latest)
        if rows:
            self.save(self.latest)
        return rows


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--run", required=True, help="folder of this training run")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument(
        "--threads", type=int, default=2, help="0: two while the machine is otherwise idle, else one"
    )
    p.add_argument(
        "--full", type=int, nargs="*", help="layers with full attention, from 1; for comparisons"
    )
    p.add_argument("--rotate", action="store_true", help="rotary positions in full attention, to compare")
    p.add_argument("--comparison", action="store_true", help="the shorter stages for comparing architectures")
    p.add_argument(
        "--products",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="what the big matrix products are made in; float32 is quicker on a CPU without AMX",
    )
    p.add_argument("--until-step", type=int, help="stop after this step; the stages go on another time")
    p.add_argument("--no-compile", action="store_true", help="start at once, run slower")
    a = p.parse_args()
    torch.set_num_threads(a.threads or 1)
    if not a.no_compile:
        models.compile_parts()
    os.makedirs(a.run, exist_ok=True)
    with open(os.path.join(a.run, "pid"), "w", encoding="utf-8") as f:
        f.write("%d\n" % os.getpid())
    size = models.Size(rotate=a.rotate)
    if a.full is not None:
        size.full = tuple(a.full)
    low = getattr(torch, a.products)
    trainer = Trainer(a.run, a.seed, recipe.COMPARISON if a.comparison else None, size=size, low=low)
    trainer.yielding = a.threads == 0

    def stop(*_):
        trainer.stopping = True  # after this step, saved

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    trainer.train(a.until_step)


if __name__ == "__main__":
    main()
