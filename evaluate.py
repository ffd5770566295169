"""The whole picture of a trained run: the ladder of systems and the speed-accuracy frontier, as tables and one file.

    python evaluate.py --preset mini                 # ladder, frontier, sweeps -> out/mini/results.json, *.svg
    python evaluate.py --preset small --only ladder

Ladder (paper, first table; plumbing/ladder.py): random, reverse and pre-rank orders, the teacher's traces, each trained
model decoding freely and greedily, and the oracle. Frontier (second table; plumbing/speed.py): the same sampler at
block length 1 and at several thresholds, timed side by side. Sweeps: what the speed-up depends on. What is measured is
added to the results that are there, unless they were taken on another device or of other weights.
"""
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from plumbing import checkpoint, figures, ladder, loop, machine, settings, speed
from plumbing.ladder import System
from plumbing.settings import UserError, flag


@dataclass
class EvalSettings(settings.Common):
    only: str = flag("", "ladder, frontier, or sweeps with the frontier (default: all)",
                     choices=("", "ladder", "frontier", "sweeps"))
    student: str = flag("", "weights of the frontier and the sweeps (default: the last stage that is there)")
    block_len: int = flag(None, "block length of the diffusion models (default: as they were trained)", at_least=1)
    users: int = flag(0, "test users of the frontier's accuracy, and of the validity in the sweep of candidates "
                      "(0: all)", at_least=0)
    time_users: int = flag(24, "test users decoded one by one for the timing, each in every mode", at_least=1)
    dtype: str = flag("auto", "of the ladder: float32, bfloat16 (autocast), or auto: the faster of the two",
                      choices=("auto", "float32", "bfloat16"))
    repeats: int = flag(3, "how often the timing is repeated, with the modes in turn", at_least=1)


def open_all(s, tok, summary):
    """All weights of a run as {name: checkpoint}: AR first, then the students. Raises UserError where AR is missing."""
    if not checkpoint.weights(s, "ar", summary):
        raise checkpoint.no_weights(s)
    names = [name for name in ("ar_sft", "ar") if checkpoint.weights(s, name, summary)]
    names += checkpoint.students(s, summary)
    made = {name: checkpoint.open_model(s, name, tok, summary)[1] for name in names}
    print(f"weights in {checkpoint.weights(s, 'ar', summary).parent}, with the step at which each was kept: "
          + ", ".join(f"{name} {state['step']}" for name, state in made.items()))
    return made


def decoded_systems(s, made, student):
    """The decoded rows of the ladder: AR, the naive conversion, and each student at tau 1 and 0.9."""
    systems = [System(name, name, 1, None) for name in ("ar_sft", "ar") if name in made]
    if student:
        systems += [System("naive", "ar", s.block_len or made[student]["settings"]["block_len"], 0.9)]
    for name in made:
        if name not in ("ar_sft", "ar"):
            taus = (1.0, 0.9) if name in checkpoint.NAMES else (0.9,)       # ablations: a tenth of the time
            systems += [System(name, name, s.block_len, tau) for tau in taus]
    return systems


def measured(file, device, digests):
    """The results that are there, to be added to; none where any was taken on another device or of other weights.

    digests: {name of weights: digest}. Raises UserError where the file cannot be read.
    """
    try:
        results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError:
        raise UserError(f"{file} cannot be read; delete it, and what it held is measured again")
    same = all(digests.get(name, digest) == digest for name, digest in results.get("weights", {}).items())
    return results if same and results.get("device") == device else {}


def main(argv=None):
    s = settings.parse(EvalSettings, {}, __doc__, argv)
    folder, tok, summary = loop.load_data(s)
    student = checkpoint.pick_student(s, summary)
    made = open_all(s, tok, summary)
    file = Path(s.out) / "results.json"
    digests = {name: checkpoint.digest(checkpoint.weights(s, name, summary)) for name in made}
    results = measured(file, s.device, digests)
    results |= {"weights": results.get("weights", {}) | digests, "preset": s.preset, "device": s.device,
                "seed": made["ar"]["settings"]["seed"], "n_users": summary["test_users_with_hit"]}

    # === 1. The ladder ==================================================================================
    if s.only in ("", "ladder"):
        machine.pick_dtype(s)
        systems = decoded_systems(s, made, student)
        rows = ladder.ladder(s, folder, tok, summary, systems, machine.autocast(s))
        speed.add_speedups(s, folder, tok, summary, systems, rows)
        print(f"Ladder, {s.dtype}: {rows[0]['n']:,} test users whose next purchase is among their candidates\n")
        ladder.show_ladder(rows, summary["hit_test"], s.full)
        results["ladder"] = [{key: value for key, value in r.items() if key != "users"} for r in rows]

    # === 2. The frontier of one student =================================================================
    if s.only != "ladder" and not student:
        print(f"\nno frontier: {s.out} has no diffusion weights; train them: python train_cft.py --preset {s.preset}")
    if s.only != "ladder" and student:
        ar, _ = checkpoint.open_model(s, "ar", tok, summary)
        model, s.block_len = checkpoint.open_student(s, student, tok, summary, s.block_len)
        rows, ar, model = speed.frontier(s, folder, tok, summary, ar, model)
        print(f"\nFrontier of {student}: batch 1, {s.device}, {torch.get_num_threads()} threads; "
              f"accuracy of {rows[0]['users']:,} users; time of {s.time_users}, median of {s.repeats} repeats")
        print(ladder.text_table(rows, speed.COLUMNS))
        results |= {"student": student, "frontier": rows}

        # === 3. What the speed-up depends on ============================================================
        if s.only != "frontier":
            results["sweeps"] = speed.sweeps(s, folder, tok, summary, ar, model)
            speed.show_sweeps(results["sweeps"])

    # === 4. The results file, and figures from it =======================================================
    part = file.with_suffix(".json.part")
    part.write_text(json.dumps(results, indent=1), encoding="utf-8")
    part.replace(file)
    figures.draw_all(Path(s.out), results)
    print(f"-> {file}, and figures *.svg beside it")


if __name__ == "__main__":
    settings.main(main)
