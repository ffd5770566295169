"""The command line of sample.py: one real user, re-ranked by the AR and by the diffusion model, one after the other.

    python sample.py                               # a user and weights that come with the clone: nothing is prepared
    python sample.py --list                        # the numbers of all such users
    python sample.py --user 13595 --prompt         # the prompt too, as the model reads it
    python sample.py --user 13595 --watch          # the canvas fills, step by step
"""
import contextlib
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

import ranking
import sample
from data.dataset import longest_output
from data.tokenizer import LETTERS
from model import Transformer
from plumbing import checkpoint, demo, settings
from plumbing.loop import load_data
from plumbing.settings import Common, UserError, flag

HOW_TO_READ = """
A retriever proposed ten candidates or fewer, and language models rank them again. Each writes one line of evidence per
candidate: its brand and its kind, each with how many of the purchases share it; the purchase that it was most often
bought with (h1 is the newest), by how many users, and how many bought it right after h1; and a grade from 0 to 7. Then it
writes the best three with their grades, and the answer: those three first, the others in their old order."""


@dataclass
class Settings(Common):
    """The flags of sample.py."""
    preset: str = flag("small", "mini, small or beauty", choices=tuple(settings.MODELS))
    user: int = flag(None, f"the user's number in users.tsv.gz (default {demo.FIRST}, or the first user of the rows)")
    student: str = flag("", "weights of the diffusion model (default: those of the last stage)")
    block_len: int = flag(None, "block length of the diffusion model (default: the length it was trained at)")
    tau: float = flag(0.9, "commit threshold of the diffusion model")
    temperature: float = flag(0.0, "temperature of the draw; 0 is greedy")
    threads: int = flag(1, "CPU threads while decoding (0: as many as torch chooses); for one user a second thread "
                        "mostly waits for the first", at_least=0)
    watch: bool = flag(False, "show the canvas filling, step by step")
    prompt: bool = flag(False, "show the prompt too, as the model reads it")
    json: bool = flag(False, "print one JSON object instead of text")
    list: bool = flag(False, "print the numbers of the users that come with the clone, and nothing else")
    UNUSED = ("data", "dtype", "full")


class Mode(NamedTuple):
    """A way to decode: "ar" at block length 1, or the name of diffusion weights at theirs."""
    name: str
    block_len: int
    model: Transformer


def main(argv=None):
    s = parse(argv)
    if s.list:
        print(*list_users(s))
        return
    with quiet(s.json):
        user, tok, summary = find_user(s)
        modes = open_modes(s, tok, summary)
    if s.threads:                                                   # not before: preparing rows may use all cores
        torch.set_num_threads(s.threads)
    max_len = longest_output(summary["config"]["candidates"])
    if not s.json:
        show_user(user)
        if s.prompt:
            print("\nThe prompt, as the models read it:\n" + tok.text(user.prompt))
    found = []
    for mode in modes:
        how = (mode.model, [user.prompt], tok, mode.block_len, s.tau, max_len, s.temperature, [s.seed])
        if s.watch and not s.json:
            print(f"\n--- {mode.name} ---")
            sample.Decoder(*how).run(Screen(tok, sys.stdout))
        found.append(measure(mode, s.tau, user, tok, how))
        if not s.json:
            show_output(found, s.watch)
    if s.json:
        print(json.dumps({"user": user.number, "history": user.history, "candidates": user.candidates,
                          "target": user.target, "modes": found}, indent=1))
    else:
        show_rankings(user, found)
        show_end(found)


# === What is shown ====================================================================================================

def parse(argv):
    """Flags -> Settings, checked before anything is prepared. Raises UserError."""
    s = Settings(**settings.read_flags(Settings, {}, __doc__, argv))
    settings.check_limits(s)
    sample.check_settings(s.block_len, s.tau, s.temperature)
    settings.fill_in(s)
    return s


def list_users(s):
    """Numbers of the users that come with the clone. Raises UserError where there are none."""
    users, _, _ = demo.load(s.preset)
    if not users:
        raise UserError(f"no users come with the clone for --preset {s.preset}: give any test user's number to --user")
    return list(users)


def find_user(s):
    """(User, tokenizer, summary). Raises UserError where there is no such user, or nothing to decode with.

    Where the run's folder has neither rows nor weights of its own, and the user is one of those that come with the
    clone, nothing is prepared. Otherwise the rows of the run's folder are used; missing rows are prepared first.
    """
    own_rows = (Path(s.out) / "data" / "summary.json").exists()
    if not own_rows and not checkpoint.begun(s.out):
        users, tok, summary = demo.load(s.preset)
        number = demo.FIRST if s.user is None else s.user
        if number in users:
            return users[number], tok, summary
    if not any(Path(s.out).glob("*.pt")) and not (checkpoint.SHIPPED / s.preset).exists():
        raise checkpoint.no_weights(s)
    folder, tok, summary = load_data(s)
    prepared = demo.Prepared(folder, summary)
    number = s.user
    if number is None:
        number = demo.FIRST if demo.FIRST in prepared.numbers else prepared.numbers[0]
    if number not in prepared.numbers:
        raise UserError(f"no user {number}: numbers run from 0 to {len(prepared.split.user) - 1}, and a user needs "
                        "enough purchases to have a test row")
    return prepared.user(prepared.numbers.index(number)), tok, summary


def open_modes(s, tok, summary):
    """The AR model and the diffusion model, as far as there are weights -> list of Mode. Raises UserError for none."""
    modes = []
    if checkpoint.weights(s, "ar", summary):
        modes.append(Mode("ar", 1, checkpoint.open_model(s, "ar", tok, summary)[0]))
    if student := checkpoint.pick_student(s, summary):
        model, block_len = checkpoint.open_student(s, student, tok, summary, s.block_len)
        modes.append(Mode(student, block_len, model))
    if not modes:
        raise checkpoint.no_weights(s)
    return modes


def measure(mode, tau, user, tok, how):
    """Decode twice, and return what is said of the second time, as the first warms up. how: for sample.timed."""
    for _ in range(2):
        [out], seconds, whole = sample.timed(*how)
    parsed = ranking.parse(out.tokens, tok, len(user.candidates))
    return {"mode": mode.name, "block_len": mode.block_len, "tau": tau if mode.block_len > 1 else None,
            "reasoning": tok.text(out.tokens), "order": parsed.order, "failure": parsed.failure, "nfe": out.nfe,
            "tokens": len(out.tokens), "tok_s": len(out.tokens) / seconds, "tok_s_end_to_end": len(out.tokens) / whole}


# === How it is shown ==================================================================================================

def quiet(on):
    """With --json only the JSON goes to stdout, and notes go to stderr."""
    return contextlib.redirect_stdout(sys.stderr) if on else contextlib.nullcontext()


def show_user(user):
    print(f"User {user.number}, last purchases, oldest first:")
    for title in user.history:
        print(f"    {title[:100] or '(no title)'}")
    print(HOW_TO_READ)


def show_output(found, watched):
    """Name and speed of the last mode found, and its text, unless that is on the screen already."""
    *before, mode = found
    name = mode["mode"] + (f", blocks of {mode['block_len']}, tau {mode['tau']}" if mode["tau"] else "")
    print(f"\n--- {name}: {mode['tokens']} tokens in {mode['nfe']} forwards; {mode['tok_s']:,.0f} tokens/s decoding, "
          f"{mode['tok_s_end_to_end']:,.0f} with prefill ---")
    same = [other["mode"] for other in before if other["reasoning"] == mode["reasoning"]]
    if same:
        print(f"It wrote the same text as {same[0]}.")
    elif not watched:
        print(mode["reasoning"])


def show_rankings(user, modes):
    """The candidates before and after, once per ranking: models that agree share one."""
    rankings = {}                                                   # order: names of the modes that give it
    for mode in modes:
        if mode["failure"]:
            print(f"\n{mode['mode']} wrote no valid permutation ({mode['failure']}), so the order stays as it was.")
        order = mode["order"] or range(len(user.candidates))
        rankings.setdefault(tuple(order), []).append(mode["mode"])
    for order, names in rankings.items():
        print("\nThe ranking of " + (f"{names[0]}:" if len(names) == 1 else f"{' and '.join(names)}, which agree:"))
        print(" after before   candidate")
        for place, c in enumerate(order, 1):
            mark = "  <- the true next purchase" if c == user.target else ""
            print(f"{place:6}{c + 1:7}   {LETTERS[c]} {user.candidates[c][:80] or '(no title)'}{mark}")
    if user.target is None:
        print("        the true next purchase is not among the candidates")


def show_end(modes):
    """How the two compare, and what to do next."""
    print()
    if len(modes) == 2:
        ar, student = modes
        print(f"{student['mode']} took {student['nfe']} forwards where {ar['mode']} took {ar['nfe']}, and decoded "
              f"{student['tok_s'] / ar['tok_s']:.1f} times as many tokens per second.")
    print("Next, train such models yourself: python train_cft.py --preset mini")


class Screen:
    """--watch: called after each step, it redraws the output so far. A dot is a token that is still masked.

    A file or a pipe cannot be redrawn, so it gets the finished text alone.
    """

    def __init__(self, tok, stream):
        self.tok, self.stream = tok, stream
        self.lines = 0                                              # lines on the screen that the next drawing replaces

    def __call__(self, decoder):
        text = self.text(decoder)
        if not self.stream.isatty():
            if not decoder.rows[0].alive:
                self.stream.write(text + "\n")
            return
        width = shutil.get_terminal_size().columns
        lines = [line[i:i + width] for line in text.split("\n") for i in range(0, max(len(line), 1), width)]
        text = "\n".join(lines)                                     # as the terminal wraps it: each line is counted
        if self.lines:
            self.stream.write(f"\x1b[{self.lines}F\x1b[J")          # up to the first line, and clear all below
        self.stream.write(text + "\n")
        self.stream.flush()
        self.lines = text.count("\n") + 1
        time.sleep(0.15)

    def text(self, decoder):
        """Finished blocks, then the active one, unless the row has stopped."""
        [row] = decoder.rows
        return self.tok.text(row.out.canvas + row.tokens * row.alive).replace("<mask>", " ·")


if __name__ == "__main__":
    settings.main(main)
