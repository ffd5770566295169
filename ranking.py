"""One answer: it is parsed into a permutation or a named failure, judged, rewarded, and its reasoning is checked.

Everything here sees token ids (data/tokenizer.py) and never a model. Paper: Sections "The task" (metrics, fallback),
"The conversion" (failures are named, no constrained decoder), "RL" (conditional reward). Two rules keep the numbers
honest. The parser repairs nothing. And an output without an answer falls back to the pre-rank order in `order_shown`
alone, which only the evaluation calls.

Left out: an LLM as judge of the reasoning. Here each claim is checked against the prompt instead.
"""
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from data import dataset

FAILURES = ("no_eos", "no_answer", "malformed", "out_of_set", "duplicate", "omission", "overflow")
KS = (1, 3, 5, 10)                                                  # the K of Recall@K and NDCG@K


# === The answer =======================================================================================================

@dataclass
class Parsed:
    order: list = None        # candidate indices (0 = first of the pre-rank order) from best to worst, or None
    failure: str = None       # None, or one of FAILURES


def cut(tokens, eos):
    """Tokens up to and including the first <eos>. Nothing after it counts, anywhere."""
    return tokens[:tokens.index(eos) + 1] if eos in tokens else tokens


def parse(output, tok, n_shown):
    """Output tokens -> Parsed. The prompt showed n_shown candidates, with the first of the identifiers A, B, C, ...

    The failures are looked for in this order: no_eos (the text was cut off), no_answer (it has no <answer>), malformed
    (something is not an identifier), out_of_set (an identifier was not shown), duplicate, omission (fewer than n_shown)
    and overflow (more than n_shown; this cannot happen without a duplicate, and has a name for symmetry).
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
    if any(s >= n_shown for s in slots):
        return Parsed(failure="out_of_set")
    if len(set(slots)) < len(slots):
        return Parsed(failure="duplicate")
    if len(slots) != n_shown:
        return Parsed(failure="omission" if len(slots) < n_shown else "overflow")
    return Parsed(order=slots)


def order_shown(parsed, n_shown):
    """What a user is shown: the answer, or the pre-rank order where there is none. Only the evaluation calls this."""
    return parsed.order if parsed.order is not None else list(range(n_shown))


def shown_counts(prompts, tok):
    """How many candidates each prompt shows: the number of identifiers after <candidates>."""
    return [sum(t in tok.slot_of for t in p[p.index(tok.candidates):]) for p in prompts]


def copied(parsed):
    """Does the answer repeat the pre-rank order?"""
    return parsed.order == sorted(parsed.order) if parsed.order else False


# === Metrics and reward ===============================================================================================

def rank_of(order, target):
    """Rank of the target, counted from 1. It is math.inf where the target is no candidate (target None)."""
    return order.index(target) + 1 if target is not None else math.inf


def rank_by_score(scores, target):
    """Rank of scores[target], from 1. Ties and NaN count *against* it, so a constant scorer gets no Recall@1."""
    return 1 + sum(not s < scores[target] for i, s in enumerate(scores) if i != target)


def metrics(ranks):
    """Recall@K and NDCG@K as means over users. Returns {"r1": ..., "ndcg1": ..., ...} for each K of KS.

    Recall@K is the share of ranks <= K. NDCG@K is the mean of 1 / log2(1 + rank), or 0 where rank > K: there is one
    relevant item, so the ideal DCG is 1.
    """
    out, n = {}, max(len(ranks), 1)
    for cutoff in KS:
        out[f"r{cutoff}"] = sum(r <= cutoff for r in ranks) / n
        out[f"ndcg{cutoff}"] = sum(1 / math.log2(1 + r) for r in ranks if r <= cutoff) / n
    return out


def reward(parsed, target, n_shown):
    """Reward of one rollout, as a dict of its parts and their total (paper, "The teacher", step 2, and "RL").

        rank     (rank before - rank after) / n_shown      how far the target rose
        format   0.2 if the target strictly rose, or was first and stays first (so copying earns nothing else)
        invalid  -1, and nothing else, where the answer is no permutation
    """
    if parsed.failure:
        return {"rank": 0.0, "format": 0.0, "invalid": -1.0, "total": -1.0}
    before, after = target + 1, rank_of(parsed.order, target)
    rank = (before - after) / n_shown
    fmt = 0.2 if after < before or after == before == 1 else 0.0
    return {"rank": rank, "format": fmt, "invalid": 0.0, "total": rank + fmt}


# === The reasoning, checked against the prompt ========================================================================

# Where each token of an output stands. The line of candidate j (A has j = 0) starts at LINES_AT + dataset.LINE * j:
#
#     place    0        1     2       3      4         5  6      7        8     9       10  11  12      13       14
#     token    <think>  kind  kind:n  brand  brand:n   A  brand  brand:n  kind  kind:n  h3  x5  next:2  grade:6  B ...
#     in line                                          0  1      2        3     4       5   6   7       8        0
PATTERN_AT = (slice(1, 3), slice(3, 5))
LINES_AT = 5
CLAIM_AT = {"brand": slice(1, 3), "kind": slice(3, 5), "link": slice(5, 6), "together": slice(6, 7),
            "next": slice(7, 8)}                                    # within a line
GRADE_AT = dataset.LINE - 1                                         # within a line
CLAIMS = ("pattern", *CLAIM_AT)


def grounding(prompts, outputs, tok, n_candidates):
    """Share of the claims that the prompts bear out, over all outputs: {"grounding": share, "pattern": share, ...}.

    An output makes 2 claims about the history (the pattern: the newest purchase's kind and brand) and 5 about each
    candidate that its prompt shows, of which there are at most n_candidates. A claim of two tokens is right if both
    are. A claim that is missing or misplaced counts as wrong.
    """
    patterns, lines = dataset.claims(dataset.read_prompts(prompts, tok, n_candidates), tok)     # (n, 4), (n, k, 8)
    right, total = Counter(), Counter()
    for output, pattern, shown in zip(outputs, patterns.tolist(), lines.tolist()):
        said = cut([int(t) for t in output], tok.eos)
        said = said + [tok.pad] * (LINES_AT + dataset.LINE * n_candidates)                      # what is missing
        truth = [tok.think, *pattern]
        for span in PATTERN_AT:
            right["pattern"] += said[span] == truth[span]
            total["pattern"] += 1
        for j, facts in enumerate(f for f in shown if f[0] >= 0):   # an absent candidate has -1 for its identifier
            line = said[LINES_AT + dataset.LINE * j:][:dataset.LINE]
            for name, span in CLAIM_AT.items():
                right[name] += line[0] == facts[0] and line[span] == facts[span]
                total[name] += 1
    shares = {name: right[name] / max(total[name], 1) for name in CLAIMS}
    return {"grounding": sum(right.values()) / max(sum(total.values()), 1)} | shares


def consistent(output, tok):
    """Does the answer follow from the model's own pick and grades?

    The first candidate after <top> is the pick, which is free. The other two must be the best graded of the rest (ties
    in pre-rank order), each with the grade that its own line gave it. The answer must be those three, and then the rest
    in pre-rank order (dataset.order_by).
    """
    output = cut([int(t) for t in output], tok.eos)
    if not {tok.top, tok.answer, tok.eos} <= set(output):           # without <eos> the answer may not be over
        return False
    lines = output[LINES_AT:output.index(tok.top)]
    top = output[output.index(tok.top) + 1:output.index(tok.answer)]                   # grade, identifier, grade, ...
    answer = [tok.slot_of.get(t) for t in output[output.index(tok.answer) + 1:-1]]
    grades = [tok.grade.index(t) if t in tok.grade else -1 for t in lines[GRADE_AT::dataset.LINE]]
    pick = tok.slot_of.get(top[1]) if len(top) > 1 else None
    if pick is None or pick >= len(grades) or -1 in grades:
        return False
    if lines[::dataset.LINE] != tok.slots[:len(grades)]:            # lines of A, B, ... in turn, and nothing between
        return False
    follows = dataset.order_by(np.array([grades]), np.array([pick]))[0].tolist()
    stated = [x for c in follows[:dataset.TOP] for x in (tok.grade[grades[c]], tok.slots[c])]
    return top == stated and answer == follows
