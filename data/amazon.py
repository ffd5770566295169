"""The preprocessed split: it is made from the publisher's files, and everything else reads it back.

The source is the Amazon product data, release of 2014 (McAuley et al., SIGIR 2015; He & McAuley, WWW 2016), from
snap.stanford.edu/data/amazon/productGraph/categoryFiles:

    reviews_<Category>_5.json.gz   one JSON object per line: reviewerID, asin, unixReviewTime, ...
    meta_<Category>.json.gz        one *Python literal* per line: asin, title, brand, categories, ...

The split is two gzip-compressed, tab-separated files, which `zcat` shows as they are:

    users.tsv.gz   number <TAB> item:day item:day ...        oldest first; an item is a line of items.tsv.gz, from 0
    items.tsv.gz   asin <TAB> brand <TAB> category > path <TAB> title

Two details decide whether the sequences equal those of the literature. The publisher dates a review by the day, and a
third of the purchases share their day with a neighbour. So the sort by time is *stable*: within a day, the order of the
file stays. And numbers in order of first appearance would leak the future: on Beauty "the last id + 1" alone finds 4%
of the test items. So users and items are ordered by a hash of their names.

    python -m data.amazon --source FOLDER                 # -> data/beauty
    python -m data.amazon --source FOLDER --out data/toys # any other category of the release
"""
import argparse
import ast
import gzip
import hashlib
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from plumbing import settings
from plumbing.settings import UserError

HOME = Path(__file__).resolve().parent / "beauty"


@dataclass
class Split:
    """A category as it is loaded. Per user: histories[u] = item numbers, oldest first; days[u] = the day of each
    purchase, counted from 1970; user[u] = the user's number in the file, as text. Per item: asin, brand and title are
    strings, "" where unknown; path is a tuple of category names, the general ones first."""
    histories: list
    days: list
    user: list
    asin: list
    brand: list
    path: list
    title: list


def opaque(name):
    """The hash of a name, for use as a sort key that means nothing and is the same on every machine."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def lines(path):
    """Yield (line number from 1, text) of a gzip file. Raises UserError that names the file and the damaged line."""
    n = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="strict") as f:
            for n, line in enumerate(f, 1):
                if line != "\n":                    # do not strip: tabs alone are the line of an item without a name
                    yield n, line.rstrip("\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file")
    except (EOFError, OSError, UnicodeDecodeError, zlib.error) as e:
        raise UserError(f"{path}: damaged after line {n} ({e}); fetch or make the file again")


def read_publisher(folder):
    """Parse the publisher's pair of files. Returns the purchases {reviewer: [(day, asin), ...]} in the order of the
    file, and the items {asin: (brand, category path, title)}. Raises UserError that names the file and the line."""
    reviews, meta = (sorted(Path(folder).glob(f"{name}_*.json.gz")) for name in ("reviews", "meta"))
    if len(reviews) != 1 or len(meta) != 1:
        raise UserError(f"{folder}: wanted one reviews_<Category>_5.json.gz and one meta_<Category>.json.gz, found "
                        f"{len(reviews)} and {len(meta)}; see snap.stanford.edu/data/amazon/productGraph/categoryFiles")
    reviews, meta = reviews[0], meta[0]
    bought, about = {}, {}
    for n, line in lines(reviews):
        try:
            r = json.loads(line)
            purchase = int(r["unixReviewTime"]) // 86400, word(r["asin"])
            bought.setdefault(word(r["reviewerID"]), []).append(purchase)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
            raise UserError(f"{reviews}, line {n}: not a review with reviewerID, asin and unixReviewTime ({e!r})")
    if not bought:
        raise UserError(f"{reviews}: holds no review")
    wanted = {asin for purchases in bought.values() for _, asin in purchases}
    for n, line in lines(meta):
        try:
            m = ast.literal_eval(line)              # never eval: this text comes from strangers, and eval would run it
            asin = word(m["asin"])
            if asin in wanted:
                paths = m.get("categories") or [[]]
                about[asin] = (clean(m.get("brand")), tuple(clean(c) for c in paths[0]), clean(m.get("title")))
        except (ValueError, KeyError, TypeError, SyntaxError, MemoryError, RecursionError) as e:
            raise UserError(f"{meta}, line {n}: not a Python literal with an asin ({type(e).__name__})")
    if not about:
        raise UserError(f"{meta}: describes none of the {len(wanted)} items in {reviews}; do the two belong together?")
    return bought, about


def word(name):
    """An asin or a reviewer, unchanged. Raises ValueError if it cannot be a cell: no text, empty, or with blanks."""
    if not isinstance(name, str) or name.split() != [name]:
        raise ValueError(f"{name!r} is not a name")
    name.encode()                                   # half a surrogate pair raises its ValueError here, not when writing
    return name


def clean(text):
    """Make one line of a text: no tabs, no doubled blanks, no word ">" (it separates categories), nothing that UTF-8
    cannot hold. What is not text, such as None, becomes ""."""
    if not isinstance(text, str):
        return ""
    return " ".join(w for w in text.encode(errors="ignore").decode().split() if w != ">")


def write_split(bought, about, out):
    """Write users.tsv.gz and items.tsv.gz into the folder `out`, both or neither, from what read_publisher returns.
    Users and items get opaque numbers. Returns the numbers of users, items and purchases."""
    asins = sorted({asin for purchases in bought.values() for _, asin in purchases}, key=opaque)
    number = {asin: i for i, asin in enumerate(asins)}
    users = []
    for name in sorted(bought, key=opaque):
        purchases = sorted(bought[name], key=lambda p: p[0])        # stable, and by the day alone
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
    """Write {path: lines} as gzip files without a time stamp, all or none. Temporary files replace the old ones when
    the last is complete, because users beside the items of another run would be nonsense."""
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
    """Read a split that this file wrote. Returns a Split; raises UserError that names the file and the line. Items and
    users are put in opaque order, so nothing that is made from a split depends on the order of its lines."""
    folder = Path(folder)
    if not (folder / "users.tsv.gz").exists() or not (folder / "items.tsv.gz").exists():
        raise UserError(f"{folder}: no users.tsv.gz and items.tsv.gz here; make them with "
                        f"`python -m data.amazon --source FOLDER --out {folder}`")
    items = read_items(folder / "items.tsv.gz")
    order = sorted(range(len(items)), key=lambda i: opaque(items[i][0]))
    number = {line: new for new, line in enumerate(order)}
    users = sorted(read_users(folder / "users.tsv.gz", number), key=lambda u: opaque(u[0]))
    name, histories, days = map(list, zip(*users))
    return Split(histories, days, name, *map(list, zip(*[items[i] for i in order])))


def read_items(path):
    """items.tsv.gz -> [(asin, brand, category path, title)] in the order of the lines."""
    items = []
    for n, line in lines(path):
        cells = line.split("\t")
        if len(cells) != 4 or not cells[0]:
            raise UserError(f"{path}, line {n}: wanted asin, brand, category path and title, separated by tabs, found "
                            f"{len(cells)} cells")
        items.append((cells[0], cells[1], tuple(c for c in cells[2].split(" > ") if c), cells[3]))
    if not items:
        raise UserError(f"{path}: the category is empty")
    if len({item[0] for item in items}) != len(items):
        raise UserError(f"{path}: an asin occurs twice")
    return items


def read_users(path, number):
    """users.tsv.gz -> [(user, item numbers, days)] in the order of the lines. number: {line of an item: its number}."""
    users = []
    for n, line in lines(path):
        try:
            name, purchases = line.split("\t")
            pairs = [p.split(":") for p in purchases.split(" ")]
            users.append((name, [number[int(i)] for i, _ in pairs], [int(d) for _, d in pairs]))
        except (ValueError, KeyError):
            raise UserError(f"{path}, line {n}: wanted a user number, a tab and item:day pairs with items below "
                            f"{len(number)}, found {line[:60]!r}")
        if users[-1][2] != sorted(users[-1][2]):
            raise UserError(f"{path}, line {n}: purchases are not in order of time")
    if not users:
        raise UserError(f"{path}: the category has no user")
    if len({u[0] for u in users}) != len(users):
        raise UserError(f"{path}: a user number occurs twice")
    return users


def main(argv=None):
    ap = argparse.ArgumentParser(description="Make the compact split from the publisher's two files.")
    ap.add_argument("--source", required=True, help="folder with the publisher's two files")
    ap.add_argument("--out", default=str(HOME), help="folder for users.tsv.gz and items.tsv.gz")
    args = ap.parse_args(argv)
    users, items, purchases = write_split(*read_publisher(args.source), args.out)
    print(f"{args.out}: {users:,} users, {items:,} items, {purchases:,} interactions, "
          f"mean length {purchases / users:.2f} (Beauty: 22,363 / 12,101 / 198,502, 8.88)")


if __name__ == "__main__":
    settings.main(main)
