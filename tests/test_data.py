"""From the publisher's files to rows: what is kept, what is refused, and that nothing held out is ever read."""
import copy
import gzip
import json
import random
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ranking
from conftest import write_publisher
from data import amazon, dataset, prepare, retriever, semantic_ids, teacher
from data import rows as rows_on_disk
from data.tokenizer import Tokenizer, train_bpe
from plumbing import settings
from plumbing.settings import UserError

CONFIG = dict(candidates=6, core=2, merges=40, sids=1, title_tokens=2)
GOOD = {"reviews_A_5.json.gz": [json.dumps({"reviewerID": "u", "asin": a, "unixReviewTime": 0}) for a in "XYZ"],
        "meta_A.json.gz": [repr({"asin": a}) for a in "XYZ"]}


def put(folder, files):
    """Write lines, or raw bytes, into gzip files of a folder. Returns the folder."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        raw = content if isinstance(content, bytes) else gzip.compress("".join(f"{c}\n" for c in content).encode())
        (folder / name).write_bytes(raw)
    return folder


def cells(path):
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def build(folder, say=lambda *_: None, **settings):
    return prepare.build(prepare.DataConfig(data=str(folder), **{**CONFIG, **settings}), say)


def same(a, b):
    """Are two sets of rows equal, byte for byte?"""
    return all(np.array_equal(a[name], b[name]) for name in a)


def everything(s):
    """Every field of a Shown side by side, for comparing."""
    return np.concatenate([value for value in vars(s).values()], axis=1)


@pytest.fixture(scope="module")
def made(split_folder):
    """(sets, tokenizer, summary) of the miniature."""
    return build(split_folder)


@pytest.fixture(scope="module")
def tok(made):
    return made[1]


@pytest.fixture(scope="module")
def shown(split_folder, tok):
    """(Shown, extra tokens of the items) of the training prefixes. Some of their candidates are removed."""
    cfg = prepare.DataConfig(data=str(split_folder), **CONFIG)
    split = amazon.load(split_folder)
    c, _, _, full = prepare.retrieve(prepare.sequences(split, cfg), split, cfg)
    about = prepare.item_tokens(split, semantic_ids.semantic_ids(semantic_ids.vectors(full))[0], tok, cfg)
    s, _ = dataset.drop_some(dataset.show(c, split, tok), c.target, 0.6, np.random.default_rng(5))
    return s, (about[c.history], about[c.item])


# === The split ========================================================================================================

def test_publisher_to_split_and_back(tmp_path):
    """Purchases of one day keep the file's order. Items keep brand, path and title, and what is missing becomes ""."""
    day = 86400
    bought = [("u", "Z", 2 * day + 50), ("u", "Y", 2 * day + 10), ("v", "X", -1), ("u", "X", day), ("u", "W", 2 * day)]
    meta = [{"asin": "X", "title": "Crème\tn° 1 > ×２ \ud83d 🧴", "brand": "L’Or", "categories": [["Beauty", "Bath"]]},
            {"asin": "NEVER", "title": "in no review"}, {"asin": "Y", "title": None, "categories": []}, {"asin": "Z"}]
    folder = put(tmp_path / "s", {
        "reviews_A_5.json.gz": [json.dumps(dict(zip(("reviewerID", "asin", "unixReviewTime"), r))) for r in bought],
        "meta_A.json.gz": [ascii(m) for m in meta]})
    assert amazon.write_split(*amazon.read_publisher(folder), tmp_path / "a") == (2, 4, 5)
    amazon.write_split(*amazon.read_publisher(folder), tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    split = amazon.load(tmp_path / "a")
    assert sorted(split.asin) == ["W", "X", "Y", "Z"] and split.asin != ["Z", "Y", "X", "W"]
    asins = {tuple(split.asin[i] for i in h): d for h, d in zip(split.histories, split.days)}
    assert asins == {("X", "Z", "Y", "W"): [1, 2, 2, 2], ("X",): [-1]}
    about = {a: x for a, *x in zip(split.asin, split.brand, split.path, split.title)}
    assert about["X"] == ["L’Or", ("Beauty", "Bath"), "Crème n° 1 ×２ 🧴"]
    assert about["Y"] == about["Z"] == about["W"] == ["", (), ""]


REVIEWS, META = GOOD
DAMAGE = {
    "truncated": (REVIEWS, gzip.compress("\n".join(GOOD[REVIEWS]).encode())[:-12], "damaged after line"),
    "not gzip": (REVIEWS, b"{}", "damaged after line 0"),
    "not utf-8": (META, gzip.compress(b"\xff\n"), "damaged after line 0"),
    "no review": (REVIEWS, [], "holds no review"),
    "bad json": (REVIEWS, GOOD[REVIEWS] + ["{"], "line 4"),
    "deep json": (REVIEWS, ["[" * 10**5], "line 1"),
    "no asin": (REVIEWS, ['{"reviewerID": "u", "unixReviewTime": 1}'], "line 1"),
    "endless time": (REVIEWS, ['{"reviewerID": "u", "asin": "X", "unixReviewTime": Infinity}'], "line 1"),
    "asin in two cells": (REVIEWS, ['{"reviewerID": "u", "asin": "X\\tY", "unixReviewTime": 1}'], "line 1"),
    "nobody": (REVIEWS, ['{"reviewerID": null, "asin": "X", "unixReviewTime": 1}'], "line 1"),
    "half a character": (REVIEWS, ['{"reviewerID": "\\ud800", "asin": "X", "unixReviewTime": 1}'], "line 1"),
    "bad literal": (META, GOOD[META] + ["{'asin': "], "line 4"),
    "a list": (META, ["['X']"], "line 1"),
    "code": (META, GOOD[META] + ["{'asin': __import__('pathlib').Path('ran').touch()}"], "line 4"),
    "other category": (META, ["{'asin': 'other'}"], "describes none"),
}


@pytest.mark.parametrize("name,content,says", DAMAGE.values(), ids=DAMAGE)
def test_damaged_publisher_files(tmp_path, monkeypatch, name, content, says):
    """Each damage is refused in one line that names the file. Code is not run, and an older split stays as it was."""
    monkeypatch.chdir(tmp_path)
    old = contents(put(tmp_path / "out", {"users.tsv.gz": ["old"], "items.tsv.gz": ["old"]}))
    folder = put(tmp_path / "s", {**GOOD, name: content})
    with pytest.raises(UserError, match=f"{name}.*{says}"):
        amazon.read_publisher(folder)
    with pytest.raises(SystemExit) as e:
        settings.main(amazon.main, ["--source", str(folder), "--out", str(tmp_path / "out")])
    assert isinstance(e.value.code, str) and "\n" not in e.value.code
    assert contents(tmp_path / "out") == old and not (tmp_path / "ran").exists()


def test_folder_without_the_one_pair(tmp_path):
    """Without a folder, in an empty one, or with two categories, the message says how many files were found."""
    two = put(tmp_path / "two", {**GOOD, "meta_B.json.gz": []})
    for folder, found in ((tmp_path / "none", "0 and 0"), (put(tmp_path / "empty", {}), "0 and 0"), (two, "1 and 2")):
        with pytest.raises(UserError, match=f"{folder}.*{found}"):
            amazon.read_publisher(folder)


def test_split_is_written_whole_or_not(tmp_path):
    """A failure in the second file leaves the first as it was, and no scrap."""
    amazon.write_split({"u": [(1, "X")]}, {}, tmp_path)
    old = contents(tmp_path)
    with pytest.raises(UnicodeEncodeError):
        amazon.write_split({"u": [(1, "Y")]}, {"Y": ("", (), "\ud800")}, tmp_path)
    assert contents(tmp_path) == old


@pytest.mark.parametrize("name,line,says", [
    ("items", "X\tbrand\tpath", "line 3.*3 cells"), ("items", "\t\t\t", "line 3"), ("items", "A\t\t\ttwin", "twice"),
    ("users", "1\t2:15000", "line 2"), ("users", "1\t-1:15000", "line 2"), ("users", "1", "line 2"),
    ("users", "1\t", "line 2"), ("users", "1\t0:x", "line 2"), ("users", "1\t0", "line 2"),
    ("users", "1\t0:1\t1:2", "line 2"), ("users", "1\t0:9 1:8", "line 2.*order of time"), ("users", "0\t0:1", "twice")])
def test_damaged_split(tmp_path, name, line, says):
    """One bad line behind good ones is refused with its number."""
    files = {"items.tsv.gz": ["A\t\t\t", "B\tb\tx > y\tt"], "users.tsv.gz": ["0\t0:1 1:1"]}
    assert amazon.load(put(tmp_path, files)).user == ["0"]
    files[f"{name}.tsv.gz"].append(line)
    with pytest.raises(UserError, match=f"{name}.tsv.gz.*{says}"):
        amazon.load(put(tmp_path, files))


def test_prepare_refuses_in_one_line(tmp_path, split_folder):
    """Bad splits, and settings that cannot work, end in one line, and no folder of rows is made."""
    bad = put(tmp_path / "bad", contents(split_folder))
    (bad / "users.tsv.gz").write_bytes((bad / "users.tsv.gz").read_bytes()[:-9])
    empty = put(tmp_path / "empty", {"items.tsv.gz": ["A\t\t\t"], "users.tsv.gz": []})
    few = put(tmp_path / "few", {"items.tsv.gz": ["A\t\t\t", "B\t\t\t"], "users.tsv.gz": ["0\t0:1", "1\t1:1 0:2 1:3"]})
    for folder, flags, says in ((tmp_path / "none", "", "no users.tsv.gz"), (bad, "", "damaged after line"),
                                (empty, "", "no user"), (few, "", "--core"), (few, "--core 1", "too few|training"),
                                (split_folder, "--candidates 11", "--candidates 11"), (few, "--tries 0", "--tries"),
                                (few, "--temperature 0", "--temperature"), (few, "--merges -1", "--merges")):
        with pytest.raises(SystemExit, match=says) as e:
            settings.main(prepare.main, ["--data", str(folder), "--out", str(tmp_path / "run"), *flags.split()])
        assert isinstance(e.value.code, str) and "\n" not in e.value.code and not (tmp_path / "run").exists()


def test_rows_are_saved_whole_or_not(tmp_path, made, monkeypatch):
    """A failure while writing leaves the former rows, a kill while deleting those leaves the new ones."""
    sets, tok, summary = made
    rows_on_disk.save(tmp_path / "data", sets, tok, summary)
    old, inner, calls = contents(tmp_path / "data"), np.savez, []
    with monkeypatch.context() as m:
        m.setattr(np, "savez", lambda *a, **k: calls.append(1) or (inner(*a, **k) if len(calls) < 2 else 1 / 0))
        with pytest.raises(ZeroDivisionError):
            rows_on_disk.save(tmp_path / "data", sets, tok, summary)
    assert contents(tmp_path / "data") == old

    def killed(folder, **_):
        if folder.exists():
            raise KeyboardInterrupt
    shutil.rmtree(tmp_path / "data.part")
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(shutil, "rmtree", killed)
        rows_on_disk.save(tmp_path / "data", sets, tok, {**summary, "new": 1})
    assert json.loads((tmp_path / "data" / "summary.json").read_text(encoding="utf-8"))["new"] == 1
    rows_on_disk.save(tmp_path / "data", sets, tok, summary)
    assert contents(tmp_path / "data").keys() == old.keys() and [p.name for p in tmp_path.iterdir()] == ["data"]


# === Odd users and catalogues =========================================================================================

def test_one_purchase_and_ten_thousand(tmp_path):
    """A user with one purchase is left out, a history of 10,000 is cut, and the command says both."""
    rng, said = random.Random(0), []
    bought, about = amazon.read_publisher(write_publisher(tmp_path))
    asins = sorted({a for purchases in bought.values() for _, a in purchases})
    bought = {**bought, "long": [(15000 + i // 3, rng.choice(asins)) for i in range(10000)]}
    amazon.write_split(bought, about, tmp_path)
    sets, tok, summary = build(tmp_path, said.append)
    assert "1 users left out" in said[0] and f"1 cut to their newest {prepare.LONGEST:,}" in said[0]
    assert len(sets["test"]["n"]) == summary["users"] == len(bought) - 1
    assert len(sets["all"]["n"]) == summary["interactions"] - 3 * summary["users"]       # one a prefix
    for rows in sets.values():
        assert (rows["target"] < rows["n"]).all()                                        # never one that is not there


def test_fewer_unseen_items_than_candidates(tmp_path):
    """Users buy almost all of a catalogue without brands or titles: lists of candidates get short, but never wrong."""
    rng = random.Random(1)
    amazon.write_split({f"U{u}": [(i, f"B{(u + i * rng.choice([1, 1, 2])) % 20}") for i in range(25)]
                        for u in range(60)}, {}, tmp_path)
    sets, tok, _ = build(tmp_path)
    assert sets["all"]["n"].min() < 3 and sets["all"]["n"].max() == 6
    split = amazon.load(tmp_path)
    for user, item, n, target in zip(*(sets["test"][f] for f in ("user", "item", "n", "target"))):
        *seen, last = split.histories[user]
        assert (item >= 0).sum() == n and not set(item[:n].tolist()) & set(seen)
        assert item[target] == last if target >= 0 else last not in item
    for rows in sets.values():
        assert (rows["target"] < rows["n"]).all()


# === What may not matter ==============================================================================================

def test_held_out_purchases_move_no_training_row(tmp_path, split_folder):
    """When the last two purchases of every user change, training rows and tokens stay, byte for byte. (The core
    is 1 here, because a k-core counts all purchases, as in the literature, to choose users and items.)"""
    n = len(cells(split_folder / "items.tsv.gz"))
    lines = []
    for line in cells(split_folder / "users.tsv.gz"):
        pairs = line.split()[1:]
        moved = [f"{(int(p.split(':')[0]) + 7) % n}:{p.split(':')[1]}" for p in pairs[-2:]]
        lines.append(line.split()[0] + "\t" + " ".join(pairs[:-2] + moved))
    put(tmp_path, {**contents(split_folder), "users.tsv.gz": lines})
    (a, tok_a, _), (b, tok_b, _) = build(split_folder, core=1), build(tmp_path, core=1)
    assert same(a["all"], b["all"]) and same(a["accepted"], b["accepted"]) and tok_a.state() == tok_b.state()
    assert not np.array_equal(a["valid"]["target"], b["valid"]["target"]) and not same(a["test"], b["test"])


def test_neither_file_order_nor_numbers_nor_global_seeds_matter(tmp_path, split_folder, made):
    """Shuffled lines and new item numbers give the same rows, byte for byte (a user's number is a name and stays). Only
    the seed in the settings changes them."""
    items, users = cells(split_folder / "items.tsv.gz"), cells(split_folder / "users.tsv.gz")
    rng, at = random.Random(3), list(range(len(items)))
    rng.shuffle(at), rng.shuffle(users)
    new = {str(old): str(i) for i, old in enumerate(at)}
    users = [u.split("\t")[0] + "\t" + " ".join(":".join((new[p.split(":")[0]], p.split(":")[1]))
                                                for p in u.split("\t")[1].split()) for u in users]
    put(tmp_path, {"items.tsv.gz": [items[i] for i in at], "users.tsv.gz": users})
    assert vars(amazon.load(tmp_path)) == vars(amazon.load(split_folder))
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    sets, _, summary = build(tmp_path)
    assert summary["fingerprint"] == made[2]["fingerprint"]
    assert all(same(sets[name], made[0][name]) for name in sets)
    other = build(split_folder, data_seed=1)
    assert other[2]["fingerprint"] != summary["fingerprint"] and not same(other[0]["all"], sets["all"])


# === Retriever and semantic IDs =======================================================================================

def test_counts_by_hand():
    """Four users and a long one. A user who buys the same two items again and again counts once."""
    histories = [[0, 1, 2], [0, 1], [1, 0], [0, 3, 0, 3], list(range(4, 16))]
    r = retriever.Retriever(histories, SimpleNamespace(asin=range(16)), torch.zeros(16, 16))
    assert r.together[0, :4].tolist() == [0, 3, 1, 1] and torch.equal(r.together, r.together.T)
    assert r.next[:4, :4].tolist() == [[0, 2, 0, 1], [1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert r.pop[:4].tolist() == [5, 3, 1, 2]
    assert r.together[4, 14] == 1 and r.together[4, 15] == 0                              # ten apart, eleven apart
    damp = 4 ** -0.4 * 2 ** -0.3, 2 ** -0.4 * 4 ** -0.3
    assert r.s[1, 2] == pytest.approx(damp[0]) and r.s[2, 1] == pytest.approx(0.5 * damp[1])
    c = r.candidates([[2, 1]], [3], 3)
    score = {j: r.s[1, j] + 0.75 * r.s[2, j] for j in (0, 3)}
    assert c.item[0, 0] == 0 and c.target[0] in (-1, 1, 2) and score[3] == 0
    assert c.score[0].tolist() == [1, 0, 0] and c.together[0, 0] == 3 and c.link[0, 0] == 0 and c.next[0, 0] == 1
    assert c.history[0].tolist() == [1, 2] + [-1] * 6


def test_k_core_by_hand():
    """What is dropped lets others fall below the limit, until nothing changes."""
    assert retriever.k_core({"a": [1, 2], "b": [2, 1], "c": [1, 3, 4], "d": [4]}, 2) == {"a": [1, 2], "b": [2, 1]}


def test_prefixes_are_scored_without_their_user(split_folder, monkeypatch):
    """A retriever for training prefixes is fitted on all users but theirs. The evidence is counted again by hand."""
    fits, calls = [], []

    class Recorder(retriever.Retriever):
        def __init__(self, histories, *rest):
            super().__init__(histories, *rest)
            fits.append(histories)

        def candidates(self, histories, targets, n_candidates):
            calls.append((histories, targets, super().candidates(histories, targets, n_candidates)))
            return calls[-1][2]

    monkeypatch.setattr(retriever, "Retriever", Recorder)
    cfg = prepare.DataConfig(data=str(split_folder), **CONFIG)
    split = amazon.load(split_folder)
    kept = prepare.sequences(split, cfg)
    prepare.retrieve(kept, split, cfg)
    whole = Counter(tuple(h[:-2]) for h in kept.values())
    assert Counter(map(tuple, fits[-1])) == whole and len(calls) == 5 + 2
    for fit, (prefixes, targets, c) in zip(fits, calls[:5]):
        last = [i + 1 == len(prefixes) or len(prefixes[i + 1]) == 1 for i in range(len(prefixes))]
        mine = Counter((*h, t) for h, t, end in zip(prefixes, targets, last) if end)
        assert Counter(map(tuple, fit)) + mine == whole
        for r in range(0, len(prefixes), 29):
            h = prefixes[r][::-1][:8]
            for j, item in enumerate(c.item[r]):
                near = [sum(any(abs(a - b) <= 10 and (f[a], f[b]) == (x, item) for a in range(len(f))
                                for b in range(len(f))) for f in fit) for x in h]
                assert item not in prefixes[r] and c.together[r, j] == max(near)
                assert c.link[r, j] == (near.index(max(near)) if max(near) else -1)
                assert c.next[r, j] == sum((h[0], item) in zip(f, f[1:]) for f in fit)
                assert c.pop[r, j] == sum(f.count(item) for f in fit)
            assert (np.diff(c.score[r]) <= 0).all() and c.score[r, 0] == 1
            assert c.target[r] == (list(c.item[r]).index(targets[r]) if targets[r] in c.item[r] else -1)


def test_semantic_ids_are_unique():
    """Items with equal vectors share three codes and differ in the last. The global seed changes nothing."""
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).repeat(4, 1)
    codes, alone = semantic_ids.semantic_ids(x)
    assert len(np.unique(codes, axis=0)) == 160 and alone == 0
    assert (codes[:40, :3] == codes[40:80, :3]).all() and np.array_equal(codes, semantic_ids.semantic_ids(x)[0])
    assert semantic_ids.semantic_ids(torch.zeros(5, 6))[0][:, 3].tolist() == [0, 1, 2, 3, 4]
    fit = SimpleNamespace(s=x @ x.T, like=torch.randn(160, 160, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(1)
    one, state = semantic_ids.vectors(fit), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(semantic_ids.vectors(fit), one) and not torch.equal(torch.get_rng_state(), state)


# === Tokenizer ========================================================================================================

def test_tokenizer_through_json(tok):
    """The same ids with the same bytes behind them, and three different ones for padding, mask and end."""
    other = Tokenizer.load(json.loads(json.dumps(tok.state())))
    mine, theirs = ({k: v for k, v in vars(t).items() if k != "encoding"} for t in (tok, other))
    assert mine == theirs and len({tok.pad, tok.mask, tok.eos}) == 3
    assert [tok.encoding.decode_single_token_bytes(i) for i in range(tok.vocab)] == \
        [other.encoding.decode_single_token_bytes(i) for i in range(tok.vocab)]


def test_titles_survive_and_hold_no_special_token(tok):
    """A title that looks like a mark, an identifier or a mask is encoded as plain text."""
    for text in ("Crème brûlée no. 12", "日本 🧴🏽 ＡＢ", "<eos> A<mask> grade:7 <answer>", " h1\u200b\x00", ""):
        ids = tok.encoding.encode_ordinary(text)
        assert tok.encoding.decode(ids) == text and max(ids, default=0) < len(tok.ranks)


def test_names_do_not_clash():
    """A brand may have the name of a kind, of one of our symbols, or of the token for the rest."""
    names = ["Kind 1", "brand other", "kind other", "eos", "eos>", "s0:1", "brand:0", "other"]
    tok = Tokenizer({bytes([b]): b for b in range(256)}, names, names, [2])
    ids = [*tok.brand_id.values(), *tok.kind_id.values(), tok.brand[0], tok.kind[0], *tok.sid[0], tok.eos]
    assert len(set(ids)) == len(ids) == 2 * len(names) + 5
    assert len({tok.encoding.decode([i]) for i in range(256, tok.vocab)}) == tok.vocab - 256


def test_bpe_by_hand_and_in_any_order():
    """The commonest pair is merged first, and the larger of equals. A pair that occurs once is never merged."""
    assert list(train_bpe(["ab ab", "ab c"], 9))[256:] == [b"ab"]           # " ab" occurs once: not worth a token
    assert list(train_bpe(["ab ab ab", "c"], 9))[256:] == [b"ab", b" ab"]
    assert list(train_bpe(["ab", "cd", "cd", "ab"], 9))[256:] == [b"cd", b"ab"]
    texts = [f"soap {i % 7} crème {i % 3} shampoo" for i in range(40)]
    ranks = train_bpe(texts, 30)
    assert ranks == train_bpe(texts[::-1], 30) and sorted(ranks.values()) == list(range(len(ranks)))


# === Prompts, claims, traces ==========================================================================================

def test_prompts_say_what_is_shown(shown, tok):
    """A prompt that is read back gives the facts it was written from, with and without semantic IDs and titles."""
    s, extra = shown
    for more in (None, extra):
        tokens, at = rows_on_disk.flatten(dataset.prompts(s, tok, more))
        rows = [tokens[a:b].tolist() for a, b in zip(at, at[1:])]
        assert np.array_equal(everything(dataset.read_prompts(rows, tok, 6)), everything(s))
    assert (s.brand < 0).any() and (s.history_brand < 0).any()               # some had fewer than six, or than eight


def test_claims_by_hand():
    """Kind and brand of the newest purchase are counted in the history, and so are those of each candidate."""
    tok = Tokenizer({bytes([b]): b for b in range(256)}, ["X", "Y"], ["P", "Q"], [])
    (o, x, y), (_, p, q) = tok.brand, tok.kind
    rest = {f: np.array([[1, 2, -1]]) for f in ("score", "pop", "like", "link", "together", "next")}
    s = dataset.Shown(np.array([[x, y, o, o, o, x, -1, -1]]), np.array([[q, p, p, q, q, q, -1, -1]]),
                      np.array([[x, o, -1]]), np.array([[q, p, -1]]), **rest)
    pattern, lines = dataset.claims(s, tok)
    assert pattern[0].tolist() == [q, tok.kind_count[3], x, tok.brand_count[2]]          # 3+: the last bucket
    assert lines[0].tolist() == [[tok.slots[0], x, tok.brand_count[2], q, tok.kind_count[3], 1, 1, 1],
                                 [tok.slots[1], o, tok.brand_count[0], p, tok.kind_count[2], 2, 2, 2], [-1] * 8]
    s.history_brand[:], s.history_kind[0] = o, [p, q, q] + [-1] * 5
    assert dataset.claims(s, tok)[0][0].tolist() == [p, tok.kind_count[1], o, tok.brand_count[0]]    # "other": no match


@pytest.mark.parametrize("grade,pick,order", [
    ([3, 5, 5, 1, 5], None, [1, 2, 4, 0, 3]), ([3, 5, 5, 1, 5], 3, [3, 1, 2, 0, 4]), ([2, 2, 2, 2], None, [0, 1, 2, 3]),
    ([0, 0, 0, 0, 7], None, [4, 0, 1, 2, 3]), ([1, 4, -1], None, [1, 0, 2]), ([6, 7, -1, -1, -1], 0, [0, 1, 2, 3, 4]),
    ([0, -1], None, [0, 1]), ([1, 2], None, [1, 0]), ([-1, 5, 5, 5, 1], None, [1, 2, 3, 4, 0]),
    ([3, 5, 5, 1, 5], 1, [1, 2, 4, 0, 3]), ([1, 4, -1, -1, -1], 1, [1, 0, 2, 3, 4])])
def test_order_by_hand(grade, pick, order):
    """First come the pick and the best grades, three in all, then the rest in pre-rank order, then absent ones."""
    assert dataset.order_by(np.array([grade]), None if pick is None else np.array([pick]))[0].tolist() == order


@pytest.mark.parametrize("n", range(1, 7))
def test_traces_parse_and_are_true(shown, tok, n):
    """Whatever the grades of n candidates are, the answer is a permutation that follows from true claims."""
    s = copy.deepcopy(shown[0])
    for f in dataset.FIELDS:
        getattr(s, f)[:, n:] = -1
    present = s.brand >= 0
    rng = np.random.default_rng(n)
    grade = np.where(present, rng.integers(0, 8, present.shape), -1)
    pick = rng.integers(0, present.sum(1))
    for p in (None, pick):
        outputs = [row[row >= 0].tolist() for row in dataset.traces(s, tok, grade, p)]
        for out, order, n_shown, first in zip(outputs, dataset.order_by(grade, p), present.sum(1), pick):
            assert ranking.parse(out, tok, n_shown).order == order[:n_shown].tolist() and ranking.consistent(out, tok)
            assert p is None or out[out.index(tok.answer) + 1] == tok.slots[first]
        prompts = [row[row >= 0].tolist() for row in dataset.prompts(s, tok)]
        assert ranking.grounding(prompts, outputs, tok, 6)["grounding"] == 1


def test_without_reasoning_the_same_answers_stand_alone(split_folder, made, tok):
    """--answer-only keeps the prompts, cuts outputs down to <answer> ... <eos>, and changes the fingerprint."""
    bare, bare_tok, summary = build(split_folder, answer_only=True)
    assert np.array_equal(bare["all"]["prompt"], made[0]["all"]["prompt"]) and bare_tok.state() == tok.state()
    assert summary["fingerprint"] != made[2]["fingerprint"] == build(split_folder, answer_only=False)[2]["fingerprint"]
    full, at = made[0]["all"]["output"], made[0]["all"]["output_at"]
    for r in range(0, len(at) - 1, 50):
        whole, lo = full[at[r]:at[r + 1]].tolist(), bare["all"]["output_at"][r]
        assert bare["all"]["output"][lo:bare["all"]["output_at"][r + 1]].tolist() == whole[whole.index(tok.answer):]


def test_prepared_rows(tmp_path, made, tok):
    """Outputs on disk parse to a permutation of what the prompt shows. An accepted one starts with the purchase."""
    rows_on_disk.save(tmp_path / "data", *made)
    for name in ("all", "accepted", "valid", "test"):
        r = rows_on_disk.Rows(tmp_path / "data" / f"{name}.npz")
        for i in range(len(r)):
            prompt, output = r[i]
            order = ranking.parse(output, tok, r.n_shown[i]).order
            assert sorted(order) == list(range(r.n_shown[i])) and ranking.shown_counts([prompt], tok) == [r.n_shown[i]]
            assert prompt[0] == tok.history and prompt[-1] == tok.rank and tok.pad not in prompt + output
            assert name != "accepted" or order[0] == r.target[i]


def test_rejection_sampling_keeps_what_was_drawn(split_folder):
    """More draws per prompt accept more traces, and few draws do not accept all."""
    one, many = (build(split_folder, tries=tries)[2] for tries in (1, 64))
    assert 0 < one["acceptance"] < many["acceptance"] <= 1 and one["accepted_rows"] < many["accepted_rows"]


def test_drop_some_by_hand():
    """The three rows of its docstring, with the lots that it shows."""
    marks = np.array([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, -1]])
    lots = iter([np.zeros(3), np.array([[.7, .1, .4, .2], [.7, .1, .4, .2], [.3, .9, .5, .1]])])
    rng = SimpleNamespace(random=lambda _: next(lots), integers=lambda low, high, n: np.full(n, 3))
    history = np.zeros((3, 8), int)
    s = dataset.Shown(history, history, **{f: marks.copy() for f in dataset.FIELDS})
    new, target = dataset.drop_some(s, np.array([2, 0, 1]), 1, rng)
    assert new.brand.tolist() == [[1, 2, 3, -1], [1, 2, 3, -1], [0, 1, 2, -1]] and target.tolist() == [1, -1, 1]


def test_drop_some_keeps_order_and_target():
    """At least three candidates stay, in their order, and the target is found where it went."""
    n, k = 400, 6
    mark = np.arange(n * k).reshape(n, k)
    mark[100:, 5:], mark[200:, 4:], mark[300:, 2:] = -1, -1, -1             # some are short already
    history = np.zeros((n, 8), int)
    s = dataset.Shown(history, history, **{f: mark.copy() for f in dataset.FIELDS})
    target = np.arange(n) % 3 - 1
    new, found = dataset.drop_some(s, target, 0.5, np.random.default_rng(0))
    for before, after, t, at in zip(mark, new.brand, target, found):
        before, after = [x for x in before if x >= 0], list(after)
        stay = [x for x in after if x >= 0]
        assert stay == [x for x in before if x in stay] and after == stay + [-1] * (k - len(stay))
        assert min(3, len(before)) <= len(stay) and (at >= 0) == (t >= 0 and before[t] in stay)
        assert at < 0 or after[at] == before[t]
    assert all(np.array_equal(getattr(new, f), new.brand) for f in dataset.FIELDS)
    assert 30 < sum(len(set(a) - set(b)) > 0 for a, b in zip(mark[:100].tolist(), new.brand[:100].tolist())) < 70
    assert np.array_equal(dataset.drop_some(s, target, 0, np.random.default_rng(0))[0].brand, mark)


# === Teacher ==========================================================================================================

def test_teacher_judges_a_candidate_by_itself():
    """Scores move with the candidates when these are reordered, and no other candidate changes them. The teacher learns
    which token marks the purchase, and grades rise with scores."""
    g = torch.Generator().manual_seed(0)
    evidence, target = torch.randint(1, 40, (2048, 5, 8), generator=g), torch.randint(5, (2048,), generator=g)
    evidence[torch.arange(2048), target, 0] = 0
    judge = teacher.fit(evidence, target, 40)
    score, order = judge(evidence), torch.tensor([3, 0, 4, 1, 2])
    assert torch.allclose(judge(evidence[:, order]), score[:, order], atol=1e-5)
    changed = evidence.clone()
    changed[:, 1:] = 7
    assert torch.allclose(judge(changed)[:, 0], score[:, 0], atol=1e-5)
    assert (score.argmax(1) == target).float().mean() > 0.95
    grade = judge.grade(score)
    assert grade.min() == 0 and grade.max() == 7 and torch.equal(grade.flatten()[score.flatten().argsort()],
                                                                 grade.flatten().sort().values)


def test_absent_candidates_are_never_drawn():
    """An absent candidate is not drawn, however low the others score."""
    present = torch.rand(200, 6, generator=torch.Generator().manual_seed(0)) < 0.4
    present[:, 2] = True
    score = torch.where(present, -5.0, 5.0)
    draws = teacher.draw_picks(score, present, 1 / 3, 50, torch.Generator().manual_seed(0))
    assert present.gather(1, draws).all() and (draws[present.sum(1) > 1] != 2).any()
