"""Stage 1, conversion fine-tuning (CFT): the AR model learns to fill a block in a few steps.

Paper, "The three stages", 1. The conversion preserves the weights: the AR tensors are copied one to one, except the new
row of <mask>, and what changes is who looks at whom, and which inputs are <mask>. At block length 1 the converted model
*is* the AR model (tests/test_stages.py). At block length 32 the naive conversion writes no valid answer, because it has
never seen a <mask>, nor a token to its right. CFT shows it both. For a prompt p and output x, two views of each block
hide targets H, and the loss is

    sum_{i in H} w_i * -log p(x_i | p, finished blocks before i's, the visible part of i's block) / sum_{i in H} w_i

The views are complementary: what one hides, the other shows. So each target is hidden exactly once, and no 1/t weight is
needed (diffusion.draw_hidden). A step reads (P + 3R) / (P + R) times the tokens of an AR step on the same rows.

    python train_cft.py --preset mini        # data, AR and CFT, one after the other, where they are missing
    python train_cft.py --preset small

Left out: the paper's epochs over a fixed set (steps are counted), and any noise level as an input to the network.
"""
from dataclasses import dataclass

import torch

import diffusion
from data.rows import Rows
from plumbing import chain, checkpoint, ladder, loop, settings
from plumbing.settings import flag


@dataclass
class CFTSettings(settings.Settings):
    start: str = flag("ar", "name of the weights to start from", pattern=r"\w[\w-]*")
    name: str = flag("cft", "name of the weights that are written, <out>/<name>.pt", pattern=r"\w[\w-]*")
    block_len: int = flag(diffusion.BLOCK_LEN, "targets per block", at_least=1)
    schedule: str = flag("complementary", f"masking schedule: one of {', '.join(diffusion.SCHEDULES)}",
                         choices=diffusion.SCHEDULES)
    hide_all: float = flag(0.2, "share of the blocks that are hidden completely, as where decoding starts (complementary)",
                       at_least=0, at_most=1)
    tail: float = flag(0.1, "loss weight of the <eos> that fill the last block", at_least=0)
    tau: float = flag(0.9, "commit threshold of the decoded validation", above=0, at_most=1)


PRESETS = {
    "mini": dict(steps=210, eval_every=210, eval_users=256, warmup=30, lr=1.5e-3),
    "small": dict(steps=1800, eval_every=300, eval_users=400, lr=1.2e-3),
    "beauty": dict(steps=6000, batch=128, lr=4e-4, warmup=200, eval_every=600, eval_users=2000),
}


def hide(chosen, draw, tok, s):
    """Rows [(prompt, output)] and a generator -> ([(Text, hidden, weight)] per micro-batch, denominator).

    hidden and weight are (views, n, R). There is one draw for the whole batch, which is split afterwards, so how a batch is
    split does not change which targets are hidden. Example, 3 rows with --micro 2: one draw of (views, 3, R), then rows 0
    and 1 with the length of the longer of both, then row 2 with its own length.
    """
    def length(part):
        return max(len(diffusion.pad_to_block(output, tok.eos, s.block_len)) for _, output in part)

    hidden, unbiased = diffusion.draw_hidden(len(chosen), length(chosen), s.block_len, draw, s.schedule, s.hide_all)
    parts, bases, first = [], [], 0
    for part in loop.split(chosen, s.micro):
        prompts, outputs = zip(*part)
        rows, longest = slice(first, first + len(part)), length(part)
        text = diffusion.pack(prompts, outputs, tok, s.block_len)
        base = diffusion.token_weights(outputs, longest, tok, s.reasoning, s.answer, s.tail)
        base = diffusion.limit_to_blocks(base, outputs, s.block_len)                      # (n, R)
        part_hidden, part_unbiased = hidden[:, rows, :longest], unbiased[:, rows, :longest]          # (views, n, R)
        parts.append((text, part_hidden, part_unbiased * part_hidden * base))
        bases.append(base)
        first += len(part)
    # The denominator is the weight of all targets and not of the hidden ones. If we divided by the
    # hidden weight only, the terms that carry 1/p would be biased. With complementary views both are the same.
    return parts, loop.denominator(bases)


def main(argv=None):
    s = settings.parse(CFTSettings, PRESETS, __doc__, argv)
    folder, tok, summary = loop.load_data(s)
    chain.need(s, s.start, summary)
    n_candidates = summary["config"]["candidates"]

    # === 1. The conversion: copy the weights; only the row of <mask> in the embedding is new =============
    model, _ = checkpoint.open_student(s, s.start, tok, summary)
    rows = Rows(folder / "all.npz")
    loop.check_fits(model.cfg, rows, s.block_len, n_candidates)
    run = loop.Run(s.name, s, model, summary)
    prompt_len, output_len = rows.lengths()
    batches = loop.Batches(prompt_len + 3 * output_len, s.batch, s.seed)

    # === 2. Validate: the loss on masks that never change, and free decoding ============================
    users = ladder.validation_users(folder, s.eval_users)           # (prompts, targets), the same ones every time
    held_out = Rows(folder / "valid.npz")
    fixed = [held_out[i] for i in range(0, len(held_out), max(len(held_out) // 128, 1))][:128]

    def validate(model):
        parts, total = hide(fixed, loop.generator(12345), tok, s)
        with torch.no_grad(), run.autocast():
            loss = sum(float(diffusion.canvas_loss(model, text, weight, hidden, tok)) for text, hidden, weight in parts)
        return {"loss": loss / total} | ladder.validate_by_decoding(
            model, tok, *users, n_candidates, s.block_len, s.tau, run.autocast())

    # === 3. Train: hide, fill in ========================================================================
    for step in run.steps(validate):
        chosen = [rows[i] for i in batches[step]]
        parts, total = hide(chosen, loop.generator(s.seed, step), tok, s)
        for text, hidden, weight in parts:
            with run.autocast():
                loss = diffusion.canvas_loss(model, text, weight, hidden, tok) / total
            loss.backward()
            run.count(loss, int(text.not_pad.sum()) + hidden.numel())

    # === 4. The table: floor, teacher, AR, the naive conversion, CFT ====================================
    ladder.show_stage(s, folder, tok, summary, [
        ladder.System("ar", "ar", 1, None), ladder.System("naive", "ar", s.block_len, s.tau),
        ladder.System(s.name, s.name, s.block_len, s.tau)], run.autocast())


if __name__ == "__main__":
    settings.main(main)
