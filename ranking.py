"""An answer, judged: parsed into a permutation or a named failure, scored by Recall and NDCG, rewarded, and its
reasoning held against the prompt. Sees token ids through `data.tokenizer.Tokenizer`, never a model.

Paper: Section "The task" (metrics, fallback), "The conversion" (failures are named, no constrained decoder), "RL"
(conditional reward). Two rules keep the numbers honest: the parser repairs nothing, and the fallback to the pre-rank
order exists in `order_shown` alone, which only the evaluation calls.
"""
import math
from dataclasses import dataclass

import numpy as np
import torch

from data import dataset

FAILURES = ("no_eos", "no_answer", "malformed", "out_of_set", "duplicate", "omission", "overflow")
KS = (1, 3, 5, 10)


@dataclass
class Parsed:
    order: list = None        # candidate indices (0 = first of the pre-rank order) from best to worst, or None
    failure: str = None       # None, or one of FAILURES


def cut(tokens, eos):
    """Tokens up to and including the first <eos>: nothing after it counts, anywhere."""
    return tokens[:tokens.index(eos) + 1] if eos in tokens else tokens


def parse(output, tok, n):
    """Output tokens -> Parsed. `n` candidates were shown, identified by the first n slot tokens A, B, C, ...

    The failures, in the order in which they are looked for: no_eos (the text was cut off), no_answer (no <answer>),
    malformed (something that is not an identifier), out_of_set (an identifier that was not shown), duplicate,
    omission (shorter than n), overflow (longer than n: cannot happen without a duplicate, named for symmetry).
    """
    output = [int(t) for t in output]
    if tok.eos not in output:
        return Parsed(failure="no_eos")
    output = cut(output, tok.eos)[:-1]
    if tok.answer not in output:
        return Parsed(failure="no_answer")
    answer = output[output.index(tok.answer) + 1:]
    slots = [tok.slot_of.get(t) for t in answer]                    # token -> 0..9, None where it is no identifier
    if None in slots:
        return Parsed(failure="malformed")
    if any(s >= n for s in slots):
        return Parsed(failure="out_of_set")
    if len(set(slots)) < len(slots):
        return Parsed(failure="duplicate")
    if len(slots) != n:
        return Parsed(failure="omission" if len(slots) < n else "overflow")
    return Parsed(order=slots)


def order_shown(parsed, n):
    """What a user would be shown: the answer, or the pre-rank order where there is none (evaluation only)."""
    return parsed.order if parsed.order is not None else list(range(n))


def rank_of(order, target):
    """Rank of the target from 1; math.inf if it is not a candidate (target None)."""
    return order.index(target) + 1 if target is not None else math.inf


def rank_by_score(scores, target):
    """Rank from 1 of scores[target], ties (and NaN) counted *against* it: a constant scorer must not get Recall 1."""
    return 1 + sum(not s < scores[target] for i, s in enumerate(scores) if i != target)


def metrics(ranks):
    """Recall@K = share with rank <= K; NDCG@K = mean of 1/log2(1 + rank) where rank <= K (one relevant item: IDCG = 1).

    Returns {"r1": ..., "ndcg1": ..., ...} for K in KS.
    """
    out = {}
    for k in KS:
        out[f"r{k}"] = sum(r <= k for r in ranks) / max(len(ranks), 1)
        out[f"ndcg{k}"] = sum(1 / math.log2(1 + r) for r in ranks if r <= k) / max(len(ranks), 1)
    return out


def reward(parsed, target, n):
    """Reward of one rollout as a dict of its parts (paper, "The teacher", step 2, and "RL"):

        rank    (rank before - rank after) / n      how far the target rose
        format  0.2 if it strictly rose, or was first and stays first; so copying the order earns nothing otherwise
        invalid -1, and nothing else, where there is no permutation
    """
    if parsed.failure:
        return {"rank": 0.0, "format": 0.0, "invalid": -1.0, "total": -1.0}
    before, after = target + 1, rank_of(parsed.order, target)
    rank = (before - after) / n
    fmt = 0.2 if after < before or after == before == 1 else 0.0
    return {"rank": rank, "format": fmt, "invalid": 0.0, "total": rank + fmt}


def copied(parsed):
    """Did the answer repeat the pre-rank order?"""
    return parsed.order == sorted(parsed.order) if parsed.order else False


def bootstrap(values, other=None, draws=2000, seed=0):
    """95% percentile interval of the mean of `values` over users, or of values - other, *paired* on the same users.

    values, other: (users,) floats. Paired: a user who is hard for one system is hard for the other, and a difference
    within users is far less noisy than a difference of two averages.
    """
    x = torch.as_tensor(values, dtype=torch.float64)
    if other is not None:
        x = x - torch.as_tensor(other, dtype=torch.float64)
    g = torch.Generator().manual_seed(seed)
    means = torch.stack([x[torch.randint(len(x), (len(x),), generator=g)].mean() for _ in range(draws)])
    lo, hi = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return [lo, hi]


# === The reasoning, held against the prompt ===========================================================================

def grounding(prompts, outputs, tok, k):
    """Share of claims that the prompt bears out, over all outputs, and its parts.

    Claims of one output with n candidates: the pattern (2: the newest purchase's kind and brand, each with its count)
    and 5 for each candidate (brand matches, kind matches, link, together, next). A missing or misplaced claim is a
    wrong one; a word that is not there counts against, never for. Returns {"grounding": ..., "pattern": ..., ...}.
    """
    facts = dataset.claims(dataset.read_prompts(prompts, tok, k), tok)
    right, total = {name: 0 for name in CLAIMS}, {name: 0 for name in CLAIMS}
    for output, pattern, lines in zip(outputs, *(f.tolist() for f in facts)):
        said = cut([int(t) for t in output], tok.eos) + [tok.pad] * (6 + dataset.LINE * k)
        for name, i in (("pattern", 1), ("pattern", 3)):            # said[0] is <think>
            right[name] += said[i:i + 2] == pattern[i - 1:i + 1]
            total[name] += 1
        for j, line in enumerate(line for line in lines if line[0] >= 0):
            at = 5 + dataset.LINE * j
            for name, span in CLAIM_AT.items():
                right[name] += said[at] == line[0] and said[at:at + dataset.LINE][span] == line[span]
                total[name] += 1
    return {"grounding": sum(right.values()) / max(sum(total.values()), 1)} | {
        name: right[name] / max(total[name], 1) for name in CLAIMS}


CLAIM_AT = {"brand": slice(1, 3), "kind": slice(3, 5), "link": slice(5, 6), "together": slice(6, 7), "next": slice(7, 8)}
CLAIMS = ("pattern", *CLAIM_AT)                                     # where each stands in a candidate's line


def consistent(output, tok):
    """Does the answer follow from the model's own pick and grades? The first of <top> is the pick, free to choose; the
    other two must be the best graded of the rest (ties in pre-rank order), each with the grade that its line gave it,
    and the answer those three, then the rest in pre-rank order."""
    output = cut([int(t) for t in output], tok.eos)
    if not {tok.top, tok.answer, tok.eos} <= set(output):           # without <eos> the answer may not be over
        return False
    lines = output[5:output.index(tok.top)]
    top = output[output.index(tok.top) + 1:output.index(tok.answer)]                   # grade, identifier, grade, ...
    answer = [tok.slot_of.get(t) for t in output[output.index(tok.answer) + 1:-1]]
    grades = [tok.grade.index(t) if t in tok.grade else -1 for t in lines[dataset.LINE - 1::dataset.LINE]]
    pick = tok.slot_of.get(top[1]) if len(top) > 1 else None
    if pick is None or pick >= len(grades) or -1 in grades:
        return False
    if lines[::dataset.LINE] != tok.slots[:len(grades)]:            # lines of A, B, ... in turn, and nothing between
        return False
    follows = dataset.order_by(np.array([grades]), np.array([pick]))[0].tolist()
    stated = [x for c in follows[:dataset.TOP] for x in (tok.grade[grades[c]], tok.slots[c])]
    return top == stated and answer == follows


# === One row of the ladder ============================================================================================

def ladder_row(system, prompts, rollouts, targets, tok, k, tau=None):
    """All that is said about one system on users whose target is a candidate: a row of results.json.

    rollouts: sample.Rollout each (tokens, and nfe where something was decoded); targets: positions. The row keeps a list
    "users" of what each user contributes to R@1 and NDCG@3, for paired intervals; the results file leaves it out.
    ndcg3_strict counts a failure as a miss instead of falling back to the pre-rank order.
    """
    outputs, counts = [r.tokens for r in rollouts], shown_counts(prompts, tok)
    parsed = [parse(o, tok, n) for o, n in zip(outputs, counts)]
    row = order_row(system, [order_shown(p, n) for p, n in zip(parsed, counts)], targets)
    failures = {kind: sum(p.failure == kind for p in parsed) / len(parsed) for kind in FAILURES}
    earned = [reward(p, t, n)["total"] for p, t, n in zip(parsed, targets, counts)]
    strict = [rank_of(p.order, t) if p.order else math.inf for p, t in zip(parsed, targets)]
    facts = grounding(prompts, outputs, tok, k)
    row |= {"tau": tau, "valid": sum(p.failure is None for p in parsed) / len(parsed),
            "failures": {f: v for f, v in failures.items() if v}, "ndcg3_strict": metrics(strict)["ndcg3"],
            "reward": sum(earned) / len(earned),
            "copy_rate": sum(map(copied, parsed)) / len(parsed), "grounding": facts.pop("grounding"),
            "grounding_parts": facts, "consistency": sum(consistent(o, tok) for o in outputs) / len(outputs),
            "tokens": sum(map(len, outputs)) / len(outputs)}
    nfe = sum(r.nfe for r in rollouts)
    if nfe:
        row |= {"nfe": nfe / len(rollouts), "tokens_per_nfe": sum(map(len, outputs)) / nfe}
    return row


def order_row(system, orders, targets):
    """The accuracy part of a row, for anything that is just an order (floor, reverse, random, oracle)."""
    ranks = [rank_of(o, t) for o, t in zip(orders, targets)]
    users = {"r1": [float(r == 1) for r in ranks], "ndcg3": [metrics([r])["ndcg3"] for r in ranks]}
    m = metrics(ranks)
    row = {"system": system, "tau": None, "n": len(ranks)}
    row |= {key: m[key] for key in ("r1", "r3", "r5", "ndcg3", "ndcg5")}
    return row | {"r1_ci": bootstrap(users["r1"]), "users": users}


def difference(row, other, key="r1"):
    """R@1 (or NDCG@3, key "ndcg3") of one row minus that of another on the same users: (mean, paired 95% interval)."""
    return row[key] - other[key], bootstrap(row["users"][key], other["users"][key])


def shown_counts(prompts, tok):
    """How many candidates each prompt shows: the identifiers after <candidates>."""
    return [sum(t in tok.slot_of for t in p[p.index(tok.candidates):]) for p in prompts]


def table(rows):
    """Rows as a text table, one line each; a column that a system has no value for is left blank."""
    def cell(row, key, form):
        return format(row[key], form) if row.get(key) is not None else ""

    timed = any("speedup" in r for r in rows)
    lines = [f"{'system':16}{'tau':>5}{'R@1':>7}{'95% interval':>15}{'R@3':>7}{'NDCG@3':>8}{'valid':>8}{'ground.':>9}"
             f"{'consist.':>9}{'copy':>7}{'NFE':>7}{'tok/NFE':>9}" + f"{'speed-up':>10}" * timed]
    for r in rows:
        lines.append(f"{r['system']:16}{cell(r, 'tau', '.2f'):>5}{r['r1']:7.3f}"
                     f"{'[{:.3f}, {:.3f}]'.format(*r['r1_ci']):>15}{r['r3']:7.3f}{r['ndcg3']:8.3f}"
                     f"{cell(r, 'valid', '.1%'):>8}{cell(r, 'grounding', '.1%'):>9}{cell(r, 'consistency', '.1%'):>9}"
                     f"{cell(r, 'copy_rate', '.1%'):>7}{cell(r, 'nfe', '.1f'):>7}{cell(r, 'tokens_per_nfe', '.1f'):>9}"
                     + f"{cell(r, 'speedup', '.2f'):>10}" * timed)
    return "\n".join(lines)


def show_ladder(rows, hit_rate):
    """Print the table, R@1 on all users (a re-ranker cannot find what the retriever missed), paired differences of
    the decoded systems against the floor and against AR, and how the invalid outputs failed."""
    print(table(rows))
    by_name = {r["system"]: r for r in rows}
    for r in (r for r in rows if "nfe" in r):
        name = r["system"] + (f", tau {r['tau']:.2f}" if r["tau"] else "")
        print(f"{name}: R@1 on all users {r['r1'] * hit_rate:.4f} (floor {by_name['floor']['r1'] * hit_rate:.4f})")
        for other in (by_name["floor"], by_name.get("ar", r)):
            if other is not r:
                told = ("{:+.4f} [{:+.4f}, {:+.4f}]".format(mean, *ci) for mean, ci in
                        (difference(r, other, key) for key in ("r1", "ndcg3")))
                print(f"  minus {other['system']}, paired, 95% interval: R@1 {next(told)}, NDCG@3 {next(told)}")
        if r["failures"]:
            print("  failures: " + ", ".join(f"{kind} {share:.2%}" for kind, share in r["failures"].items()))
