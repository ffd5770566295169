"""From the split to training rows: everything before the first gradient, in one readable list of steps.

    python -m data.prepare --preset small            # -> out/small/data
    python -m data.prepare --preset mini --data data/toys --out out/toys

Rows lie on disk as flat token arrays with offsets (row r = tokens[at[r]:at[r + 1]]), memory-mapped by the trainers.
Two sets of training traces, as in GR2, which trains on broad data before its rejection-sampled SFT:

    all        every prefix of every training sequence with the teacher's greedy verdict, whether or not the next
               purchase is among the candidates: teaches to read evidence and to write
    accepted   the target hidden, the pick drawn from the teacher's softmax, kept if the pick *is* the target

Held-out purchases (the last two of each user) reach no fit: not the retriever, the semantic IDs, the teacher, nor the
tokenizer, which reads the catalogue only.
"""
import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch

from data import amazon, dataset, retriever, semantic_ids, teacher
from data.amazon import DataError
from data.tokenizer import Tokenizer


def flag(default, help):
    """A settings field with its help text: the flags of every command are made from these."""
    return field(default=default, metadata={"help": help})


def add_flags(ap, cls, presets, choices={}):
    """One flag for each field of a settings dataclass; its help ends with the default, or with what each preset sets.
    A flag that is not given is absent from the namespace, so that presets can fill in. cls.UNUSED names no flags."""
    def text(value):
        return f"{value:g}" if isinstance(value, float) else str(value)

    for f in fields(cls):
        if f.name in getattr(cls, "UNUSED", ()):
            continue
        set_by = {name: (p if isinstance(p, dict) else vars(p)).get(f.name, f.default) for name, p in presets.items()}
        shown = f" (default {text(f.default)})" if f.default not in ("", False, None) else ""
        if len(set(set_by.values())) > 1:
            shown = " (" + ", ".join(f"{name} {text(v)}" for name, v in set_by.items()) + ")"
        kind = dict(action="store_true") if f.default is False else dict(type=int if f.default is None else type(f.default))
        ap.add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, help=f.metadata["help"] + shown,
                        **kind, **choices.get(f.name, {}))


@dataclass
class DataConfig:
    """What decides the rows. A checkpoint remembers the rows it was trained on and refuses others."""
    data: str = flag(str(amazon.HOME), "folder with users.tsv.gz and items.tsv.gz")
    core: int = flag(5, "least purchases of a user and of an item (k-core)")
    candidates: int = flag(10, "how many the retriever hands over, at most 10")
    folds: int = flag(retriever.FOLDS, "how many of the five folds of users give training prefixes")
    sids: int = flag(0, "1: the prompt shows each item's four semantic-ID tokens")
    title_tokens: int = flag(0, "the prompt shows each title cut to so many pieces")
    answer_only: bool = flag(False, "outputs are the answer alone, without the reasoning before it")
    merges: int = flag(256, "size of the BPE beyond the 256 bytes")
    drop: float = flag(0.1, "share of training rows from which candidates are removed at random")
    tries: int = flag(4, "draws per prompt in rejection sampling")
    temperature: float = flag(1 / 3, "softmax temperature of those draws")
    data_seed: int = flag(0, "of the teacher, the draws and the removals")


PRESETS = {
    "mini": DataConfig(candidates=5, folds=2, merges=0),
    "small": DataConfig(),
    "beauty": DataConfig(sids=1, title_tokens=12, merges=4096),
}
ADDED = {"answer_only": False}       # settings younger than the weights in the clone, with the value those were made at
LONGEST = 1000                       # of a longer history the newest count: its prefixes would cost its square
MOST_ITEMS = 30_000                  # four dense items x items matrices: 10 GB at this size, 2 GB for Beauty
# What Beauty gave when this was written, for the eye: users, items and interactions are the field's 5-core counts.
EXPECTED = {"users": 22363, "items": 12101, "interactions": 198502, "sid_unique": 1.0}


def sequences(split, cfg):
    """k-core, then leave-one-out: {user index: purchases}, at least three each (train, validation, test) and at most
    LONGEST."""
    kept = retriever.k_core(dict(enumerate(split.histories)), cfg.core)
    kept = {u: h[-LONGEST:] for u, h in kept.items() if len(h) >= 3}
    if len(split.asin) > MOST_ITEMS:
        raise DataError(f"{cfg.data}: {len(split.asin):,} items; the retriever's dense matrices hold up to "
                        f"{MOST_ITEMS:,}. A smaller category, or sparse rows in data/retriever.py, will do")
    if not kept:
        raise DataError(f"{cfg.data}: no user has {max(cfg.core, 3)} purchases of items bought {cfg.core} times; "
                        "a smaller --core lets more in")
    return kept


def retrieve(kept, split, cfg):
    """(training prefixes, validation, test) as Candidates, and the retriever fitted on all training purchases.

    Users are dealt to folds by a hash of their name, so neither file order nor numbering matters."""
    train = {u: h[:-2] for u, h in kept.items()}
    like = retriever.likeness(split.title, split.brand)
    fold = {u: amazon.opaque(f"fold {split.user[u]}")[0] % retriever.FOLDS for u in kept}
    parts = []
    for f in range(cfg.folds):
        mine = [h for u, h in train.items() if fold[u] == f and len(h) >= 2]
        others = [h for u, h in train.items() if fold[u] != f]
        if mine and others:
            prefixes = [(h[:p], h[p]) for h in mine for p in range(1, len(h))]
            parts.append(retriever.Retriever(others, split, like).candidates(*zip(*prefixes), cfg.candidates))
    if not parts:
        raise DataError(f"{cfg.data}: {len(kept)} users are too few for {retriever.FOLDS} folds of training prefixes")
    full = retriever.Retriever(list(train.values()), split, like)
    valid = full.candidates([h[:-2] for h in kept.values()], [h[-2] for h in kept.values()], cfg.candidates)
    test = full.candidates([h[:-1] for h in kept.values()], [h[-1] for h in kept.values()], cfg.candidates)
    return retriever.Candidates.join(parts), valid, test, full


def item_tokens(split, sids, tok, cfg):
    """(items, e) tokens that describe an item beyond brand and kind, -1 = nothing; None where the preset shows none."""
    columns = []
    if cfg.sids:
        columns += [np.asarray(tok.sid[level])[sids[:, level]][:, None] for level in range(sids.shape[1])]
    if cfg.title_tokens:
        titles = np.full((len(split.title), cfg.title_tokens), -1)
        for i, title in enumerate(split.title):
            pieces = tok.encoding.encode_ordinary(title)[:cfg.title_tokens]
            titles[i, :len(pieces)] = pieces
        columns.append(titles)
    return np.concatenate(columns, axis=1) if columns else None


def rows_of(c, shown, target, grade, pick, tok, extra, cfg):
    """One set of rows as arrays ready for np.savez."""
    about = None if extra is None else (extra[c.history], extra[c.item])
    prompt, prompt_at = dataset.flatten(dataset.prompts(shown, tok, about))
    output, output_at = dataset.flatten(dataset.traces(shown, tok, grade, pick, not cfg.answer_only))
    return {"prompt": prompt, "prompt_at": prompt_at, "output": output, "output_at": output_at,
            "target": target.astype(np.int8), "n": (shown.brand >= 0).sum(1).astype(np.int8)}


def build(cfg, say=print):
    """All steps. Returns (sets of arrays by name, tokenizer, summary)."""
    start = time.time()
    split = amazon.load(cfg.data)
    kept = sequences(split, cfg)
    items = {i for h in kept.values() for i in h}
    say(f"{len(kept):,} users, {len(items):,} items, {sum(map(len, kept.values())):,} interactions; "
        f"{len(split.histories) - len(kept):,} users left out (fewer than {max(cfg.core, 3)} purchases), "
        f"{sum(len(h) == LONGEST for h in kept.values()):,} cut to their newest {LONGEST:,}")
    train, valid, test, full = retrieve(kept, split, cfg)
    say(f"retrieved {len(train.item):,} training prefixes, hit rates: train {hit(train):.3f}, "
        f"validation {hit(valid):.3f}, test {hit(test):.3f} ({time.time() - start:.0f}s)")
    sids, alone = semantic_ids.semantic_ids(semantic_ids.vectors(full), cfg.data_seed)
    tok = Tokenizer.train(split, sids if cfg.sids else sids[:, :0], cfg.merges)
    if tok.vocab > 2**16:
        raise DataError(f"--merges {cfg.merges}: {tok.vocab:,} tokens; rows on disk hold ids below {2**16:,}")
    extra = item_tokens(split, sids, tok, cfg)

    shown = {name: dataset.show(c, split, tok) for name, c in (("train", train), ("valid", valid), ("test", test))}
    hits = train.target >= 0
    if hits.sum() < 10:
        raise DataError(f"{cfg.data}: only {hits.sum()} training prefixes have their next purchase among the "
                        f"{cfg.candidates} candidates; the teacher needs more data")
    evidence = torch.from_numpy(dataset.evidence(shown["train"], tok)).clamp(min=tok.pad)
    judge = teacher.fit(evidence[hits], torch.from_numpy(train.target[hits]), tok.vocab, cfg.data_seed)

    rng = np.random.default_rng(cfg.data_seed)
    sets, orders = {}, {}
    for name, c in (("train", train), ("valid", valid), ("test", test)):
        s, target = shown[name], c.target
        if name == "train":
            s, target = dataset.drop_some(s, target, cfg.drop, rng)
        there = s.brand >= 0
        score = judge(torch.from_numpy(dataset.evidence(s, tok)).clamp(min=tok.pad))
        grade = np.where(there, judge.grade(score).numpy(), -1)
        if name == "train":
            sets["all"] = rows_of(c, s, target, grade, None, tok, extra, cfg)
            hit_rows = np.flatnonzero(target >= 0)
            g = torch.Generator().manual_seed(cfg.data_seed)
            draws = teacher.draw_picks(score[hit_rows], torch.from_numpy(there[hit_rows]), cfg.temperature, cfg.tries, g)
            good = hit_rows[(draws.numpy() == target[hit_rows, None]).any(1)]
            picked = dataset.Shown(**{f: v[good] for f, v in vars(s).items()})
            sets["accepted"] = rows_of(c.take(good), picked, target[good], grade[good], target[good], tok, extra, cfg)
            accepted = len(good) / len(hit_rows)
        else:
            sets[name] = rows_of(c, s, target, grade, None, tok, extra, cfg)
            sets[name] |= {"item": c.item.astype(np.int32), "history": c.history.astype(np.int32),
                           "user": np.array(list(kept), dtype=np.int32)}
            orders[name] = teacher_line(c.target, score.numpy(), dataset.order_by(grade))
    lengths = {name: [int(np.diff(sets["test"][f"{name}_at"]).mean().round()), int(np.diff(sets["test"][f"{name}_at"]).max())]
               for name in ("prompt", "output")}
    summary = {"users": len(kept), "items": len(items), "interactions": sum(map(len, kept.values())),
               "train_rows": len(sets["all"]["n"]), "accepted_rows": len(sets["accepted"]["n"]),
               "acceptance": accepted, "hit_train": hit(train), "hit_valid": hit(valid), "hit_test": hit(test),
               "test_users_with_hit": int((test.target >= 0).sum()), "valid": orders["valid"], "test": orders["test"],
               "sid_unique": float(len(np.unique(sids, axis=0)) / len(sids)), "sid_unique_3": alone,
               "vocab": tok.vocab, "prompt_tokens": lengths["prompt"], "output_tokens": lengths["output"],
               "seconds": round(time.time() - start), "config": asdict(cfg)}
    return sets, tok, summary | {"fingerprint": fingerprint(split, tok, cfg)}


def fingerprint(split, tok, cfg):
    """What a checkpoint must share with the rows it is used on: purchases, catalogue, token ids and settings. Not the
    rows themselves: a k-means or a teacher fitted on another machine may differ in a last bit, and move a few grades.
    A setting of ADDED counts only where it is not what it was before there was a flag for it."""
    settings = {k: v for k, v in asdict(cfg).items() if k != "data" and (k not in ADDED or v != ADDED[k])}
    parts = (split.histories, split.asin, split.brand, split.path, split.title, tok.state(), settings)
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def hit(c):
    return float((c.target >= 0).mean())


def teacher_line(target, score, order):
    """Recall on the rows with a hit: the pre-rank floor, the teacher's scores, the order that its grades write."""
    hits = np.flatnonzero(target >= 0)
    t, s, o = target[hits], score[hits], order[hits]
    mine = np.take_along_axis(s, t[:, None], 1)
    by_score = (s >= mine).sum(1)                                   # ties against the target
    by_grade = (o == t[:, None]).argmax(1) + 1
    return {f"{name}_r{k}": float((rank <= k).mean()) for k in (1, 3)
            for name, rank in (("floor", t + 1), ("score", by_score), ("written", by_grade))}


def save(folder, sets, tok, summary):
    """Into a temporary folder that is renamed when complete: a half-written data set is never seen by a trainer."""
    folder = Path(folder)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, arrays in sets.items():
        np.savez(part / f"{name}.npz", **arrays)
    (part / "tokenizer.json").write_text(json.dumps(tok.state()))
    (part / "summary.json").write_text(json.dumps(summary, indent=1))
    old = folder.with_name(folder.name + ".old.part")               # moved away at once: deleting takes its time, and a
    shutil.rmtree(old, ignore_errors=True)                          # kill in the middle would leave half a folder
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


class Rows:
    """Rows of one set. rows[i] -> (prompt, output) as lists; target[i], n[i] as saved."""

    def __init__(self, path):
        with np.load(path) as z:
            self.arrays = {name: z[name] for name in z.files}
        self.target, self.n = self.arrays["target"].astype(int), self.arrays["n"].astype(int)

    def __len__(self):
        return len(self.n)

    def __getitem__(self, i):
        a = self.arrays
        return (a["prompt"][a["prompt_at"][i]:a["prompt_at"][i + 1]].tolist(),
                a["output"][a["output_at"][i]:a["output_at"][i + 1]].tolist())

    def lengths(self):
        """(len,) prompt and output lengths."""
        return np.diff(self.arrays["prompt_at"]), np.diff(self.arrays["output_at"])


def show_summary(s):
    """Found beside expected (Beauty's; a category of your own has its own figures)."""
    test, valid = s["test"], s["valid"]
    lines = [("users / items / interactions", f"{s['users']:,} / {s['items']:,} / {s['interactions']:,}",
              f"{EXPECTED['users']:,} / {EXPECTED['items']:,} / {EXPECTED['interactions']:,}"),
             ("hit rate: train, validation, test", f"{s['hit_train']:.3f}, {s['hit_valid']:.3f}, {s['hit_test']:.3f}",
              "test >= .095 at ten candidates"),
             ("test users with a hit", f"{s['test_users_with_hit']:,}", ""),
             ("floor R@1, R@3: validation; test", f"{valid['floor_r1']:.3f}, {valid['floor_r3']:.3f}; "
              f"{test['floor_r1']:.3f}, {test['floor_r3']:.3f}", "R@1 .29 to .32 at ten"),
             ("teacher by score, the same", f"{valid['score_r1']:.3f}, {valid['score_r3']:.3f}; "
              f"{test['score_r1']:.3f}, {test['score_r3']:.3f}", "floor + .05, R@3 >= .63 at ten"),
             ("teacher as written (grades)", f"{valid['written_r1']:.3f}, {valid['written_r3']:.3f}; "
              f"{test['written_r1']:.3f}, {test['written_r3']:.3f}", "within .01 of its scores"),
             ("rows: all prefixes; accepted", f"{s['train_rows']:,}; {s['accepted_rows']:,} "
              f"({s['acceptance']:.0%} of those with a hit)", ""),
             ("semantic IDs unique (first three)", f"{s['sid_unique']:.1%} ({s['sid_unique_3']:.0%})", "100% (77%)"),
             ("tokens: prompt, output (mean, most)", f"{s['prompt_tokens'][0]}, {s['prompt_tokens'][1]}; "
              f"{s['output_tokens'][0]}, {s['output_tokens'][1]}", "output 80 to 150 at ten"),
             ("vocabulary; seconds", f"{s['vocab']:,}; {s['seconds']}", "")]
    for name, found, expected in lines:
        print(f"  {name:36} {found:36} {expected}")


def main(argv=None):
    ap = argparse.ArgumentParser(description="Prepare training rows from a split.")
    ap.add_argument("--preset", choices=list(PRESETS), default="small")
    ap.add_argument("--out", default=None, help="folder of the run (default out/<preset>); rows go to <out>/data")
    add_flags(ap, DataConfig, PRESETS)
    args = vars(ap.parse_args(argv))
    preset, out = args.pop("preset"), args.pop("out")
    cfg = DataConfig(**{**asdict(PRESETS[preset]), **args})
    folder = Path(out or f"out/{preset}") / "data"
    try:
        check(cfg)
        check_place(folder)
        sets, tok, summary = build(cfg)
        save(folder, sets, tok, summary | {"preset": preset})
    except (DataError, OSError) as e:
        sys.exit(f"data.prepare: {e}")
    show_summary(summary)
    print(f"-> {folder}")


def check_place(folder):
    """A place that cannot be written to is found before minutes of work; nothing is made there yet."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise DataError(f"{folder}: {there} is not a folder that can be written to")


def check(cfg):
    """Settings that cannot work, refused by name."""
    if not 2 <= cfg.candidates <= 10:
        raise DataError(f"--candidates {cfg.candidates}: between 2 and 10 (identifiers are A to J)")
    if not 1 <= cfg.folds <= retriever.FOLDS:
        raise DataError(f"--folds {cfg.folds}: between 1 and {retriever.FOLDS}")
    for name, least in (("core", 1), ("title_tokens", 0), ("merges", 0), ("tries", 1), ("data_seed", 0)):
        if getattr(cfg, name) < least:
            raise DataError(f"--{name} {getattr(cfg, name)}: at least {least}")
    if cfg.sids not in (0, 1):
        raise DataError(f"--sids {cfg.sids}: 0 or 1")
    if not 0 <= cfg.drop <= 1 or not cfg.temperature > 0:
        raise DataError(f"--drop {cfg.drop} (between 0 and 1) or --temperature {cfg.temperature} (above 0) cannot work")


if __name__ == "__main__":
    main()
