"""Who is bought after what: the retriever that hands ten candidates, in order, to the re-ranker, with its evidence.

Item-to-item, in one matrix of similarities (items x items):

    S[i, j] = covisits(i, j) / (pop_i^a pop_j^b)  +  CONTENT * likeness(i, j)

where covisits counts users who bought i and j at most WINDOW purchases apart, the nearer the more, i before j counting
more than j before i; damping by popularity keeps best-sellers from being everybody's neighbour; likeness compares the
words of brand and title, and finds the same shampoo in another size. A history scores

    score(j) = sum_k  DECAY^k  S[h_k, j],      k = 1 the newest, ten at most, seen items removed; the top n are shown.

It is deliberately a plain one (Linden et al., 2003): a strong recall with a naive order leaves the re-ranker something
to read. What it read is the *evidence* it hands over, in whole numbers that a person can check: how often a candidate
was bought by the same users as a history item, how often straight after the newest one, how alike the titles are.

Nothing held out is ever fitted, and a training prefix is scored by a retriever fitted *without its user*: otherwise
its own target sits in the counts, and the model would learn to trust evidence that is never there again.
"""
import math
import re
import warnings
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

WINDOW, NEAR, BACK = 10, 0.5, 0.5       # covisit weight distance^-NEAR, times BACK in the backward direction
DAMP_FROM, DAMP_TO = 0.4, 0.3           # a and b above
CONTENT, DECAY = 0.12, 0.75
LAST, SLOTS = 10, 8                     # purchases that score; the newest SLOTS of them are shown as h1 ... h8
FOLDS = 5


@dataclass
class Candidates:
    """n histories with k candidates each, as retrieved, and the evidence for them. All arrays are (n, k) but for
    `history` (n, SLOTS), newest first, and `target` (n,), the position of the next purchase or -1.

    item: -1 where a small catalogue has no unseen item left. score: relative to the first candidate's, 0 to 1. link:
    which shown history item (0 = h1) it was most often bought with, -1 for none; together: by how many users; next:
    how many bought it straight after h1. like: likeness of its title with that of h1, 0 to 1. pop: its purchases in
    the fit.
    """
    item: np.ndarray
    score: np.ndarray
    pop: np.ndarray
    link: np.ndarray
    together: np.ndarray
    next: np.ndarray
    like: np.ndarray
    history: np.ndarray
    target: np.ndarray

    def take(self, rows):
        return Candidates(**{name: value[rows] for name, value in vars(self).items()})

    @staticmethod
    def join(parts):
        return Candidates(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in vars(parts[0])})


def likeness(titles, brands):
    """Cosine of TF-IDF word vectors of title and brand: (items, items) floats, diagonal 0. Words in fewer than two
    items or in more than an eighth of them say nothing about likeness and are left out."""
    words = [set(re.findall(r"[a-z0-9]+", f"{t} {b}".lower())) for t, b in zip(titles, brands)]
    count = Counter(w for ws in words for w in ws)
    column = {w: c for c, w in enumerate(sorted(w for w, c in count.items() if 2 <= c <= max(len(titles) / 8, 2)))}
    x = torch.zeros(len(titles), len(column))
    for i, ws in enumerate(words):
        for w in ws:
            if w in column:
                x[i, column[w]] = math.log(len(titles) / count[w])
    x = F.normalize(x, dim=1)
    with warnings.catch_warnings():                                 # "sparse CSR is in beta": a product is all we ask
        warnings.simplefilter("ignore")
        same = x.to_sparse_csr() @ x.T if len(column) else torch.zeros(len(titles), len(titles))
    return same.fill_diagonal_(0)


def pairs(histories, window):
    """All purchases of a user at most `window` apart: (earlier item, later item, distance, user) as four arrays."""
    items = np.array([i for h in histories for i in h], dtype=np.int64)
    owner = np.repeat(np.arange(len(histories)), [len(h) for h in histories])
    out = []
    for d in range(1, window + 1):
        same = owner[d:] == owner[:-d]                              # both ends belong to one user
        i, j = items[:-d][same], items[d:][same]
        keep = i != j
        out.append((i[keep], j[keep], np.full(keep.sum(), d), owner[d:][same][keep]))
    return [np.concatenate(column) for column in zip(*out)]


def users_of(n, i, j, owner):
    """(n, n) how many users have the pair (i, j): one who buys the same two a thousand times counts once."""
    i, j = np.divmod(np.unique((owner * n + i) * n + j) % (n * n), n)
    return Retriever.matrix(n, i, j, np.ones(len(i), np.int16))


class Retriever:
    """S and the counts behind it, fitted on `histories` (lists of item numbers; only training purchases)."""

    def __init__(self, histories, split, like):
        n = len(split.asin)
        self.like = like
        self.pop = np.bincount([i for h in histories for i in h], minlength=n).astype(np.float32)
        i, j, d, owner = pairs(histories, WINDOW)
        near = d ** -NEAR
        both = np.concatenate([i, j]), np.concatenate([j, i])
        self.together = users_of(n, *both, np.concatenate([owner, owner]))
        self.next = users_of(n, i[d == 1], j[d == 1], owner[d == 1])
        s = self.matrix(n, *both, np.concatenate([near, BACK * near]).astype(np.float32))
        s /= torch.from_numpy((1 + self.pop) ** DAMP_FROM)[:, None]
        s /= torch.from_numpy((1 + self.pop) ** DAMP_TO)[None, :]
        self.s = s.add_(like, alpha=CONTENT)

    @staticmethod
    def matrix(n, i, j, weight):
        """Dense (n, n) sum of weights at (i, j). Dense is 0.6 GB for Beauty, and a gather of rows is all that scoring
        then needs; above some 20,000 items use sparse rows instead."""
        weight = torch.from_numpy(weight)
        return torch.zeros(n * n, dtype=weight.dtype).index_add_(0, torch.from_numpy(i * n + j), weight).view(n, n)

    def candidates(self, histories, targets, k):
        """The k best unseen items of each history, with evidence. histories: lists, oldest first; targets: item
        numbers, used only to mark their position. Returns Candidates."""
        parts = []
        for lo in range(0, len(histories), 1024):
            chunk = histories[lo:lo + 1024]
            recent = [h[-LAST:][::-1] for h in chunk]               # newest first
            index = torch.tensor([r + [0] * (LAST - len(r)) for r in recent])                       # (n, LAST)
            there = torch.tensor([[1.0] * len(r) + [0.0] * (LAST - len(r)) for r in recent])
            weight = there * DECAY ** torch.arange(LAST)
            score = F.embedding_bag(index, self.s, per_sample_weights=weight, mode="sum")           # (n, items)
            row = np.repeat(np.arange(len(chunk)), [len(h) for h in chunk])
            score[row, [i for h in chunk for i in h]] = -1.0        # seen items are never candidates
            value, item = score.topk(min(k, score.shape[1]), dim=1)                                 # (n, k)
            h, shown = index[:, :SLOTS], there[:, :SLOTS].bool()
            together = (self.together[h[:, :, None], item[:, None, :]] * shown[:, :, None]).numpy() # (n, SLOTS, k)
            link = together.argmax(1)                               # argmax takes the first: ties go to the newest
            most = np.take_along_axis(together, link[:, None], 1)[:, 0]
            hit = (item.numpy() == np.asarray(targets[lo:lo + 1024])[:, None]) & (value >= 0).numpy()
            parts.append(Candidates(
                item=np.where(value >= 0, item, -1), pop=self.pop[item.numpy()],
                score=(value / value[:, :1].clamp(min=1e-9)).clamp(min=0).numpy(),
                link=np.where(most > 0, link, -1), together=most, next=self.next[h[:, :1], item].numpy(),
                like=self.like[h[:, :1], item].numpy(), history=np.where(shown.numpy(), h.numpy(), -1),
                target=np.where(hit.any(1), hit.argmax(1), -1)))
        return Candidates.join(parts)


def k_core(histories, k):
    """Drop purchases of items bought fewer than k times and users left with fewer than k purchases, until nothing
    changes (McAuley et al.). histories: {user: [item, ...]}; returns the same, smaller. Beauty comes as a 5-core."""
    while True:
        count = Counter(i for h in histories.values() for i in h)
        kept = {u: [i for i in h if count[i] >= k] for u, h in histories.items()}
        kept = {u: h for u, h in kept.items() if len(h) >= k}
        if sum(map(len, kept.values())) == sum(map(len, histories.values())):
            return kept
        histories = kept
