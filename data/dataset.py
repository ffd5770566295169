"""Prompts and traces as token rows: what a prompt shows, what can be claimed about it, and the text that claims it.

    prompt  <history> h8 brand kind ... h1 brand kind <candidates> A brand kind score pop like link xN next ... <rank>
    output  <think> [kind] kind:n <brand> brand:n               the pattern: do older purchases share the newest one's
                                                                kind and brand?
            A brand brand:n kind kind:n h3 x5 next:2 grade:6    per candidate: its brand and kind, each with how often
            B ...                                               the history has it; what it is bought with, by how
                                                                many, how many bought it right after h1; the verdict
            <top> grade:6 C grade:5 A grade:5 F                 three to put first: the pick, then by grade
            <answer> C A F B D E G H I J <eos>                  those three, then the rest in pre-rank order

Everything is done for all rows at once, on arrays of *token ids* in which -1 means "nothing here". Shapes: n rows, k
candidates. A prompt is written from a `Shown`, and the grounding checker (ranking.py) reads a `Shown` back from it.
"""
from dataclasses import dataclass

import numpy as np

from data.tokenizer import EDGES

TOP = 3                          # so many candidates are put first; the rest follows in pre-rank order
LINE = 9                         # tokens of a candidate's line in the reasoning


@dataclass
class Shown:
    """What the prompts say, as token ids. history_*: (n, 8), newest first. The others: (n, k), in pre-rank order."""
    history_brand: np.ndarray
    history_kind: np.ndarray
    brand: np.ndarray
    kind: np.ndarray
    score: np.ndarray
    pop: np.ndarray
    like: np.ndarray
    link: np.ndarray
    together: np.ndarray
    next: np.ndarray


FIELDS = ("brand", "kind", "score", "pop", "like", "link", "together", "next")      # of a candidate, in prompt order


def bucket(tokens, values, name):
    """The token of the bucket that each value falls into (EDGES of data/tokenizer.py). Any shape -> the same shape."""
    return np.asarray(tokens)[np.digitize(values, EDGES[name])]


def show(c, split, tok):
    """Candidates (data/retriever.py) -> Shown."""
    brand = np.array([tok.brand_id.get(b, tok.brand[0]) for b in split.brand])                      # (items,)
    kind = np.array([tok.kind_id.get(p[-1] if p else "", tok.kind[0]) for p in split.path])         # (items,)
    absent = c.history < 0
    fields = {f: bucket(getattr(tok, f), getattr(c, f), f) for f in ("score", "pop", "like", "together", "next")}
    fields |= {"brand": brand[c.item], "kind": kind[c.item],
               "link": np.asarray(tok.h)[c.link]}                   # a link of -1 finds the last of tok.h, " nobody"
    return Shown(history_brand=np.where(absent, -1, brand[c.history]),
                 history_kind=np.where(absent, -1, kind[c.history]),
                 **{f: np.where(c.item >= 0, v, -1) for f, v in fields.items()})


def drop_some(shown, target, share, rng):
    """Remove candidates at random in a share of the rows, so that the model learns to rank fewer, too. At least TOP
    stay. Returns (Shown, target); a target that was removed is -1. Each candidate draws a lot, and the smallest stay:

        before     lots              keep   after      target before -> after
        A B C D    .7 .1 .4 .2       3      B C D -    2 (C) -> 1 (C is now the second)
        A B C D    .7 .1 .4 .2       3      B C D -    0 (A) -> -1 (A was removed)
        A B C -    .3 .9 .5 1.1      3      A B C -    1 (B) -> 1 (absent ones draw lots above 1: they go first)
    """
    n, n_candidates = shown.brand.shape
    keep = np.full(n, n_candidates)
    some = rng.random(n) < share
    if n_candidates > TOP:
        keep[some] = rng.integers(TOP, n_candidates, some.sum())
    lot = rng.random((n, n_candidates)) + (shown.brand < 0)
    largest = np.take_along_axis(np.sort(lot, axis=1), keep[:, None] - 1, 1)                # (n, 1) lot that may stay
    stays = lot <= largest                                          # (n, k)
    order = np.argsort(~stays, axis=1, kind="stable")               # (n, k): first those who stay, in their old order
    filled = np.take_along_axis(stays, order, 1)
    fields = {f: np.where(filled, np.take_along_axis(getattr(shown, f), order, 1), -1) for f in FIELDS}
    found = (order == target[:, None]) & filled                     # (n, k): is the target here now?
    return (Shown(history_brand=shown.history_brand, history_kind=shown.history_kind, **fields),
            np.where(found.any(1), found.argmax(1), -1))


def count_equal(mine, theirs, other):
    """How often each of `mine` (n, k) occurs in its row of `theirs` (n, 8). "other" and -1 match nothing. -> (n, k)"""
    comparable = (mine != other) & (mine >= 0)
    return ((mine[:, :, None] == theirs[:, None, :]) & comparable[:, :, None]).sum(2)      # (n, k, 8) -> (n, k)


def claims(s, tok):
    """All that the reasoning may claim about prompts, before any verdict. Shown -> (pattern, lines):

    pattern (n, 4)     the kind of the newest purchase, how often the history has that kind; the same for its brand
    lines (n, k, 8)    identifier, brand, its matches, kind, its matches, link, together, next; all -1 if absent

    A brand is named before it is counted: a token behind the name finds its equals in the history in one step of
    attention. Without the name it would have to find the candidate first, and then the brand."""
    pattern = []
    for values, other, tokens in ((s.history_kind, tok.kind[0], tok.kind_count),
                                  (s.history_brand, tok.brand[0], tok.brand_count)):
        newest = values[:, :1]                                      # (n, 1)
        pattern += [newest, bucket(tokens, count_equal(newest, values, other), "count")]
    n, n_candidates = s.brand.shape
    lines = [np.broadcast_to(np.asarray(tok.slots)[:n_candidates], (n, n_candidates)),
             s.brand, bucket(tok.brand_count, count_equal(s.brand, s.history_brand, tok.brand[0]), "count"),
             s.kind, bucket(tok.kind_count, count_equal(s.kind, s.history_kind, tok.kind[0]), "count"),
             s.link, s.together, s.next]
    return np.concatenate(pattern, axis=1), np.where((s.brand >= 0)[:, :, None], np.stack(lines, axis=2), -1)


def evidence(s, tok):
    """The tokens by which the teacher judges: what is shown and claimed of a candidate, without its names. Returns
    (n, k, 8), pad where a candidate is absent."""
    _, lines = claims(s, tok)
    parts = [np.stack([s.score, s.pop, s.like], axis=2), lines[:, :, [2, 4, 5, 6, 7]]]
    return np.maximum(np.concatenate(parts, axis=2), tok.pad)


def prompts(s, tok, extra=None):
    """Write the prompts of all rows. Returns (n, L), -1 where a row has nothing. extra: (history (n, 8, e), candidates
    (n, k, e)), the tokens that stand before an item's brand: its semantic ID and the pieces of its title."""
    n, n_candidates = s.brand.shape
    bought, present = s.history_brand >= 0, s.brand >= 0            # (n, 8), (n, k)
    parts = [np.full((n, 1), tok.history)]
    for j in reversed(range(s.history_brand.shape[1])):             # the oldest purchase is written first
        parts += [np.where(bought[:, j, None], tok.h[j], -1)]                               # (n, 1)
        parts += [np.where(bought[:, j, None], extra[0][:, j], -1)] if extra else []        # (n, e)
        parts += [s.history_brand[:, j, None], s.history_kind[:, j, None]]
    parts += [np.full((n, 1), tok.candidates)]
    for j in range(n_candidates):
        parts += [np.where(present[:, j, None], tok.slots[j], -1)]
        parts += [np.where(present[:, j, None], extra[1][:, j], -1)] if extra else []
        parts += [getattr(s, f)[:, j, None] for f in FIELDS]
    return np.concatenate(parts + [np.full((n, 1), tok.rank)], axis=1)


def read_prompt(tokens, tok):
    """The inverse for one prompt. Returns two lists, history (oldest first) and candidates, with a dict {field: token}
    per item. Semantic IDs and titles are skipped, because no claim is about them."""
    field = {t: name for name in FIELDS for t in getattr(tok, "h" if name == "link" else name)}
    sides = {tok.history: [], tok.candidates: []}
    side, names = sides[tok.history], set(tok.h)                    # names: the tokens that open an item on this side
    for t in map(int, tokens):
        if t in sides:
            side, names = sides[t], set(tok.h if t == tok.history else tok.slots)
        elif t in names:
            side.append({})
        elif t in field and side:
            side[-1][field[t]] = t
    return sides[tok.history], sides[tok.candidates]


def read_prompts(rows, tok, n_candidates):
    """Prompts (a list of token lists, of at most n_candidates each) -> Shown, for the grounding checker."""
    s = Shown(*[np.full((len(rows), 8), -1) for _ in range(2)],
              *[np.full((len(rows), n_candidates), -1) for _ in FIELDS])
    for r, row in enumerate(rows):
        history, candidates = read_prompt(row, tok)
        for j, item in enumerate(reversed(history)):                # newest first
            s.history_brand[r, j], s.history_kind[r, j] = item["brand"], item["kind"]
        for j, item in enumerate(candidates):
            for f in FIELDS:
                getattr(s, f)[r, j] = item[f]
    return s


def order_by(grade, pick=None):
    """The answer that follows from grades (n, k), -1 where absent: candidates (n, k), the first one first. TOP are put
    first: the pick (n,), then the best grades, ties in pre-rank order; without a pick, the best grades. The rest follow
    in pre-rank order, and absent ones are last. Three rows, candidates counted from 0:

        grade        pick   order
        3 5 5 1 5    1      1 2 4  0 3      three fives, then the rest as it came
        3 5 5 1 5    3      3 1 2  0 4      the pick, though its grade is the worst; two fives; the rest
        1 4 - - -    1      1 0  2 3 4      only two are there
    """
    present = grade >= 0
    wish = grade.astype(np.int64)                                   # a copy
    if pick is not None:
        wish[np.arange(len(grade)), pick] = 10**6                   # above every grade
    first = np.argsort(-wish, axis=1, kind="stable")[:, :TOP]       # (n, TOP): who is put first
    place = np.full(grade.shape, TOP)                               # equal places: a stable sort keeps pre-rank order
    np.put_along_axis(place, first, np.arange(first.shape[1])[None], 1)
    return np.argsort(np.where(present, place, TOP + 1), axis=1, kind="stable")


def traces(s, tok, grade, pick=None, reasoning=True):
    """Write the outputs of all rows. Returns (n, L), -1 where a row has nothing. grade and pick: see order_by. Without
    `reasoning` only the answer is written, to measure what it brings to write the reasons first."""
    n = len(grade)
    pattern, lines = claims(s, tok)
    verdict = np.where(grade >= 0, np.asarray(tok.grade)[grade], -1)                        # (n, k)
    lines = np.concatenate([lines, verdict[:, :, None]], axis=2)    # (n, k, LINE)
    order = order_by(grade, pick)
    answer = np.where(np.take_along_axis(grade, order, 1) >= 0, np.asarray(tok.slots)[order], -1)   # (n, k)

    def mark(token):
        return np.full((n, 1), token)

    # Each place in <top> states a grade before a candidate. To find the best grade that is left, and then the first
    # candidate with it, are two easy steps. To find the candidate at once was learned last, and half as well.
    graded = np.stack([np.take_along_axis(verdict, order, 1), answer], axis=2)[:, :TOP]     # (n, TOP, 2)
    reasons = [mark(tok.think), pattern, lines.reshape(n, -1), mark(tok.top), graded.reshape(n, -1)]
    return np.concatenate(reasons * reasoning + [mark(tok.answer), answer, mark(tok.eos)], axis=1)


def longest_output(n_candidates):
    """Tokens of an output about n_candidates, <eos> included. Nothing longer can be valid, so decoding stops there."""
    return 8 + 2 * TOP + n_candidates * (LINE + 1)
