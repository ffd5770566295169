"""Speed: the same sampler at block length 1 (AR) and in blocks, timed side by side.

All modes are timed in one run, in turns, so a slow minute of the machine hits all of them alike. Tokens per forward is
the figure that does not depend on the machine. A *mode* is (model, block length, tau), where tau is None for AR; the
first mode of a race is always AR, and speed-ups are ratios to it. Block length None is `plain_loop`, which shows what the
sampler costs AR beside the loop that one would write for AR alone.
"""
import copy
import dataclasses
import statistics
import time
from typing import NamedTuple

import torch

import diffusion
import ranking
import sample
from data.dataset import longest_output
from model import KVCache, Transformer
from plumbing import machine
from plumbing.ladder import ladder_row, open_system, text_table, users_with_hit

TAUS = (1.0, 0.95, 0.9, 0.8, 0.6, 0.4)
SIZES = {"output_len": (32, 64, 96, 128), "candidates": (3, 5, 7, 10), "prompt_len": (128, 256, 512, 1024, 2048),
         "batch": (1, 4, 16, 64), "block_len": (4, 8, 16, 32, 64)}  # what the sweeps go through
COLUMNS = [("mode", "mode", "<10", ""), ("tau", "tau", ">6", ""), ("dtype", "dtype", ">10", ""),     # of the frontier
           ("R@1", "r1", ">8", ".3f"), ("NDCG@3", "ndcg3", ">8", ".3f"), ("valid", "valid", ">8", ".1%"),
           ("NFE", "nfe", ">7", ".1f"), ("tok/NFE", "tokens_per_nfe", ">9", ".1f"), ("tok/s", "tok_s", ">8", ",.0f"),
           ("end to end", "tok_s_end_to_end", ">12", ",.0f"), ("speed-up", "speedup", ">10", ".2f"),
           ("least to most", "speedup_range", ">16", ".2f")]


# === Timing ===========================================================================================================

@torch.inference_mode()
def plain_loop(model, prompt, tok, max_len):
    """Greedy AR decoding of one prompt with a cache and nothing else: the baseline at its best.

    Returns what sample.timed does: ([Rollout], seconds of decoding, seconds of prefill and decoding).
    """
    start, n, device = time.perf_counter(), len(prompt), model.embed.weight.device
    cache = KVCache(model.cfg, 1, n + max_len, device, model.embed.weight.dtype)
    places = torch.arange(n + max_len, device=device)[None]                               # (1, n + max_len)
    causal = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    hidden = model(torch.tensor([prompt], device=device), places[:, :n], causal, cache.at(0, n))
    machine.wait_for(device)
    ready, tokens = time.perf_counter(), []
    while True:
        tokens.append(int(diffusion.output_logits(model, hidden[:, -1], tok).argmax()))
        if tokens[-1] == tok.eos or len(tokens) == max_len:
            break
        at = n + len(tokens) - 1
        hidden = model(torch.tensor([tokens[-1:]], device=device), places[:, at:at + 1], None, cache.at(at, at + 1))
    end = time.perf_counter()
    return [sample.Rollout(tokens, nfe=len(tokens))], end - ready, end - start


def timed(model, prompts, tok, block_len, tau, max_len):
    """sample.timed, or the plain loop where the block length is None (one prompt)."""
    if block_len is None:
        return plain_loop(model, *prompts, tok, max_len)
    return sample.timed(model, prompts, tok, block_len, tau, max_len)


def race(modes, batches, tok, max_len, repeats):
    """Time the modes on the same batches of prompts, one mode after the other, several times.

    Returns one dict per mode: nfe and tokens_per_nfe; tok_s, tokens per second of decoding alone, and tok_s_end_to_end,
    with the prefill (medians over the repeats); speedup, the median of the ratio within a repeat, and speedup_range.
    """
    for model, block_len, tau in modes:                             # warm up
        timed(model, batches[0], tok, block_len, tau, max_len)
    rates = [[] for _ in modes]                                     # per repeat: (decoding alone, end to end)
    counts = [None] * len(modes)
    for _ in range(repeats):
        for m, (model, block_len, tau) in enumerate(modes):
            runs = [timed(model, batch, tok, block_len, tau, max_len) for batch in batches]
            out = [rollout for done, _, _ in runs for rollout in done]
            tokens, nfe = sum(len(r.tokens) for r in out), sum(r.nfe for r in out)
            counts[m] = {"nfe": nfe / len(out), "tokens_per_nfe": tokens / nfe}
            rates[m].append((tokens / sum(alone for _, alone, _ in runs), tokens / sum(whole for _, _, whole in runs)))
    rows = []
    for mine, count in zip(rates, counts):
        alone, whole = (statistics.median(rate) for rate in zip(*mine))
        ratios = [own[0] / ar[0] for own, ar in zip(mine, rates[0])]
        rows.append(count | {"tok_s": alone, "tok_s_end_to_end": whole, "speedup": statistics.median(ratios),
                             "speedup_range": [min(ratios), max(ratios)]})
    return rows


def fastest(model, prompts, tok, block_len, tau, max_len):
    """The model in float32 or bfloat16, whichever decodes these prompts faster on this machine.

    A forward of one token is bound by its own overhead and one of 32 by arithmetic, so AR and diffusion need not agree.
    """
    if machine.matmul_rate(str(model.embed.weight.device), torch.bfloat16, 0.05) < 1e10:
        return model                                                # bfloat16 is emulated here: do not even try
    half = copy.deepcopy(model).bfloat16()
    seconds = [min(sample.timed(m, prompts, tok, block_len, tau, max_len)[1] for _ in range(4)) for m in (model, half)]
    return half if seconds[1] < seconds[0] else model


def add_speedups(s, folder, tok, summary, systems, rows):
    """Add speed-ups at batch 1 to the decoded rows of a ladder, timed on the first s.time_users users, AR first."""
    prompts, _ = users_with_hit(folder, "test")
    few, max_len = [[p] for p in prompts[:s.time_users]], longest_output(summary["config"]["candidates"])
    decoded = [r for r in rows if "nfe" in r]                       # one per system, in their order
    pairs, modes = sorted(zip(systems, decoded), key=lambda pair: pair[0].row != "ar"), []
    for system, _ in pairs:
        model, block_len = open_system(s, system, tok, summary)
        modes.append((fastest(model, few[0], tok, block_len, system.tau, max_len), block_len, system.tau))
    for (_, row), speed in zip(pairs, race(modes, few, tok, max_len, s.repeats)):
        row |= {key: speed[key] for key in ("speedup", "speedup_range")}


# === The frontier =====================================================================================================

def frontier(s, folder, tok, summary, ar, student):
    """Rows of results.json's "frontier", at batch 1: AR, AR by the plain loop, then the student at each of TAUS.

    Accuracy comes from s.users test users with a hit (0: all), in the dtype in which the mode is timed; time from
    s.time_users of them. Returns (rows, AR and the student in their faster dtypes).
    """
    n_candidates = summary["config"]["candidates"]
    max_len = longest_output(n_candidates)
    prompts, targets = users_with_hit(folder, "test")
    few = [[p] for p in prompts[:s.time_users]]
    prompts, targets = prompts[:s.users or None], targets[:s.users or None]
    ar = fastest(ar, few[0], tok, 1, None, max_len)
    student = fastest(student, few[0], tok, s.block_len, 0.9, max_len)
    modes = [(ar, 1, None), (ar, None, None)] + [(student, s.block_len, tau) for tau in TAUS]
    rows = []
    for (model, block_len, tau), speed in zip(modes, race(modes, few, tok, max_len, s.repeats)):
        if block_len:                                               # the plain loop, next to AR, writes the same tokens
            done = sample.decode(model, prompts, tok, block_len, tau or 1.0, max_len)
        row = ladder_row("", prompts, done, targets, tok, n_candidates, tau)
        kept = ("r1", "ndcg3", "valid", "failures", "nfe", "tokens", "tokens_per_nfe")
        rows.append({"users": len(done), "mode": "diffusion" if tau else "ar" if block_len else "plain loop", "tau": tau,
                     "block_len": block_len or 1, "batch": 1, "dtype": str(model.embed.weight.dtype).removeprefix("torch.")}
                    | speed | {key: row[key] for key in kept})
    return rows, ar, student


# === Sweeps: what the speed-up depends on, at tau 0.9 =================================================================

class Bench(NamedTuple):
    """What all sweeps share: settings, models in their faster dtypes, and the test users with a hit."""
    s: object
    tok: object
    n_candidates: int
    ar: Transformer
    student: Transformer
    prompts: list
    targets: list

    def race(self, batches, max_len=None, block_len=None):
        """(AR's dict, the student's dict) of `race`, with whole outputs and the blocks of s unless others are given."""
        modes = [(self.ar, 1, None), (self.student, block_len or self.s.block_len, 0.9)]
        return race(modes, batches, self.tok, max_len or longest_output(self.n_candidates), self.s.repeats)

    def few(self, prompts):
        """The first of these prompts in batches of one, for the timing."""
        return [[p] for p in prompts[:self.s.time_users]]

    def decode(self, prompts, block_len):
        return sample.decode(self.student, prompts, self.tok, block_len, 0.9, longest_output(self.n_candidates))


def sweeps(s, folder, tok, summary, ar, student):
    """Rows of results.json's "sweeps": {name: rows}, with the names of SIZES."""
    bench = Bench(s, tok, summary["config"]["candidates"], ar, student, *users_with_hit(folder, "test"))
    output_len = sweep_output_len(bench)
    return {"output_len": output_len, "candidates": sweep_candidates(bench),
            "prompt_len": sweep_prompt_len(bench, output_len[-1]["tokens_per_nfe"]), "batch": sweep_batch(bench),
            "block_len": sweep_block_len(bench)}


def sweep_output_len(bench):
    """Outputs that are cut off after so many tokens."""
    rows = []
    for length in sorted({min(n, longest_output(bench.n_candidates)) for n in SIZES["output_len"]}):
        ar, row = bench.race(bench.few(bench.prompts), length)
        rows.append({"tokens": ar["nfe"]} | row)
    return rows


def sweep_candidates(bench):
    """Whole outputs, which are shorter where they are about fewer candidates, and how many of them are valid."""
    rows = []
    for n in sorted({min(n, bench.n_candidates) for n in SIZES["candidates"]}):
        prompts = [fewer(p, bench.tok, n) for p in bench.prompts[:bench.s.users or None]]
        _, row = bench.race(bench.few(prompts))
        pairs = zip(bench.decode(prompts, bench.s.block_len), ranking.shown_counts(prompts, bench.tok))
        failures = [ranking.parse(rollout.tokens, bench.tok, count).failure for rollout, count in pairs]
        rows.append({"candidates": n} | row | {"valid": failures.count(None) / len(failures)})
    return rows


def fewer(prompt, tok, n_shown):
    """A prompt that shows only the first n_shown candidates."""
    if n_shown < len(tok.slots) and tok.slots[n_shown] in prompt:
        return prompt[:prompt.index(tok.slots[n_shown])] + [tok.rank]
    return prompt


def sweep_prompt_len(bench, tokens_per_nfe):
    """The cost of one forward of a block and of a single token, by the number of cached tokens, and the speed-up that
    this leaves at so many tokens per forward."""
    rows = []
    for cached in SIZES["prompt_len"]:
        one, block = forward_cost(bench.ar, 1, cached), forward_cost(bench.student, bench.s.block_len, cached)
        rows.append({"cached": cached, "ms_one": one, "ms_block": block, "cost": block / one,
                     "speedup": tokens_per_nfe * one / block})
    return rows


def forward_cost(model, tokens, cached, repeats=30):
    """Median milliseconds of one forward of `tokens` tokens against a cache of `cached` tokens.

    The cost does not depend on what the weights know, so a longer context than the model's own can be tried.
    """
    device, dtype = model.embed.weight.device, model.embed.weight.dtype
    cfg = dataclasses.replace(model.cfg, ctx_len=max(model.cfg.ctx_len, cached + tokens))
    other = Transformer(cfg).to(device, dtype)
    cache = KVCache(cfg, 1, cached + tokens, device, dtype)
    x = torch.zeros(1, tokens, dtype=torch.long, device=device)     # (1, tokens)
    spent = []
    with torch.inference_mode():
        for _ in range(repeats):
            start = time.perf_counter()
            other.logits(other(x, x + cached, None, cache.at(cached, cached + tokens))).sum().item()
            spent.append(1000 * (time.perf_counter() - start))
    return statistics.median(spent)


def sweep_batch(bench):
    """Rows that are decoded together, so many at a time."""
    rows = []
    for size in SIZES["batch"]:
        users = min(max(size, bench.s.time_users), len(bench.prompts))
        ar, row = bench.race([bench.prompts[i:i + size] for i in range(0, users, size)])
        rows.append({"batch": size, "tok_s_ar": ar["tok_s"]} | row)
    return rows


def sweep_block_len(bench, users=400):
    """Other block lengths than the one trained at, where they fit the context, with R@1 and validity."""
    rows = []
    for block_len in SIZES["block_len"]:
        blocks = -(-longest_output(bench.n_candidates) // block_len)
        if max(map(len, bench.prompts)) - 1 + blocks * block_len > bench.student.cfg.ctx_len:
            continue
        _, row = bench.race(bench.few(bench.prompts), block_len=block_len)
        prompts = bench.prompts[:users]
        judged = ladder_row("", prompts, bench.decode(prompts, block_len), bench.targets[:users], bench.tok,
                            bench.n_candidates)
        rows.append({"block_len": block_len} | row | {key: judged[key] for key in ("r1", "valid")})
    return rows


def show_sweeps(found):
    for name, rows in found.items():
        shown = {key: value for key, value in rows[0].items() if key not in ("speedup_range", "tok_s_end_to_end")}
        columns = [(key, key, ">16", "," if isinstance(value, int) else ",.3f") for key, value in shown.items()]
        print(f"\n{name}\n{text_table(rows, columns)}")
