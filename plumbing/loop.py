"""What every training stage needs around its method: rows, the order of the data, rollouts, and the loop's bookkeeping.

A stage's own file holds forward, loss and backward. `Run` does what comes before and after them in each step:

    for step in run.steps(validate):        sets the learning rate, then hands over to the stage's own lines:
        loss = ...                              forward
        loss.backward()                         backward
        run.count(loss, tokens)                 what to log (several times where a batch is split)
                                            then clips, checks for finite values, steps, logs, validates, saves

Resuming is exact. The data order is a function of (seed, step), every other draw comes from a generator keyed by (seed,
step) or (seed, step, row), and the saved state holds weights, optimiser, position and settings. So twenty steps equal
ten, a kill and ten more, bit for bit on a CPU (tests/test_loop.py; train_rl.py says what holds within a phase of its
rollouts).
"""
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

from data import prepare
from data import rows as rows_on_disk
from data.dataset import longest_output
from plumbing import checkpoint, machine
from plumbing.settings import UserError
from sample import Decoder

# Settings that may differ when a run is resumed: they decide where and how things are shown or split.
FREE = ("resume", "out", "device", "threads", "micro", "save_every", "log_every", "data", "table", "full")


# === Rows =============================================================================================================

def load_data(s):
    """(folder, tokenizer, summary) of the prepared rows. Missing rows are prepared first. Raises UserError."""
    folder = Path(s.out) / "data"
    if not (folder / "summary.json").exists():
        wanted = prepare.PRESETS[s.preset]
        if s.data:
            wanted = prepare.DataConfig(**{**asdict(wanted), "data": s.data})
        print(f"{folder} is missing, so it is prepared first: python -m data.prepare --preset {s.preset} --out "
              + shlex.quote(s.out) + (f" --data {shlex.quote(s.data)}" if s.data else ""))
        prepare.check_place(folder)
        sets, tok, summary = prepare.build(wanted)
        rows_on_disk.save(folder, sets, tok, summary | {"preset": s.preset})
        prepare.show_summary(summary)
    tok, summary = rows_on_disk.load(folder)
    source, preset = summary["config"]["data"], summary["preset"]
    if s.data and Path(source).resolve() != Path(s.data).resolve():
        raise UserError(f"{folder} was made from {source}, not from {s.data}; give another --out")
    if preset != s.preset:
        raise UserError(f"{folder} was prepared for --preset {preset}, not {s.preset}; give another --out")
    if not summary["test_users_with_hit"] or not summary["hit_valid"]:
        raise UserError(f"{folder}: no validation or test user's next purchase is among the candidates: too little data")
    return folder, tok, summary


def check_fits(cfg, rows, block_len, n_candidates):
    """Refuse rows that are longer than the model's context, before the first step. Raises UserError.

    An output gets whole blocks, for its own length or for what decoding allows it, whichever is longer.
    """
    prompt, output = rows.lengths()
    blocks = -(-max(int(output.max()), longest_output(n_candidates)) // block_len)
    longest = int(prompt.max()) - 1 + blocks * block_len            # the last prompt token is the first input u_0
    if longest > cfg.ctx_len:
        raise UserError(f"prompt and output take {longest} tokens, ctx_len is {cfg.ctx_len}: a smaller --block-len, fewer "
                        "--title-tokens or --candidates in data.prepare, or a larger ctx_len in settings.MODELS")


class Batches:
    """batches[step] -> the row numbers (batch,) of that step: a function of (seed, step), so resuming saves no position.

    Each epoch is one permutation of the rows, cut into pools of 32 batches. Each pool is sorted by length, so that a batch
    pads little, and cut into batches, which are then shuffled. Example with 6 rows, batches of 2, one pool:

        permutation 4 0 5 2 1 3  ->  sorted by length 0 2 | 4 1 | 5 3  ->  shuffled 5 3 | 0 2 | 4 1

    The last, incomplete batch of an epoch is left out. The batches of the current epoch are kept until the next begins.
    """

    def __init__(self, lengths, batch, seed):
        self.lengths, self.batch, self.seed = lengths, batch, seed
        self.per_epoch = max(len(lengths) // batch, 1)
        self.epoch, self.batches = None, None

    def __getitem__(self, step):
        epoch, at = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            self.epoch, self.batches = epoch, self.shuffle(np.random.default_rng((self.seed, epoch)))
        return self.batches[at]

    def shuffle(self, rng):
        """The batches of one epoch, in order."""
        order = rng.permutation(len(self.lengths))[:self.per_epoch * self.batch]
        pools = np.array_split(order, range(32 * self.batch, len(order), 32 * self.batch))
        order = np.concatenate([pool[np.argsort(self.lengths[pool], kind="stable")] for pool in pools])
        batches = [order[i:i + self.batch] for i in range(0, len(order), self.batch)]
        return [batches[i] for i in rng.permutation(len(batches))]


def generator(*key):
    """A random generator for one purpose. Keyed by (seed, step, row, ...), it does not depend on who draws before it."""
    seed = np.random.SeedSequence([int(part) % 2**64 for part in key]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed >> 1))


def split(items, size):
    """A list in micro-batches of `size`; 0 keeps it whole."""
    size = size or len(items)
    return [items[lo:lo + size] for lo in range(0, len(items), size)]


def denominator(weights):
    """The one sum of weights by which the losses of all micro-batches are divided. It is never 0."""
    return max(sum(float(w.sum()) for w in weights), 1e-9)


def rollout_groups(model, rows, chosen, tok, s, n_candidates, *key):
    """Decode s.group sampled rollouts of each chosen row, from one prefill, by the real decoder.

    Returns (prompts, groups of sample.Rollout). The noise is keyed by (key, row, rollout).
    """
    prompts = [rows[i][0] for i in chosen]
    seeds = [int(generator(*key, i, g).initial_seed()) for i in chosen for g in range(s.group)]
    flat = Decoder(model, prompts, tok, s.block_len, s.tau, longest_output(n_candidates), s.temperature, seeds,
                   copies=s.group).run()
    return prompts, split(flat, s.group)


def end_line(path):
    """Begin a new line in a log whose last line was cut off. A log that does not exist yet is left alone."""
    path = Path(path)
    if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
        with open(path, "ab") as f:
            f.write(b"\n")


# === The loop =========================================================================================================

class Run:
    """One run of a stage called `name`: its optimiser, log, validation, saved state and product.

    tolerance: weights are kept if they score the best so far, or as good within this (default .1 / sqrt(eval_users)).
    """

    def __init__(self, name, s, model, summary, tolerance=None):
        self.name, self.s, self.model, self.summary = name, s, model.to(s.device), summary
        self.product, self.state_file, self.log_file = (
            Path(s.out) / f"{name}{end}" for end in (".pt", ".state.pt", ".jsonl"))
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        vectors = [p for p in model.parameters() if p.dim() < 2]    # the gains of the norms: no decay
        self.opt = torch.optim.AdamW([{"params": matrices, "weight_decay": s.decay},
                                      {"params": vectors, "weight_decay": 0.0}],
                                     lr=s.lr, betas=(0.9, 0.95), fused=True)
        self.step, self.best, self.seconds, self.stop = 0, -math.inf, 0.0, False
        self.tolerance = 0.1 / math.sqrt(s.eval_users) if tolerance is None else tolerance
        start = checkpoint.weights(s, s.start, summary) if getattr(s, "start", "") else None
        self.made_from = checkpoint.digest(start) if start else ""
        if s.resume:
            self.restore()                                          # this also restores the dtype
            end_line(self.log_file)                                 # a kill may have left half a line
        self.rate = machine.pick_dtype(s)
        if not s.resume:
            self.save_state()                                       # from here on this run counts as unfinished
            self.log_file.write_text("", encoding="utf-8")

    def steps(self, validate, validate_first=False):
        """Iterate over the steps that are left; the caller's loop body is the training step.

        validate(model) -> dict with "score". validate_first: validate before the first step too, so that the start
        competes, and weights which training clearly harmed are not kept.
        """
        s = self.s
        self.announce()
        if validate_first and self.best == -math.inf:
            self.check(validate)
        handler = signal.signal(signal.SIGINT, self.interrupt)
        bar = tqdm(total=s.steps, initial=self.step, desc=self.name, mininterval=1.0, dynamic_ncols=True)
        self.start_counting()
        try:
            while self.step < s.steps and not self.stop:
                start = time.time()
                for group in self.opt.param_groups:
                    group["lr"] = self.lr(self.step)
                self.loss = 0.0
                yield self.step
                norm = self.update()
                self.seconds += time.time() - start
                bar.update()
                last = self.step == s.steps
                if last or self.step % s.log_every == 0:
                    self.log_progress(bar, norm)
                if last or self.step % s.eval_every == 0:
                    self.check(validate)
                    self.start_counting()
                if last or self.step % s.eval_every == 0 or self.step % s.save_every == 0:
                    self.save_state()
        finally:
            bar.close()
            signal.signal(signal.SIGINT, handler)
        if self.stop:                                               # the weights so far do not count as finished ones
            self.save_state()
            again = shlex.join([a for a in sys.argv[1:] if a != "--resume"] + ["--resume"])
            sys.exit(f"stopped after step {self.step}, saved to {self.state_file}; go on with: "
                     f"python {Path(sys.argv[0]).name} {again}")

    # --- parts of a step ---

    def lr(self, step):
        """Linear warm-up, then a cosine from lr down to a twentieth of it."""
        if step < self.s.warmup:
            return self.s.lr * (step + 1) / self.s.warmup
        done = (step - self.s.warmup) / max(self.s.steps - self.s.warmup, 1)
        return self.s.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    def autocast(self):
        return machine.autocast(self.s)

    def count(self, loss, tokens):
        """Add the loss of a micro-batch and the tokens it read to what is logged."""
        self.loss += float(loss.detach())
        self.tokens += tokens

    def update(self):
        """Clip, check for finite values, step the optimiser. Returns the norm of the gradient. Raises UserError."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.s.clip))
        if not math.isfinite(self.loss) or not math.isfinite(norm):
            raise UserError(f"step {self.step}: the loss is {self.loss}, the gradient norm {norm}; the last good state is "
                            f"in {self.state_file}; a smaller --lr or --dtype float32 may help")
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        self.step += 1
        self.losses.append(self.loss)
        return norm

    # --- what is shown and logged ---

    def announce(self):
        s, (body, embedding) = self.s, self.model.size()
        print(f"{self.name}: {body / 1e6:.2f}M parameters in the layers, {embedding / 1e6:.2f}M in the embedding; "
              f"{s.device}, {s.dtype}, {self.rate / 1e9:.0f} GFLOP/s in a matrix product; {s.steps} steps of {s.batch} "
              + (f"prompts x {s.group}" if hasattr(s, "group") else "rows"))

    def start_counting(self):
        """Begin the sums of the next log line. Time spent on validation is not counted."""
        self.tokens, self.mark, self.losses = 0, time.time(), []

    def log(self, **values):
        with open(self.log_file, "a", encoding="utf-8") as f:
            f.write(json.dumps({"step": self.step, **values}) + "\n")

    def log_progress(self, bar, norm):
        """One line of the log: means since the last one. matmul_share compares 6 operations per parameter and token
        (forward 2, backward 4) with the rate of a plain matrix product."""
        took, loss = time.time() - self.mark, sum(self.losses) / len(self.losses)
        bar.set_postfix(loss=f"{loss:.3f}", tok_s=f"{self.tokens / took:,.0f}", refresh=False)
        self.log(loss=loss, lr=self.lr(self.step - 1), grad_norm=norm, tokens_per_s=self.tokens / took,
                 matmul_share=6 * self.model.size()[0] * self.tokens / took / self.rate, seconds=self.seconds)
        self.start_counting()

    # --- what is kept ---

    def check(self, validate):
        """Validate, and keep the weights if their score is the best so far or as good within the tolerance.

        NDCG@3 of one user varies by about .42, so .1 / sqrt(n) is a fourth of the standard error on n users. If
        two are equal, the weights trained longer are kept. So the kept weights may score a little lower than the start, by
        at most the tolerance.
        """
        self.model.eval()
        found = validate(self.model)
        self.model.train()
        self.log(**{f"valid_{key}": value for key, value in found.items()})
        told = ", ".join(f"{key} {value:.3f}" for key, value in found.items() if isinstance(value, float))
        tqdm.write(f"step {self.step}: {told}")
        if found["score"] > self.best - self.tolerance:
            self.best = max(found["score"], self.best)
            self.save_product(found)

    def stamp(self):
        """What a product and a state have in common."""
        return {"model": self.model.state_dict(), "step": self.step, "settings": asdict(self.s),
                "made_from": self.made_from, "fingerprint": self.summary["fingerprint"]}

    def save_product(self, found):
        numbers = {key: value for key, value in found.items() if isinstance(value, (int, float))}
        checkpoint.save(self.product, self.stamp() | {"config": asdict(self.model.cfg), "validation": numbers})

    def save_state(self):
        checkpoint.save(self.state_file, self.stamp() | {"opt": self.opt.state_dict(), "best": self.best,
                                                         "seconds": self.seconds})

    def restore(self):
        """Take up the saved state. Raises UserError where it was run from another start, with other settings or rows."""
        s, start = self.s, shlex.join(a for a in sys.argv[1:] if a != "--resume")
        state = checkpoint.load(self.state_file, f"start without --resume: python {Path(sys.argv[0]).name} {start}")
        if state["made_from"] != self.made_from:
            raise UserError(f"{self.state_file} was begun from another {s.start}.pt than is there now; start {self.name} "
                            "again by its own command, without --resume")
        before = state["settings"]
        other = [key for key, value in asdict(s).items() if key not in FREE and before.get(key, value) != value
                 and not (key == "dtype" and value == "auto")]
        if other:
            told = ", ".join(f"--{key.replace('_', '-')} {before[key]}" for key in other)
            raise UserError(f"{self.state_file} was run with other settings: {told}; resume with those")
        if state["fingerprint"] != self.summary["fingerprint"]:
            raise UserError(f"{self.state_file} was run on other data; start without --resume")
        s.dtype = before["dtype"]
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.step, self.best, self.seconds = state["step"], state["best"], state["seconds"]
        print(f"resumed {self.name} at step {self.step} of {s.steps}")

    def interrupt(self, *_):
        """Ctrl-C: finish the step, save, and stop. A second Ctrl-C stops at once."""
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        tqdm.write("stopping after this step (Ctrl-C again to stop at once, unsaved)")
