"""Shared by all tests: a miniature category in the publisher's format, prepared once, and a model of its size.

The miniature goes through the same code as Beauty. Its users buy along a few chains of items, so that co-visits mean
something, and it has the oddities of real files: items without brand or title, unicode, a user with one purchase.
"""
import gzip
import json
import random
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import stage                                          # noqa: E402
from data import amazon, prepare                      # noqa: E402
from model import ModelConfig, Transformer            # noqa: E402

torch.set_num_threads(1)         # the models here are tiny: a second thread only waits for the first


def write_publisher(folder, users=150, items=60, seed=0, category="Mini"):
    """reviews_<category>_5.json.gz and meta_<category>.json.gz with a little structure. Returns the folder."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    asin = [f"B{i:09d}" for i in range(items)]
    reviews = []
    for u in range(users):
        at, day = rng.randrange(items), 15000 + rng.randrange(100)
        for _ in range(rng.randint(5, 12)):
            reviews.append((asin[at], day, f"R{u}"))
            at = (at + rng.choice([1, 1, 1, 2, 5])) % items         # neighbours on a ring are bought after each other
            day += rng.choice([0, 1, 9])
    reviews.append((asin[0], 15000, "once"))
    reviews.sort(key=lambda r: (r[0], r[1]))                        # the publisher's order: by asin, then time
    with gzip.open(folder / f"reviews_{category}_5.json.gz", "wt") as f:
        for a, day, user in reviews:
            f.write(json.dumps({"reviewerID": user, "asin": a, "unixReviewTime": day * 86400}) + "\n")
    with gzip.open(folder / f"meta_{category}.json.gz", "wt") as f:
        for i, a in enumerate(asin):
            m = {"asin": a, "title": f"Crème no. {i} brand{i % 6} kind{i % 9}", "brand": f"Brand {i % 6}",
                 "categories": [["Beauty", f"Kind {i % 9}"]], "price": 1.5}
            if i % 10 == 3:
                del m["brand"]
            if i % 10 == 7:
                del m["title"]
            f.write(repr(m) + "\n")
        f.write(repr({"asin": "NEVERBOUGHT", "title": "in no review"}) + "\n")
    return folder


@pytest.fixture(scope="session")
def split_folder(tmp_path_factory):
    """The miniature as our compact split."""
    root = tmp_path_factory.mktemp("mini")
    amazon.write_split(*amazon.read_publisher(write_publisher(root / "source")), root / "split")
    return root / "split"


@pytest.fixture(scope="session")
def prepared(split_folder):
    """(sets, tokenizer, summary) of the miniature with six candidates."""
    cfg = prepare.DataConfig(data=str(split_folder), candidates=6, core=2, merges=40, sids=1, title_tokens=2)
    return prepare.build(cfg, say=lambda *_: None)


@pytest.fixture(scope="session")
def rows(prepared, tmp_path_factory):
    """The prepared miniature on disk: a run folder whose `data` is complete."""
    out = tmp_path_factory.mktemp("run")
    sets, tokenizer, summary = prepared
    prepare.save(out / "data", sets, tokenizer, summary | {"preset": "mini"})
    return out


@pytest.fixture
def tok(prepared):
    return prepared[1]


@pytest.fixture
def prompts(rows):
    """Twelve prompts of unequal length, with their outputs."""
    r = prepare.Rows(rows / "data" / "all.npz")
    order = sorted(range(len(r)), key=lambda i: len(r[i][0]))
    return [r[order[i * (len(r) - 1) // 11]] for i in range(12)]


@pytest.fixture
def model(tok):
    """A small untrained transformer, weights enlarged so that its opinions differ from token to token: those of the
    layers most, or the tied embedding would make it repeat its input, and finish every block from left to right."""
    torch.manual_seed(1)
    m = Transformer(ModelConfig(vocab=tok.vocab, width=32, layers=2, heads=2, ctx_len=320))
    for name, p in m.named_parameters():
        if p.dim() == 2:
            p.data *= 4 if name.startswith("embed") else 20
    return m.eval()


@pytest.fixture
def ctrl_c_at(monkeypatch):
    """ctrl_c_at(step): Ctrl-C while the rows of that step are drawn; ctrl_c_at(None): no more."""
    real = stage.batch_rows

    def arm(step):
        def interrupting(*args):
            if args[3] == step:
                signal.raise_signal(signal.SIGINT)
            return real(*args)
        monkeypatch.setattr(stage, "batch_rows", interrupting)
    return arm
