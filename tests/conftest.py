"""Shared by all tests: a miniature category in the publisher's format, prepared once, and models of its size.

The miniature goes through the same code as Beauty. Its users buy along a few chains of items, so that co-visits mean
something, and it has the oddities of real files: items without brand or title, unicode, a user with one purchase.
"""
import gzip
import itertools
import json
import random
import signal
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ranking                                        # noqa: E402
import train_ar                                       # noqa: E402
import train_cft                                      # noqa: E402
import train_opd                                      # noqa: E402
import train_rl                                       # noqa: E402
from data import amazon, prepare                      # noqa: E402
from data import rows as rows_on_disk                 # noqa: E402
from model import ModelConfig, Transformer            # noqa: E402
from plumbing import checkpoint, loop, settings       # noqa: E402

torch.set_num_threads(1)         # the models here are tiny: a second thread only waits for the first

TINY = dict(width=16, layers=1, heads=1, ctx_len=320)                # instead of settings.MODELS["mini"]
QUICK = dict(steps=3, batch=4, eval_every=3, eval_users=4, dtype="float32")      # instead of a stage's PRESETS["mini"]


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
    with gzip.open(folder / f"reviews_{category}_5.json.gz", "wt", encoding="utf-8") as f:
        for a, day, user in reviews:
            f.write(json.dumps({"reviewerID": user, "asin": a, "unixReviewTime": day * 86400}) + "\n")
    with gzip.open(folder / f"meta_{category}.json.gz", "wt", encoding="utf-8") as f:
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
    rows_on_disk.save(out / "data", sets, tokenizer, summary | {"preset": "mini"})
    return out


@pytest.fixture
def tok(prepared):
    return prepared[1]


@pytest.fixture
def prompts(rows):
    """Twelve prompts of unequal length, with their outputs."""
    r = rows_on_disk.Rows(rows / "data" / "all.npz")
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
def tiny(monkeypatch):
    """The preset `mini` has a model of a few thousand parameters."""
    monkeypatch.setitem(settings.MODELS, "mini", TINY)


@pytest.fixture(scope="session")
def trained(rows, tmp_path_factory):
    """The whole chain on the miniature, a few steps per stage: a run folder with all six weights but cft_rl."""
    out = tmp_path_factory.mktemp("chain")
    (out / "data").symlink_to(rows / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(settings.MODELS, "mini", TINY)
        for module, more in ((train_ar, dict(accepted_steps=1)), (train_cft, dict(block_len=8)),
                             (train_opd, dict(block_len=8, group=2)), (train_rl, dict(block_len=8, group=2))):
            patch.setitem(module.PRESETS, "mini", QUICK | more)
        # Models this young write no permutation, and equal rewards teach nothing: let rewards differ.
        rewards = itertools.cycle([1.0, -1.0, 0.5])
        patch.setattr(ranking, "reward", lambda *_: {"rank": 0, "format": 0, "invalid": 0, "total": next(rewards)})
        args = ["--preset", "mini", "--out", str(out), "--device", "cpu", "--table", "0"]
        train_ar.main(args)
        train_rl.main(args + ["--block-len", "1", "--start", "ar_sft", "--name", "ar"])
        for module in (train_cft, train_opd, train_rl):
            module.main(args)
    return out


@pytest.fixture
def interrupt_at(monkeypatch):
    """interrupt_at(step): Ctrl-C while the rows of that step are drawn; interrupt_at(None): no more. With an exception as
    second argument, that is raised instead, as a kill would end the run."""
    real = loop.Batches.__getitem__

    def arm(step, error=None):
        def interrupting(self, at):
            if at == step and error:
                raise error
            if at == step:
                signal.raise_signal(signal.SIGINT)
            return real(self, at)
        monkeypatch.setattr(loop.Batches, "__getitem__", interrupting)
    return arm


def link(source, folder, *names):
    """Symbolic links in `folder` to files of another run."""
    for name in names:
        (folder / name).symlink_to(source / name)


def state_of(folder, name):
    return checkpoint.load(folder / f"{name}.state.pt", "")
