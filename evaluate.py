"""The whole picture of a trained run: the ladder of systems and the speed-accuracy frontier, as tables and one file.

    python evaluate.py --preset mini                 # ladder and frontier -> out/mini/results.json
    python evaluate.py --preset small --only ladder

Ladder (paper, first table): random, reverse and pre-rank orders, the teacher's traces, each trained model decoding
freely and greedily, the oracle; all test users with a hit, fixed lists, fixed order; intervals by bootstrap over users,
paired where two systems are compared. Frontier (second table): the same sampler on the same weights at block length 1
and at several thresholds, timed in one run in turns, so that a slow minute of the machine hits all alike. Tokens per
forward (NFE) is the figure that does not depend on the machine.

Left out: an LLM as judge of the reasoning; ranking.py checks each claim against the prompt instead.
"""
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import diffusion
import ranking
import sample
import stage
from data import prepare
from data.dataset import longest_output
from stage import flag

TAUS = (1.0, 0.95, 0.9, 0.8, 0.6, 0.4)
STAGES = ("ar_sft", "ar", "cft", "opd", "cft_rl", "rl")     # in the ladder's order; a run need not have all


@dataclass
class EvalSettings(stage.Common):
    only: str = flag("", "ladder or frontier (default: both)")
    block_len: int = flag(32, "block length of the diffusion model")
    time_users: int = flag(24, "test users decoded one by one for the timing, each in every mode")
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
    return {"score": row["ndcg3_strict"]} | {key: float(row[key]) for key in keys}


def ladder(s, folder, tok, summary, systems):
    """Rows for all test users with a hit: random, reverse, floor, teacher (the traces it wrote for them), each of
    `systems` = (row's name, weights' name, block length, tau or None for AR), oracle. Differences are taken against
    the row "ar", user by user."""
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
    for system, name, block_len, tau in systems:
        path = stage.weights(s.out, s.preset, name) or Path(s.out) / f"{name}.pt"
        model, _ = stage.load_model(path, tok, summary, f"train it: python train_{name}.py --preset {s.preset}", s.device)
        if system == "naive":
            diffusion.convert(model, tok)
        with tqdm(total=len(hits), desc=f"{system} {tau or ''}", leave=False, disable=None) as bar:
            done = sample.decode(model, prompts, tok, block_len, tau or 1.0, longest_output(k), bar=bar)
        out.append(ranking.ladder_row(system, prompts, done, targets, tok, k, tau))
    [ar] = [r for r in out if r["system"] == "ar"]
    for row in out:
        if "nfe" in row and row is not ar:
            row["r1_minus_ar"], row["r1_minus_ar_ci"] = ranking.difference(row, ar)
    return out + [ranking.order_row("oracle", [[t] + [c for c in range(n) if c != t] for t, n in zip(targets, counts)],
                                    targets)]


# === The frontier =====================================================================================================

def frontier(s, folder, tok, summary, models):
    """models: {mode: (model, block_len)} with "ar" first. Returns rows of results.json's "frontier", at batch 1.

    Accuracy from all test users with a hit; time from a few, each mode after the other for every repeat. Both modes
    use the same Decoder; tok_s is decode only (the cache is filled), tok_s_end_to_end includes the prefill.
    """
    k = summary["config"]["candidates"]
    prompts, targets = users_with_hit(folder, "test")
    modes = [("ar", 1, None, models["ar"])] + [("diffusion", s.block_len, tau, models["cft"]) for tau in TAUS]
    rows = []
    for mode, block_len, tau, model in modes:
        done = sample.decode(model, prompts, tok, block_len, tau or 1.0, longest_output(k))
        row = ranking.ladder_row(mode, prompts, done, targets, tok, k, tau)
        rows.append({"mode": mode, "tau": tau, "block_len": block_len, "batch": 1} |
                    {key: row[key] for key in ("r1", "ndcg3", "valid", "failures", "nfe", "tokens", "tokens_per_nfe")})
    rates = [[] for _ in modes]                                     # per repeat: (decode only, end to end)
    for _ in range(s.repeats):
        for (mode, block_len, tau, model), found in zip(modes, rates):
            spent = [0, 0.0, 0.0]
            for prompt in prompts[:s.time_users]:
                start = time.perf_counter()
                d = sample.Decoder(model, [prompt], tok, block_len, tau or 1.0, longest_output(k), record=False)
                ready = time.perf_counter()
                [out] = d.run()
                end = time.perf_counter()
                spent = [spent[0] + len(out.tokens), spent[1] + end - ready, spent[2] + end - start]
            found.append((spent[0] / spent[1], spent[0] / spent[2]))
    for row, found in zip(rows, rates):
        row["tok_s"], row["tok_s_end_to_end"] = (statistics.median(x) for x in zip(*found))
        row["speedup"] = statistics.median(mine[0] / ar[0] for mine, ar in zip(found, rates[0]))
        row["speedup_range"] = [f(mine[0] / ar[0] for mine, ar in zip(found, rates[0])) for f in (min, max)]
    return rows


def show_frontier(rows):
    print(f"{'mode':10}{'tau':>6}{'R@1':>8}{'NDCG@3':>8}{'valid':>8}{'NFE':>7}{'tok/NFE':>9}{'tok/s':>8}"
          f"{'end to end':>12}{'speed-up':>10}   (least to most)")
    for r in rows:
        print(f"{r['mode']:10}{r['tau'] if r['tau'] else '':>6}{r['r1']:8.3f}{r['ndcg3']:8.3f}{r['valid']:8.1%}{r['nfe']:7.1f}"
              f"{r['tokens_per_nfe']:9.1f}{r['tok_s']:8,.0f}{r['tok_s_end_to_end']:12,.0f}{r['speedup']:9.2f}x   "
              "({:.2f} to {:.2f})".format(*r["speedup_range"]))


def main(argv=None):
    s = stage.settings(EvalSettings, {}, __doc__, argv)
    if s.only not in ("", "ladder", "frontier"):
        raise stage.UserError(f"--only {s.only}: ladder or frontier")
    sample.check_settings(s.block_len, 1.0)
    if s.threads:
        torch.set_num_threads(s.threads)
    folder, tok, summary = stage.load_data(s)
    paths = {name: stage.weights(s.out, s.preset, name) for name in ("ar", "cft")}
    if not paths["ar"]:
        raise stage.UserError(f"no weights in {s.out}; train them: python train_ar.py --preset {s.preset}")
    file = Path(s.out) / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    results |= {"preset": s.preset, "seed": s.seed, "device": s.device, "n_users": summary["test_users_with_hit"]}
    if s.only in ("", "ladder"):
        have = [name for name in STAGES if stage.weights(s.out, s.preset, name)]
        systems = [(name, name, 1, None) for name in ("ar_sft", "ar") if name in have]
        if len(have) > len(systems):
            systems += [("naive", "ar", s.block_len, 0.9)]
        systems += [(name, name, s.block_len, tau) for name in have if not name.startswith("ar") for tau in (1.0, 0.9)]
        rows = ladder(s, folder, tok, summary, systems)
        print(f"Ladder: {rows[0]['n']:,} test users whose next purchase is among the candidates")
        ranking.show_ladder(rows, summary["hit_test"])
        results["ladder"] = [{key: v for key, v in r.items() if key not in ("hits1", "n", "ndcg3_strict")} for r in rows]
    if s.only in ("", "frontier"):
        if not paths["cft"]:
            print(f"\nno frontier: {s.out} has no cft.pt; train it with python train_cft.py --preset {s.preset}")
        else:
            models = {n: stage.load_model(p, tok, summary, f"python train_{n}.py", s.device)[0] for n, p in paths.items()}
            rows = frontier(s, folder, tok, summary, models)
            print(f"\nFrontier: batch 1, {s.device}, {torch.get_num_threads()} threads; median of {s.repeats} repeats")
            show_frontier(rows)
            results["frontier"] = rows
    part = file.with_suffix(".json.part")
    part.write_text(json.dumps(results, indent=1))
    part.replace(file)
    print(f"-> {file}")


if __name__ == "__main__":
    stage.main(main)
