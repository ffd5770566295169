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
import time
from dataclasses import dataclass, field

import torch

import diffusion
import machine
from checkpoint import UserError
from model import KVCache


@dataclass
class Rollout:
    """One decoded output. tokens end with the first <eos>, or with the last block if none came.

    The trajectory: step[i] and logprob[i] say at which step of its block token i of `canvas` (tokens and tail, whole
    blocks) was committed, and with which log-probability; nfe counts this row's steps, each one forward, without the
    prefill (and, in a larger batch, without the extra read of a finished block: Decoder.forward).
    """
    tokens: list
    canvas: list = field(default_factory=list)
    step: list = field(default_factory=list)
    logprob: list = field(default_factory=list)
    nfe: int = 0


def choose(logits, open_, tau, temperature=0.0, generators=None):
    """One step's decisions. logits (n, B, vocab), open_ (n, B) -> what to commit now (n, B), token and log-prob (n, B).

    Confidence is the top probability, at the temperature of the draw, and not the probability of the token drawn:
    *when* a position is committed then follows from the canvas alone. Otherwise a position would wait until it has
    drawn a likely token, and outputs would not be samples from the distribution that their log-probabilities say. So
    the commit rule comes first, and only what is committed is drawn. Greedy at temperature 0 (nothing is divided).
    """
    logp = (logits / temperature if temperature else logits).log_softmax(-1)
    best, token = logp.max(-1)                                                          # (n, B)
    now = diffusion.commit(best.exp(), open_, tau)
    if temperature:
        noise = torch.stack([torch.rand(logits.shape[1], generator=g, dtype=torch.float64) for g in generators])
        token[now] = draw(logp[now], noise.to(logp.device)[now])
        best = logp.gather(-1, token[..., None]).squeeze(-1)
    return now, token, best


def draw(logp, uniform):
    """Tokens (m,) from log-probabilities (m, vocab) and uniform numbers (m,) in [0, 1): the first token at which the
    cumulated probability reaches 1 - u. In float64: a float32 uniform is a multiple of 2^-24, and cuts the tail off."""
    reached = logp.double().exp().cumsum(-1)
    return torch.searchsorted(reached, ((1 - uniform) * reached[:, -1])[:, None])[:, 0]   # never one of probability 0


class Decoder:
    """State of a batch while it is decoded. One instance decodes one batch: `Decoder(...).run()`. With copies = G each
    prompt is prefilled once and decoded G times (rows G * i ... G * i + G - 1), as a group of rollouts is.

    Rows advance independently: each has its own block number, and with it its own place in the cache. Slots: prompts
    are left-padded to P' (the last prompt token is the first input, so it is not among them), output input u_i lives
    in slot P' + i.
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
            raise UserError("a prompt needs at least two tokens: one to look at and one to continue")
        prompt, there = diffusion.pad_prompts(prompts, tok.pad)
        if int(there.sum(1).max()) - 1 + length > model.cfg.ctx_len:
            raise UserError(f"a prompt of {int(there.sum(1).max())} tokens and {length} of output do not fit ctx_len "
                            f"{model.cfg.ctx_len}; fewer history items or a model with a longer context will")
        self.p, self.there, self.padded = prompt.shape[1] - 1, there[:, :-1].to(self.dev), not bool(there.all())
        self.real = self.there.sum(1)                               # (n,) prompt tokens in the cache
        self.slot_block = torch.cat((torch.arange(self.p) - self.p, torch.arange(length) // block_len)).to(self.dev)
        self.cache = KVCache(model.cfg, n, self.p + length, self.dev, next(model.blocks.parameters()).dtype)
        self.prefill(prompt[:, :-1].to(self.dev))
        group = torch.arange(n, device=self.dev).repeat_interleave(copies)
        if copies > 1:
            self.cache.keep(group)
        self.there, self.real, n = self.there[group], self.real[group], n * copies
        self.first = prompt[:, -1].to(self.dev)[group]              # the real token that opens the active block
        # Slots that may be looked at: all but those that hold pads.
        self.key_there = torch.cat((self.there, torch.ones(n, length, dtype=torch.bool, device=self.dev)), 1)
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
        """One step's forward -> logits of the active block (n, B, vocab).

        Before it, the last block must have keys and values from its clean tokens. Where every row still lacks them, as
        at batch 1 after each block, the input is [last block | active block], and they cost no pass of their own. Rows
        of a larger batch finish at different steps: the few that just did have a small forward for themselves, which
        costs less than giving all rows twice the tokens.
        """
        inputs, q_block = self.canvas(), self.block[:, None].expand(-1, self.b)
        if bool(self.pending.all()):
            inputs, q_block = torch.cat((self.before, inputs), 1), torch.cat((q_block - 1, q_block), 1)     # (n, 2B)
        elif bool(self.pending.any()):
            rows = self.pending.nonzero().flatten()
            self.read(self.before[rows], q_block[rows] - 1, rows)
        return diffusion.output_logits(self.model, self.read(inputs, q_block)[:, -self.b:], self.tok)

    def read(self, inputs, q_block, rows=None):
        """Inputs (m, q) and their block numbers (m, q), of all rows or of `rows` (m,), through the model against the
        cache -> hidden states (m, q, width). They are written to their own slots of the cache."""
        some = slice(None) if rows is None else rows
        at = q_block * self.b + self.offset.repeat(inputs.shape[1] // self.b)           # (m, q) index in the output
        together = rows is None and bool((q_block == q_block[:1]).all())                # all rows at the same block
        used = self.p + (int(q_block.max()) + 1) * self.b
        mask = None
        if not together or inputs.shape[1] > self.b:
            mask = diffusion.may_look(q_block, self.slot_block[:used])                  # one occupant a slot: the rule
            mask = (mask & self.key_there[some, None, :used])[:, None]                  # (m, 1, q, used)
        elif self.padded:
            mask = self.key_there[:, None, None, :used]
        slots = used - inputs.shape[1] if together else self.p + at
        return self.model(inputs, self.real[some, None] + at, mask, self.cache.at(slots, used, rows))

    def advance(self):
        """One step: forward, commit, and on to the next block where one is finished."""
        was_clean = ~self.open[:, :-1].any(1)                       # the canvas of this forward held no <mask>
        logits = self.forward()
        self.pending.zero_()
        now, token, logp = choose(logits, self.open, self.tau, self.temperature, self.generators)   # (n, B) each
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


def check_settings(block_len, tau, temperature=0.0):
    """block_len None: not given, to be taken from the checkpoint."""
    if block_len is not None and block_len < 1:
        raise UserError(f"block length {block_len}: at least 1 (1 is the AR decoder)")
    if not 0 < tau <= 1:
        raise UserError(f"tau {tau}: a probability, above 0 and up to 1")
    if temperature and not 0.001 <= temperature <= 1000:            # nor nan; logits over less overflow
        raise UserError(f"temperature {temperature}: 0 (greedy), or from .001 to 1000")


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


def timed(model, prompts, tok, block_len, tau, max_len, temperature=0.0, seeds=None):
    """Decode these prompts as one batch: (rollouts, seconds of decoding, seconds of prefill and decoding)."""
    start = time.perf_counter()
    d = Decoder(model, prompts, tok, block_len, tau or 1.0, max_len, temperature, seeds, record=False)
    machine.wait_for(model.embed.weight.device)
    ready = time.perf_counter()
    done = d.run()
    end = time.perf_counter()
    return done, end - ready, end - start


if __name__ == "__main__":
    import show                                                     # only here: the stages build on the sampler, show on them
    import settings
    settings.main(show.main)
