"""The chain of stages. A stage whose input is missing has the command run that makes it, in a process of its own.

Each of those commands does the same for its own input, so what is missing is run in order, down to preparing the rows:

    train_rl.py needs opd  ->  train_opd.py needs cft  ->  train_cft.py needs ar  ->  train_rl.py (block length 1)
    needs ar_sft  ->  train_ar.py

The table of weights and commands is checkpoint.MADE_BY.
"""
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from plumbing.checkpoint import MADE_BY, NAMES, digest, load, weights
from plumbing.settings import ROOT, UserError


def need(s, name, summary):
    """See to it that the weights called `name` are in the run's folder. Raises UserError.

    They are there; or they come with the clone and are copied; or their command is run, or continued where it was
    stopped.
    """
    path = weights(s, name, summary)
    if path and path.parent != Path(s.out):
        copy_from_clone(s, name, path)
        return
    state = unfinished(Path(s.out) / f"{name}.state.pt")
    if path and not state:
        return
    if name not in MADE_BY:
        raise UserError(f"{name} was stopped: finish it by its own command and --resume" if state else
                        f"{s.out}/{name}.pt is missing, and no stage makes weights of that name by itself")
    # A run that was stopped goes on from where it stopped, unless what it started from has been made anew since.
    start = Path(s.out) / f"{state['settings'].get('start')}.pt" if state else None
    goes_on = state is not None and (not start.exists() or digest(start) == state["made_from"])
    command = MADE_BY[name].split() + flags(s, name) + ["--resume"] * goes_on
    print((f"{name} was stopped before its end, so it is continued" if goes_on else f"{s.out}/{name}.pt is needed first")
          + f": python {shlex.join(command)}", flush=True)
    run(command)


def flags(s, name):
    """The settings that must reach the command that makes `name`. --dtype, --micro and --data do where they were given:
    else each stage's own preset decides."""
    given = {"preset": s.preset, "out": s.out, "seed": s.seed, "device": s.device, "threads": s.threads, "table": 0}
    given |= {key: getattr(s, key) for key in ("dtype", "micro", "data") if key in s.given}
    if name not in ("ar_sft", "ar") and (getattr(s, "block_len", None) or 1) > 1:
        given["block-len"] = s.block_len                            # blocks as long as they are asked for here
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


def run(command):
    """Run one of the commands to its end. Ctrl-C reaches that process too: it saves, says so, and we end with it. A
    termination is handed on, so that nothing trains on unseen. Raises UserError where the command ends early."""
    child = subprocess.Popen([sys.executable, str(ROOT / command[0]), *command[1:]])

    def wait(*_):
        pass                                                        # the child decides when it is done

    def hand_on(*_):
        child.terminate()
    old = {signal.SIGINT: signal.signal(signal.SIGINT, wait), signal.SIGTERM: signal.signal(signal.SIGTERM, hand_on)}
    try:
        code = child.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if code:
        raise UserError(f"python {command[0]} ended early (see above); the next start continues from what it saved")


def unfinished(state_file):
    """The saved state of a run that was stopped before its last step, or None."""
    if not state_file.exists():
        return None
    state = load(state_file, "delete it")
    return state if state["step"] < state["settings"]["steps"] else None


def copy_from_clone(s, name, path):
    """Copy weights that come with the clone, with all that they were made from, and the AR model, which tables ask for."""
    last = max(NAMES.index(name), NAMES.index("ar"))
    for source in (path.with_name(f"{n}.pt") for n in NAMES[:last + 1]):
        if source.exists():
            shutil.copyfile(source, Path(s.out) / source.name)
    print(f"{name}.pt comes with the clone ({path}) and was copied to {s.out}")
