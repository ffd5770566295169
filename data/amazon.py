"""The preprocessed split: made from the publisher's files, read back by everything else.

Source format (Amazon product data, 2014 release; McAuley et al., SIGIR 2015; He & McAuley, WWW 2016), from
snap.stanford.edu/data/amazon/productGraph/categoryFiles:

    reviews_<Category>_5.json.gz   one JSON object a line: reviewerID, asin, unixReviewTime, ...
    meta_<Category>.json.gz        one *Python literal* a line: asin, title, brand, categories, ...

Ours, two gzip-compressed, tab-separated files that `zcat` shows as they are:

    users.tsv.gz   number <TAB> item:day item:day ...        oldest first; item = line of items.tsv.gz, from 0
    items.tsv.gz   asin <TAB> brand <TAB> category > path <TAB> title

Two details decide whether the sequences equal the field's. (1) The publisher dates reviews by the day, and a third of
the purchases share their day with a neighbour, so the sort by time must be *stable*: file order breaks ties.
(2) Numbers given in order of first appearance leak the future (on Beauty "the last id + 1" alone finds 4% of the
test items): here users and items are ordered by a hash of their names, so a number says nothing.

    python -m data.amazon --source FOLDER                 # -> data/beauty
    python -m data.amazon --source FOLDER --out data/toys # any other category of the release
"""
import argparse
import ast
import gzip
import hashlib
import json
import os
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).resolve().parent / "beauty"


class DataError(ValueError):
    """A mistake in a user's file: the message names file, line and remedy, and is shown without a traceback."""


@dataclass
class Split:
    """A category as loaded: everything later stages see of the world.

    histories[u] = item numbers of user u, oldest first; days[u] = the day (since 1970) of each.
    asin, brand, title: one string an item ("" = unknown); path: one tuple of category names an item, general first.
    """
    histories: list
    days: list
    user: list
    asin: list
    brand: list
    path: list
    title: list


def opaque(name):
    """Sort key without meaning: the hash of a name. Same name, same key, on every machine."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def lines(path):
    """(line number from 1, text) of a gzip file; damage raises DataError naming file and line."""
    n = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="strict") as f:
            for n, line in enumerate(f, 1):
                if line != "\n":                                    # tabs alone are a line: of an item without a name
                    yield n, line.rstrip("\n")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file")
    except (EOFError, OSError, UnicodeDecodeError, zlib.error) as e:
        raise DataError(f"{path}: damaged after line {n} ({e}); fetch or make the file again")


def publisher_files(folder):
    """The one pair (reviews, meta) in a folder, whatever the category."""
    reviews = sorted(Path(folder).glob("reviews_*.json.gz"))
    meta = sorted(Path(folder).glob("meta_*.json.gz"))
    if len(reviews) != 1 or len(meta) != 1:
        raise DataError(f"{folder}: wanted one reviews_<Category>_5.json.gz and one meta_<Category>.json.gz, found "
                        f"{len(reviews)} and {len(meta)}; both are at "
                        "snap.stanford.edu/data/amazon/productGraph/categoryFiles")
    return reviews[0], meta[0]


def read_publisher(folder):
    """Parse the publisher's pair of files into (purchases by user, metadata by asin)."""
    reviews, meta = publisher_files(folder)
    bought = {}                                                     # reviewer -> [(day, asin)] in file order
    for n, line in lines(reviews):
        try:
            r = json.loads(line)
            purchase = int(r["unixReviewTime"]) // 86400, word(r["asin"])
            bought.setdefault(word(r["reviewerID"]), []).append(purchase)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
            raise DataError(f"{reviews}, line {n}: not a review with reviewerID, asin and unixReviewTime ({e!r})")
    if not bought:
        raise DataError(f"{reviews}: holds no review")
    about = {}
    wanted = {asin for purchases in bought.values() for _, asin in purchases}
    for n, line in lines(meta):
        try:
            m = ast.literal_eval(line)                              # a literal, never eval: this is other people's text
            asin = word(m["asin"])
            if asin in wanted:
                paths = m.get("categories") or [[]]
                about[asin] = (clean(m.get("brand")), tuple(clean(c) for c in paths[0]), clean(m.get("title")))
        except (ValueError, KeyError, TypeError, SyntaxError, MemoryError, RecursionError) as e:
            raise DataError(f"{meta}, line {n}: not a Python literal with an asin ({type(e).__name__})")
    if not about:
        raise DataError(f"{meta}: describes none of the {len(wanted)} items in {reviews}; do the two belong together?")
    return bought, about


def word(name):
    """An asin or a reviewer as it is, if it can be a cell of our files: text, not empty, without blanks."""
    if not isinstance(name, str) or name.split() != [name]:
        raise ValueError(f"{name!r} is not a name")
    name.encode()                                                   # half a surrogate pair: a ValueError now
    return name


def clean(text):
    """One line without tabs or doubled blanks, nor a word ">", which separates categories; None and non-text become
    "". What UTF-8 cannot hold (half a surrogate pair) is left out."""
    if not isinstance(text, str):
        return ""
    return " ".join(w for w in text.encode(errors="ignore").decode().split() if w != ">")


def write_split(bought, about, out):
    """Number users and items opaquely, sort each history stably by day, write both files whole or not at all."""
    asins = sorted({asin for purchases in bought.values() for _, asin in purchases}, key=opaque)
    number = {asin: i for i, asin in enumerate(asins)}
    users = []
    for name in sorted(bought, key=opaque):
        purchases = sorted(bought[name], key=lambda p: p[0])        # stable: the file's order breaks ties in a day
        users.append(" ".join(f"{number[asin]}:{day}" for day, asin in purchases))
    items = []
    for asin in asins:
        brand, path, title = about.get(asin, ("", (), ""))
        items.append("\t".join([asin, brand, " > ".join(path), title]))
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_gz({out / "users.tsv.gz": [f"{u}\t{row}" for u, row in enumerate(users)], out / "items.tsv.gz": items})
    return len(users), len(items), sum(len(p) for p in bought.values())


def write_gz(files):
    """{path: rows}, atomic and reproducible: temporary files, renamed over the old ones when the last is complete
    (users beside the items of another run would be nonsense), no time stamp in the gzip header."""
    parts = {path: path.with_name(path.name + ".part") for path in files}
    try:
        for path, rows in files.items():
            with open(parts[path], "wb") as f, gzip.GzipFile(filename="", fileobj=f, mode="wb", compresslevel=9,
                                                             mtime=0) as z:
                z.write(("\n".join(rows) + "\n").encode())
        for path, part in parts.items():
            os.replace(part, path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def load(folder=HOME):
    """Read a split made by this file. Items and users are put in opaque order whatever the order of the lines, so that
    renumbering the files changes nothing downstream. Raises DataError that names file and line.
    """
    folder = Path(folder)
    if not (folder / "users.tsv.gz").exists() or not (folder / "items.tsv.gz").exists():
        raise DataError(f"{folder}: no users.tsv.gz and items.tsv.gz here; make them with "
                        f"`python -m data.amazon --source FOLDER --out {folder}`")
    rows = []
    for n, line in lines(folder / "items.tsv.gz"):
        cells = line.split("\t")
        if len(cells) != 4 or not cells[0]:
            raise DataError(f"{folder / 'items.tsv.gz'}, line {n}: wanted asin, brand, category path and title, "
                            f"separated by tabs, found {len(cells)} cells")
        rows.append((cells[0], cells[1], tuple(c for c in cells[2].split(" > ") if c), cells[3]))
    if not rows:
        raise DataError(f"{folder / 'items.tsv.gz'}: the category is empty")
    if len({r[0] for r in rows}) != len(rows):
        raise DataError(f"{folder / 'items.tsv.gz'}: an asin occurs twice")
    order = sorted(range(len(rows)), key=lambda i: opaque(rows[i][0]))
    renumber = {old: new for new, old in enumerate(order)}
    rows = [rows[i] for i in order]
    users = []
    for n, line in lines(folder / "users.tsv.gz"):
        try:
            name, purchases = line.split("\t")
            pairs = [p.split(":") for p in purchases.split(" ")]
            users.append((name, [renumber[int(i)] for i, _ in pairs], [int(d) for _, d in pairs]))
        except (ValueError, KeyError):
            raise DataError(f"{folder / 'users.tsv.gz'}, line {n}: wanted a user number, a tab and item:day pairs with "
                            f"items below {len(rows)}, found {line[:60]!r}")
        if users[-1][2] != sorted(users[-1][2]):
            raise DataError(f"{folder / 'users.tsv.gz'}, line {n}: purchases are not in order of time")
    if not users:
        raise DataError(f"{folder / 'users.tsv.gz'}: the category has no user")
    if len({u[0] for u in users}) != len(users):
        raise DataError(f"{folder / 'users.tsv.gz'}: a user number occurs twice")
    users.sort(key=lambda u: opaque(u[0]))
    return Split([u[1] for u in users], [u[2] for u in users], [u[0] for u in users],
                 *map(list, zip(*[(a, b, p, t) for a, b, p, t in rows])))


def main(argv=None):
    ap = argparse.ArgumentParser(description="Make the compact split from the publisher's two files.")
    ap.add_argument("--source", required=True, help="folder with reviews_<Category>_5.json.gz and meta_<Category>.json.gz")
    ap.add_argument("--out", default=str(HOME), help="folder for users.tsv.gz and items.tsv.gz")
    args = ap.parse_args(argv)
    try:
        users, items, purchases = write_split(*read_publisher(args.source), args.out)
    except (DataError, OSError) as e:
        sys.exit(f"data.amazon: {e}")
    print(f"{args.out}: {users:,} users, {items:,} items, {purchases:,} interactions, "
          f"mean length {purchases / users:.2f} (Beauty: 22,363 / 12,101 / 198,502, 8.88)")


if __name__ == "__main__":
    main()
