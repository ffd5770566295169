"""The sampler: prompts in, outputs out, one block at a time. Block length 1 *is* the AR decoder.

Paper: "The conversion" (commit rule, NFE, cache). Prefill once; then each step runs the active block, partly masked,
against the cache, and commits every target that is sure enough (tau) plus the surest one. Costs that a careless sampler
pays at every step and this one does not: nothing is concatenated (the cache is allocated once, a canvas overwrites its
own slots), a mask is made only where some key must not be seen, and a finished block costs no pass of its own: the
forward that makes its keys and values from clean tokens is fused with the next block's first step, and falls away
where the canvas was already clean, as it always is at block length 1.

    python sample.py --preset small --user 13595         # a real user: history, reasoning, ranking before and after
    python sample.py --preset small --user 13595 --watch

Left out: caching inside an active block (Fast-dLLM's approximation; here K/V come from clean blocks only), a
constrained decoder (a valid permutation must be learned), batching over prompts that arrive at different times.
"""
import argparse
import json
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

import diffusion
from model import KVCache


@dataclass
class Rollout:
    """One decoded output. tokens end with the first <eos>, or with the last block if none came.

    The trajectory: step[i] and logprob[i] say at which step of its block token i of `canvas` (tokens and tail, whole
    blocks) was committed, and with which log-probability; nfe counts this row's forwards, without the prefill.
    """
    tokens: list
    canvas: list = field(default_factory=list)
    step: list = field(default_factory=list)
    logprob: list = field(default_factory=list)
    nfe: int = 0


def choose(logits, temperature, generators):
    """Candidate token for each position. logits (n, B, vocab) -> tokens (n, B), confidence (n, B), log-prob (n, B).

    Greedy at temperature 0 (nothing is divided). Otherwise softmax(logits / T) by the Gumbel trick, with float64
    noise from each row's own generator: float32 uniforms stop at 2^-24 and cut the tail off. Confidence is the top
    probability, without noise, at the temperature of the draw: *when* a position is committed then follows from the
    canvas alone. Were it the probability of the token drawn, a position would wait until it has drawn a likely one,
    and outputs would not be samples from the distribution that their log-probabilities say.
    """
    logp = (logits / temperature if temperature else logits).log_softmax(-1)
    if temperature:
        noise = torch.stack([torch.rand(logits.shape[1:], generator=g, dtype=torch.float64) for g in generators])
        gumbel = -torch.log(-torch.log(noise.clamp(min=1e-300)))
        token = (logp.double() + gumbel.to(logp.device)).argmax(-1)
    else:
        token = logp.argmax(-1)
    return token, logp.amax(-1).exp(), logp.gather(-1, token[..., None]).squeeze(-1)


class Decoder:
    """State of a batch while it is decoded. One instance decodes one batch: `Decoder(...).run()`. With copies = G each
    prompt is prefilled once and decoded G times (rows G * i ... G * i + G - 1), as a group of rollouts is.

    Rows advance independently: each has its own block number, and with it its own place in the cache. Slots: prompts
    are left-padded to P' (the last prompt token is the first input, so it is not among them), output input u_i lives
    in slot P' + i, and B spare slots at the end take what a row without a previous block would write.
    """

    @torch.inference_mode()
    def __init__(self, model, prompts, tok, block_len, tau, max_len, temperature=0.0, seeds=None, record=True,
                 copies=1):
        check_settings(block_len, tau, temperature)
        self.model, self.tok, self.b, self.tau, self.temperature = model, tok, block_len, tau, temperature
        self.dev, n = model.embed.weight.device, len(prompts)
        self.blocks = -(-max_len // block_len)                      # most blocks of an output
        length = self.blocks * block_len
        if min(map(len, prompts)) < 2:
            raise SettingsError("a prompt needs at least two tokens: one to look at and one to continue")
        prompt, there = diffusion.pad_prompts(prompts, tok.pad)
        if int(there.sum(1).max()) - 1 + length > model.cfg.ctx_len:
            raise SettingsError(f"a prompt of {int(there.sum(1).max())} tokens and {length} of output do not fit ctx_len "
                             f"{model.cfg.ctx_len}; fewer history items or a model with a longer context will")
        self.p, self.there, self.padded = prompt.shape[1] - 1, there[:, :-1].to(self.dev), not bool(there.all())
        self.real = self.there.sum(1)                               # (n,) prompt tokens in the cache
        # Block number of every slot; the spare slots are beyond any block.
        self.slot_block = torch.cat((torch.arange(self.p) - self.p, torch.arange(length) // block_len,
                                     torch.full((block_len,), self.blocks + 1))).to(self.dev)
        self.cache = KVCache(model.cfg, n, self.p + length + block_len, self.dev, next(model.blocks.parameters()).dtype)
        self.prefill(prompt[:, :-1].to(self.dev))
        group = torch.arange(n, device=self.dev).repeat_interleave(copies)
        if copies > 1:
            self.cache.keep(group)
        self.there, self.real, n = self.there[group], self.real[group], n * copies
        self.first = prompt[:, -1].to(self.dev)[group]              # the real token that opens the active block
        # Slots that may be looked at: all but those that hold pads.
        self.key_there = torch.cat((self.there, torch.ones(n, length + block_len, dtype=torch.bool, device=self.dev)), 1)
        self.offset = torch.arange(block_len, device=self.dev)
        self.generators = [torch.Generator().manual_seed(s) for s in seeds] if temperature else None
        self.rows = list(range(n))                                  # which output each row of the batch belongs to
        self.out = [Rollout([]) for _ in range(n)]
        self.record = record
        self.block = torch.zeros(n, dtype=torch.long, device=self.dev)
        self.tokens = torch.full((n, block_len), tok.mask, device=self.dev)             # targets y of the active block
        self.open = torch.ones(n, block_len, dtype=torch.bool, device=self.dev)
        self.step = torch.zeros(n, block_len, dtype=torch.long, device=self.dev)        # when committed
        self.logp = torch.zeros(n, block_len, device=self.dev)
        self.nth = torch.zeros(n, dtype=torch.long, device=self.dev)                    # steps done in the active block
        self.before = torch.zeros(n, block_len, dtype=torch.long, device=self.dev)      # clean inputs of the last block
        self.pending = torch.zeros(n, dtype=torch.bool, device=self.dev)                # its K/V are still to be made
        self.alive = torch.ones(n, dtype=torch.bool, device=self.dev)

    def prefill(self, prompt):
        """The prompt through the model once. Pads look at themselves only (softmax over nothing would be NaN)."""
        place = (torch.arange(self.p, device=self.dev) - self.p + self.real[:, None]).clamp(min=0)
        causal = diffusion.may_look(self.slot_block[:self.p], self.slot_block[:self.p])
        if self.padded:
            eye = torch.eye(self.p, dtype=torch.bool, device=self.dev)
            causal = (causal & self.there[:, None, :] | eye)[:, None]
        self.model(prompt, place, causal, self.cache.at(0, self.p))

    def canvas(self):
        """Inputs of the active block (n, B): its first token is real, then each committed target, else <mask>."""
        return diffusion.canvas(torch.cat((self.first[:, None], self.tokens[:, :-1]), 1), self.open, self.tok.mask, self.b)

    def forward(self):
        """One forward of all rows -> logits of the active block (n, B, vocab).

        If any row's last block is still without clean keys and values, the input is [last block | active block].
        Rows that do not need the first half feed it again, which rewrites the same values; in block 0 there is no
        last block, and the half goes to the spare slots.
        """
        inputs, q_block = self.canvas(), self.block[:, None].expand(-1, self.b)
        if fused := bool(self.pending.any()):
            inputs = torch.cat((self.before, inputs), 1)                                # (n, 2B)
            q_block = torch.cat((q_block - 1, q_block), 1)
        lengths = q_block.shape[1]
        at = q_block * self.b + self.offset.repeat(lengths // self.b)                   # (n, B or 2B) index in output
        last = int(self.block.max())
        together = bool((self.block == last).all())                                     # all rows at the same block
        if together and not (fused and last == 0):
            slots, used = self.p + last * self.b - (self.b if fused else 0), self.p + (last + 1) * self.b
        else:
            spare = self.cache.capacity - self.b + self.offset.repeat(lengths // self.b)
            slots, used = torch.where(at >= 0, self.p + at, spare), self.cache.capacity
        mask = None
        if fused or not together:
            mask = self.slot_block[:used] <= q_block[..., None]                         # one occupant a slot: the rule
            mask = (mask & self.key_there[:, None, :used])[:, None]                     # (n, 1, q, used)
        elif self.padded:
            mask = self.key_there[:, None, None, :used]
        hidden = self.model(inputs, (self.real[:, None] + at).clamp(min=0), mask, self.cache.at(slots, used))
        return diffusion.output_logits(self.model, hidden[:, -self.b:], self.tok)

    def advance(self):
        """One step: forward, commit, and on to the next block where one is finished."""
        was_clean = ~self.open[:, :-1].any(1)                       # the canvas of this forward held no <mask>
        logits = self.forward()
        self.pending.zero_()
        token, confidence, logp = choose(logits, self.temperature, self.generators)
        now = diffusion.commit(confidence, self.open, self.tau)                         # (n, B)
        self.tokens = torch.where(now, token, self.tokens)
        self.logp = torch.where(now, logp, self.logp)
        self.step = torch.where(now, self.nth[:, None], self.step)
        self.open, self.nth = self.open & ~now, self.nth + 1
        done = ~self.open.any(1)                                                        # (n,) blocks complete
        if bool(done.any()):
            self.finish(done, was_clean)

    def finish(self, done, was_clean):
        """Hand over the finished blocks; rows with an <eos>, or at the last block, stop."""
        for r in done.nonzero().flatten().tolist():
            if not self.alive[r]:
                continue
            out = self.out[self.rows[r]]
            block = self.tokens[r].tolist()
            out.canvas += block
            out.nfe += int(self.nth[r])
            if self.record:
                out.step += self.step[r].tolist()
                out.logprob += self.logp[r].tolist()
            if self.tok.eos in block or int(self.block[r]) + 1 == self.blocks:
                end = out.canvas.index(self.tok.eos) + 1 if self.tok.eos in out.canvas else len(out.canvas)
                out.tokens = out.canvas[:end]
                self.alive[r] = False
        move = done & self.alive
        clean = torch.cat((self.first[:, None], self.tokens[:, :-1]), 1)
        self.before = torch.where(move[:, None], clean, self.before)
        self.pending = move & ~was_clean
        self.first = torch.where(move, self.tokens[:, -1], self.first)
        self.block = self.block + move
        fresh = move | ~self.alive                                  # a stopped row idles on an open canvas until removed
        self.open = self.open | fresh[:, None]
        self.nth = torch.where(fresh, 0, self.nth)

    def drop(self):
        """Remove stopped rows once they are half of the batch (copying the cache at every end would cost more)."""
        keep = self.alive.nonzero().flatten()
        if not len(keep):
            return
        self.cache.keep(keep)
        self.rows = [self.rows[r] for r in keep.tolist()]
        if self.generators:
            self.generators = [self.generators[r] for r in keep.tolist()]
        for name in ("there", "real", "key_there", "block", "tokens", "open", "step", "logp", "nth", "first", "before",
                     "pending", "alive"):
            setattr(self, name, getattr(self, name)[keep])

    @torch.inference_mode()
    def run(self, watch=None):
        """Decode to the end -> list of Rollouts, in the order of the prompts. watch(decoder) is called after each step."""
        while bool(self.alive.any()):
            self.advance()
            if watch:
                watch(self)
            if 2 * int(self.alive.sum()) <= len(self.rows):
                self.drop()
        return self.out


class SettingsError(ValueError):
    """A block length, threshold, temperature or prompt that cannot be decoded with."""


def check_settings(block_len, tau, temperature=0.0):
    if block_len < 1:
        raise SettingsError(f"block length {block_len}: at least 1 (1 is the AR decoder)")
    if not 0 < tau <= 1:
        raise SettingsError(f"tau {tau}: a probability, above 0 and up to 1")
    if temperature < 0:
        raise SettingsError(f"temperature {temperature}: 0 (greedy) or above")


def decode(model, prompts, tok, block_len=1, tau=1.0, max_len=128, temperature=0.0, seeds=None, batch=128, bar=None):
    """Decode any number of prompts in batches -> Rollouts in their order. Prompts of similar length share a batch."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out = [None] * len(prompts)
    for lo in range(0, len(prompts), batch):
        rows = order[lo:lo + batch]
        done = Decoder(model, [prompts[i] for i in rows], tok, block_len, tau, max_len, temperature,
                       [seeds[i] for i in rows] if seeds else None).run()
        for i, rollout in zip(rows, done):
            out[i] = rollout
        if bar is not None:
            bar.update(len(rows))
    return out


# === The command line: one real user ==================================================================================

def watcher(tok, stream):
    """--watch: redraw the output so far after each step; a dot is a token that is still masked."""
    state = {"lines": 0}

    def show(d):
        active = [t if not open_ else tok.mask for t, open_ in zip(d.tokens[0].tolist(), d.open[0].tolist())]
        body = tok.text(d.out[0].canvas + (active if bool(d.alive[0]) else [])).replace("<mask>", " ·")
        if not stream.isatty():                                     # a file or a pipe gets the finished text alone
            return None if bool(d.alive[0]) else stream.write(body + "\n")
        body = "\n".join(line[:shutil.get_terminal_size().columns] for line in body.split("\n"))
        stream.write(f"\x1b[{state['lines']}F\x1b[J" if state["lines"] else "")      # up to the first line, clear below
        stream.write(body + "\n")
        stream.flush()
        state["lines"] = body.count("\n") + 1
        time.sleep(0.15)
    return show


def wait_for(model):
    """A GPU works on while Python goes on: before reading a clock, wait for it."""
    if model.embed.weight.is_cuda:
        torch.cuda.synchronize()


def timed(model, prompts, tok, block_len, tau, max_len, temperature=0.0, seeds=None):
    """Decode these prompts as one batch: (rollouts, seconds of decoding, seconds of prefill and decoding)."""
    start = time.perf_counter()
    d = Decoder(model, prompts, tok, block_len, tau or 1.0, max_len, temperature, seeds, record=False)
    wait_for(model)
    ready = time.perf_counter()
    done = d.run()
    end = time.perf_counter()
    return done, end - ready, end - start


def main(argv=None):
    import ranking                      # only here: the stages build on the sampler, not the other way round
    import stage
    from data import amazon, prepare
    from data.dataset import longest_output

    ap = argparse.ArgumentParser(description="Re-rank one real user's candidates and show how.")
    ap.add_argument("--preset", choices=list(stage.MODELS), default="mini")
    ap.add_argument("--out", default="", help="folder of the run (default out/<preset>)")
    ap.add_argument("--user", type=int, default=0, help="the user's number in users.tsv.gz")
    ap.add_argument("--student", default="", help="weights of the diffusion model (default: the last stage there is)")
    ap.add_argument("--block-len", type=int, help="block length of the diffusion model (default: as trained)")
    ap.add_argument("--tau", type=float, default=0.9, help="commit threshold of the diffusion model")
    ap.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--watch", action="store_true", help="show the canvas filling, step by step")
    ap.add_argument("--prompt", action="store_true", help="show the prompt, too, as the model reads it")
    ap.add_argument("--json", action="store_true", help="one JSON object instead of text")
    s = ap.parse_args(argv)
    s.out, s.data = s.out or f"out/{s.preset}", ""
    try:
        check_settings(1 if s.block_len is None else s.block_len, s.tau, s.temperature)
        stage.check_device(s.device)
        if not any(Path(s.out).glob("*.pt")) and not (stage.SHIPPED / s.preset).exists():
            raise stage.UserError(f"no weights in {s.out}: train them with python train_ar.py --preset {s.preset}")
        with quiet(s.json):
            folder, tok, summary = stage.load_data(s)
        split = amazon.load(summary["config"]["data"])
        rows = prepare.Rows(folder / "test.npz")
        names = [split.user[u] for u in rows.arrays["user"]]
        if str(s.user) not in names:
            raise stage.UserError(f"no user {s.user}: numbers run from 0 to {len(split.user) - 1}, and a user needs "
                                  "enough purchases to have a test row")
        models = []
        student = s.student or (stage.students(s.out, s.preset) or ["cft"])[-1]
        if s.student and not stage.weights(s.out, s.preset, s.student):
            raise stage.UserError(f"--student {s.student}: there is no {s.out}/{s.student}.pt")
        for name in ("ar", student):
            path = stage.weights(s.out, s.preset, name)
            if path:
                model, state = stage.load_model(path, tok, summary, stage.remedy(s, name), s.device)
                models.append((name, 1 if name == "ar" else s.block_len or stage.block_len(state), model))
        if not models:
            raise stage.UserError(f"no weights in {s.out}: train them with python train_ar.py --preset {s.preset}")
        r = names.index(str(s.user))
        prompt, target, n = rows[r][0], int(rows.target[r]), int(rows.n[r])
        result = {"user": s.user, "history": [split.title[i] for i in rows.arrays["history"][r][::-1] if i >= 0],
                  "candidates": [split.title[i] for i in rows.arrays["item"][r] if i >= 0],
                  "target": target if target >= 0 else None, "modes": []}
        if not s.json:
            show_user(result)
            print("\n" + tok.text(prompt) if s.prompt else "", end="\n" if s.prompt else "")
        for mode, block_len, model in models:
            max_len = longest_output(summary["config"]["candidates"])
            if s.watch and not s.json:
                print(f"\n--- {mode} ---")
                Decoder(model, [prompt], tok, block_len, s.tau, max_len, s.temperature, [s.seed]).run(watcher(tok, sys.stdout))
            for _ in range(2):                                      # the first time warms up
                [out], seconds, whole = timed(model, [prompt], tok, block_len, s.tau, max_len, s.temperature, [s.seed])
            parsed = ranking.parse(out.tokens, tok, n)
            result["modes"].append({
                "mode": mode, "block_len": block_len, "tau": s.tau if block_len > 1 else None, "reasoning": tok.text(out.tokens),
                "order": parsed.order, "failure": parsed.failure, "nfe": out.nfe, "tokens": len(out.tokens),
                "tok_s": len(out.tokens) / seconds, "tok_s_end_to_end": len(out.tokens) / whole})
            if not s.json:
                show_mode(result, result["modes"][-1], s.watch)
    except SettingsError as e:
        raise stage.UserError(str(e))
    if s.json:
        print(json.dumps(result, indent=1))


def quiet(on):
    """With --json only the JSON goes to stdout; progress goes to stderr."""
    import contextlib
    return contextlib.redirect_stdout(sys.stderr) if on else contextlib.nullcontext()


def show_user(result):
    print(f"User {result['user']}, last purchases, oldest first:")
    for title in result["history"]:
        print(f"    {title[:100] or '(no title)'}")


def show_mode(result, mode, watched):
    name = mode["mode"] + (f", blocks of {mode['block_len']}, tau {mode['tau']}" if mode["tau"] else "")
    print(f"\n--- {name}: {mode['tokens']} tokens in {mode['nfe']} forwards, {mode['tok_s']:,.0f} tokens/s decoding, "
          f"{mode['tok_s_end_to_end']:,.0f} with prefill ---")
    if not watched:
        print(mode["reasoning"])
    if mode["failure"]:
        print(f"\nNo valid permutation ({mode['failure']}): the pre-rank order would be shown.")
    order = mode["order"] or list(range(len(result["candidates"])))
    print("\n after before   candidate")
    for place, c in enumerate(order, 1):
        mark = "  <- the true next purchase" if c == result["target"] else ""
        print(f"{place:6}{c + 1:7}   {'ABCDEFGHIJ'[c]} {result['candidates'][c][:80] or '(no title)'}{mark}")
    if result["target"] is None:
        print("        the true next purchase is not among the candidates")


if __name__ == "__main__":
    from stage import main as run_main
    run_main(main)
