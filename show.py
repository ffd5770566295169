"""The command line of sample.py: one real user, re-ranked by the AR and by the diffusion model, side by side.

    python sample.py --preset small --user 13595 --prompt        # history, prompt, reasoning, ranking before and after
    python sample.py --preset small --user 13595 --watch         # the canvas filling, step by step
"""
import argparse
import contextlib
import json
import shutil
import sys
import time
from pathlib import Path

import checkpoint
import machine
import ranking
import sample
import settings
import stage
from checkpoint import UserError
from data import amazon, prepare
from data.dataset import longest_output


def main(argv=None):
    ap = argparse.ArgumentParser(description="Re-rank one real user's candidates and show how.")
    ap.add_argument("--preset", choices=list(settings.MODELS), default="mini")
    ap.add_argument("--out", default="", help="folder of the run (default out/<preset>)")
    ap.add_argument("--user", type=int, default=0, help="the user's number in users.tsv.gz")
    ap.add_argument("--student", default="", help="weights of the diffusion model (default: the last stage there is)")
    ap.add_argument("--block-len", type=int, help="block length of the diffusion model (default: as trained)")
    ap.add_argument("--tau", type=float, default=0.9, help="commit threshold of the diffusion model")
    ap.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--watch", action="store_true", help="show the canvas filling, step by step")
    ap.add_argument("--prompt", action="store_true", help="show the prompt, too, as the model reads it")
    ap.add_argument("--json", action="store_true", help="one JSON object instead of text")
    s = ap.parse_args(argv)
    s.out, s.data = s.out or f"out/{s.preset}", ""
    sample.check_settings(s.block_len, s.tau, s.temperature)
    machine.check_device(s.device)
    if not any(Path(s.out).glob("*.pt")) and not (checkpoint.SHIPPED / s.preset).exists():
        raise checkpoint.no_weights(s)
    with quiet(s.json):
        folder, tok, summary = stage.load_data(s)
    split = amazon.load(summary["config"]["data"])
    rows = prepare.Rows(folder / "test.npz")
    names = [split.user[u] for u in rows.arrays["user"]]
    if str(s.user) not in names:
        raise UserError(f"no user {s.user}: numbers run from 0 to {len(split.user) - 1}, and a user needs enough "
                        "purchases to have a test row")
    models = []
    if checkpoint.weights(s.out, s.preset, "ar"):
        models.append(("ar", 1, checkpoint.open_model(s, "ar", tok, summary)[0]))
    if student := checkpoint.pick_student(s):
        models.append((student, *reversed(checkpoint.open_student(s, student, tok, summary, s.block_len))))
    if not models:
        raise checkpoint.no_weights(s)
    r = names.index(str(s.user))
    prompt, target, n = rows[r][0], int(rows.target[r]), int(rows.n[r])
    result = {"user": s.user, "history": [split.title[i] for i in rows.arrays["history"][r][::-1] if i >= 0],
              "candidates": [split.title[i] for i in rows.arrays["item"][r] if i >= 0],
              "target": target if target >= 0 else None, "modes": []}
    if not s.json:
        show_user(result)
        print("\n" + tok.text(prompt) if s.prompt else "", end="\n" if s.prompt else "")
    for mode, block_len, model in models:
        max_len = longest_output(summary["config"]["candidates"])
        if s.watch and not s.json:
            print(f"\n--- {mode} ---")
            watched = sample.Decoder(model, [prompt], tok, block_len, s.tau, max_len, s.temperature, [s.seed])
            watched.run(watcher(tok, sys.stdout))
        for _ in range(2):                                          # the first time warms up
            [out], seconds, whole = sample.timed(model, [prompt], tok, block_len, s.tau, max_len, s.temperature, [s.seed])
        parsed = ranking.parse(out.tokens, tok, n)
        result["modes"].append({
            "mode": mode, "block_len": block_len, "tau": s.tau if block_len > 1 else None,
            "reasoning": tok.text(out.tokens), "order": parsed.order, "failure": parsed.failure,
            "nfe": out.nfe, "tokens": len(out.tokens),
            "tok_s": len(out.tokens) / seconds, "tok_s_end_to_end": len(out.tokens) / whole})
        if not s.json:
            show_mode(result, result["modes"][-1], s.watch)
    if s.json:
        print(json.dumps(result, indent=1))


def quiet(on):
    """With --json only the JSON goes to stdout; progress goes to stderr."""
    return contextlib.redirect_stdout(sys.stderr) if on else contextlib.nullcontext()


def show_user(result):
    print(f"User {result['user']}, last purchases, oldest first:")
    for title in result["history"]:
        print(f"    {title[:100] or '(no title)'}")


def show_mode(result, mode, watched):
    name = mode["mode"] + (f", blocks of {mode['block_len']}, tau {mode['tau']}" if mode["tau"] else "")
    print(f"\n--- {name}: {mode['tokens']} tokens in {mode['nfe']} forwards, {mode['tok_s']:,.0f} tokens/s decoding, "
          f"{mode['tok_s_end_to_end']:,.0f} with prefill ---")
    if not watched:
        print(mode["reasoning"])
    if mode["failure"]:
        print(f"\nNo valid permutation ({mode['failure']}): the pre-rank order would be shown.")
    order = mode["order"] or list(range(len(result["candidates"])))
    print("\n after before   candidate")
    for place, c in enumerate(order, 1):
        mark = "  <- the true next purchase" if c == result["target"] else ""
        print(f"{place:6}{c + 1:7}   {'ABCDEFGHIJ'[c]} {result['candidates'][c][:80] or '(no title)'}{mark}")
    if result["target"] is None:
        print("        the true next purchase is not among the candidates")


def watcher(tok, stream):
    """--watch: redraw the output so far after each step; a dot is a token that is still masked."""
    state = {"lines": 0}

    def show(d):
        active = [t if not open_ else tok.mask for t, open_ in zip(d.tokens[0].tolist(), d.open[0].tolist())]
        body = tok.text(d.out[0].canvas + (active if bool(d.alive[0]) else [])).replace("<mask>", " ·")
        if not stream.isatty():                                     # a file or a pipe gets the finished text alone
            return None if bool(d.alive[0]) else stream.write(body + "\n")
        body = "\n".join(line[:shutil.get_terminal_size().columns] for line in body.split("\n"))
        stream.write(f"\x1b[{state['lines']}F\x1b[J" if state["lines"] else "")      # up to the first line, clear below
        stream.write(body + "\n")
        stream.flush()
        state["lines"] = body.count("\n") + 1
        time.sleep(0.15)
    return show
