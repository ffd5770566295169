"""The whole picture of a trained run: the ladder of systems and the speed-accuracy frontier, as tables and one file.

    python evaluate.py --preset mini                 # ladder, frontier, sweeps -> out/mini/results.json, *.svg
    python evaluate.py --preset small --only ladder

Ladder (paper, first table): random, reverse and pre-rank orders, the teacher's traces, each trained model decoding
freely and greedily, the oracle; all test users with a hit, fixed lists, fixed order; intervals by bootstrap over users,
paired where two systems are compared. Frontier (second table): the same sampler on the same weights at block length 1
and at several thresholds, timed in one run in turns, so that a slow minute of the machine hits all alike. Tokens per
forward (NFE) is the figure that does not depend on the machine.

Left out: an LLM as judge of the reasoning; ranking.py checks each claim against the prompt instead.
"""
import copy
import dataclasses
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import checkpoint
import figures
import machine
import ranking
import sample
import settings
import stage
from data import prepare
from data.dataset import longest_output
from model import KVCache, Transformer
from settings import flag

TAUS = (1.0, 0.95, 0.9, 0.8, 0.6, 0.4)
SIZES = {"output_len": (32, 64, 96, 128), "candidates": (3, 5, 7, 10), "prompt_len": (128, 256, 512, 1024, 2048),
         "batch": (1, 4, 16, 64), "block_len": (4, 8, 16, 32, 64)}  # what the sweeps go through


@dataclass
class EvalSettings(settings.Common):
    only: str = flag("", "ladder, frontier, or sweeps with the frontier (default: all)")
    student: str = flag("", "weights of the frontier and the sweeps (default: the last stage that is there)")
    block_len: int = flag(None, "block length of the diffusion models (default: as they were trained)")
    users: int = flag(0, "test users of the frontier's accuracy and of the validity in the sweep of candidates (0: all)")
    time_users: int = flag(24, "test users decoded one by one for the timing, each in every mode")
    dtype: str = flag("auto", "of the ladder: float32, bfloat16 (autocast), or auto, the faster of the two")
    repeats: int = flag(3, "how often the timing is repeated, modes in turn")
    threads: int = flag(0, "CPU threads (0: as torch chooses)")


# === Users, validation, the ladder ====================================================================================

def users_with_hit(folder, name):
    """(prompts, targets) of the users of "valid" or "test" whose purchase is among the candidates, in fixed order."""
    rows = prepare.Rows(folder / f"{name}.npz")
    hits = np.flatnonzero(rows.target >= 0)
    return [rows[i][0] for i in hits], rows.target[hits].tolist()


def validation_users(folder, n):
    """(prompts, targets) of n validation users with a hit: the same ones every time."""
    prompts, targets = users_with_hit(folder, "valid")
    chosen = np.random.default_rng(0).permutation(len(prompts))[:n]
    return [prompts[i] for i in chosen], [targets[i] for i in chosen]


def validate_by_decoding(model, tok, prompts, targets, k, block_len, tau, autocast):
    """Decode freely and greedily; the validation part of a ladder row. score = NDCG@3 with failures counted as misses:
    smoother than Recall@1, and a model that is often invalid cannot hide behind the fallback."""
    with autocast:
        rollouts = sample.decode(model, prompts, tok, block_len, tau, longest_output(k))
    row = ranking.ladder_row("", prompts, rollouts, targets, tok, k)
    keys = ("r1", "r3", "ndcg3", "reward", "valid", "grounding", "consistency", "copy_rate", "nfe", "tokens_per_nfe")
    return {"score": row["ndcg3_strict"], "failures": row["failures"]} | {key: float(row[key]) for key in keys}


def ladder(s, folder, tok, summary, systems, autocast, time_users=0):
    """Rows for all test users with a hit: random, reverse, floor, teacher (the traces it wrote for them), each of
    `systems` = (row's name, weights' name, block length, tau or None for AR), oracle. Differences are taken against
    the row "ar", user by user; so are speed-ups at batch 1, on the first `time_users` users."""
    k = summary["config"]["candidates"]
    rows = prepare.Rows(folder / "test.npz")
    hits = np.flatnonzero(rows.target >= 0)
    prompts, written = zip(*(rows[i] for i in hits))
    targets, counts = rows.target[hits].tolist(), rows.n[hits].tolist()
    rng = np.random.default_rng(0)
    out = [ranking.order_row("random", [rng.permutation(n).tolist() for n in counts], targets),
           ranking.order_row("reverse", [list(range(n))[::-1] for n in counts], targets),
           ranking.order_row("floor", [list(range(n)) for n in counts], targets),
           ranking.ladder_row("teacher", prompts, [sample.Rollout(o) for o in written], targets, tok, k)]
    modes = []
    for system, name, block_len, tau in systems:
        model, block_len = checkpoint.open_student(s, name, tok, summary, 1 if tau is None else block_len)
        modes.append((model, block_len, tau))
        with autocast, tqdm(total=len(hits), desc=f"{system} {tau or ''}", leave=False, disable=None) as bar:
            done = sample.decode(model, prompts, tok, block_len, tau or 1.0, longest_output(k), bar=bar)
        out.append(ranking.ladder_row(system, prompts, done, targets, tok, k, tau))
    [ar] = [r for r in out if r["system"] == "ar"]
    for row in out:
        if "nfe" in row and row is not ar:
            for key in ("r1", "ndcg3"):
                row[f"{key}_minus_ar"], row[f"{key}_minus_ar_ci"] = ranking.difference(row, ar, key)
    if time_users:
        few, max_len = [[p] for p in prompts[:time_users]], longest_output(k)
        timed = sorted(zip(out[-len(modes):], modes), key=lambda x: x[0] is not ar)         # AR is the first
        quick = [(fastest(model, few[0], tok, b, tau, max_len), b, tau) for _, (model, b, tau) in timed]
        for (row, _), speed in zip(timed, race(quick, few, tok, max_len, s.repeats)):
            row |= {key: speed[key] for key in ("speedup", "speedup_range")}
    return out + [ranking.order_row("oracle", [[t] + [c for c in range(n) if c != t] for t, n in zip(targets, counts)],
                                    targets)]


# === The frontier =====================================================================================================

def race(modes, batches, tok, max_len, repeats):
    """modes: [(model, block_len, tau)], the first of them AR. Each decodes the same batches, one mode after the other,
    several times. Returns for each mode: tok_s (decode only), tok_s_end_to_end, speedup (median over the repeats of
    the ratio within a repeat) and its range, nfe, tokens_per_nfe."""
    for mode in modes:
        sample.timed(mode[0], batches[0], tok, *mode[1:], max_len)         # warm up
    rates = [[] for _ in modes]                                     # per repeat: (decode only, end to end)
    counts = [None] * len(modes)
    for _ in range(repeats):
        for m, (model, block_len, tau) in enumerate(modes):
            runs = [sample.timed(model, batch, tok, block_len, tau, max_len) for batch in batches]
            out = [r for done, _, _ in runs for r in done]
            tokens, nfe = sum(len(r.tokens) for r in out), sum(r.nfe for r in out)
            counts[m] = {"nfe": nfe / len(out), "tokens_per_nfe": tokens / nfe}
            rates[m].append(tuple(tokens / sum(run[i] for run in runs) for i in (1, 2)))
    rows = []
    for found, count in zip(rates, counts):
        decode, whole = (statistics.median(x) for x in zip(*found))
        ratios = [mine[0] / ar[0] for mine, ar in zip(found, rates[0])]
        rows.append(count | {"tok_s": decode, "tok_s_end_to_end": whole, "speedup": statistics.median(ratios),
                             "speedup_range": [min(ratios), max(ratios)]})
    return rows


def fastest(model, prompts, tok, block_len, tau, max_len):
    """The model in float32 or bfloat16, whichever decodes these prompts faster here: a forward of one token is bound
    by its own overhead, one of 32 by arithmetic, so AR and diffusion need not agree."""
    if machine.matmul_rate(str(model.embed.weight.device), torch.bfloat16, 0.05) < 1e10:
        return model                                                # emulated: do not even try
    half = copy.deepcopy(model).bfloat16()
    seconds = [min(sample.timed(m, prompts, tok, block_len, tau, max_len)[1] for _ in range(4)) for m in (model, half)]
    return half if seconds[1] < seconds[0] else model


def frontier(s, folder, tok, summary, ar, student):
    """Rows of results.json's "frontier", at batch 1: AR, then the student at each tau. Accuracy from all test users
    with a hit, in the dtype in which the mode is timed; time from a few of them."""
    k = summary["config"]["candidates"]
    prompts, targets = users_with_hit(folder, "test")
    few, max_len = [[p] for p in prompts[:s.time_users]], longest_output(k)
    prompts, targets = prompts[:s.users or None], targets[:s.users or None]
    modes = [(fastest(ar, few[0], tok, 1, None, max_len), 1, None)]
    quick = fastest(student, few[0], tok, s.block_len, 0.9, max_len)
    modes += [(quick, s.block_len, tau) for tau in TAUS]
    rows = []
    for (model, block_len, tau), speed in zip(modes, race(modes, few, tok, max_len, s.repeats)):
        done = sample.decode(model, prompts, tok, block_len, tau or 1.0, max_len)
        row = ranking.ladder_row("", prompts, done, targets, tok, k, tau)
        rows.append({"users": len(done), "mode": "diffusion" if tau else "ar", "tau": tau, "block_len": block_len,
                     "batch": 1, "dtype": str(model.embed.weight.dtype).removeprefix("torch.")} | speed |
                    {key: row[key] for key in ("r1", "ndcg3", "valid", "failures", "nfe", "tokens", "tokens_per_nfe")})
    return rows, modes[0][0], quick


# === Sweeps ===========================================================================================================

def fewer(prompt, tok, n):
    """A prompt that shows only the first n candidates."""
    return prompt[:prompt.index(tok.slots[n])] + [tok.rank] if n < len(tok.slots) and tok.slots[n] in prompt else prompt


def forward_cost(model, tokens, cached, repeats=30):
    """Median milliseconds of one forward of `tokens` tokens against a cache of `cached`. Cost does not depend on what
    the weights know, so a longer context than the model's own can be tried."""
    cfg = dataclasses.replace(model.cfg, ctx_len=max(model.cfg.ctx_len, cached + tokens))
    other = Transformer(cfg).to(model.embed.weight.device, model.embed.weight.dtype)
    cache = KVCache(cfg, 1, cached + tokens, model.embed.weight.device, model.embed.weight.dtype)
    x = torch.zeros(1, tokens, dtype=torch.long, device=model.embed.weight.device)
    spent = []
    with torch.inference_mode():
        for _ in range(repeats):
            start = time.perf_counter()
            other.logits(other(x, x + cached, None, cache.at(cached, cached + tokens))).sum().item()
            spent.append(1000 * (time.perf_counter() - start))
    return statistics.median(spent)


def sweeps(s, folder, tok, summary, ar, student):
    """What the speed-up depends on, at tau = .9: rows under each name of SIZES.

    output_len  outputs cut off after so many tokens; candidates: whole outputs, shorter as they are about fewer
    prompt_len  the cost of one forward, block over single token, by cached tokens, and the speed-up that it leaves
    batch       rows decoded together; block_len  other blocks than the ones trained on, with their validity
    """
    k = summary["config"]["candidates"]
    prompts, targets = users_with_hit(folder, "test")
    few, out = prompts[:s.time_users], {name: [] for name in SIZES}
    both, alone = [(ar, 1, None), (student, s.block_len, 0.9)], [[p] for p in few]
    for length in sorted({min(n, longest_output(k)) for n in SIZES["output_len"]}):
        base, row = race(both, alone, tok, length, s.repeats)
        out["output_len"].append({"tokens": base["nfe"]} | row)
    tokens_per_nfe = row["tokens_per_nfe"]                          # of the longest outputs
    for n in sorted({min(n, k) for n in SIZES["candidates"]}):
        shorter = [fewer(p, tok, n) for p in prompts[:s.users or None]]
        _, row = race(both, [[p] for p in shorter[:s.time_users]], tok, longest_output(k), s.repeats)
        done = sample.decode(student, shorter, tok, s.block_len, 0.9, longest_output(k))
        failed = [ranking.parse(r.tokens, tok, m).failure for r, m in zip(done, ranking.shown_counts(shorter, tok))]
        valid = failed.count(None) / len(done)
        out["candidates"].append({"candidates": n} | row | {"valid": valid})
    for cached in SIZES["prompt_len"]:
        one, block = forward_cost(ar, 1, cached), forward_cost(student, s.block_len, cached)
        out["prompt_len"].append({"cached": cached, "ms_one": one, "ms_block": block, "cost": block / one,
                                  "speedup": tokens_per_nfe * one / block})
    for size in SIZES["batch"]:
        batches = [prompts[i:i + size] for i in range(0, min(max(size, s.time_users), len(prompts)), size)]
        base, row = race(both, batches, tok, longest_output(k), s.repeats)
        out["batch"].append({"batch": size, "tok_s_ar": base["tok_s"]} | row)
    for b in SIZES["block_len"]:
        if max(map(len, prompts)) - 1 + -(-longest_output(k) // b) * b > student.cfg.ctx_len:
            continue
        _, row = race([both[0], (student, b, 0.9)], alone, tok, longest_output(k), s.repeats)
        done = sample.decode(student, prompts[:400], tok, b, 0.9, longest_output(k))
        judged = ranking.ladder_row("", prompts[:400], done, targets[:400], tok, k)
        out["block_len"].append({"block_len": b} | row | {key: judged[key] for key in ("r1", "valid")})
    return out


# === Tables, from the results alone ===================================================================================

def show_stage(s, folder, tok, summary, systems, autocast):
    """The ladder at the end of a stage that was run for its own sake, not because a later one needed it."""
    if not checkpoint.NEEDED:
        rows = ladder(s, folder, tok, summary, systems, autocast)
        print(f"\nTest: {rows[0]['n']:,} users whose next purchase is among the {summary['config']['candidates']} "
              "candidates")
        ranking.show_ladder(rows, summary["hit_test"])


def show_step(s, folder, tok, summary, autocast):
    """The ladder at the end of a stage that goes from one student, s.start, to another, s.name: AR and both."""
    first = checkpoint.open_model(s, s.start, tok, summary)[1]["settings"].get("block_len", 1) == 1      # no CFT before it
    show_stage(s, folder, tok, summary, [("ar", "ar", 1, None),
                                         ("naive" if first else s.start, s.start, s.block_len, s.tau),
                                         (s.name, s.name, s.block_len, s.tau)], autocast)


def show_frontier(rows):
    print(f"{'mode':10}{'tau':>6}{'dtype':>10}{'R@1':>8}{'NDCG@3':>8}{'valid':>8}{'NFE':>7}{'tok/NFE':>9}{'tok/s':>8}"
          f"{'end to end':>12}{'speed-up':>10}   (least to most)")
    for r in rows:
        print(f"{r['mode']:10}{r['tau'] if r['tau'] else '':>6}{r['dtype']:>10}{r['r1']:8.3f}{r['ndcg3']:8.3f}"
              f"{r['valid']:8.1%}{r['nfe']:7.1f}{r['tokens_per_nfe']:9.1f}{r['tok_s']:8,.0f}{r['tok_s_end_to_end']:12,.0f}"
              f"{r['speedup']:9.2f}x   " + "({:.2f} to {:.2f})".format(*r["speedup_range"]))


def show_sweeps(found):
    for name, rows in found.items():
        columns = [c for c in rows[0] if c not in ("speedup_range", "tok_s_end_to_end")]
        print(f"\n{name}\n" + "".join(f"{c:>16}" for c in columns))
        for r in rows:
            print("".join(f"{r[c]:>16,}" if isinstance(r[c], int) else f"{r[c]:>16,.3f}" for c in columns))


def measured(file, device, digests):
    """The results that are there, to be added to; none where any was taken on another device or of other weights."""
    try:
        results = json.loads(file.read_text()) if file.exists() else {}
    except ValueError:
        raise checkpoint.UserError(f"{file} cannot be read; delete it, and what it held is measured again")
    same = all(digests.get(name, digest) == digest for name, digest in results.get("weights", {}).items())
    return results if same and results.get("device") == device else {}


def main(argv=None):
    s = settings.parse(EvalSettings, {}, __doc__, argv)
    if s.only not in ("", "ladder", "frontier", "sweeps"):
        raise checkpoint.UserError(f"--only {s.only}: ladder, frontier or sweeps")
    sample.check_settings(s.block_len, 1.0)
    if s.threads:
        torch.set_num_threads(s.threads)
    folder, tok, summary = stage.load_data(s)
    students, student = checkpoint.students(s.out, s.preset), checkpoint.pick_student(s)
    if not checkpoint.weights(s.out, s.preset, "ar"):
        raise checkpoint.no_weights(s)
    models = ["ar_sft"] * bool(checkpoint.weights(s.out, s.preset, "ar_sft")) + ["ar"]
    made = {name: checkpoint.open_model(s, name, tok, summary)[1] for name in models + students}
    print(f"weights in {checkpoint.weights(s.out, s.preset, 'ar').parent}, each of its stage's step: "
          + ", ".join(f"{n} {state['step']}" for n, state in made.items()))
    file = Path(s.out) / "results.json"
    digests = {name: checkpoint.digest(checkpoint.weights(s.out, s.preset, name)) for name in made}
    results = measured(file, s.device, digests)
    results |= {"weights": results.get("weights", {}) | digests, "preset": s.preset, "device": s.device,
                "seed": made["ar"]["settings"]["seed"], "n_users": summary["test_users_with_hit"]}
    if s.only in ("", "ladder"):
        systems = [(name, name, 1, None) for name in models]
        systems += [("naive", "ar", s.block_len or made[student]["settings"]["block_len"], 0.9)] if student else []
        systems += [(name, name, s.block_len, tau) for name in students for tau in (1.0, 0.9)
                    if tau < 1 or name in checkpoint.NAMES]         # of ablations .9 says enough, at a tenth of the time
        machine.pick_dtype(s)
        rows = ladder(s, folder, tok, summary, systems, machine.autocast(s), s.time_users)
        print(f"Ladder, {s.dtype}: {rows[0]['n']:,} test users whose next purchase is among the candidates")
        ranking.show_ladder(rows, summary["hit_test"])
        results["ladder"] = [{key: v for key, v in r.items() if key != "users"} for r in rows]
    if s.only in ("", "frontier", "sweeps") and not student:
        print(f"\nno frontier: {s.out} has no diffusion weights; train them with python train_cft.py --preset {s.preset}")
    elif s.only != "ladder":
        ar, _ = checkpoint.open_model(s, "ar", tok, summary)
        model, s.block_len = checkpoint.open_student(s, student, tok, summary, s.block_len)
        rows, ar, model = frontier(s, folder, tok, summary, ar, model)
        print(f"\nFrontier of {student}: batch 1, {s.device}, {torch.get_num_threads()} threads; "
              f"accuracy of {rows[0]['users']:,} users; time of {s.time_users}, median of {s.repeats} repeats")
        show_frontier(rows)
        results |= {"student": student, "frontier": rows}
        if s.only in ("", "sweeps"):
            results["sweeps"] = sweeps(s, folder, tok, summary, ar, model)
            show_sweeps(results["sweeps"])
    part = file.with_suffix(".json.part")
    part.write_text(json.dumps(results, indent=1))
    part.replace(file)
    figures.draw_all(Path(s.out), results)
    print(f"-> {file}, and figures *.svg beside it")


if __name__ == "__main__":
    settings.main(main)
