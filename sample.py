"""The sampler: prompts in, outputs out, one block at a time. Block length 1 *is* the AR decoder.

Paper: "The conversion" (commit rule, NFE, cache). The prompt is read once (prefill). Then each step runs the active
block, partly masked, against the cache, and commits every target that is sure enough (tau) plus the surest one.

A careless sampler pays costs at every step that this one does not pay. Nothing is concatenated: the cache is allocated
once, and a canvas overwrites its own slots. A mask is made only where some key must not be seen. The keys and values of
a finished block must be made from clean tokens; that forward is fused with the first step of the next block where all
rows need it, and it falls away where the canvas was already clean (at block length 1 it always is).

    python sample.py --watch         # a real user, re-ranked by AR and by diffusion, before your eyes

Left out: caching inside an active block (Fast-dLLM approximates there; here keys and values come from clean blocks
only), a constrained decoder (the model must learn to write a valid permutation), prompts that arrive at other times.
"""
import runpy
import time
from dataclasses import dataclass, field

import torch

import diffusion
from model import KVCache
from plumbing import machine
from plumbing.settings import UserError


@dataclass
class Rollout:
    """One decoded output, with its trajectory: which token was committed when, and how likely it was.

    Example with B = 4, where the output is "w e r e <eos>" and x stands for <eos>:

        tokens    w e r e   x              up to the first <eos>; all of the canvas if none came
        canvas    w e r e | x x x x        whole blocks
        step      0 1 0 2 | 0 0 1 0        the step of its block at which each token was committed
        nfe       3 + 2 = 5                forwards: the steps of all blocks, without the prefill

    logprob has the log-probability (nats) of each token of the canvas when it was committed. step and logprob stay
    empty where nothing is recorded. nfe leaves out the extra reads of finished blocks in a batch (Decoder.forward).
    """
    tokens: list
    canvas: list = field(default_factory=list)
    step: list = field(default_factory=list)
    logprob: list = field(default_factory=list)
    nfe: int = 0


# === 1. One step's decisions ==========================================================================================

def choose(logits, open_, tau, temperature=0.0, generators=None):
    """Decide what to commit now. logits (n, B, vocab), open_ (n, B) -> now, token and log-probability, (n, B) each.

    The commit rule comes first, and only what is committed is drawn. The confidence of a position is its top
    probability (at the temperature of the draw), not the probability of the token that is drawn. *When* a position is
    committed then follows from the canvas alone. Otherwise a position would wait until it has drawn a likely token, and
    outputs would not be samples from the distribution that their log-probabilities describe.

    Temperature 0 is greedy, and divides nothing. Otherwise generators has one torch.Generator per row.
    """
    logp = (logits / temperature if temperature else logits).log_softmax(-1)              # (n, B, vocab)
    best, token = logp.max(-1)                                                            # (n, B)
    now = diffusion.commit(best.exp(), open_, tau)                                        # (n, B)
    if temperature:
        noise = torch.stack([torch.rand(logits.shape[1], generator=g, dtype=torch.float64) for g in generators])
        token[now] = draw(logp[now], noise.to(logp.device)[now])
        best = logp.gather(-1, token[..., None]).squeeze(-1)
    return now, token, best


def draw(logp, uniform):
    """Tokens (m,) from log-probabilities (m, vocab) and uniform numbers u (m,) in [0, 1): the first token at which the
    cumulated probability reaches 1 - u, so a token of probability 0 is never drawn. In float64, because a float32
    uniform number is a multiple of 2^-24 and would cut the tail off."""
    reached = logp.double().exp().cumsum(-1)                                              # (m, vocab)
    return torch.searchsorted(reached, ((1 - uniform) * reached[:, -1])[:, None])[:, 0]


# === 2. A batch while it is decoded ===================================================================================

@dataclass
class Row:
    """One output while it is decoded. Everything that is known about a row without asking the device is kept here."""
    out: Rollout
    first: int                # the real token that opens the active block
    block: int                # number of the active block
    tokens: list              # (B,) its targets; <mask> where a target is still hidden
    step: list                # (B,) at which step each target was committed
    logprob: list             # (B,) its log-probability then
    nth: int = 0              # steps done in this block
    last: list = None         # (1 + B,) first and tokens of the block before, while its keys and values must still be made
    alive: bool = True        # False once the row has stopped


class Decoder:
    """Decodes one batch: `Decoder(...).run()`. The rows advance independently, each with its own active block.

    Every row has the same slots in the cache. Prompts are left-padded to P' tokens. The last prompt token is not among
    them, because it is the first input of block 0 (diffusion.py, "The shift"). Input i of the output lives in slot
    P' + i. Here is a batch of three rows with P' = 5 and B = 4:

        slot     0 1 2 3 4   5 6 7 8   9 ...     13 ...
                  prompt    | block 0 | block 1 | block 2 |      h  a prompt token       .  a pad, which nobody sees
        row 0    . . h h h  | c c c c | u u u u | a a a a |      c  a clean input        -  not written yet
        row 1    h h h h h  | c c c c | a a a a | - - - - |      u  an input that was last read with <mask> among them
        row 2    . h h h h  | c c c c | c c c c | a a a a |      a  an input of the active block

    Row 0 is *pending*: it has just finished block 1, and the keys and values of that block were made while some of its
    inputs were still <mask>. They must be made again from the clean inputs, before block 2 may look at them:

        fused read of row 0    [ last block, clean | active block ]    2B tokens in one forward    (see `forward`)

    The device is asked once per step, for what was decided (`advance`). Place, step and life of a row are plain Python
    numbers. A stopped row stays in the batch, where nobody looks at it, until half of the rows have stopped.
    """

    @torch.inference_mode()
    def __init__(self, model, prompts, tok, block_len, tau, max_len, temperature=0.0, seeds=None, record=True,
                 copies=1):
        """prompts: lists of two tokens or more. max_len: most tokens of an output, rounded up to whole blocks. seeds:
        one per output, needed where temperature > 0. record: keep step and logprob.

        With copies = G each prompt is read once and decoded G times, as a group of rollouts is: prompt i has the rows
        G * i ... G * i + G - 1. Raises UserError for settings or prompts that cannot work.
        """
        check_settings(block_len, tau, temperature)
        self.model, self.tok, self.device = model, tok, model.embed.weight.device
        self.block_len, self.tau, self.temperature, self.record = block_len, tau, temperature, record
        self.blocks = -(-max_len // block_len)                      # most blocks of an output
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds] if temperature else None
        prompt, not_pad = self.pad(prompts)                                               # (n, P) each
        self.lay_out_slots(not_pad)
        self.prefill(prompt[:, :-1].to(self.device))
        if copies > 1:
            group = torch.arange(len(prompts), device=self.device).repeat_interleave(copies)         # 0 0 1 1 ... for 2
            self.keep(group)
        self.rows = [Row(Rollout([]), p[-1], 0, *self.hidden_block()) for p in prompts for _ in range(copies)]
        self.out = [row.out for row in self.rows]

    def pad(self, prompts):
        """Left-pad the prompts -> (tokens, not_pad), (n, P) each. Refuses prompts that are too short or too long."""
        if min(map(len, prompts)) < 2:
            raise UserError("a prompt needs at least two tokens: one to look at and one to continue")
        prompt, not_pad = diffusion.pad_prompts(prompts, self.tok.pad)
        longest, output = max(map(len, prompts)), self.blocks * self.block_len
        if longest - 1 + output > self.model.cfg.ctx_len:
            raise UserError(f"a prompt of {longest} tokens and {output} of output do not fit ctx_len "
                            f"{self.model.cfg.ctx_len}; fewer history items or a model with a longer context will")
        return prompt, not_pad

    def lay_out_slots(self, not_pad):
        """Allocate the cache, and say of each slot which block it belongs to and whether it may be read at all."""
        n, output = len(not_pad), self.blocks * self.block_len
        self.padded = not bool(not_pad.all())
        self.prompt_slots = not_pad.shape[1] - 1                                          # P'
        not_pad = not_pad[:, :-1].to(self.device)
        self.prompt_len = not_pad.sum(1, keepdim=True)                                    # (n, 1) without pads
        numbers = torch.arange(self.prompt_slots) - self.prompt_slots, torch.arange(output) // self.block_len
        self.slot_block = torch.cat(numbers).to(self.device)                              # (slots,) below 0: the prompt
        self.readable = torch.cat((not_pad, not_pad.new_ones(n, output)), 1)              # (n, slots)
        self.places = torch.arange(output, device=self.device)                            # 0 1 2 ... in the output
        dtype = next(self.model.blocks.parameters()).dtype
        self.cache = KVCache(self.model.cfg, n, self.prompt_slots + output, self.device, dtype)

    def prefill(self, prompt):
        """Read the prompts (n, P') once, causally. A pad looks at itself alone: softmax over nothing is NaN."""
        p = self.prompt_slots
        place = (torch.arange(p, device=self.device) - p + self.prompt_len).clamp(min=0)              # (n, P')
        mask = diffusion.may_look(self.slot_block[:p], self.slot_block[:p])                           # (P', P')
        if self.padded:
            itself = torch.eye(p, dtype=torch.bool, device=self.device)
            mask = (mask & self.readable[:, None, :p] | itself)[:, None]                              # (n, 1, P', P')
        self.model(prompt, place, mask, self.cache.at(0, p))

    def hidden_block(self):
        """tokens, step and logprob of a block in which nothing is decided."""
        return [self.tok.mask] * self.block_len, [0] * self.block_len, [0.0] * self.block_len

    @torch.inference_mode()
    def run(self, watch=None):
        """Decode to the end -> Rollouts in the order of the prompts. watch(decoder) is called after each step."""
        while any(row.alive for row in self.rows):
            self.advance()
            if watch:
                watch(self)
            if 2 * sum(row.alive for row in self.rows) <= len(self.rows):
                self.drop()
        return self.out

    def advance(self):
        """One step: one forward, then commit, then on to the next block in the rows that have finished theirs."""
        mask = self.tok.mask
        state = torch.tensor([[row.first, *row.tokens] for row in self.rows], device=self.device)     # (n, 1 + B)
        first, targets = state[:, 0], state[:, 1:]                                                    # (n,), (n, B)
        # Does this forward's canvas hold no <mask>? The last target is left out: it is no input of its own block.
        was_clean = [mask not in row.tokens[:-1] for row in self.rows]
        logits = self.forward(first, targets)                                                         # (n, B, vocab)
        decided = choose(logits, targets == mask, self.tau, self.temperature, self.generators)        # (n, B) each
        # The one look at the device. In float32, which holds every token id below 2^24 exactly.
        decided = torch.stack(decided).tolist()                                                       # (3, n, B)
        for row, clean, *row_decided in zip(self.rows, was_clean, *decided):
            if not row.alive:
                continue
            for i, (now, token, logprob) in enumerate(zip(*row_decided)):
                if now:
                    row.tokens[i], row.step[i], row.logprob[i] = int(token), row.nth, logprob
            row.nth, row.last = row.nth + 1, None
            if mask not in row.tokens:
                self.finish(row, clean)

    def forward(self, first, targets):
        """The forward of one step; first (n,) and targets (n, B) -> logits of the active block (n, B, vocab).

        A hidden target is <mask>, so the shift turns targets into a canvas. Pending rows need keys and values from the
        clean tokens of their last block first. With three rows of B = 4:

            pending      forwards of this step
            none         [active] of all rows                                    3 rows of 4 tokens
            all          [last | active] of all rows, fused                      3 rows of 8 tokens
            row 1 only   [last] of row 1, then [active] of all rows              1 row of 4 tokens, then 3 rows of 4

        At batch 1 it is "all" after each block, so a finished block costs no forward of its own. In a larger batch rows
        finish at different steps, and reading a few rows apart costs less than giving all rows 8 tokens.
        """
        inputs, blocks = diffusion.shift(first, targets), [row.block for row in self.rows]            # (n, B), n numbers
        pending = [r for r, row in enumerate(self.rows) if row.last is not None]
        if pending:
            last = torch.tensor([self.rows[r].last for r in pending], device=self.device)             # (pending, 1 + B)
            last = diffusion.shift(last[:, 0], last[:, 1:])                                           # (pending, B) clean
        if len(pending) == len(self.rows):
            hidden_states = self.read(torch.cat((last, inputs), 1), [b - 1 for b in blocks], None)    # (n, 2B, width)
        else:
            if pending:
                self.read(last, [blocks[r] - 1 for r in pending], torch.tensor(pending, device=self.device))
            hidden_states = self.read(inputs, blocks, None)                                           # (n, B, width)
        return diffusion.output_logits(self.model, hidden_states[:, -self.block_len:], self.tok)

    def read(self, inputs, blocks, rows):
        """Run inputs (m, q), of all rows (None) or of `rows` (m,), against the cache -> hidden states (m, q, width).

        blocks: m numbers, of the block to which each row's first input belongs; q is B or 2B. Keys and values are
        written to the slots of the inputs. In the drawing above (B = 4, P' = 5), where rows 0 and 2 read block 2 and row
        1 reads block 1:

            place in the output    8 9 10 11 | 4 5 6 7 | 8 9 10 11        slots = 5 + place, a list per row
            keys looked at         slots 0 ... 16, cut by a mask: row 1 must not see block 2

        Where all rows read one and the same block there is no mask to make: that block and all before it may be seen,
        and the slots are one range for all rows. Only pads must still be hidden, if there are any.
        """
        q, b, p = inputs.shape[1], self.block_len, self.prompt_slots
        used = p + max(blocks) * b + q                                                    # slots up to the newest input
        together = rows is None and min(blocks) == max(blocks)                            # all rows at the same block
        prompt_len, readable = (x if rows is None else x[rows] for x in (self.prompt_len, self.readable))
        mask = None
        if together:
            place = self.places[blocks[0] * b:blocks[0] * b + q]                                      # (q,)
            slots = used - q
        else:
            place = torch.tensor(blocks, device=self.device)[:, None] * b + self.places[:q]           # (m, q)
            slots = p + place
        if not together or q > b:
            mask = diffusion.may_look((place // b).expand(len(blocks), q), self.slot_block[:used])    # (m, q, used)
            mask = (mask & readable[:, None, :used])[:, None]                                         # (m, 1, q, used)
        elif self.padded:
            mask = readable[:, None, None, :used]                                                     # (m, 1, 1, used)
        return self.model(inputs, prompt_len + place, mask, self.cache.at(slots, used, rows))

    def finish(self, row, was_clean):
        """Hand over the finished block of a row, and move the row to the next block, or stop it.

        was_clean: this step's forward had no <mask> among the inputs of the row. Two rows with B = 4:

            tokens              what happens
            a r e t             block + 1, first = t. Unless it was clean, the row is pending.
            o n <eos> <eos>     it holds <eos>, so the row stops
        """
        out = row.out
        out.canvas += row.tokens
        out.nfe += row.nth
        if self.record:
            out.step += row.step
            out.logprob += row.logprob
        if self.tok.eos in row.tokens or row.block + 1 == self.blocks:
            out.tokens = out.canvas[:out.canvas.index(self.tok.eos) + 1] if self.tok.eos in row.tokens else out.canvas[:]
            row.alive = False
            return
        if not was_clean:
            row.last = [row.first, *row.tokens]
        row.first, row.block, row.nth = row.tokens[-1], row.block + 1, 0
        row.tokens, row.step, row.logprob = self.hidden_block()

    def drop(self):
        """Remove the stopped rows. It is called when they are half of the batch: each call copies the cache."""
        alive = [r for r, row in enumerate(self.rows) if row.alive]
        if alive:
            self.keep(torch.tensor(alive, device=self.device))
            self.rows = [self.rows[r] for r in alive]
            if self.generators:
                self.generators = [self.generators[r] for r in alive]

    def keep(self, rows):
        """What the device holds per row, for these rows (m,) only."""
        self.cache.keep(rows)
        self.prompt_len, self.readable = self.prompt_len[rows], self.readable[rows]


# === 3. Any number of prompts =========================================================================================

def check_settings(block_len, tau, temperature=0.0):
    """Refuse settings that cannot work. Raises UserError. block_len None: not given, a checkpoint will say."""
    if block_len is not None and block_len < 1:
        raise UserError(f"block length {block_len}: at least 1 (1 is the AR decoder)")
    if not 0 < tau <= 1:
        raise UserError(f"tau {tau}: a probability, above 0 and up to 1")
    if temperature and not 0.001 <= temperature <= 1000:            # nan fails too; logits divided by less overflow
        raise UserError(f"temperature {temperature}: 0 (greedy), or from .001 to 1000")


def decode(model, prompts, tok, block_len=1, tau=1.0, max_len=128, temperature=0.0, seeds=None, batch=128, bar=None):
    """Decode any number of prompts in batches -> Rollouts in their order. Prompts of similar length share a batch.
    bar: a tqdm bar that counts prompts, or None. The other arguments are those of Decoder."""
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
    """Decode these prompts as one batch -> (Rollouts, seconds of decoding, seconds of prefill and decoding)."""
    start = time.perf_counter()
    decoder = Decoder(model, prompts, tok, block_len, tau or 1.0, max_len, temperature, seeds, record=False)
    machine.wait_for(model.embed.weight.device)
    ready = time.perf_counter()
    done = decoder.run()
    end = time.perf_counter()
    return done, end - ready, end - start


if __name__ == "__main__":
    runpy.run_module("plumbing.show", run_name="__main__")          # a program of its own, which imports this file
