"""Text and symbols to token ids and back: a byte-level BPE for titles, and one token for each thing that is compared.

A small model learns "is this the same brand as that?" from equal ids in a few thousand steps; from strings of word
pieces it takes far longer. So frequent brands and kinds (leaf categories), history slots h1...h8, candidate
identifiers A...J, evidence, counts and grades have a token each. Their names are chosen so that decoding a reasoning
is already readable. The BPE is trained here and held, with all these as special tokens, in a `tiktoken.Encoding`;
nothing is downloaded.

pad, eos and mask are three different ids (pitfall: one id for two of them makes padding content, or ends it).
"""
import base64
from collections import Counter, defaultdict

import regex                      # comes with tiktoken, which uses it for the same patterns
import tiktoken

PATTERN = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
SLOTS, LETTERS = 8, "ABCDEFGHIJ"
GRADES = 8
# Evidence, cut into buckets: a value v falls into bucket sum(v >= edge). Fixed edges, so nothing is fitted, and the
# same number means the same token on every data set.
EDGES = {
    "score": [i / 16 for i in range(1, 16)] + [1.0],                # relative to the first candidate, which has 1.0
    "pop": [2, 4, 6, 9, 13, 19, 28, 42, 63, 95, 142, 213],          # times 1.5: popularity is felt in ratios
    "like": [.02, .05, .1, .15, .2, .3, .4, .5, .6, .7, .8],
    "together": [1, 2, 3, 4, 6, 9, 14, 20],
    "next": [1, 2, 3, 4, 6, 9],
    "count": [1, 2, 3],                                             # matches within the history: 0, 1, 2, 3 or more
}
NUMBER = {"together": ["0", "1", "2", "3", "4-5", "6-8", "9-13", "14-19", "20+"],
          "next": ["0", "1", "2", "3", "4-5", "6-8", "9+"], "count": ["0", "1", "2", "3+"]}
SECTIONS = ["<pad>", "<mask>", "<eos>", "<history>", "<candidates>", "<rank>", "<think>", "<top>", "<answer>"]


def train_bpe(texts, merges):
    """Byte-pair encoding (Sennrich et al., 2016) over the words of `texts`: {bytes: rank}, 256 bytes first.

    Words are counted once; a merge touches only the words that hold its pair. Ties go to the larger pair of bytes,
    so the result does not depend on the order of the texts.
    """
    count = Counter(word for text in texts for word in regex.findall(PATTERN, text))
    words = [([bytes([b]) for b in word.encode()], n) for word, n in sorted(count.items())]
    ranks = {bytes([b]): b for b in range(256)}
    pairs, where = Counter(), defaultdict(set)
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
    """Names and ids. `brands` and `kinds` are the frequent ones, the rest share "other", which matches nothing."""

    def __init__(self, ranks, brands, kinds, sid_sizes):
        self.ranks, self.brands, self.kinds, self.sid_sizes = ranks, brands, kinds, sid_sizes
        special = {}

        def add(*names):
            """New tokens in a row; returns their ids."""
            ids = []
            for name in names:
                assert name not in special, name
                special[name] = len(ranks) + len(special)
                ids.append(special[name])
            return ids

        (self.pad, self.mask, self.eos, self.history, self.candidates, self.rank, self.think, self.top,
         self.answer) = add(*SECTIONS)
        self.slots = add(*[f" {x}" for x in LETTERS])               # candidate identifiers, in pre-rank order
        self.h = add(*[f" h{i + 1}" for i in range(SLOTS)], " nobody")      # h1 newest; the last: no link
        self.score = add(*[f" score:{i}" for i in range(len(EDGES["score"]) + 1)])
        self.pop = add(*[f" pop:{i}" for i in range(len(EDGES["pop"]) + 1)])
        self.like = add(*[f" like:{i}" for i in range(len(EDGES["like"]) + 1)])
        self.together = add(*[f" x{n}" for n in NUMBER["together"]])
        self.next = add(*[f" next:{n}" for n in NUMBER["next"]])
        self.brand_count = add(*[f" brand:{n}" for n in NUMBER["count"]])
        self.kind_count = add(*[f" kind:{n}" for n in NUMBER["count"]])
        self.grade = add(*[f" grade:{g}" for g in range(GRADES)])
        self.brand = add(" (brand other)", *[f" <{b}>" for b in brands])    # brackets that no name has, whatever it is
        self.kind = add(" (kind other)", *[f" [{k}]" for k in kinds])
        self.sid = [add(*[f"<s{level}:{c}>" for c in range(n)]) for level, n in enumerate(sid_sizes)]
        self.vocab = len(ranks) + len(special)
        self.encoding = tiktoken.Encoding("diffusion-gr2", pat_str=PATTERN, mergeable_ranks=ranks,
                                          special_tokens=special, explicit_n_vocab=self.vocab)
        self.slot_of = {t: i for i, t in enumerate(self.slots)}
        self.brand_id = {b: self.brand[i + 1] for i, b in enumerate(brands)}
        self.kind_id = {k: self.kind[i + 1] for i, k in enumerate(kinds)}

    @classmethod
    def train(cls, split, sids, merges, n_brands=600, n_kinds=250):
        """From the catalogue alone: no purchase is read, so nothing held out can leak in. sids (items, levels) decide
        how many semantic-ID tokens there are; no column, no such tokens."""
        def frequent(names, n):
            count = Counter(x for x in names if x)
            return sorted(count, key=lambda x: (-count[x], x))[:n]

        kinds = frequent([p[-1] if p else "" for p in split.path], n_kinds)
        ranks = train_bpe(split.title + split.brand, merges)
        return cls(ranks, frequent(split.brand, n_brands), kinds, [int(column.max()) + 1 for column in sids.T])

    def state(self):
        """Plain values for JSON; `Tokenizer.load(state)` is the inverse."""
        ranks = [base64.b64encode(b).decode() for b in self.ranks]
        return {"ranks": ranks, "brands": self.brands, "kinds": self.kinds, "sid_sizes": self.sid_sizes}

    @classmethod
    def load(cls, state):
        ranks = {base64.b64decode(b): i for i, b in enumerate(state["ranks"])}
        return cls(ranks, state["brands"], state["kinds"], state["sid_sizes"])

    def text(self, tokens):
        """Decode for people: section marks and, inside a reasoning, each candidate's line start a new line."""
        breaks, out, lines = {self.think, self.top, self.answer, self.history, self.candidates, self.rank}, "", True
        for t in map(int, tokens):
            if t == self.top or t == self.rank:
                lines = False                                       # from here identifiers follow each other
            if t == self.pad:
                continue
            out += "\n" if (t in breaks or (lines and t in self.slot_of)) and out else ""
            out += self.encoding.decode([t])
        return out
