"""Who is bought after what: the retriever, which hands ten candidates, in order and with evidence, to the re-ranker.

It compares items with items, in one matrix of similarities (items x items):

    S[i, j] = covisits(i, j) / (pop_i^a pop_j^b)  +  CONTENT * likeness(i, j)

covisits counts the users who bought i and j at most WINDOW purchases apart. Near ones count more than distant ones, and
i before j counts more than j before i. Dividing by popularity keeps best-sellers from being everybody's neighbour.
likeness compares the words of brand and title, so it finds the same shampoo in another size. A history scores item j by

    score(j) = sum_i  DECAY^i  S[h_i, j]       i = 0 is the newest purchase, and at most LAST purchases count

The best items that the user has not bought are shown. The method is plain on purpose (Linden et al., 2003): a strong
recall in a naive order leaves the re-ranker something to read. It reads the *evidence*, numbers that people can check:
how many users bought a candidate with an item of the history, or straight after the newest, how alike the titles are.

No held-out purchase is fitted, and a training prefix is scored by a retriever that was fitted *without its user*. Its
own target would be in the counts otherwise, and the model would learn to trust evidence that no test prompt has.
"""
import math
import re
import warnings
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

WINDOW, NEAR, BACK = 10, 0.5, 0.5       # a covisit weighs distance^-NEAR, times BACK in the backward direction
DAMP_FROM, DAMP_TO = 0.4, 0.3           # a and b above
CONTENT, DECAY = 0.12, 0.75
LAST, SLOTS = 10, 8                     # so many purchases score; the newest SLOTS of them are shown as h1 ... h8
FOLDS = 5


@dataclass
class Candidates:
    """n histories, k candidates for each in the retriever's order, and the evidence for them. All arrays are (n, k),
    except history (n, SLOTS), newest first, and target (n,).
    item: item number, or -1 where a small catalogue has no unseen item left. score: relative to the first candidate's,
    0 to 1. pop: its purchases in the fit. link: the shown history item (0 = h1) that it was bought with most often, -1
    for none; together: by how many users. next: how many users bought it straight after h1. like: likeness of its title
    with that of h1, 0 to 1. history: item numbers, or -1. target: position of the next purchase, or -1."""
    item: np.ndarray
    score: np.ndarray
    pop: np.ndarray
    link: np.ndarray
    together: np.ndarray
    next: np.ndarray
    like: np.ndarray
    history: np.ndarray
    target: np.ndarray

    @staticmethod
    def join(parts):
        return Candidates(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in vars(parts[0])})


def likeness(titles, brands):
    """Cosine of the TF-IDF word vectors of title and brand: (items, items) floats, 0 on the diagonal. A word in fewer
    than two items, or in more than an eighth of them, says nothing about likeness and is left out."""
    words = [set(re.findall(r"[a-z0-9]+", f"{t} {b}".lower())) for t, b in zip(titles, brands)]
    count = Counter(w for ws in words for w in ws)
    column = {w: c for c, w in enumerate(sorted(w for w, c in count.items() if 2 <= c <= max(len(titles) / 8, 2)))}
    x = torch.zeros(len(titles), len(column))
    for i, ws in enumerate(words):
        for w in ws:
            if w in column:
                x[i, column[w]] = math.log(len(titles) / count[w])
    x = F.normalize(x, dim=1)
    with warnings.catch_warnings():                                 # torch warns that sparse matrices are in beta
        warnings.simplefilter("ignore")
        same = x.to_sparse_csr() @ x.T if len(column) else torch.zeros(len(titles), len(titles))
    return same.fill_diagonal_(0)


def pairs(histories, window):
    """All pairs of purchases of one user at most `window` apart, of two different items. Returns four arrays of one
    length: earlier item, later item, distance, index of the history."""
    items = np.array([i for h in histories for i in h], dtype=np.int64)
    owner = np.repeat(np.arange(len(histories)), [len(h) for h in histories])
    out = []
    for d in range(1, window + 1):
        same = owner[d:] == owner[:-d]                              # both ends belong to one user
        i, j = items[:-d][same], items[d:][same]
        keep = i != j
        out.append((i[keep], j[keep], np.full(keep.sum(), d), owner[d:][same][keep]))
    return [np.concatenate(column) for column in zip(*out)]


def matrix(n, i, j, weight):
    """Dense (n, n) sum of the weights at (i, j). It takes 0.6 GB for Beauty, and to score a history is then to gather
    rows. Above some 20,000 items, sparse rows would be the better choice."""
    weight = torch.from_numpy(weight)
    return torch.zeros(n * n, dtype=weight.dtype).index_add_(0, torch.from_numpy(i * n + j), weight).view(n, n)


def users_of(n, i, j, owner):
    """(n, n) how many users have the pair (i, j). A user who buys the same two items a thousand times counts once."""
    i, j = np.divmod(np.unique((owner * n + i) * n + j) % (n * n), n)
    return matrix(n, i, j, np.ones(len(i), np.int16))


class Retriever:
    """S and the counts behind it, fitted on `histories`: lists of item numbers, of training purchases only.
    pop is (items,); together, next, s and like are (items, items)."""

    def __init__(self, histories, split, like):
        n = len(split.asin)
        self.like = like
        self.pop = np.bincount([i for h in histories for i in h], minlength=n).astype(np.float32)
        i, j, d, owner = pairs(histories, WINDOW)
        near = d ** -NEAR
        both = np.concatenate([i, j]), np.concatenate([j, i])
        self.together = users_of(n, *both, np.concatenate([owner, owner]))
        self.next = users_of(n, i[d == 1], j[d == 1], owner[d == 1])
        s = matrix(n, *both, np.concatenate([near, BACK * near]).astype(np.float32))
        s /= torch.from_numpy((1 + self.pop) ** DAMP_FROM)[:, None]
        s /= torch.from_numpy((1 + self.pop) ** DAMP_TO)[None, :]
        self.s = s.add_(like, alpha=CONTENT)

    def candidates(self, histories, targets, n_candidates):
        """The best unseen items of each history (a list, oldest first), with their evidence. Returns Candidates.
        targets: one item number per history; it only marks where the target stands among the candidates."""
        return Candidates.join([self.candidates_of_few(histories[lo:lo + 1024], targets[lo:lo + 1024], n_candidates)
                                for lo in range(0, len(histories), 1024)])

    def candidates_of_few(self, histories, targets, n_candidates):
        """The same for so few histories that their scores of all items, (n, items), fit into memory."""
        recent = [h[-LAST:][::-1] for h in histories]               # newest first
        index = torch.tensor([r + [0] * (LAST - len(r)) for r in recent])                           # (n, LAST)
        not_pad = torch.tensor([[1.0] * len(r) + [0.0] * (LAST - len(r)) for r in recent])          # (n, LAST)
        weight = not_pad * DECAY ** torch.arange(LAST)
        score = F.embedding_bag(index, self.s, per_sample_weights=weight, mode="sum")               # (n, items)
        row = np.repeat(np.arange(len(histories)), [len(h) for h in histories])
        score[row, [i for h in histories for i in h]] = -1.0        # an item that was bought is never a candidate
        value, item = score.topk(min(n_candidates, score.shape[1]), dim=1)                          # (n, k)
        h, shown = index[:, :SLOTS], not_pad[:, :SLOTS].bool()
        together = (self.together[h[:, :, None], item[:, None, :]] * shown[:, :, None]).numpy()     # (n, SLOTS, k)
        link = together.argmax(1)                                   # (n, k); of equals the first: ties go to the newest
        most = np.take_along_axis(together, link[:, None], 1)[:, 0]
        hit = (item.numpy() == np.asarray(targets)[:, None]) & (value >= 0).numpy()
        return Candidates(
            item=np.where(value >= 0, item, -1), pop=self.pop[item.numpy()],
            score=(value / value[:, :1].clamp(min=1e-9)).clamp(min=0).numpy(),
            link=np.where(most > 0, link, -1), together=most, next=self.next[h[:, :1], item].numpy(),
            like=self.like[h[:, :1], item].numpy(), history=np.where(shown.numpy(), h.numpy(), -1),
            target=np.where(hit.any(1), hit.argmax(1), -1))


def k_core(histories, least):
    """Drop purchases of items bought fewer than `least` times, and users with fewer purchases than that, until nothing
    changes (McAuley et al.). histories: {user: [item, ...]}. Returns the same, smaller. Beauty comes as a 5-core."""
    before = None
    while histories != before:
        before, count = histories, Counter(i for h in histories.values() for i in h)
        kept = {u: [i for i in h if count[i] >= least] for u, h in histories.items()}
        histories = {u: h for u, h in kept.items() if len(h) >= least}
    return histories
