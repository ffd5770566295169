"""Weights on disk: written whole or not at all, read without running code, and refused by name where they do not belong.

A stage called `name` writes two files. <out>/<name>.pt is the product: weights, config, settings, the fingerprint of its
rows, and a digest of the weights it was made from. <out>/<name>.state.pt is what the stage needs to go on (loop.Run).
"""
import functools
import hashlib
import os
import shlex
import shutil
import sys
from pathlib import Path

import torch

import diffusion
from model import ModelConfig, Transformer
from plumbing.settings import ROOT, UserError

MADE_BY = {                                                         # weights: command, in the order of the ladder
    "ar_sft": "train_ar.py",
    "ar": "train_rl.py --block-len 1 --start ar_sft --name ar",
    "cft": "train_cft.py",
    "opd": "train_opd.py",
    "cft_rl": "train_rl.py --start cft --name cft_rl",
    "rl": "train_rl.py",
}
NAMES = tuple(MADE_BY)
SHIPPED = ROOT / "data" / "weights"                                 # trained weights that come with the clone


# === One file =========================================================================================================

def save(path, state):
    """Write a file beside the old one, flush it to disk and rename it. A kill at any moment leaves one of the two whole.
    Raises UserError where there is no room for it, or no right to write."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as e:                            # torch reports a full disk as a RuntimeError
        part.unlink(missing_ok=True)                                # half a file would keep the disk full
        raise UserError(f"{path} could not be saved ({str(e).splitlines()[0][:100]}); "
                        f"{shutil.disk_usage(path.parent).free / 1e6:,.0f} MB are free there")


def load(path, hint):
    """A checkpoint as plain tensors and values. weights_only: reading a checkpoint cannot run code. Raises UserError."""
    if not Path(path).exists():
        raise UserError(f"{path} is missing; {hint}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:
        raise UserError(f"{path} is not a checkpoint of this project ({type(e).__name__}); {hint}")


def load_model(path, tok, summary, hint, device="cpu"):
    """(model, checkpoint). Weights of other rows or of another shape are refused by name. Raises UserError."""
    state = load(path, hint)
    if not isinstance(state, dict) or not {"model", "config", "fingerprint", "settings", "made_from"} <= set(state):
        raise UserError(f"{path} is not a model checkpoint of this project; {hint}")
    if state["fingerprint"] != summary["fingerprint"]:
        raise UserError(f"{path} was trained on other rows than {summary['config']['data']} now gives "
                        f"({state['fingerprint']}, not {summary['fingerprint']}); {hint}")
    try:
        cfg = ModelConfig(**state["config"])
    except TypeError as e:
        raise UserError(f"{path} has another kind of config ({e}); {hint}")
    if cfg.vocab != tok.vocab:
        raise UserError(f"{path} has a vocabulary of {cfg.vocab}, the data {tok.vocab}; {hint}")
    if not all(tensor.isfinite().all() for tensor in state["model"].values()):
        raise UserError(f"{path} holds weights that are not finite numbers; {hint}")
    model = Transformer(cfg)
    try:
        model.load_state_dict({name: tensor.float() for name, tensor in state["model"].items()})
    except RuntimeError as e:
        reason = str(e).splitlines()[-1].strip()
        raise UserError(f"{path} has another shape than its own config says ({reason}); {hint}")
    return model.to(device), state


def digest(path):
    """Eight hex digits that tell one file from another."""
    return hashlib.sha1(Path(path).read_bytes()).hexdigest()[:8]


# === The weights of a run =============================================================================================

def begun(out):
    """Has any stage written something into this folder?"""
    return any((Path(out) / f"{name}{end}").exists() for name in NAMES for end in (".pt", ".state.pt"))


def weights(s, name, summary):
    """Path of the weights called `name`, or None where there are none.

    They are those of the run's folder. Where no stage has begun in it, they are those that come with the clone, if they
    were trained on the same rows. The two are never mixed, because a student belongs to its teacher.
    """
    own = Path(s.out) / f"{name}.pt"
    if begun(s.out):
        return own if own.exists() else None
    shipped = SHIPPED / s.preset / f"{name}.pt"
    if shipped.exists() and shipped_fingerprint(shipped) == summary["fingerprint"]:
        return shipped
    return None


@functools.cache
def shipped_fingerprint(path):
    """Fingerprint of the rows that weights in the clone were trained on. The files do not change while we run."""
    return load(path, "fetch it again")["fingerprint"]


def no_weights(s):
    """The error for a run that has no model."""
    return UserError(f"no AR weights in {s.out} yet; this makes them and a diffusion model: python train_cft.py --preset "
                     f"{s.preset} --out {shlex.quote(str(s.out))}")


def remedy(s, name):
    """What to do about weights that cannot be used."""
    if name not in NAMES:
        return "make it again with the command that made it"
    return f"make it again: python {MADE_BY[name]} --preset {s.preset} --out {shlex.quote(str(s.out))}"


def open_model(s, name, tok, summary):
    """(model, checkpoint) of the weights called `name` in this run, on the run's device. Raises UserError."""
    path = weights(s, name, summary) or Path(s.out) / f"{name}.pt"
    model, state = load_model(path, tok, summary, remedy(s, name), s.device)
    start = path.with_name(f"{state['settings'].get('start')}.pt")
    if start.exists() and state["made_from"] != digest(start):
        print(f"note: {path} was made from another {start.name} than is there now; {remedy(s, name)}", file=sys.stderr)
    return model, state


def open_student(s, name, tok, summary, block_len=None):
    """(model, block length) to decode in blocks. The block length is the one trained at, where none is given.

    AR weights have never seen a <mask>. They are converted first, which without any training is the naive conversion:

        weights       asked for        decoded at              converted
        AR            1                1                       no
        AR            nothing, or B    BLOCK_LEN, or B         yes
        diffusion     nothing, or B    as trained, or B        no, it was before its training
    """
    model, state = open_model(s, name, tok, summary)
    trained = state["settings"].get("block_len", 1)                 # SFT has no such setting: it is AR
    if trained == 1 and block_len != 1:
        diffusion.convert(model, tok)
    return model, block_len or (trained if trained > 1 else diffusion.BLOCK_LEN)


def students(s, summary):
    """Names of the diffusion weights of a run: first the stages', in the ladder's order, then those whose --name was
    chosen by hand (ablations), in alphabetical order."""
    known = [name for name in NAMES if name not in ("ar_sft", "ar") and weights(s, name, summary)]
    others = [path for path in sorted(Path(s.out).glob("*.pt")) if "." not in path.stem and path.stem not in NAMES]
    return known + [path.stem for path in others if trained_block_len(path) > 1]


def trained_block_len(path):
    """Block length that a product was trained at; 1 for AR, and for a file that is not a product."""
    state = load(path, "delete it")
    return state.get("settings", {}).get("block_len", 1) if isinstance(state, dict) else 1


def pick_student(s, summary):
    """Name of the diffusion weights that --student asks for, else the last stage's, else None. Raises UserError."""
    names = students(s, summary)
    if not s.student:
        return ([name for name in names if name in NAMES] or [None])[-1]
    if s.student not in names:
        raise UserError(f"--student {s.student}: no diffusion weights of that name in {s.out}; there are: "
                        f"{', '.join(names) or 'none'}")
    return s.student
