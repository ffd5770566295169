"""What every training stage shares: rows, data order, rollouts, and the loop with its optimiser, log, checkpoint, resume.

The stages (train_ar.py, train_cft.py, ...) differ only in what a step's loss is; `Run` holds the loop around it, so
that a stage reads as its method and nothing else.

Resume is exact: the data order is a function of (seed, step), every other draw comes from a generator keyed by
(seed, step, row), and the checkpoint holds weights, optimiser, schedule position and settings. Twenty steps equal ten,
a kill, and ten more, bit for bit on a CPU (tests/test_stage.py, tests/test_evaluate.py; for a phase of RL's
rollouts see train_rl.py).
"""
import contextlib
import json
import math
import shlex
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import checkpoint
import machine
from checkpoint import UserError
from data import prepare
from data.dataset import longest_output
from data.tokenizer import Tokenizer
from sample import Decoder


# === Data =============================================================================================================

def load_data(s):
    """(folder, tokenizer, summary) of the prepared rows; prepares them first where they are missing, saying so."""
    folder = Path(s.out) / "data"
    wanted = prepare.PRESETS[s.preset]
    if s.data:
        wanted = prepare.DataConfig(**{**asdict(wanted), "data": s.data})
    if not (folder / "summary.json").exists():
        print(f"{folder} is missing: preparing it (python -m data.prepare --preset {s.preset} --out {s.out}" +
              (f" --data {s.data})" if s.data else ")"))
        prepare.check_place(folder)
        sets, tok, summary = prepare.build(wanted)
        prepare.save(folder, sets, tok, summary | {"preset": s.preset})
        prepare.show_summary(summary)
    summary = json.loads((folder / "summary.json").read_text())
    if s.data and Path(summary["config"]["data"]).resolve() != Path(s.data).resolve():
        raise UserError(f"{folder} was made from {summary['config']['data']}, not from {s.data}; give another --out")
    if summary.get("preset", s.preset) != s.preset:
        raise UserError(f"{folder} was prepared for --preset {summary['preset']}, not {s.preset}; give another --out")
    if not summary["test_users_with_hit"] or not summary["hit_valid"]:
        raise UserError(f"{folder}: no validation or test user's next purchase is among the candidates: too little data")
    return folder, Tokenizer.load(json.loads((folder / "tokenizer.json").read_text())), summary


def batch_rows(lengths, batch, seed, step):
    """Row numbers of a step: a function of (seed, step) alone, so resuming needs no saved position.

    Each epoch is one permutation, cut into pools of 32 batches; a pool is sorted by length before it is cut into
    batches, so a batch pads little, and its batches are shuffled. The last, incomplete batch of an epoch is dropped.
    """
    per_epoch = max(len(lengths) // batch, 1)
    epoch, at = divmod(step, per_epoch)
    key = (seed, epoch, batch, len(lengths), int(lengths.sum()))
    if key not in CURRENT_EPOCH:
        rng = np.random.default_rng((seed, epoch))
        order = rng.permutation(len(lengths))[:per_epoch * batch]
        pools = [pool[np.argsort(lengths[pool], kind="stable")] for pool in np.array_split(
            order, range(32 * batch, len(order), 32 * batch))]
        order = np.concatenate(pools)
        batches = [order[i:i + batch] for i in range(0, len(order), batch)]
        CURRENT_EPOCH.clear()                                       # one epoch's batches are kept, not all of them
        CURRENT_EPOCH[key] = [batches[i] for i in rng.permutation(len(batches))]
    return CURRENT_EPOCH[key][at]


CURRENT_EPOCH = {}


def generator(*key):
    """A generator for one purpose: keyed by (seed, step, row, ...), it does not depend on who draws before or after."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence([int(k) & 0xFFFFFFFF for k in key])
                                             .generate_state(1, np.uint64)[0] >> 1))


def check_fits(cfg, rows, block_len, k):
    """Refuse rows that are longer than the model's context, before the first step rather than in the middle. An output
    about k candidates gets whole blocks, for its own length or for what decoding allows it, whichever is longer."""
    prompt, output = rows.lengths()
    longest = int(prompt.max()) - 1 + -(-max(int(output.max()), longest_output(k)) // block_len) * block_len
    if longest > cfg.ctx_len:
        raise UserError(f"prompt and output take {longest} tokens, ctx_len is {cfg.ctx_len}: a smaller --block-len, fewer "
                        "--title-tokens or --candidates in data.prepare, or a larger ctx_len in settings.MODELS")


def roll_out(model, rows, chosen, tok, s, k, *key):
    """s.group sampled rollouts of each chosen row about k candidates, from one prefill, by the real decoder -> prompts,
    groups of sample.Rollout. Noise is keyed by (key, row, rollout)."""
    prompts = [rows[i][0] for i in chosen]
    seeds = [int(generator(*key, i, g).initial_seed()) for i in chosen for g in range(s.group)]
    flat = Decoder(model, prompts, tok, s.block_len, s.tau, longest_output(k), s.temperature, seeds, copies=s.group).run()
    return prompts, [flat[i:i + s.group] for i in range(0, len(flat), s.group)]


def denominator(parts):
    """[(forward, weight)] micro-batches -> the one sum of weights that divides all their losses; never 0."""
    return max(sum(w for _, w in parts), 1e-9)


# === The loop =========================================================================================================

class Run:
    """The loop around a stage's loss.

    name: of the stage: writes <out>/<name>.pt (the product: weights, config, fingerprint) and <out>/<name>.state.pt
    (to resume). batch_loss(step) -> ([(forward, weight)], tokens): one pair a micro-batch, where forward() gives a sum
    of losses and the gradient is taken of sum(forward()) / sum(weight). validate(model) -> dict with "score": the best
    is kept, or one as good within `noise` (default: .1 / sqrt(eval_users)). exact: train in float32 whatever s.dtype says;
    it is then the dtype of the validation alone.
    """

    def __init__(self, name, s, model, tok, summary, noise=None, exact=False):
        self.name, self.s, self.model, self.tok, self.summary = name, s, model.to(s.device), tok, summary
        self.product = Path(s.out) / f"{name}.pt"
        self.state_file = Path(s.out) / f"{name}.state.pt"
        self.log_file = Path(s.out) / f"{name}.jsonl"
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]
        self.opt = torch.optim.AdamW([{"params": matrices, "weight_decay": s.decay},
                                      {"params": vectors, "weight_decay": 0.0}],
                                     lr=s.lr, betas=(0.9, 0.95), fused=True)
        self.step, self.best, self.seconds, self.stop, self.exact = 0, -math.inf, 0.0, False, exact
        self.noise = 0.1 / math.sqrt(s.eval_users) if noise is None else noise
        start = checkpoint.weights(s.out, s.preset, s.start) if getattr(s, "start", "") else None
        self.made_from = checkpoint.digest(start) if start else ""
        if s.resume:
            self.restore()                                          # and with it the dtype
        self.rate = machine.pick_dtype(s)
        if not s.resume:
            self.save_state()                                       # from here on this run counts as unfinished
            self.log_file.write_text("")

    def restore(self):
        start = shlex.join(a for a in sys.argv[1:] if a != "--resume")
        state = checkpoint.load(self.state_file, f"start without --resume: python {Path(sys.argv[0]).name} {start}")
        if state.get("made_from", self.made_from) != self.made_from:
            raise UserError(f"{self.state_file} was begun from another {self.s.start}.pt than is there now; start {self.name} "
                            "again by its own command, without --resume")
        mine = {k: v for k, v in asdict(self.s).items() if k not in FREE}
        other = [k for k, v in mine.items() if state["settings"].get(k, v) != v and not (k == "dtype" and v == "auto")]
        if other:
            raise UserError(f"{self.state_file} was run with other settings: " + ", ".join(
                f"--{k.replace('_', '-')} {state['settings'].get(k)}" for k in other) + "; resume with those")
        if state["fingerprint"] != self.summary["fingerprint"]:
            raise UserError(f"{self.state_file} was run on other data; start without --resume")
        self.s.dtype = state["settings"]["dtype"]
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.step, self.best, self.seconds = state["step"], state["best"], state["seconds"]
        print(f"resumed {self.name} at step {self.step} of {self.s.steps}")

    def lr(self, step):
        """Linear warm-up, then a cosine from lr to a twentieth of it."""
        if step < self.s.warmup:
            return self.s.lr * (step + 1) / self.s.warmup
        done = (step - self.s.warmup) / max(self.s.steps - self.s.warmup, 1)
        return self.s.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    def save_state(self):
        checkpoint.save(self.state_file, {
            "model": self.model.state_dict(), "opt": self.opt.state_dict(), "step": self.step, "best": self.best,
            "seconds": self.seconds, "settings": asdict(self.s), "made_from": self.made_from,
            "fingerprint": self.summary["fingerprint"]})

    def save_product(self, found):
        checkpoint.save(self.product, {
            "model": self.model.state_dict(), "config": asdict(self.model.cfg), "step": self.step,
            "fingerprint": self.summary["fingerprint"], "settings": asdict(self.s), "made_from": self.made_from,
            "validation": {k: v for k, v in found.items() if isinstance(v, (int, float))}})

    def log(self, **values):
        with open(self.log_file, "a") as f:
            f.write(json.dumps({"step": self.step, **values}) + "\n")

    def autocast(self):
        return machine.autocast(self.s)

    def train(self, batch_loss, validate, start_competes=False):
        """start_competes: validate before the first step too, so that weights which training clearly harmed are not kept."""
        s = self.s
        body, embedding = self.model.size()
        print(f"{self.name}: {body / 1e6:.2f}M parameters in the layers, {embedding / 1e6:.2f}M in the embedding; "
              f"{s.device}, {s.dtype}{', training in float32' * self.exact}, {self.rate / 1e9:.0f} GFLOP/s in a matrix "
              f"product; {s.steps} steps of {s.batch} "
              + (f"prompts x {s.group}" if hasattr(s, "group") else "rows"))
        if start_competes and self.best == -math.inf:
            self.check(validate)
        old = signal.signal(signal.SIGINT, self.interrupt)
        bar = tqdm(total=s.steps, initial=self.step, desc=self.name, mininterval=1.0, dynamic_ncols=True)
        seen, mark, losses = 0, time.time(), []
        try:
            while self.step < s.steps and not self.stop:
                start = time.time()
                for group in self.opt.param_groups:
                    group["lr"] = self.lr(self.step)
                parts, tokens = batch_loss(self.step)
                total = denominator(parts)
                loss = 0.0
                for forward, _ in parts:
                    with contextlib.nullcontext() if self.exact else self.autocast():
                        part = forward() / total
                    part.backward()
                    loss += float(part.detach())
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.clip)
                if not math.isfinite(loss) or not math.isfinite(float(norm)):
                    raise UserError(f"step {self.step}: the loss is {loss}, the gradient norm {float(norm)}; the last "
                                    f"good state is in {self.state_file}; a smaller --lr or --dtype float32 may help")
                self.opt.step()
                self.opt.zero_grad(set_to_none=True)
                self.step += 1
                self.seconds += time.time() - start
                seen, losses = seen + tokens, losses + [loss]
                bar.update()
                if self.step % s.log_every == 0 or self.step == s.steps:
                    took = time.time() - mark
                    mfu = 6 * body * seen / took / self.rate        # 6 operations a parameter and token, backward included
                    bar.set_postfix(loss=f"{sum(losses) / len(losses):.3f}", tok_s=f"{seen / took:,.0f}", refresh=False)
                    self.log(loss=sum(losses) / len(losses), lr=self.lr(self.step - 1), grad_norm=float(norm),
                             tokens_per_s=seen / took, matmul_share=mfu, seconds=self.seconds)
                    seen, mark, losses = 0, time.time(), []
                if self.step % s.eval_every == 0 or self.step == s.steps:
                    self.check(validate)
                    mark = time.time()
                if self.step % s.save_every == 0 or self.step % s.eval_every == 0 or self.step == s.steps:
                    self.save_state()
        finally:
            bar.close()
            signal.signal(signal.SIGINT, old)
        if self.stop:                                               # the weights so far are not called finished ones
            self.save_state()
            # A stage that another one needed is gone on with by itself when that one is run again (see need).
            flags = sys.argv[1:] + ["--resume"] * (not checkpoint.NEEDED and not s.resume)
            again = f"python {Path(sys.argv[0]).name} {shlex.join(flags)}"
            sys.exit(f"stopped after step {self.step}, saved to {self.state_file}; go on with: {again}")

    def check(self, validate):
        """Validate; keep the weights if their score is the best so far, or as good within the noise. NDCG@3 of one user
        varies by about .42, so .1 / sqrt(n) is a fourth of the standard error on n users, and of two equals the longer
        trained is the better bet. So weights that are kept may score below the start by as much as the noise."""
        self.model.eval()
        found = validate(self.model)
        self.model.train()
        self.log(**{f"valid_{k}": v for k, v in found.items()})
        tqdm.write(f"step {self.step}: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items() if isinstance(v, float)))
        if found["score"] > self.best - self.noise:
            self.best = max(found["score"], self.best)
            self.save_product(found)

    def interrupt(self, *_):
        if self.stop:                                               # a second Ctrl-C does not wait for the step
            raise KeyboardInterrupt
        self.stop = True
        tqdm.write("stopping after this step (Ctrl-C again to stop at once, unsaved)")


FREE = ("resume", "out", "device", "save_every", "log_every", "data")     # may differ when a run is resumed
