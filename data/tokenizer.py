"""Text and symbols to token ids and back: a byte-level BPE for titles, and one token for each thing that is compared.

From equal ids, a small model learns "is this the same brand as that?" in a few thousand steps; from strings of word
pieces it takes far longer. So these have a token each: frequent brands and kinds (leaf categories), history slots
h1...h8, candidate identifiers A...J, evidence, counts and grades. Their names make a decoded reasoning readable. A
`tiktoken.Encoding` holds them as special tokens, beside the BPE, which is trained here (nothing is downloaded). pad,
eos and mask are three different ids: if two of them were one, padding would count as content, or would end it.
"""
import base64
from collections import Counter, defaultdict

import regex                     # comes with tiktoken, which uses it for the same patterns
import tiktoken

PATTERN = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
SLOTS, LETTERS = 8, "ABCDEFGHIJ"
GRADES = 8
# Evidence is cut into buckets: the bucket of a value is the number of edges that are not above it. The edges are fixed,
# so nothing is fitted, and a number has the same token on every data set.
EDGES = {
    "score": [i / 16 for i in range(1, 16)] + [1.0],                # relative to the first candidate, whose score is 1
    "pop": [2, 4, 6, 9, 13, 19, 28, 42, 63, 95, 142, 213],          # each 1.5 times the last: ratios count
    "like": [.02, .05, .1, .15, .2, .3, .4, .5, .6, .7, .8],
    "together": [1, 2, 3, 4, 6, 9, 14, 20],
    "next": [1, 2, 3, 4, 6, 9],
    "count": [1, 2, 3],                                             # matches in the history: 0, 1, 2, 3 or more
}
NUMBER = {"together": ["0", "1", "2", "3", "4-5", "6-8", "9-13", "14-19", "20+"],
          "next": ["0", "1", "2", "3", "4-5", "6-8", "9+"], "count": ["0", "1", "2", "3+"]}
SECTIONS = ["<pad>", "<mask>", "<eos>", "<history>", "<candidates>", "<rank>", "<think>", "<top>", "<answer>"]


def train_bpe(texts, merges):
    """Byte-pair encoding (Sennrich et al., 2016) of the words of `texts`. Returns {bytes: rank}, the 256 bytes first.
    Each different word is stored once, with its count, and a merge touches only the words that hold its pair. Of pairs
    that are equally frequent the larger one is merged, so the order of the texts does not matter."""
    count = Counter(word for text in texts for word in regex.findall(PATTERN, text))
    words = [([bytes([b]) for b in word.encode()], n) for word, n in sorted(count.items())]
    ranks = {bytes([b]): b for b in range(256)}
    pairs, where = Counter(), defaultdict(set)                      # how often a pair occurs, and in which words
    for w, (parts, n) in enumerate(words):
        for pair in zip(parts, parts[1:]):
            pairs[pair] += n
            where[pair].add(w)
    while len(ranks) < 256 + merges and pairs:
        best = max(pairs, key=lambda p: (pairs[p], p))
        if pairs[best] < 2:
            break
        merged = best[0] + best[1]
        ranks[merged] = len(ranks)
        for w in where.pop(best):
            parts, n = words[w]
            for pair in zip(parts, parts[1:]):
                pairs[pair] -= n
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i:i + 2] = [merged]
                i += 1
            for pair in zip(parts, parts[1:]):
                pairs[pair] += n
                where[pair].add(w)
        del pairs[best]
    return ranks


class Tokenizer:
    """Names and ids. `brands` and `kinds` are the frequent names; all others share one token, which matches nothing."""

    def __init__(self, ranks, brands, kinds, sid_sizes):
        self.ranks, self.brands, self.kinds, self.sid_sizes = ranks, brands, kinds, sid_sizes
        special = {}

        def add(*names):
            """Make a new token for each name. Returns their ids, which follow each other."""
            first = len(ranks) + len(special)
            special.update((name, first + i) for i, name in enumerate(names))
            assert len(ranks) + len(special) == first + len(names), "two tokens have one name"
            return list(range(first, first + len(names)))

        (self.pad, self.mask, self.eos, self.history, self.candidates, self.rank, self.think, self.top,
         self.answer) = add(*SECTIONS)
        self.slots = add(*[f" {x}" for x in LETTERS])               # identifiers of candidates, in pre-rank order
        self.h = add(*[f" h{i + 1}" for i in range(SLOTS)], " nobody")      # h1 is the newest; the last: no link
        self.score = add(*[f" score:{i}" for i in range(len(EDGES["score"]) + 1)])
        self.pop = add(*[f" pop:{i}" for i in range(len(EDGES["pop"]) + 1)])
        self.like = add(*[f" like:{i}" for i in range(len(EDGES["like"]) + 1)])
        self.together = add(*[f" x{n}" for n in NUMBER["together"]])
        self.next = add(*[f" next:{n}" for n in NUMBER["next"]])
        self.brand_count = add(*[f" brand:{n}" for n in NUMBER["count"]])
        self.kind_count = add(*[f" kind:{n}" for n in NUMBER["count"]])
        self.grade = add(*[f" grade:{g}" for g in range(GRADES)])
        self.brand = add(" (brand other)", *[f" <{b}>" for b in brands])    # (...) is no name
        self.kind = add(" (kind other)", *[f" [{kind}]" for kind in kinds])
        self.sid = [add(*[f"<s{level}:{c}>" for c in range(n)]) for level, n in enumerate(sid_sizes)]
        self.vocab = len(ranks) + len(special)
        self.encoding = tiktoken.Encoding("diffusion-gr2", pat_str=PATTERN, mergeable_ranks=ranks,
                                          special_tokens=special, explicit_n_vocab=self.vocab)
        self.slot_of = {t: i for i, t in enumerate(self.slots)}
        self.brand_id = {b: self.brand[i + 1] for i, b in enumerate(brands)}
        self.kind_id = {kind: self.kind[i + 1] for i, kind in enumerate(kinds)}

    @classmethod
    def train(cls, split, sids, merges, n_brands=600, n_kinds=250):
        """Make a tokenizer from the catalogue alone: it reads no purchase, so nothing held out can leak in. The codes
        in each column of sids (items, levels) get tokens; without columns there are none."""
        def frequent(names, n):
            count = Counter(x for x in names if x)
            return sorted(count, key=lambda x: (-count[x], x))[:n]

        kinds = frequent([p[-1] if p else "" for p in split.path], n_kinds)
        ranks = train_bpe(split.title + split.brand, merges)
        return cls(ranks, frequent(split.brand, n_brands), kinds, [int(column.max()) + 1 for column in sids.T])

    def state(self):
        """Plain values that JSON can hold. `Tokenizer.load(state)` is the inverse."""
        ranks = [base64.b64encode(b).decode() for b in self.ranks]
        return {"ranks": ranks, "brands": self.brands, "kinds": self.kinds, "sid_sizes": self.sid_sizes}

    @classmethod
    def load(cls, state):
        ranks = {base64.b64decode(b): i for i, b in enumerate(state["ranks"])}
        return cls(ranks, state["brands"], state["kinds"], state["sid_sizes"])

    def text(self, tokens):
        """Decode for people. A section starts a new line, and so does each candidate up to <top> or <rank>."""
        sections = {self.think, self.top, self.answer, self.history, self.candidates, self.rank}
        out, in_lines = "", True
        for t in (t for t in map(int, tokens) if t != self.pad):
            if t == self.top or t == self.rank:
                in_lines = False                                    # from here on identifiers follow each other
            out += "\n" if (t in sections or (in_lines and t in self.slot_of)) and out else ""
            out += self.encoding.decode([t])
        return out
