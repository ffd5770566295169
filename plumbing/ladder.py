"""The ladder: the users that are evaluated, one row per system, intervals, and the table that is printed.

A row is measured on all test users whose next purchase is among their candidates, with fixed lists in a fixed order. A
model decodes freely and greedily. Intervals come from a bootstrap over users, and where two systems are compared they
are paired: a user who is hard for one system is hard for the other.
"""
import math
import shlex
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import ranking
import sample
from data.dataset import longest_output
from data.rows import Rows
from plumbing import checkpoint


class System(NamedTuple):
    """One decoded row of the ladder."""
    row: str              # its name in the table
    weights: str          # the name of its weights
    block_len: int        # None: as the weights were trained
    tau: float            # None: AR, at block length 1


# === Users ============================================================================================================

def users_with_hit(folder, name):
    """(prompts, targets) of the users of "valid" or "test" whose purchase is among the candidates, in fixed order."""
    rows = Rows(folder / f"{name}.npz")
    hits = np.flatnonzero(rows.target >= 0)
    return [rows[i][0] for i in hits], rows.target[hits].tolist()


def validation_users(folder, n):
    """(prompts, targets) of n validation users with a hit. They are the same ones every time."""
    prompts, targets = users_with_hit(folder, "valid")
    chosen = np.random.default_rng(0).permutation(len(prompts))[:n]
    return [prompts[i] for i in chosen], [targets[i] for i in chosen]


def validate_by_decoding(model, tok, prompts, targets, n_candidates, block_len, tau, autocast):
    """Decode freely and greedily. Returns the validation part of a ladder row.

    Its "score" is NDCG@3 with failures counted as misses. It is smoother than Recall@1, and a model that is often
    invalid cannot hide behind the fallback.
    """
    with autocast:
        rollouts = sample.decode(model, prompts, tok, block_len, tau, longest_output(n_candidates))
    row = ladder_row("", prompts, rollouts, targets, tok, n_candidates)
    keys = ("r1", "r3", "ndcg3", "reward", "valid", "grounding", "consistency", "copy_rate", "nfe", "tokens_per_nfe")
    return {"score": row["ndcg3_strict"], "failures": row["failures"]} | {key: float(row[key]) for key in keys}


# === Rows =============================================================================================================

def ladder(s, folder, tok, summary, systems, autocast):
    """Rows of results.json for all test users with a hit.

    They are random, reverse, floor, teacher (the traces that it wrote for these users), each System of `systems`, and
    oracle. Each other decoded row is compared with the row "ar", user by user, where there is one.
    """
    n_candidates = summary["config"]["candidates"]
    rows = Rows(folder / "test.npz")
    hits = np.flatnonzero(rows.target >= 0)
    prompts, written = zip(*(rows[i] for i in hits))
    targets, counts = rows.target[hits].tolist(), rows.n_shown[hits].tolist()
    rng = np.random.default_rng(0)
    out = [order_row("random", [rng.permutation(n).tolist() for n in counts], targets),
           order_row("reverse", [list(range(n))[::-1] for n in counts], targets),
           order_row("floor", [list(range(n)) for n in counts], targets),
           ladder_row("teacher", prompts, [sample.Rollout(o) for o in written], targets, tok, n_candidates)]
    for system in systems:
        (model, block_len), tau = open_system(s, system, tok, summary), system.tau
        with autocast, tqdm(total=len(hits), desc=f"{system.row} {tau or ''}", leave=False, disable=None) as bar:
            done = sample.decode(model, prompts, tok, block_len, tau or 1.0, longest_output(n_candidates), bar=bar)
        out.append(ladder_row(system.row, prompts, done, targets, tok, n_candidates, tau))
    compare_with_ar(out)
    best = [[t] + [c for c in range(n) if c != t] for t, n in zip(targets, counts)]
    return out + [order_row("oracle", best, targets)]


def open_system(s, system, tok, summary):
    """(model, block length) of a System."""
    return checkpoint.open_student(s, system.weights, tok, summary, 1 if system.tau is None else system.block_len)


def compare_with_ar(rows):
    """Add to each other decoded row its difference to the row "ar" and the paired interval, for R@1 and NDCG@3."""
    ar = next((r for r in rows if r["system"] == "ar"), None)
    for row in rows:
        if ar and "nfe" in row and row is not ar:
            for key in ("r1", "ndcg3"):
                row[f"{key}_minus_ar"], row[f"{key}_minus_ar_ci"] = difference(row, ar, key)


def ladder_row(system, prompts, rollouts, targets, tok, n_candidates, tau=None):
    """All that is said about one system on users whose target is a candidate: a row of results.json.

    rollouts: one sample.Rollout per user (tokens, and nfe where something was decoded); targets: positions. The row
    also has "users", lists of what each user contributes to R@1 and NDCG@3, for paired intervals; the results file
    leaves them out. A failure falls back to the pre-rank order, but ndcg3_strict counts it as a miss.
    """
    outputs, counts = [r.tokens for r in rollouts], ranking.shown_counts(prompts, tok)
    parsed = [ranking.parse(o, tok, n) for o, n in zip(outputs, counts)]
    row = order_row(system, [ranking.order_shown(p, n) for p, n in zip(parsed, counts)], targets)
    failures = {kind: sum(p.failure == kind for p in parsed) / len(parsed) for kind in ranking.FAILURES}
    earned = [ranking.reward(p, t, n)["total"] for p, t, n in zip(parsed, targets, counts)]
    strict = [ranking.rank_of(p.order, t) if p.order else math.inf for p, t in zip(parsed, targets)]
    parts = ranking.grounding(prompts, outputs, tok, n_candidates)
    row |= {"tau": tau, "valid": sum(p.failure is None for p in parsed) / len(parsed),
            "failures": {kind: share for kind, share in failures.items() if share},
            "ndcg3_strict": ranking.metrics(strict)["ndcg3"], "reward": sum(earned) / len(earned),
            "copy_rate": sum(map(ranking.copied, parsed)) / len(parsed), "grounding": parts.pop("grounding"),
            "grounding_parts": parts, "consistency": sum(ranking.consistent(o, tok) for o in outputs) / len(outputs),
            "tokens": sum(map(len, outputs)) / len(outputs)}
    nfe = sum(r.nfe for r in rollouts)
    if nfe:
        row |= {"nfe": nfe / len(rollouts), "tokens_per_nfe": sum(map(len, outputs)) / nfe}
    return row


def order_row(system, orders, targets):
    """The accuracy part of a row, for anything that is just an order (floor, reverse, random, oracle)."""
    ranks = [ranking.rank_of(o, t) for o, t in zip(orders, targets)]
    users = {"r1": [float(r == 1) for r in ranks], "ndcg3": [ranking.metrics([r])["ndcg3"] for r in ranks]}
    means = ranking.metrics(ranks)
    row = {"system": system, "tau": None, "n": len(ranks)}
    row |= {key: means[key] for key in ("r1", "r3", "r5", "ndcg3", "ndcg5")}
    return row | {"r1_ci": bootstrap(users["r1"]), "users": users}


# === Intervals ========================================================================================================

def bootstrap(values, other=None, draws=2000, seed=0):
    """95% percentile interval of the mean of `values` over users, or of values - other, paired on the same users.

    values, other: (users,) floats. A difference within users is far less noisy than a difference of two averages.
    """
    x = torch.as_tensor(values, dtype=torch.float64)
    if other is not None:
        x = x - torch.as_tensor(other, dtype=torch.float64)
    g = torch.Generator().manual_seed(seed)
    means = torch.stack([x[torch.randint(len(x), (len(x),), generator=g)].mean() for _ in range(draws)])
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return [low, high]


def difference(row, other, key="r1"):
    """R@1 (or NDCG@3, key "ndcg3") of one row minus that of another on the same users: (mean, paired 95% interval)."""
    return row[key] - other[key], bootstrap(row["users"][key], other["users"][key])


# === The printed table ================================================================================================

# Columns of a table: heading, key in a row, alignment and width, format.
SHORT = [("R@1", "r1", ">8", ".3f"), ("95% interval", "r1_ci", ">17", ".3f"), ("valid", "valid", ">9", ".1%"),
         ("tokens per forward", "tokens_per_nfe", ">21", ".1f")]
FULL = [("system", "system", "<16", ""), ("tau", "tau", ">5", ".2f"), ("R@1", "r1", ">7", ".3f"),
        ("95% interval", "r1_ci", ">15", ".3f"), ("R@3", "r3", ">7", ".3f"), ("NDCG@3", "ndcg3", ">8", ".3f"),
        ("valid", "valid", ">8", ".1%"), ("ground.", "grounding", ">9", ".1%"),
        ("consist.", "consistency", ">9", ".1%"), ("copy", "copy_rate", ">7", ".1%"), ("NFE", "nfe", ">7", ".1f"),
        ("tok/NFE", "tokens_per_nfe", ">9", ".1f")]
TIMED = [("speed-up", "speedup", ">10", ".2f")]


def label(row):
    """The name of a row, with its threshold: "cft, tau 0.9"."""
    return row["system"] + (f", tau {row['tau']:g}" if row["tau"] else "")


def cell(value, form):
    """A value as text: an interval in brackets, and nothing where a row has no such value."""
    if isinstance(value, list):
        return f"[{value[0]:{form}}, {value[1]:{form}}]"
    return "" if value is None else format(value, form)


def text_table(rows, columns):
    """Rows (dicts) as text with one line each, under a line of headings."""
    lines = ["".join(f"{heading:{place}}" for heading, _, place, _ in columns)]
    lines += ["".join(f"{cell(r.get(key), form):{place}}" for _, key, place, form in columns) for r in rows]
    return "\n".join(lines)


def table(rows, full=False):
    """The ladder as text: five columns without the random and the reversed order, or everything that was measured."""
    if full:
        return text_table(rows, FULL + TIMED * any("speedup" in r for r in rows))
    rows = [r | {"label": label(r)} for r in rows if r["system"] not in ("random", "reverse")]
    return text_table(rows, [("system", "label", f"<{max(len(r['label']) for r in rows)}", ""), *SHORT])


def show_ladder(rows, hit_rate, full, rest="--full prints all rows and columns, paired differences and failures."):
    """Print the table. Under the five columns stands what they mean, and `rest`: how to see everything else."""
    print(table(rows, full))
    if full:
        show_differences(rows, hit_rate)
        return
    print("\nR@1: how often the next purchase is put first. valid: how often the output is a complete ranking; if not,\n"
          "the floor counts. A good diffusion model keeps the R@1 of AR and writes many tokens per forward.")
    print(rest)


def show_differences(rows, hit_rate):
    """Print, for each decoded system: R@1 on all users (a re-ranker cannot find what the retriever missed), paired
    differences to the floor and to AR, and how the invalid outputs failed."""
    [floor] = [r for r in rows if r["system"] == "floor"]
    for r in (r for r in rows if "nfe" in r):
        print(f"{label(r)}: R@1 on all users {r['r1'] * hit_rate:.4f} (floor {floor['r1'] * hit_rate:.4f})")
        for other in (other for other in rows if other["system"] in ("floor", "ar") and other is not r):
            told = [f"{name} {mean:+.4f} [{low:+.4f}, {high:+.4f}]" for name, (mean, (low, high)) in
                    (("R@1", difference(r, other, "r1")), ("NDCG@3", difference(r, other, "ndcg3")))]
            print(f"  minus {other['system']}, paired, 95% interval: {', '.join(told)}")
        if r["failures"]:
            print("  failures: " + ", ".join(f"{kind} {share:.2%}" for kind, share in r["failures"].items()))


# === The table at the end of a stage ==================================================================================

def show_stage(s, folder, tok, summary, systems, autocast):
    """Print the test table at the end of a stage, unless s.table is 0."""
    if not s.table:
        return
    rows = ladder(s, folder, tok, summary, systems, autocast)
    print(f"\nTest: {rows[0]['n']:,} users whose next purchase is among their candidates\n")
    again = f"python evaluate.py --preset {s.preset} --out {shlex.quote(str(s.out))} --only ladder --full"
    show_ladder(rows, summary["hit_test"], s.full, f"All columns, paired differences and failures: {again}")


def show_step(s, folder, tok, summary, autocast):
    """The table of a stage that went from the weights s.start to s.name: AR, the start and the result."""
    if s.block_len == 1:                                            # the stage trained AR itself
        show_stage(s, folder, tok, summary, [System(name, name, 1, None) for name in (s.start, s.name)], autocast)
        return
    _, start = checkpoint.open_model(s, s.start, tok, summary)
    without_cft = start["settings"].get("block_len", 1) == 1        # then the start is the naive conversion
    show_stage(s, folder, tok, summary, [System("ar", "ar", 1, None),
                                         System("naive" if without_cft else s.start, s.start, s.block_len, s.tau),
                                         System(s.name, s.name, s.block_len, s.tau)], autocast)
