"""Prepared rows on disk: data/prepare.py writes them once, and every training stage reads them.

A folder holds one .npz file per set of rows (all, accepted, valid, test), tokenizer.json and summary.json. Rows differ
in length, so a set keeps the tokens of all its rows in one flat array, and beside it where each row starts:

    prompt      7 3 9   4 4   8 5 ...       uint16; the tokens of row 0, then those of row 1, ...
    prompt_at   0       3     5 ...         row r is prompt[prompt_at[r]:prompt_at[r + 1]]

`output` and `output_at` do the same for the outputs. `target` is the position of the next purchase among the
candidates, or -1, and `n` is the number of candidates shown. valid and test also say whom and what the rows are about:
`user`, `history` and `item`. A set is read into memory as a whole.
"""
import json
import shutil
from pathlib import Path

import numpy as np

from data.tokenizer import Tokenizer


def flatten(matrix):
    """(n, L) tokens, -1 where there is none -> flat uint16 tokens and their (n + 1,) offsets, as they lie on disk."""
    filled = matrix >= 0
    return matrix[filled].astype(np.uint16), np.concatenate([[0], np.cumsum(filled.sum(1))])


def save(folder, sets, tok, summary):
    """Write sets {name: {array name: array}} as a whole or not at all: a temporary folder is renamed when complete, and
    replaces former rows. Raises OSError, for instance if the disk is full; the former rows are then still there."""
    folder = Path(folder)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, arrays in sets.items():
        np.savez(part / f"{name}.npz", **arrays)
    (part / "tokenizer.json").write_text(json.dumps(tok.state()), encoding="utf-8")
    (part / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    # Deleting takes time, and a kill in the middle of it would leave half a folder. So the old rows move away first.
    old = folder.with_name(folder.name + ".old.part")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def load(folder):
    """What the sets of a folder have in common: (tokenizer, summary). Raises OSError where a file is missing."""
    texts = [(Path(folder) / f"{name}.json").read_text(encoding="utf-8") for name in ("tokenizer", "summary")]
    return Tokenizer.load(json.loads(texts[0])), json.loads(texts[1])


class Rows:
    """The rows of one set. rows[i] -> (prompt, output), two lists of tokens. target (n,) and n_shown (n,) are integers,
    and `arrays` holds all arrays of the file by name. Raises OSError where the file is missing."""

    def __init__(self, path):
        with np.load(path) as z:
            self.arrays = {name: z[name] for name in z.files}
        self.target, self.n_shown = self.arrays["target"].astype(int), self.arrays["n"].astype(int)

    def __len__(self):
        return len(self.n_shown)

    def __getitem__(self, i):
        a = self.arrays
        return (a["prompt"][a["prompt_at"][i]:a["prompt_at"][i + 1]].tolist(),
                a["output"][a["output_at"][i]:a["output_at"][i + 1]].tolist())

    def lengths(self):
        """The length of each prompt (n,) and of each output (n,), in tokens."""
        return np.diff(self.arrays["prompt_at"]), np.diff(self.arrays["output_at"])
