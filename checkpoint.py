"""Weights on disk: written whole or not at all, read without running code, refused by name where they do not belong,
looked for in the run's folder and in the clone, and made by the stage that makes them where they are missing.

A stage called `name` writes <out>/<name>.pt (the product: weights, config, settings, fingerprint of its rows) and
<out>/<name>.state.pt (what it needs to go on: stage.py, `Run`).
"""
import functools
import hashlib
import importlib
import json
import os
import shutil
from pathlib import Path

import torch

import diffusion
from model import ModelConfig, Transformer

NAMES = ("ar_sft", "ar", "cft", "opd", "cft_rl", "rl")                  # weights, in the ladder's order
MAKER = {"ar_sft": "train_ar", "ar": "train_ar", "cft": "train_cft", "opd": "train_opd", "rl": "train_rl"}  # by itself
SHIPPED = Path(__file__).resolve().parent / "data" / "weights"         # trained weights in the clone


class UserError(ValueError):
    """A mistake that a user can mend: shown as one line, without a traceback (settings.main)."""


def save(path, state):
    """Atomic: written beside, flushed to disk, renamed. A kill at any moment leaves the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as f:
        torch.save(state, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def load(path, hint):
    """A checkpoint as plain tensors and values (weights_only: a checkpoint cannot run code)."""
    if not Path(path).exists():
        raise UserError(f"{path} is missing; {hint}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:
        raise UserError(f"{path} is not a checkpoint of this project ({type(e).__name__}); {hint}")


def load_model(path, tok, summary, hint, device="cpu"):
    """(model, checkpoint): refuses weights of other data or of another shape by name."""
    state = load(path, hint)
    if not isinstance(state, dict) or not {"model", "config", "fingerprint", "settings"} <= set(state):
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
    model = Transformer(cfg)
    try:
        model.load_state_dict({k: v.float() for k, v in state["model"].items()})
    except RuntimeError as e:
        reason = str(e).splitlines()[-1].strip()
        raise UserError(f"{path} has another shape than its own config says ({reason}); {hint}")
    return model.to(device), state


def weights(out, preset, name):
    """Path of a stage's weights, or None: those of the run's folder, or, where no stage has begun in it, those that come
    with the clone, if they were trained on the same rows. Never some of each: a student belongs to its teacher."""
    own = Path(out) / f"{name}.pt"
    if any((Path(out) / f"{n}{end}").exists() for n in NAMES for end in (".pt", ".state.pt")):
        return own if own.exists() else None
    shipped, summary = SHIPPED / preset / f"{name}.pt", Path(out) / "data" / "summary.json"
    if not shipped.exists() or not summary.exists():
        return None
    return shipped if fingerprint(shipped) == json.loads(summary.read_text())["fingerprint"] else None


@functools.cache
def fingerprint(path):
    """Of the rows that shipped weights were trained on."""
    return load(path, "fetch it again")["fingerprint"]


def no_weights(s):
    """The error for a run without a model."""
    return UserError(f"no weights in {s.out}; train them: python train_ar.py --preset {s.preset}")


def remedy(s, name):
    """What to do about weights that cannot be used."""
    if name not in NAMES:
        return "make it again with the command that made it"
    command = f"{MAKER[name]}.py" if name in MAKER else "train_rl.py --start cft --name cft_rl"
    return f"make it again: python {command} --preset {s.preset} --out {s.out}"


NEEDED = []                                                         # stages that run because a later one needs them


def need(s, name):
    """See to it that the weights a stage starts from are in its folder: they are there, or come with the clone, or the
    stage that makes them is run first, or gone on with where it was stopped."""
    module = MAKER.get(name)
    flags = ["--preset", s.preset, "--out", s.out, "--seed", str(s.seed), "--device", s.device]
    if module != "train_ar" and (getattr(s, "block_len", None) or 1) > 1:
        flags += ["--block-len", str(s.block_len)]                  # blocks as long as they are asked for here
    path = weights(s.out, s.preset, name)
    if path and path.parent != Path(s.out):
        for source in (path.with_name(f"{n}.pt") for n in NAMES[:max(NAMES.index(name), NAMES.index("ar")) + 1]):
            if source.exists():                                     # with all that it was made from, and the AR model
                shutil.copyfile(source, Path(s.out) / source.name)
        print(f"{name}.pt comes with the clone ({path}); copied to {s.out}")
        return
    for n in ("ar_sft", "ar") if name == "ar" else (name,):
        if (file := Path(s.out) / f"{n}.state.pt").exists():
            state = load(file, "delete it")
            between = (name, n) == ("ar", "ar_sft") and not path and (Path(s.out) / "ar_sft.pt").exists() \
                and not (Path(s.out) / "ar.state.pt").exists()      # SFT is done, its RL not begun
            if state["step"] < state["settings"]["steps"] or between:
                if not module:
                    raise UserError(f"{n} was stopped at step {state['step']}: finish it by its own command and --resume")
                print(f"{n} was stopped at step {state['step']}: going on with it")
                flags, path = flags + ["--resume"], None
                break
    if not path:
        if not module:
            raise UserError(f"{s.out}/{name}.pt is missing, and no stage makes weights of that name by itself")
        print(f"{s.out}/{name}.pt is needed: python {module}.py {' '.join(flags[:2])}")
        NEEDED.append(name)
        try:
            importlib.import_module(module).main(flags + (["--data", s.data] if s.data else []))
        finally:
            NEEDED.remove(name)


def digest(path):
    """Tells one file from another."""
    return hashlib.sha1(path.read_bytes()).hexdigest()[:8]


def open_model(s, name, tok, summary):
    """(model, checkpoint) of the weights called `name` in this run, on the run's device."""
    path = weights(s.out, s.preset, name) or Path(s.out) / f"{name}.pt"
    model, state = load_model(path, tok, summary, remedy(s, name), s.device)
    start = path.with_name(f"{state['settings'].get('start')}.pt")
    if start.exists() and state.get("made_from") and state["made_from"] != digest(start):
        say_once(f"note: {start} is not the one from which {path} was made; {remedy(s, name)}")
    return model, state


say_once = functools.cache(print)


def open_student(s, name, tok, summary, block_len=None):
    """(model, block length) to decode in blocks: as long as it was trained at, if none is given. AR weights have never
    seen a <mask>: they are converted first, which without any training is the naive conversion."""
    model, state = open_model(s, name, tok, summary)
    trained = state["settings"].get("block_len", 1)                 # SFT has no such setting: AR
    if trained == 1 and block_len != 1:
        diffusion.convert(model, tok)
    return model, block_len or (trained if trained > 1 else diffusion.BLOCK_LEN)


def load_settings(path):
    """The settings a product was trained with; none, if it is not one."""
    state = load(path, "delete it")
    return state.get("settings", {}) if isinstance(state, dict) else {}


def pick_student(s):
    """Name of the diffusion weights that were asked for by --student, or the last stage's; None if there are none."""
    there = students(s.out, s.preset)
    if not s.student:
        return ([n for n in there if n in NAMES] or [None])[-1]
    if s.student not in there:
        raise UserError(f"--student {s.student}: no diffusion weights of that name in {s.out}; there are: "
                        f"{', '.join(there) or 'none'}")
    return s.student


def students(out, preset):
    """Names of the diffusion weights that are there: the stages' in the ladder's order, then those with a --name of
    their own (ablations), by name."""
    known = [name for name in NAMES if name not in ("ar_sft", "ar") and weights(out, preset, name)]
    return known + [p.stem for p in sorted(Path(out).glob("*.pt")) if "." not in p.stem and p.stem not in NAMES
                    and load_settings(p).get("block_len", 1) > 1]
