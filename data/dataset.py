"""Prompts and traces as token rows: what is shown, what can be claimed about it, and the text that claims it.

    prompt  <history> h8 brand kind ... h1 brand kind <candidates> A brand kind score pop like link xN next ... <rank>
    output  <think> [kind] kind:n <brand> brand:n               the pattern: does the newest purchase repeat older ones?
            A brand brand:n kind kind:n h3 x5 next:2 grade:6    for each candidate: how often the history has its brand
            B ...                                               and kind, what it is bought with, by how many, how many
                                                                bought it next; verdict
            <top> grade:6 C grade:5 A grade:5 F                 three to put first, the pick, then by grade
            <answer> C A F B D E G H I J <eos>                  those three, then the rest in pre-rank order

Everything is done for all rows at once, on arrays of *token ids* with -1 for "not there"; `Shown` is both what the
writer writes and what the grounding checker (ranking.py) reads back from a prompt, so there is one account of the facts.
"""
from dataclasses import dataclass

import numpy as np

from data.tokenizer import EDGES

TOP = 3                          # how many are put first before the rest follows in pre-rank order
LINE = 9                         # tokens of a candidate's line in the reasoning


@dataclass
class Shown:
    """What a prompt says, as token ids. history_*: (n, 8), newest first. The others: (n, k), in pre-rank order."""
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


FIELDS = ("brand", "kind", "score", "pop", "like", "link", "together", "next")      # a candidate's, in prompt order


def bucket(tokens, values, name):
    """The token of the bucket in which each value falls (EDGES of data/tokenizer.py)."""
    return np.asarray(tokens)[np.digitize(values, EDGES[name])]


def show(c, split, tok):
    """Candidates (data/retriever.py) -> Shown."""
    brand = np.array([tok.brand_id.get(b, tok.brand[0]) for b in split.brand])
    kind = np.array([tok.kind_id.get(p[-1] if p else "", tok.kind[0]) for p in split.path])
    absent = c.history < 0
    fields = {"brand": brand[c.item], "kind": kind[c.item], "score": bucket(tok.score, c.score, "score"),
              "pop": bucket(tok.pop, c.pop, "pop"), "like": bucket(tok.like, c.like, "like"),
              "link": np.asarray(tok.h)[c.link],                    # -1, no link, is the last of tok.h
              "together": bucket(tok.together, c.together, "together"), "next": bucket(tok.next, c.next, "next")}
    return Shown(history_brand=np.where(absent, -1, brand[c.history]),
                 history_kind=np.where(absent, -1, kind[c.history]),
                 **{f: np.where(c.item >= 0, v, -1) for f, v in fields.items()})


def drop_some(shown, target, share, rng):
    """In a share of the rows, remove candidates at random, so that fewer than ten are served too and an identifier can
    be out of set. Three at least stay, in order. Returns (Shown, target), the target -1 where it was removed."""
    n, k = shown.brand.shape
    keep = np.full(n, k)
    some = rng.random(n) < share
    keep[some] = rng.integers(min(TOP, k), k, some.sum()) if k > TOP else k
    chance = rng.random((n, k)) + (shown.brand < 0)                 # those not there anyway are the first to go
    lucky = np.argsort(np.argsort(chance, axis=1), axis=1) < keep[:, None]                  # (n, k): who stays
    order = np.argsort(~lucky, axis=1, kind="stable")               # the stayers first, in their old order
    stays = np.take_along_axis(lucky, order, 1)
    fields = {f: np.where(stays, np.take_along_axis(getattr(shown, f), order, 1), -1) for f in FIELDS}
    found = (order == target[:, None]) & stays
    return (Shown(history_brand=shown.history_brand, history_kind=shown.history_kind, **fields),
            np.where(found.any(1), found.argmax(1), -1))


def count_equal(mine, theirs, other):
    """How often `mine` (n, k) occurs in `theirs` (n, 8); "other" and -1 match nothing. Returns (n, k) integers."""
    same = (mine[:, :, None] == theirs[:, None, :]) & (mine != other)[:, :, None] & (mine >= 0)[:, :, None]
    return same.sum(2)


def claims(s, tok):
    """All that the reasoning may claim about a prompt, before any verdict:
    pattern (n, 4): kind of the newest purchase and how often the history has it, the same for its brand;
    lines (n, k, 8): identifier, brand and its matches, kind and its matches, link, together, next; -1 = not there.

    The brand is named before it is counted: a token that has the brand before it finds its equals in the history in
    one step of attention, where otherwise it must first find the candidate and then its brand.
    """
    pattern = []
    for values, other, tokens in ((s.history_kind, tok.kind[0], tok.kind_count),
                                  (s.history_brand, tok.brand[0], tok.brand_count)):
        newest = values[:, :1]                                      # (n, 1)
        pattern += [newest, bucket(tokens, count_equal(newest, values, other), "count")]
    n, k = s.brand.shape
    there = s.brand >= 0
    lines = [np.broadcast_to(np.asarray(tok.slots)[:k], (n, k)),
             s.brand, bucket(tok.brand_count, count_equal(s.brand, s.history_brand, tok.brand[0]), "count"),
             s.kind, bucket(tok.kind_count, count_equal(s.kind, s.history_kind, tok.kind[0]), "count"),
             s.link, s.together, s.next]
    return np.concatenate(pattern, axis=1), np.where(there[:, :, None], np.stack(lines, axis=2), -1)


def evidence(s, tok):
    """(n, k, 8) tokens that the teacher judges a candidate by: what is shown of it and what is claimed, without names."""
    _, lines = claims(s, tok)
    return np.concatenate([np.stack([s.score, s.pop, s.like], axis=2), lines[:, :, [2, 4, 5, 6, 7]]], axis=2)


def flatten(matrix):
    """(n, L) with -1 for nothing -> (flat uint16 tokens, (n + 1,) offsets): the format on disk."""
    there = matrix >= 0
    return matrix[there].astype(np.uint16), np.concatenate([[0], np.cumsum(there.sum(1))])


def prompts(s, tok, extra=None):
    """Write the prompts of all rows. extra: optional (history (n, 8, e), candidates (n, k, e)) tokens of each item
    that go before its brand: semantic IDs and title pieces. Returns (n, L) with -1 for nothing."""
    n, k = s.brand.shape
    there, old = s.brand >= 0, s.history_brand >= 0

    def column(value, mask):
        return np.where(mask, value, -1)[:, None]

    parts = [np.full((n, 1), tok.history)]
    for j in reversed(range(s.history_brand.shape[1])):             # oldest first
        parts += [column(tok.h[j], old[:, j])]
        parts += [np.where(old[:, j, None], extra[0][:, j], -1)] if extra else []
        parts += [s.history_brand[:, j, None], s.history_kind[:, j, None]]
    parts += [np.full((n, 1), tok.candidates)]
    for j in range(k):
        parts += [column(tok.slots[j], there[:, j])]
        parts += [np.where(there[:, j, None], extra[1][:, j], -1)] if extra else []
        parts += [getattr(s, f)[:, j, None] for f in FIELDS]
    return np.concatenate(parts + [np.full((n, 1), tok.rank)], axis=1)


def read_prompt(tokens, tok):
    """The inverse for one prompt: lists of history and candidate items, each a dict of FIELDS (+ its identifier).
    Semantic IDs and titles are skipped: no claim is about them."""
    field = {t: name for name in FIELDS for t in getattr(tok, "h" if name == "link" else name)}
    sides = {tok.history: [], tok.candidates: []}
    side, names = sides[tok.history], set(tok.h)                    # tokens that open an item on this side
    for t in map(int, tokens):
        if t in sides:
            side, names = sides[t], set(tok.h if t == tok.history else tok.slots)
        elif t in names:
            side.append({})
        elif t in field and side:
            side[-1][field[t]] = t
    return sides[tok.history], sides[tok.candidates]


def read_prompts(rows, tok, k):
    """Prompts (lists of tokens) -> Shown, for the grounding checker."""
    s = Shown(*[np.full((len(rows), 8), -1) for _ in range(2)], *[np.full((len(rows), k), -1) for _ in FIELDS])
    for r, row in enumerate(rows):
        history, candidates = read_prompt(row, tok)
        for j, item in enumerate(reversed(history)):                # newest first
            s.history_brand[r, j], s.history_kind[r, j] = item["brand"], item["kind"]
        for j, item in enumerate(candidates):
            for f in FIELDS:
                getattr(s, f)[r, j] = item[f]
    return s


def order_by(grade, pick=None):
    """The answer that follows from grades (n, k), -1 = not there: the pick, then by grade, ties in pre-rank order,
    TOP in all; the rest in pre-rank order. pick (n,) or None for the best grade. Returns (n, k), absent ones last."""
    n, k = grade.shape
    key = np.where(grade >= 0, grade, -1).astype(np.int64)
    if pick is not None:
        key[np.arange(n), pick] = 10**6
    best = np.argsort(-key, axis=1, kind="stable")[:, :TOP]         # (n, TOP)
    rank = np.where(grade >= 0, TOP, 10**6)                         # the rest keep their order: equal keys, stable sort
    np.put_along_axis(rank, best, np.arange(best.shape[1])[None], 1)
    return np.argsort(np.where(grade >= 0, rank, 10**6), axis=1, kind="stable")


def traces(s, tok, grade, pick=None, reasoning=True):
    """Write the outputs of all rows: (n, L) with -1 for nothing. grade (n, k) numbers, -1 = not there. Without
    reasoning only the answer is left, to show what writing the reasons first brings."""
    n, k = grade.shape
    pattern, lines = claims(s, tok)
    verdict = np.where(grade >= 0, np.asarray(tok.grade)[grade], -1)
    lines = np.concatenate([lines, verdict[:, :, None]], axis=2)    # (n, k, LINE)
    order = order_by(grade, pick)
    there = np.take_along_axis(grade, order, 1) >= 0
    answer = np.where(there, np.asarray(tok.slots)[order], -1)

    def mark(token):
        return np.full((n, 1), token)

    # Each place on <top> states its grade first: finding the best grade left, and then the first with that grade, are
    # two easy steps where finding the candidate at once is a hard one (it was learned last, and half as well).
    graded = np.stack([np.take_along_axis(verdict, order, 1), answer], axis=2)[:, :TOP]     # (n, TOP, 2)
    reasons = [mark(tok.think), pattern, lines.reshape(n, -1), mark(tok.top), graded.reshape(n, -1)]
    return np.concatenate(reasons * reasoning + [mark(tok.answer), answer, mark(tok.eos)], axis=1)


def longest_output(k):
    """Tokens of an output about k candidates, to its <eos>. Nothing longer can be valid, so decoding stops there."""
    return 8 + 2 * TOP + k * (LINE + 1)
