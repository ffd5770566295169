"""Stage 0: the autoregressive teacher, by supervised fine-tuning (SFT) on reasoning traces, then RL.

Paper, "The teacher (AR GR2)": SFT on traces, first broad ones, then rejection-sampled ones, with the loss on the output
only and separate weights for reasoning and answer -> ar_sft.pt. Then RL on the ranking reward, which is train_rl.py at
block length 1 -> ar.pt. What the paper starts from (Qwen3-8B) is replaced by a model trained from nothing, so the broad
set carries most of the learning: reading evidence, comparing, writing. RL is told the seed, device, dtype
and the --rl flags; the rest is train_rl.py's preset, and its own command (see there) has all flags.

    python train_ar.py --preset mini         # minutes on a laptop; prepares the data by itself
    python train_ar.py --preset small        # under an hour on two cores

Equation (SFT): minimise  sum_i w_i * -log p(x_i | prompt, x_<i) / sum_i w_i  over the output tokens i of a batch.
"""
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import diffusion
import evaluate
import settings
import stage
import train_rl
from data import prepare
from model import ModelConfig, Transformer
from settings import flag


@dataclass
class ARSettings(settings.Settings):
    accepted_steps: int = flag(300, "the last so many steps are on the rejection-sampled traces")
    rl_steps: int = flag(0, "optimiser steps of RL that follow (0: none, ar.pt is ar_sft.pt)")
    rl_paper: int = flag(1, "1: that RL is the paper's (advantage by the std, no anchor, temperature 1); 0: train_rl.py's preset")


PRESETS = {
    "mini": dict(steps=400, accepted_steps=20, rl_steps=10, rl_paper=0, eval_every=380, eval_users=256, warmup=50, lr=2e-3),
    "small": dict(steps=3200, accepted_steps=60, rl_steps=100, eval_every=400, eval_users=400),
    "beauty": dict(steps=8000, accepted_steps=800, rl_steps=300, batch=128, lr=6e-4, warmup=300, eval_every=800, eval_users=2000),
}


def main(argv=None):
    s = settings.parse(ARSettings, PRESETS, __doc__, argv)
    folder, tok, summary = stage.load_data(s)
    k = summary["config"]["candidates"]
    torch.manual_seed(s.seed)
    model = Transformer(ModelConfig(vocab=tok.vocab, **settings.MODELS[s.preset]))
    sets = [prepare.Rows(folder / f"{name}.npz") for name in ("all", "accepted")]
    stage.check_fits(model.cfg, sets[0], 1, k)
    run = stage.Run("ar_sft", s, model, tok, summary)
    if not s.resume:
        (Path(s.out) / "ar.state.pt").unlink(missing_ok=True)       # RL of an earlier run is not to be gone on with

    # === 1. Two sets of traces, one after the other =====================================================
    lengths = [np.add(*rows.lengths()) for rows in sets]

    def batch_loss(step):
        """-> ([(forward, weight)] one a micro-batch, tokens in the batch)."""
        late = step >= s.steps - s.accepted_steps                   # the second set comes last
        rows, at = sets[late], step - (s.steps - s.accepted_steps) * late
        chosen = [rows[i] for i in stage.batch_rows(lengths[late], s.batch, s.seed, at)]
        parts = []
        for lo in range(0, len(chosen), s.micro or s.batch):
            prompts, outputs = zip(*chosen[lo:lo + (s.micro or s.batch)])
            text = diffusion.pack(prompts, outputs, tok, block_len=1)
            w = diffusion.token_weights(outputs, text.target.shape[1], tok, s.reasoning, s.answer, tail=0.0)
            parts.append((lambda t=text, w=w: diffusion.loss_sum(run.model, t, w, tok), float(w.sum())))
        return parts, sum(len(p) + len(o) - 1 for p, o in chosen)

    # === 2. Train; choose by free decoding on validation users ==========================================
    prompts, targets = evaluate.validation_users(folder, s.eval_users)

    def validate(model):
        return evaluate.validate_by_decoding(model, tok, prompts, targets, k, block_len=1, tau=1.0, autocast=run.autocast())

    run.train(batch_loss, validate)

    # === 3. RL by the same code as for the diffusion model, at block length 1 ===========================
    if s.rl_steps:
        paper = ["--advantage", "std", "--kl-weight", "0", "--temperature", "1"] if s.rl_paper else []
        again = ["--resume"] if s.resume and (Path(s.out) / "ar.state.pt").exists() else []
        train_rl.main(["--preset", s.preset, "--out", s.out, "--seed", str(s.seed), "--device", s.device, "--block-len",
                       "1", "--start", "ar_sft", "--name", "ar", "--steps", str(s.rl_steps), "--dtype", s.dtype, *paper, *again])
    else:
        shutil.copyfile(run.product, Path(s.out) / "ar.pt")

    # === 4. The table: floor, teacher, AR ===============================================================
    evaluate.show_stage(s, folder, tok, summary, [("ar_sft", "ar_sft", 1, None)] * bool(s.rl_steps) +
                        [("ar", "ar", 1, None)], run.autocast())


if __name__ == "__main__":
    settings.main(main)
