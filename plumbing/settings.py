"""Settings: each command has one dataclass whose fields are its flags. This file imports nothing else of the project.

A value comes from the first of these that has one: the command line, the preset, the field's default. The limits of a
value stand beside its field, so a value that cannot work is refused before anything is prepared or written.
"""
import argparse
import os
import re
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]                          # the folder of the clone

MODELS = {                                                          # sizes of the model (model.ModelConfig) per preset
    "mini": dict(width=128, layers=4, heads=4, ctx_len=192),
    "small": dict(width=192, layers=4, heads=4, ctx_len=256),
    "beauty": dict(width=512, layers=10, heads=8, ctx_len=640),
}
ORDERS = ("random", "reverse", "floor", "teacher", "naive", "oracle")        # rows of the ladder without weights of their own


class UserError(ValueError):
    """A mistake that the user can mend. It is shown as one line without a traceback (see `main`)."""


# === Fields ===========================================================================================================

def flag(default, help, at_least=None, above=None, at_most=None, choices=None, pattern=None):
    """A field of a settings dataclass, with its help text and the limits of its value."""
    limits = dict(at_least=at_least, above=above, at_most=at_most, choices=choices, pattern=pattern)
    return field(default=default, metadata={"help": help, **limits})


def check_limits(s):
    """Hold every field of a settings object against its limits. Raises UserError that names the flag and the limit.

    Comparisons are written so that nan fails each of them.
    """
    for f in fields(s):
        value, limit = getattr(s, f.name), f.metadata
        if value is None:
            continue                                                # not given: a checkpoint decides
        says = None
        if limit["at_least"] is not None and not limit["at_least"] <= value < float("inf"):
            says = f"a finite number, at least {limit['at_least']}"
        elif limit["above"] is not None and not limit["above"] < value < float("inf"):
            says = f"a finite number above {limit['above']}"
        elif limit["at_most"] is not None and not value <= limit["at_most"]:
            says = f"at most {limit['at_most']}"
        elif limit["choices"] and value not in limit["choices"]:
            says = "one of " + ", ".join(str(choice) for choice in limit["choices"] if choice != "")
        elif limit["pattern"] and not re.fullmatch(limit["pattern"], value):
            says = "letters, digits, - and _ only"
        if says:
            raise UserError(f"--{f.name.replace('_', '-')} {value}: {says}")


def add_flags(parser, cls, presets):
    """Add one flag per field of a settings dataclass. Its help ends with the default, or with what each preset sets.

    A flag that is not given stays absent from the parsed namespace, so that a preset can fill it in. presets:
    {name: dict or settings object}. Fields that cls.UNUSED names get no flag.
    """
    def text(value):
        return f"{value:g}" if isinstance(value, float) else str(value)

    for f in fields(cls):
        if f.name in getattr(cls, "UNUSED", ()):
            continue
        per_preset = {name: (p if isinstance(p, dict) else vars(p)).get(f.name, f.default) for name, p in presets.items()}
        shown = "" if f.default in ("", None) or f.default is False else f" (default {text(f.default)})"
        if len(set(per_preset.values())) > 1:
            shown = " (" + ", ".join(f"{name} {text(value)}" for name, value in per_preset.items()) + ")"
        kind = dict(type=int if f.default is None else type(f.default))
        if f.default is False:
            kind = dict(action="store_true")
        help = (f.metadata["help"] + shown).replace("%", "%%")
        parser.add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, help=help, **kind)


# === What commands share ==============================================================================================

@dataclass
class Common:
    """What every command has."""
    preset: str = flag("", "mini, small or beauty (default: beauty with a GPU, mini without)", choices=("", *MODELS))
    out: str = flag("", "folder of the run (default out/<preset>)")
    data: str = flag("", "folder with users.tsv.gz and items.tsv.gz (default: the Beauty split in the clone)")
    device: str = flag("", "cuda or cpu (default: cuda where there is one)")
    threads: int = flag(0, "CPU threads (0: as many as torch chooses)", at_least=0)
    seed: int = flag(0, "decides initial weights, data order and every draw", at_least=0, at_most=2**63 - 1)
    dtype: str = flag("auto", "float32, bfloat16 (autocast), or auto: the faster of the two, measured at the start",
                      choices=("auto", "float32", "bfloat16"))
    full: bool = flag(False, "show all columns of the table, the paired differences and the failures")


@dataclass
class Settings(Common):
    """What all training stages have. A stage adds fields of its own, and its PRESETS override defaults."""
    resume: bool = flag(False, "go on from the last saved state of this stage")
    table: int = flag(1, "1: end with a table of the test users; 0: end after training", choices=(0, 1))
    steps: int = flag(1000, "optimiser steps", at_least=1)
    batch: int = flag(32, "rows per step", at_least=1)
    micro: int = flag(0, "rows per forward (0: the whole batch); fewer rows save memory and change nothing else", at_least=0)
    lr: float = flag(1.5e-3, "peak learning rate", at_least=0)
    warmup: int = flag(100, "steps of linear warm-up; a cosine down to a twentieth of lr follows", at_least=0)
    decay: float = flag(0.05, "AdamW weight decay of the matrices", at_least=0)
    clip: float = flag(1.0, "largest gradient norm", above=0)
    reasoning: float = flag(0.5, "loss weight of a reasoning token", at_least=0)
    answer: float = flag(1.0, "loss weight of an answer token", at_least=0)
    eval_every: int = flag(500, "steps between validations by free decoding (the best weights are kept)", at_least=1)
    eval_users: int = flag(512, "validation users with a hit that are decoded each time", at_least=1)
    save_every: int = flag(200, "steps between saved states, beside the state after each validation", at_least=1)
    log_every: int = flag(20, "steps between log lines", at_least=1)


@dataclass
class OnPolicySettings(Settings):
    """What the stages have that learn from the student's own rollouts."""
    block_len: int = flag(None, "block length; 1 is autoregressive (default: the length the start was trained at)", at_least=1)
    tau: float = flag(0.9, "commit threshold of the rollouts and of the decoded validation", above=0, at_most=1)
    temperature: float = flag(1.0, "temperature of the rollouts; RL takes the ratio at the same one", at_least=0, at_most=1000)
    batch: int = flag(32, "prompts per step, each with --group rollouts", at_least=1)
    group: int = flag(4, "rollouts per prompt", at_least=1)


def parse(cls, presets, doc, argv=None, ar_presets=None):
    """Flags -> a filled settings object. Unknown flags end with argparse's one line, bad values raise UserError.

    presets: {preset: values}. ar_presets: {preset: values} that go before those where --block-len is 1.
    """
    given = read_flags(cls, presets, doc, argv)
    preset = given.get("preset") or ("beauty" if torch.cuda.is_available() else "mini")
    values = dict(presets.get(preset, {}))
    if given.get("block_len") == 1:
        values |= (ar_presets or {}).get(preset, {})
    s = cls(**{**values, **given, "preset": preset})
    s.given = set(given)                                            # what the command line said itself (plumbing/chain.py)
    check_limits(s)
    if not given.get("preset"):
        print(f"--preset {preset} (the default {'with' if preset == 'beauty' else 'without'} a GPU)")
    fill_in(s)
    if s.threads:
        torch.set_num_threads(s.threads)
    check_names(s)
    return s


def read_flags(cls, presets, doc, argv=None):
    """What the command line says, as a dict. An unknown flag ends with argparse's short message."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0], usage="%(prog)s [flags]   (--help lists them)")
    add_flags(parser, cls, presets)
    return vars(parser.parse_args(argv))


def fill_in(s):
    """Fill in the folder and the device where they were not given, and refuse a device that cannot be used."""
    s.out = s.out or f"out/{s.preset}"
    s.device = s.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(s.device)


def check_device(name):
    """Refuse a device that cannot be used, before any work is done. Raises UserError."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device {name}: {str(e).splitlines()[0][:100]}; leave the flag out to take what there is")


def check_names(s):
    """Refuse a --name that would hide a row of the ladder or overwrite what the stage starts from. Raises UserError."""
    name, start, block_len = getattr(s, "name", None), getattr(s, "start", None), getattr(s, "block_len", None)
    if name in ORDERS:
        raise UserError(f"--name {name}: a row of the ladder has that name already")
    if name is not None and (name == start or name in ("ar", "ar_sft") and block_len != 1):
        raise UserError(f"--name {name}: the stage works from these weights; give the new ones another name")
    if block_len == 1 and name in ("cft", "opd", "cft_rl", "rl"):
        raise UserError(f"--block-len 1 is autoregressive, and {name} is the name of a diffusion model: give --name, and "
                        "to RL also --start ar_sft")


def main(run, *args):
    """Run a command. A user's mistake becomes one line and exit status 1; Ctrl-C before training gives 130.

    A character that the terminal's encoding lacks is replaced, so printing a title never ends in a traceback.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        run(*args)
    except BrokenPipeError:                                         # the reader has seen enough, as with "| head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())                    # nothing is left to flush into
    except (UserError, OSError) as e:
        sys.exit(f"{Path(sys.argv[0]).name}: {e}")
    except KeyboardInterrupt:
        sys.exit(130)
