"""Stage 1, conversion fine-tuning (CFT): the AR model learns to fill a block in a few steps.

Paper, "The three stages", 1. Weight-preserving: the AR tensors are copied one to one, and what changes is who looks at
whom and which inputs are <mask>. At block length 1 the converted model *is* the AR model, which is checked before the
first step. The naive conversion at block length 32 is mostly invalid: it has never seen a <mask>, nor a token to its
right. CFT shows it both.

    python train_cft.py --preset mini        # data, AR and CFT, one after the other, where they are missing
    python train_cft.py --preset small

Loss: for a prompt p and output x, hide targets H (diffusion.draw_hidden) in two views of each block, and minimise

    sum_{i in H} w_i * -log p(x_i | p, finished blocks before i's, the visible part of i's block) / sum_{i in H} w_i

with the two views complementary, so that each target is hidden exactly once and no 1/t weight is needed. A step has
(P + 3R)/(P + R) times the tokens of an AR step on the same rows. Left out: the paper's epochs over a fixed set (we
count steps), and any noise level as an input to the network.
"""
from dataclasses import dataclass

import numpy as np
import torch

import checkpoint
import diffusion
import evaluate
import sample
import settings
import stage
from data import prepare
from settings import flag


@dataclass
class CFTSettings(settings.Settings):
    start: str = flag("ar", "name of the weights to start from")
    name: str = flag("cft", "name of the weights that are written, <out>/<name>.pt")
    block_len: int = flag(diffusion.BLOCK_LEN, "targets of a block")
    schedule: str = flag("complementary", f"masking schedule: one of {', '.join(diffusion.SCHEDULES)}")
    full: float = flag(0.2, "share of blocks that are hidden completely, as where decoding starts (complementary)")
    tail: float = flag(0.1, "loss weight of the <eos> that fill the last block")
    tau: float = flag(0.9, "threshold of the decoded validation")


PRESETS = {
    "mini": dict(steps=210, eval_every=210, eval_users=256, warmup=30, lr=1.5e-3),
    "small": dict(steps=1800, eval_every=300, eval_users=400, lr=1.2e-3),
    "beauty": dict(steps=6000, batch=128, lr=4e-4, warmup=200, eval_every=600, eval_users=2000),
}


def same_at_block_length_one(ar, converted, tok, row, device):
    """The converted model's logits at B = 1 equal those of AR's plain causal forward: nothing was lost on the way."""
    prompt, output = row
    x = torch.tensor([prompt + output[:-1]], device=device)
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=device).tril()
    hidden = ar(x, torch.arange(x.shape[1], device=device)[None], causal)[0, len(prompt) - 1:]
    plain = diffusion.output_logits(ar, hidden, tok)
    text = diffusion.pack([prompt], [output], tok, block_len=1)
    logits, _ = diffusion.score(converted, text, torch.ones_like(text.target, dtype=torch.bool), tok)
    if not torch.allclose(logits, plain, atol=1e-4, rtol=1e-4):
        raise RuntimeError("the conversion changed the model: logits at block length 1 differ from the AR model's")


def main(argv=None):
    s = settings.parse(CFTSettings, PRESETS, __doc__, argv)
    if s.schedule not in diffusion.SCHEDULES:
        raise checkpoint.UserError(f"--schedule {s.schedule}: one of {', '.join(diffusion.SCHEDULES)}")
    sample.check_settings(s.block_len, s.tau)
    folder, tok, summary = stage.load_data(s)
    checkpoint.need(s, s.start)
    k = summary["config"]["candidates"]

    # === 1. The conversion: copy the weights, check that nothing else changed ===========================
    before, _ = checkpoint.open_model(s, s.start, tok, summary)
    model, _ = checkpoint.open_student(s, s.start, tok, summary)
    rows = prepare.Rows(folder / "all.npz")
    with torch.no_grad():
        same_at_block_length_one(before, model, tok, rows[0], s.device)
    stage.check_fits(model.cfg, rows, s.block_len, k)
    run = stage.Run(s.name, s, model, tok, summary)
    lengths = np.add(rows.lengths()[0], 3 * rows.lengths()[1])

    # === 2. A step: hide, score =========================================================================
    def micro_batches(chosen, draw):
        """Rows and a generator -> [(forward, weight)]. One draw for the whole batch, then micro-batches: how a batch
        is split does not change which targets are hidden."""
        length = max(len(diffusion.pad_to_block(o, tok.eos, s.block_len)) for _, o in chosen)
        hidden, weight = diffusion.draw_hidden(len(chosen), length, s.block_len, draw, s.schedule, s.full)
        parts = []
        for lo in range(0, len(chosen), s.micro or s.batch):
            prompts, outputs = zip(*chosen[lo:lo + (s.micro or s.batch)])
            short = max(len(diffusion.pad_to_block(o, tok.eos, s.block_len)) for o in outputs)
            h, w = (x[:, lo:lo + len(prompts), :short] for x in (hidden, weight))
            text = diffusion.pack(prompts, outputs, tok, s.block_len)
            base = diffusion.token_weights(outputs, short, tok, s.reasoning, s.answer, s.tail)
            base = diffusion.limit_to_blocks(base, outputs, s.block_len)                  # (n, R)
            # Divided by the weight of all targets, not of the hidden ones: dividing 1/p-weighted terms by what chance
            # has hidden would be biased. With complementary views both are the same.
            parts.append((lambda t=text, w=w * h * base, h=h: diffusion.loss_sum(run.model, t, w, tok, h),
                          float(base.sum())))
        return parts

    def batch_loss(step):
        chosen = [rows[i] for i in stage.batch_rows(lengths, s.batch, s.seed, step)]
        parts = micro_batches(chosen, stage.generator(s.seed, step))
        views = 1 if s.schedule != "complementary" else 2
        return parts, sum(len(p) + (1 + views) * len(o) for p, o in chosen)

    # === 3. Validate: the loss on masks that never change, and free decoding ============================
    prompts, targets = evaluate.validation_users(folder, s.eval_users)
    held = prepare.Rows(folder / "valid.npz")
    fixed = [held[i] for i in range(0, len(held), max(len(held) // 128, 1))][:128]

    def validate(model):
        parts = micro_batches(fixed, stage.generator(12345))
        with torch.no_grad(), run.autocast():
            loss = sum(float(f()) for f, _ in parts) / stage.denominator(parts)
        return {"loss": loss} | evaluate.validate_by_decoding(model, tok, prompts, targets, k, s.block_len, s.tau,
                                                           run.autocast())

    run.train(batch_loss, validate)

    # === 4. The table: floor, AR, the naive conversion, CFT =============================================
    evaluate.show_stage(s, folder, tok, summary, [("ar", "ar", 1, None), ("naive", "ar", s.block_len, s.tau),
                                                (s.name, s.name, s.block_len, s.tau)], run.autocast())


if __name__ == "__main__":
    settings.main(main)
