"""Stage 2, on-policy distillation (OPD): the AR teacher corrects what the student itself writes.

Paper, "The three stages", 2. CFT shows the student perfect texts. While decoding it meets its own texts, and nothing has
taught it about the errors in those. So the student decodes (with the real parallel decoder, a few sampled rollouts per
prompt), and the frozen AR teacher reads the finished tokens causally, once, and gives its full next-token distribution p_i
at each of them. The student is scored on the canvas on which it committed token i (diffusion.replay), which gives q_i, and

    loss = sum_i w_i D(p_i || q_i) / sum_i w_i          D = forward KL = sum_v p(v) (log p(v) - log q(v))

over the committed tokens i up to and including the first <eos>, with CFT's token weights w. The paper takes the forward
KL. Its gradient in the student's logits is q - p: it is bounded, and it does not vanish where the student gives almost
no probability to a token that the teacher likes, as the gradient of the reverse KL does. `--kl reverse` and `--kl jsd`
are there to be compared (diffusion.divergence); the divergence that is logged is the one that is trained.

    python train_opd.py --preset mini        # data, AR and CFT first, where they are missing

Only committed positions count. Over all hidden positions, a teacher that is itself unsure of a token would teach the
student to be unsure of it earlier, and every unsure token costs a forward. Left out: a mix with CFT's loss, and a
temperature of the teacher. The paper's constant learning rate is a warm-up and a cosine here.
"""
from dataclasses import dataclass

import numpy as np
import torch

import diffusion
from data.rows import Rows
from plumbing import chain, checkpoint, ladder, loop, settings
from plumbing.settings import UserError, flag
from sample import check_settings


@dataclass
class OPDSettings(settings.OnPolicySettings):
    start: str = flag("cft", "name of the weights to start from", pattern=r"\w[\w-]*")
    name: str = flag("opd", "name of the weights that are written, <out>/<name>.pt", pattern=r"\w[\w-]*")
    teacher: str = flag("ar", "name of the AR weights that teach", pattern=r"\w[\w-]*")
    kl: str = flag("forward", f"divergence: one of {', '.join(diffusion.DIVERGENCES)}", choices=diffusion.DIVERGENCES)


PRESETS = {
    "mini": dict(steps=6, batch=8, lr=5e-5, warmup=2, eval_every=6, eval_users=256, log_every=2),
    "small": dict(steps=20, batch=12, micro=16, lr=1e-5, warmup=5, eval_every=10, eval_users=2544, log_every=10),
    "beauty": dict(steps=1000, batch=128, micro=64, lr=1e-5, warmup=20, eval_every=100, eval_users=2000, log_every=10),
}


def micro_batches(prompts, groups, tok, s):
    """Rollouts of all prompts -> ([(prompts, rollouts, weight (n, length))] per micro-batch, denominator)."""
    pairs = [(prompt, rollout) for prompt, group in zip(prompts, groups) for rollout in group]
    parts = []
    for part in loop.split(pairs, s.micro):
        part_prompts, rollouts = map(list, zip(*part))
        outputs = [r.tokens for r in rollouts]
        weight = diffusion.token_weights(outputs, max(map(len, outputs)), tok, s.reasoning, s.answer, tail=0.0)
        parts.append((part_prompts, rollouts, weight))
    return parts, loop.denominator(weight for *_, weight in parts)


def distil(student, teacher, prompts, rollouts, weight, tok, s):
    """Sum of weight * D over the committed tokens of some rollouts; weight (n, length). No gradient reaches the teacher.

    Student and teacher score the same tokens in different orders. The student's line j is the token at (row[j], place[j]),
    in the order of the canvases. The teacher's lines are in reading order, so `line` finds the one for (row, place). Two
    rollouts of 3 and 2 tokens:

        written        1 1 1 / 1 1 0        which places have a token
        line           0 1 2 / 3 4 -        running count of them, minus 1: (row 1, place 0) is the teacher's line 3
    """
    q, _, row, place = diffusion.replay(student, prompts, rollouts, tok, s.block_len)    # (m, vocab), -, (m,), (m,)
    with torch.no_grad():
        causal = diffusion.pack(prompts, [r.tokens for r in rollouts], tok, block_len=1)
        ends = torch.tensor([len(r.tokens) for r in rollouts])
        written = torch.arange(causal.target.shape[1]) < ends[:, None]                    # (n, R)
        p, _ = diffusion.score(teacher, causal, written, tok)                             # (m, vocab), in reading order
        line = (written.flatten().cumsum(0) - 1).view(written.shape).to(row.device)       # (n, R)
    d = diffusion.divergence(p[line[row, place]].log_softmax(-1), q.log_softmax(-1), s.kl)           # (m,)
    return (weight.to(q.device)[row, place] * d).sum()


def main(argv=None):
    s = settings.parse(OPDSettings, PRESETS, __doc__, argv)
    check_settings(s.block_len, s.tau, s.temperature)
    if s.temperature == 0 and s.group > 1:
        raise UserError("--temperature 0: all rollouts of a prompt would be the same; give --group 1")
    folder, tok, summary = loop.load_data(s)
    n_candidates = summary["config"]["candidates"]
    chain.need(s, s.start, summary)
    chain.need(s, s.teacher, summary)
    model, s.block_len = checkpoint.open_student(s, s.start, tok, summary, s.block_len)
    teacher, _ = checkpoint.open_model(s, s.teacher, tok, summary)
    teacher.requires_grad_(False)
    rows = Rows(folder / "all.npz")
    loop.check_fits(model.cfg, rows, s.block_len, n_candidates)
    run = loop.Run(s.name, s, model, summary, tolerance=0.0)        # thousands of tokens decide: no luck to allow for
    batches = loop.Batches(np.zeros(len(rows), dtype=int), s.batch, s.seed)    # unsorted: by length, tasks would be alike

    # === 1. Validate: the divergence on the student's own outputs, and free greedy decoding ==============
    # Validation prompts have all candidates. Training rows that show fewer are the harder part of the training loss.
    users = ladder.validation_users(folder, s.eval_users)           # (prompts, targets), the same ones every time
    held_out = Rows(folder / "valid.npz")
    fixed = list(range(0, len(held_out), max(len(held_out) // 48, 1)))[:48]

    def validate(model):
        with torch.no_grad(), run.autocast():
            parts, total = micro_batches(*loop.rollout_groups(model, held_out, fixed, tok, s, n_candidates, 12345), tok, s)
            kl = sum(float(distil(model, teacher, *part, tok, s)) for part in parts) / total
        decoded = ladder.validate_by_decoding(model, tok, *users, n_candidates, s.block_len, s.tau, run.autocast())
        return {"kl": kl} | decoded | {"score": -kl}                # this stage is for the divergence, so it decides

    for step in run.steps(validate, validate_first=True):           # the curve begins where CFT ended
        # === 2. The student decodes =====================================================================
        with run.autocast():                                        # as it is scored, and as it validates
            prompts, groups = loop.rollout_groups(model, rows, batches[step], tok, s, n_candidates, s.seed, step)
        parts, total = micro_batches(prompts, groups, tok, s)
        rollouts = [r for _, part, _ in parts for r in part]
        run.log(rollout_tokens_per_nfe=sum(len(r.tokens) for r in rollouts) / sum(r.nfe for r in rollouts),
                rollout_no_eos=sum(r.tokens[-1] != tok.eos for r in rollouts))
        # === 3. The teacher reads, and the student is scored where it committed =========================
        for prompts, part, weight in parts:
            with run.autocast():
                loss = distil(model, teacher, prompts, part, weight, tok, s) / total
            loss.backward()
            run.count(loss, diffusion.replay_tokens(prompts, part, s.block_len))

    ladder.show_step(s, folder, tok, summary, run.autocast())


if __name__ == "__main__":
    settings.main(main)
