"""Settings: one dataclass a command, whose fields are its flags; what all commands and what all stages have; the sizes of
the presets' models; and how a command's mistakes are told.

A preset's values (each command has its PRESETS) go before a field's default, what is given on the command line before
both. How a field becomes a flag: data/prepare.py, `flag` and `add_flags`.
"""
import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
import machine
from checkpoint import UserError
from data import prepare
from data.amazon import DataError
from data.prepare import flag

MODELS = {
    "mini": dict(width=128, layers=4, heads=4, ctx_len=192),
    "small": dict(width=192, layers=4, heads=4, ctx_len=256),
    "beauty": dict(width=512, layers=10, heads=8, ctx_len=640),
}


@dataclass
class Common:
    """What every command has."""
    preset: str = flag("", "mini, small or beauty (default: beauty with a GPU, mini without)")
    out: str = flag("", "folder of the run (default out/<preset>)")
    data: str = flag("", "folder with users.tsv.gz and items.tsv.gz (default: the Beauty split in the clone)")
    device: str = flag("", "cuda or cpu (default: cuda where there is one)")
    seed: int = flag(0, "decides initial weights, data order and every draw")


@dataclass
class Settings(Common):
    """What all training stages have. A stage adds its own fields; its PRESETS override defaults."""
    resume: bool = flag(False, "go on from the last saved state of this stage")
    dtype: str = flag("auto", "float32, bfloat16 (autocast), or auto: the faster of the two, measured at start")
    steps: int = flag(1000, "optimiser steps")
    batch: int = flag(32, "rows of a step")
    micro: int = flag(0, "rows of one forward (0: the whole batch); smaller saves memory and changes nothing else")
    lr: float = flag(1.5e-3, "peak learning rate")
    warmup: int = flag(100, "steps of linear warm-up; a cosine to a twentieth of lr follows")
    decay: float = flag(0.05, "AdamW weight decay of matrices")
    clip: float = flag(1.0, "largest gradient norm")
    reasoning: float = flag(0.5, "loss weight of a reasoning token")
    answer: float = flag(1.0, "loss weight of an answer token")
    eval_every: int = flag(500, "steps between validations by free decoding (the best one is kept)")
    eval_users: int = flag(512, "validation users with a hit that are decoded each time")
    save_every: int = flag(200, "steps between saved states, beside those after each validation")
    log_every: int = flag(20, "steps between log lines")


@dataclass
class OnPolicySettings(Settings):
    """What the stages have that learn from the student's own rollouts."""
    block_len: int = flag(None, "block length, 1: autoregressive (default: as the start was trained)")
    tau: float = flag(0.9, "threshold of the rollouts and of the decoded validation")
    temperature: float = flag(1.0, "of the rollouts; in RL the ratio is taken at the same one")
    batch: int = flag(32, "prompts of a step, each with --group rollouts")
    group: int = flag(4, "rollouts of a prompt")


RANGES = [
    (("steps", "batch", "group", "minibatches", "eval_users", "log_every", "save_every", "eval_every", "time_users", "repeats"),
     lambda v: v >= 1, "at least 1"),
    (("micro", "decay", "threads", "warmup", "lr", "reasoning", "answer", "tail", "users", "epsilon", "kl_weight",
      "accepted_steps", "rl_steps"), lambda v: 0 <= v < float("inf"), "not below 0, and finite"),
    (("clip",), lambda v: v > 0, "above 0"),
    (("full",), lambda v: 0 <= v <= 1, "between 0 and 1"),
    (("rl_paper",), lambda v: v in (0, 1), "0 or 1"),
    (("seed",), lambda v: 0 <= v < 2**63, "between 0 and 2^63"),
    (("name",), lambda v: re.fullmatch(r"\w[\w-]*", v), "letters, digits, - and _"),
]


def parse(cls, presets, doc, argv=None):
    """Flags -> a filled settings dataclass. An unknown flag or preset ends with argparse's one line."""
    ap = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    prepare.add_flags(ap, cls, presets, {"preset": {"choices": list(MODELS)}})
    given = vars(ap.parse_args(argv))
    preset = given.get("preset") or ("beauty" if torch.cuda.is_available() else "mini")
    if not given.get("preset"):
        print(f"--preset {preset} (the default {'with' if preset == 'beauty' else 'without'} a GPU)")
    s = cls(**{**presets.get(preset, {}), **given, "preset": preset})
    s.out = s.out or f"out/{preset}"
    s.device = s.device or ("cuda" if torch.cuda.is_available() else "cpu")
    machine.check_device(s.device)
    for names, fits, says in RANGES:
        for name in names:
            if hasattr(s, name) and not fits(getattr(s, name)):     # not, and not the opposite: nan fits nothing
                raise UserError(f"--{name.replace('_', '-')} {getattr(s, name)}: {says}")
    start, name = getattr(s, "start", ""), getattr(s, "name", None)
    if name in ("random", "reverse", "floor", "teacher", "naive", "oracle"):
        raise UserError(f"--name {name}: a row of the ladder has that name already")
    if name == start or name in ("ar", "ar_sft") and getattr(s, "block_len", 1) != 1:
        raise UserError(f"--name {name}: these weights are what the stage works from; give the new ones another name")
    if getattr(s, "block_len", None) == 1 and name in checkpoint.NAMES and name not in ("ar", "ar_sft"):
        raise UserError(f"--block-len 1 is autoregressive, {name} a diffusion model's name: give --name, to RL --start ar_sft")
    if getattr(s, "dtype", "auto") not in ("auto", "float32", "bfloat16"):
        raise UserError(f"--dtype {s.dtype}: auto, float32 or bfloat16")
    return s


def main(run, *args):
    """Run a stage's main: mistakes become one line and exit status 1, Ctrl-C before training 130."""
    try:
        run(*args)
    except (UserError, DataError, OSError) as e:
        sys.exit(f"{Path(sys.argv[0]).name}: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
