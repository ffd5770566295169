"""A few test users that come with the clone, so that `python sample.py` shows one without preparing any rows.

data/weights/<preset>/users.json.gz lies beside the weights that were trained on the same rows. It is one JSON object:

    summary      fingerprint of the rows, and the settings that they were prepared with
    tokenizer    state of the tokenizer (data/tokenizer.py)
    users        one object per user, with the fields of `User`

    python -m plumbing.demo --preset small     # write the file from the rows in out/small; make them first if need be
"""
import argparse
import gzip
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from data import amazon
from data.rows import Rows
from data.tokenizer import Tokenizer
from plumbing import settings
from plumbing.checkpoint import SHIPPED
from plumbing.loop import load_data
from plumbing.settings import ROOT

FIRST = 13595                       # the user that is shown where nobody else is asked for
HITS, MISSES = 31, 8                # further users whose next purchase is a candidate, and users whose is not
LARGEST = 200_000                   # bytes: the file is part of every clone


@dataclass
class User:
    """A test user: what the model reads, and what a person needs to follow it."""
    number: int         # in users.tsv.gz
    prompt: list        # tokens
    target: int         # position of the true next purchase among the candidates, or None
    history: list       # titles of the purchases in the prompt, oldest first
    candidates: list    # titles in the retriever's order


def file(preset):
    return SHIPPED / preset / "users.json.gz"


def load(preset):
    """The users that come with the clone -> ({number: User}, tokenizer, summary). No users where there is no file."""
    if not file(preset).exists():
        return {}, None, None
    with gzip.open(file(preset), "rt", encoding="utf-8") as f:
        found = json.load(f)
    users = [User(**values) for values in found["users"]]
    return {user.number: user for user in users}, Tokenizer.load(found["tokenizer"]), found["summary"]


class Prepared:
    """All test users of a prepared folder. numbers[r] is the number of the user of row r, users[r] the whole User."""

    def __init__(self, folder, summary):
        self.split = amazon.load(summary["config"]["data"])
        self.rows = Rows(Path(folder) / "test.npz")
        self.numbers = [int(self.split.user[u]) for u in self.rows.arrays["user"]]

    def user(self, r):
        """The user of row r."""
        history, items = self.rows.arrays["history"][r], self.rows.arrays["item"][r]      # newest first; -1: no item
        before, candidates = ([self.split.title[i] for i in row if i >= 0] for row in (history[::-1], items))
        target = int(self.rows.target[r])
        return User(self.numbers[r], self.rows[r][0], target if target >= 0 else None, before, candidates)


def choose(numbers, targets):
    """Rows of the users that are shipped: FIRST, then users drawn at random, some of whom the retriever failed."""
    draw = random.Random(0)
    others = [r for r, number in enumerate(numbers) if number != FIRST]
    hits, misses = ([r for r in others if (targets[r] >= 0) == hit] for hit in (True, False))
    drawn = draw.sample(hits, min(HITS, len(hits))) + draw.sample(misses, min(MISSES, len(misses)))
    first = [r for r, number in enumerate(numbers) if number == FIRST]
    return first + sorted(drawn, key=numbers.__getitem__)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="plumbing.demo", description="Write the users that come with the clone.")
    parser.add_argument("--preset", choices=list(settings.MODELS), default="small")
    parser.add_argument("--out", default="", help="folder of the run whose rows are read (default out/<preset>)")
    s = parser.parse_args(argv)
    s.out, s.data = s.out or f"out/{s.preset}", ""
    folder, tok, summary = load_data(s)
    prepared = Prepared(folder, summary)
    users = [prepared.user(r) for r in choose(prepared.numbers, prepared.rows.target)]
    data = Path(summary["config"]["data"]).resolve()                # no path of this machine goes into the file
    config = summary["config"] | {"data": data.relative_to(ROOT).as_posix() if data.is_relative_to(ROOT) else data.name}
    content = {"summary": {"fingerprint": summary["fingerprint"], "config": config}, "tokenizer": tok.state(),
               "users": [asdict(user) for user in users]}
    path = file(s.preset)
    path.parent.mkdir(parents=True, exist_ok=True)
    amazon.write_gz({path: [json.dumps(content, ensure_ascii=False)]})
    size = path.stat().st_size
    print(f"{path}: {len(users)} users, {size:,} bytes (at most {LARGEST:,} are wanted), rows {summary['fingerprint']}")


if __name__ == "__main__":
    settings.main(main)
