"""From the split to training rows: everything that happens before the first gradient. `build` is the list of steps.

    python -m data.prepare --preset small            # -> out/small/data
    python -m data.prepare --preset mini --data data/toys --out out/toys

There are two sets of training traces, as in GR2, which trains on broad data before its rejection-sampled SFT:

    all        every prefix of every training sequence with the teacher's greedy verdict, whether or not the next
               purchase is among the candidates; these teach the model to read evidence and to write
    accepted   the pick is drawn from the teacher's softmax, and the trace is kept if the pick *is* the next purchase

The last two purchases of each user are held out and reach no fit: not the retriever, the semantic IDs or the teacher.
The tokenizer reads the catalogue only.
"""
import argparse
import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from data import amazon, dataset, retriever, rows, semantic_ids, teacher
from data.tokenizer import Tokenizer
from plumbing import settings
from plumbing.settings import UserError, flag


@dataclass
class DataConfig:
    """The settings that decide the rows. A checkpoint remembers the rows it was trained on, and refuses others."""
    data: str = flag(str(amazon.HOME), "folder with users.tsv.gz and items.tsv.gz")
    core: int = flag(5, "least number of purchases of a user and of an item (k-core)", at_least=1)
    candidates: int = flag(10, "number of candidates per prompt (identifiers are A to J)", at_least=2, at_most=10)
    folds: int = flag(retriever.FOLDS, "folds of users that give training rows", at_least=1, at_most=retriever.FOLDS)
    sids: int = flag(0, "1: the prompt shows each item's four semantic-ID tokens", choices=(0, 1))
    title_tokens: int = flag(0, "the prompt shows the first pieces of each title, so many at most", at_least=0)
    answer_only: bool = flag(False, "an output is the answer alone, without the reasoning before it")
    merges: int = flag(256, "size of the BPE beyond the 256 bytes", at_least=0)
    drop: float = flag(0.1, "share of training rows from which candidates are removed at random", at_least=0, at_most=1)
    tries: int = flag(4, "draws per prompt in rejection sampling", at_least=1)
    temperature: float = flag(1 / 3, "softmax temperature of those draws", above=0)
    data_seed: int = flag(0, "seed of the teacher, the draws and the removals", at_least=0)


PRESETS = {
    "mini": DataConfig(candidates=5, folds=2, merges=0),
    "small": DataConfig(),
    "beauty": DataConfig(sids=1, title_tokens=12, merges=4096),
}
LONGEST = 1000                       # of a longer history only the newest count: the cost of its prefixes is quadratic
MOST_ITEMS = 30_000                  # four dense items x items matrices: 10 GB for so many items, 2 GB for Beauty


def build(cfg, say=print):
    """Make all rows. Returns (sets, tokenizer, summary); data/rows.py says what a set holds. `say` receives lines of
    progress. Raises UserError where the data are damaged, too few or too many."""
    # 1. Who is there: the users and items of the k-core.
    start = time.time()
    split = amazon.load(cfg.data)
    kept = sequences(split, cfg)
    counts = {"users": len(kept), "items": len({i for h in kept.values() for i in h}),
              "interactions": sum(map(len, kept.values()))}
    say(f"{counts['users']:,} users, {counts['items']:,} items, {counts['interactions']:,} interactions; "
        f"{len(split.histories) - len(kept):,} users left out (fewer than {max(cfg.core, 3)} purchases), "
        f"{sum(len(h) == LONGEST for h in kept.values()):,} cut to their newest {LONGEST:,}")
    # 2. The candidates of every prompt, with their evidence.
    train, valid, test, full = retrieve(kept, split, cfg)
    hits = {f"hit_{name}": float((c.target >= 0).mean())
            for name, c in (("train", train), ("valid", valid), ("test", test))}
    say(f"retrieved {len(train.item):,} training prefixes, hit rates: train {hits['hit_train']:.3f}, "
        f"validation {hits['hit_valid']:.3f}, test {hits['hit_test']:.3f} ({time.time() - start:.0f}s)")
    # 3. Tokens for items and symbols, and the teacher that grades candidates.
    sids, alone = semantic_ids.semantic_ids(semantic_ids.vectors(full), cfg.data_seed)
    tok = Tokenizer.train(split, sids if cfg.sids else sids[:, :0], cfg.merges)
    if tok.vocab > 2**16:
        raise UserError(f"--merges {cfg.merges}: {tok.vocab:,} tokens; rows on disk hold ids below {2**16:,}")
    about = item_tokens(split, sids, tok, cfg)
    judge = fit_teacher(train, split, tok, cfg)
    # 4. The rows.
    sets, recall = {}, {}
    sets["all"], sets["accepted"], acceptance = training_rows(train, split, judge, tok, about, cfg)
    for name, c in (("valid", valid), ("test", test)):
        sets[name], recall[name] = held_out_rows(c, split, list(kept), judge, tok, about, cfg)
    # 5. What was found.
    lengths = {name: np.diff(sets["test"][f"{name}_at"]) for name in ("prompt", "output")}
    summary = {**counts, "train_rows": len(sets["all"]["n"]), "accepted_rows": len(sets["accepted"]["n"]),
               "acceptance": acceptance, **hits, "test_users_with_hit": int((test.target >= 0).sum()), **recall,
               "sid_unique": float(len(np.unique(sids, axis=0)) / len(sids)), "sid_unique_3": alone, "vocab": tok.vocab,
               **{f"{name}_tokens": [int(n.mean().round()), int(n.max())] for name, n in lengths.items()},
               "seconds": round(time.time() - start), "config": asdict(cfg)}
    return sets, tok, summary | {"fingerprint": fingerprint(split, tok, cfg)}


# === The steps ========================================================================================================

def sequences(split, cfg):
    """The k-core: {user index: purchases, oldest first}. Each user has at least three (train, validation, test)."""
    kept = retriever.k_core(dict(enumerate(split.histories)), cfg.core)
    kept = {u: h[-LONGEST:] for u, h in kept.items() if len(h) >= 3}
    if len(split.asin) > MOST_ITEMS:
        raise UserError(f"{cfg.data}: {len(split.asin):,} items are too many for dense matrices ({MOST_ITEMS:,})")
    if not kept:
        raise UserError(f"{cfg.data}: no user has {max(cfg.core, 3)} purchases of items bought {cfg.core} times; "
                        "a smaller --core lets more in")
    return kept


def retrieve(kept, split, cfg):
    """Candidates of the training prefixes, of validation and of test, and the retriever fitted on all training data.
    Prefixes of one fold of users are scored by a retriever fitted on the other folds. A hash of a user's name decides
    the fold, so neither the order of the file nor the numbers matter."""
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
        raise UserError(f"{cfg.data}: {len(kept)} users are too few for {retriever.FOLDS} folds of training prefixes")
    full = retriever.Retriever(list(train.values()), split, like)
    valid = full.candidates([h[:-2] for h in kept.values()], [h[-2] for h in kept.values()], cfg.candidates)
    test = full.candidates([h[:-1] for h in kept.values()], [h[-1] for h in kept.values()], cfg.candidates)
    return retriever.Candidates.join(parts), valid, test, full


def item_tokens(split, sids, tok, cfg):
    """(items, e) tokens that describe an item beyond its brand and kind, -1 for nothing. If none are shown, e is 0."""
    columns = [np.zeros((len(split.title), 0), int)]
    if cfg.sids:
        columns += [np.asarray(tok.sid[level])[sids[:, level]][:, None] for level in range(sids.shape[1])]
    if cfg.title_tokens:
        titles = np.full((len(split.title), cfg.title_tokens), -1)
        for i, title in enumerate(split.title):
            pieces = tok.encoding.encode_ordinary(title)[:cfg.title_tokens]
            titles[i, :len(pieces)] = pieces
        columns.append(titles)
    return np.concatenate(columns, axis=1)


def fit_teacher(train, split, tok, cfg):
    """Fit the teacher on the prefixes whose next purchase is a candidate. Raises UserError if there are too few."""
    hits = train.target >= 0
    if hits.sum() < 10:
        raise UserError(f"{cfg.data}: only {hits.sum()} training prefixes have their next purchase among the "
                        f"{cfg.candidates} candidates; the teacher needs more data")
    evidence = torch.from_numpy(dataset.evidence(dataset.show(train, split, tok), tok)[hits])
    return teacher.fit(evidence, torch.from_numpy(train.target[hits]), tok.vocab, cfg.data_seed)


def judged(judge, shown, tok):
    """The teacher's scores (n, k) of all candidates, and their grades (n, k), -1 where a candidate is absent."""
    score = judge(torch.from_numpy(dataset.evidence(shown, tok)))
    return score, np.where(shown.brand >= 0, judge.grade(score).numpy(), -1)


def pack(prompts, outputs, target, shown):
    """One set of rows as arrays for the disk: prompts and outputs are (n, L) with -1 for nothing, target is (n,)."""
    prompt, prompt_at = rows.flatten(prompts)
    output, output_at = rows.flatten(outputs)
    return {"prompt": prompt, "prompt_at": prompt_at, "output": output, "output_at": output_at,
            "target": target.astype(np.int8), "n": (shown.brand >= 0).sum(1).astype(np.int8)}


def training_rows(train, split, judge, tok, about, cfg):
    """Write both sets of training rows. Returns (all, accepted, accepted share of the rows whose target is shown)."""
    rng = np.random.default_rng(cfg.data_seed)
    shown, target = dataset.drop_some(dataset.show(train, split, tok), train.target, cfg.drop, rng)
    score, grade = judged(judge, shown, tok)
    prompts = dataset.prompts(shown, tok, (about[train.history], about[train.item]))
    everything = pack(prompts, dataset.traces(shown, tok, grade, None, not cfg.answer_only), target, shown)
    # Rejection sampling: several picks per row are drawn, and the row is kept if one of them is the purchase.
    hits = np.flatnonzero(target >= 0)
    present = torch.from_numpy(shown.brand[hits] >= 0)
    draws = teacher.draw_picks(score[hits], present, cfg.temperature, cfg.tries,
                               torch.Generator().manual_seed(cfg.data_seed)).numpy()        # (hits, tries)
    good = hits[(draws == target[hits, None]).any(1)]
    shown, target = dataset.Shown(**{f: value[good] for f, value in vars(shown).items()}), target[good]
    outputs = dataset.traces(shown, tok, grade[good], target, not cfg.answer_only)
    return everything, pack(prompts[good], outputs, target, shown), len(good) / len(hits)


def held_out_rows(c, split, users, judge, tok, about, cfg):
    """Write the rows of validation or test, one per user, with the teacher's greedy verdict. Returns (set, recalls)."""
    shown = dataset.show(c, split, tok)
    score, grade = judged(judge, shown, tok)
    packed = pack(dataset.prompts(shown, tok, (about[c.history], about[c.item])),
                  dataset.traces(shown, tok, grade, None, not cfg.answer_only), c.target, shown)
    packed |= {"item": c.item.astype(np.int32), "history": c.history.astype(np.int32),
               "user": np.array(users, dtype=np.int32)}
    return packed, recalls(c.target, score.numpy(), dataset.order_by(grade))


def recalls(target, score, order):
    """Recall at 1 and 3 on the rows with a hit: of the pre-rank order ("floor"), of the teacher's scores, and of the
    order that its grades write. target (n,), score and order (n, k). Returns {"floor_r1": ..., ...}."""
    hits = np.flatnonzero(target >= 0)
    t, s, o = target[hits], score[hits], order[hits]
    by_score = (s >= np.take_along_axis(s, t[:, None], 1)).sum(1)   # of equal scores the target's counts as the last
    by_grade = (o == t[:, None]).argmax(1) + 1
    return {f"{name}_r{n}": float((rank <= n).mean()) for n in (1, 3)
            for name, rank in (("floor", t + 1), ("score", by_score), ("written", by_grade))}


def fingerprint(split, tok, cfg):
    """What a checkpoint must share with the rows it is used on: purchases, catalogue, token ids, settings. Neither the
    folder nor the rows count: a teacher fitted on another machine may differ in a last bit, and move a few grades."""
    chosen = {name: value for name, value in asdict(cfg).items() if name != "data"}
    parts = (split.histories, split.asin, split.brand, split.path, split.title, tok.state(), chosen)
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


# === The command ======================================================================================================

def check_place(folder):
    """Refuse a place that cannot be written to, before minutes of work. Makes nothing there yet. Raises UserError."""
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"{folder}: {nearest} is not a folder that can be written to")


def show_summary(s):
    """Print what was found beside what Beauty gives. Another category has figures of its own."""
    def recall(name):
        return "; ".join(f"{s[part][name + '_r1']:.3f}, {s[part][name + '_r3']:.3f}" for part in ("valid", "test"))

    for name, found, expected in (
            ("users / items / interactions", f"{s['users']:,} / {s['items']:,} / {s['interactions']:,}",
             "22,363 / 12,101 / 198,502"),
            ("hit rate: train, validation, test", f"{s['hit_train']:.3f}, {s['hit_valid']:.3f}, {s['hit_test']:.3f}",
             "test >= .095 at ten candidates"),
            ("test users with a hit", f"{s['test_users_with_hit']:,}", ""),
            ("floor R@1, R@3: validation; test", recall("floor"), "R@1 .29 to .32 at ten"),
            ("teacher by score, the same", recall("score"), "floor + .05, R@3 >= .63 at ten"),
            ("teacher as written (grades)", recall("written"), "within .01 of its scores"),
            ("rows: all; accepted, of hits", f"{s['train_rows']:,}; {s['accepted_rows']:,}, {s['acceptance']:.0%}", ""),
            ("semantic IDs unique (first three)", f"{s['sid_unique']:.1%} ({s['sid_unique_3']:.0%})", "100% (77%)"),
            ("tokens: prompt, output (mean, most)", "{}, {}; {}, {}".format(*s["prompt_tokens"], *s["output_tokens"]),
             "output 80 to 150 at ten"),
            ("vocabulary; seconds", f"{s['vocab']:,}; {s['seconds']}", "")):
        print(f"  {name:36} {found:36} {expected}")


def main(argv=None):
    ap = argparse.ArgumentParser(description="Prepare training rows from a split.")
    ap.add_argument("--preset", choices=list(PRESETS), default="small")
    ap.add_argument("--out", default=None, help="folder of the run (default out/<preset>); rows go to <out>/data")
    settings.add_flags(ap, DataConfig, PRESETS)
    given = vars(ap.parse_args(argv))
    preset, out = given.pop("preset"), given.pop("out")
    cfg = DataConfig(**{**asdict(PRESETS[preset]), **given})
    folder = Path(out or f"out/{preset}") / "data"
    settings.check_limits(cfg)
    check_place(folder)
    sets, tok, summary = build(cfg)
    rows.save(folder, sets, tok, summary | {"preset": preset})
    show_summary(summary)
    print(f"-> {folder}")


if __name__ == "__main__":
    settings.main(main)
