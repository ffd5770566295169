"""Stage 2, on-policy distillation (OPD): the AR teacher corrects what the student itself writes.

Paper, "The three stages", 2. CFT shows the student perfect texts; while decoding it meets its own, and errors on those
are what it has never been taught about. So the student decodes (the real parallel decoder, a few sampled rollouts a
prompt), the frozen AR teacher reads the finished tokens causally, once, and at each of them gives its full next-token
distribution p_i; the student is scored on the canvas on which it committed token i (diffusion.replay), and

    loss = sum_i w_i D(p_i || q_i) / sum_i w_i,      forward KL (Hinton et al., 2015):  D = sum_v p(v) (log p(v) - log q(v))

over the committed tokens i up to and including the first <eos>, w = CFT's token weights. Forward, because its gradient
in the student's logits is q - p: bounded, and it does not vanish where the student gives a token of the teacher's next
to nothing, as that of the reverse one does. `--kl reverse` (GKD, Agarwal et al., 2024) and `--kl jsd`, the mean of both
to their middle, are there to be compared; the divergence that is logged is the one that is trained.

    python train_opd.py --preset mini        # data, AR and CFT first, where they are missing

Only committed positions count: over all hidden ones a teacher that is itself unsure of a token teaches the student to
be unsure of it earlier, and every unsure token costs a forward. Left out: a mix with CFT's loss, teacher temperature.
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

KINDS = ("forward", "reverse", "jsd")


@dataclass
class OPDSettings(settings.OnPolicySettings):
    start: str = flag("cft", "name of the weights to start from")
    name: str = flag("opd", "name of the weights that are written, <out>/<name>.pt")
    teacher: str = flag("ar", "name of the AR weights that teach")
    kl: str = flag("forward", f"divergence: one of {', '.join(KINDS)}")


PRESETS = {
    "mini": dict(steps=6, batch=8, lr=5e-5, warmup=2, eval_every=6, eval_users=256, log_every=2),
    "small": dict(steps=20, batch=12, micro=16, lr=1e-5, warmup=5, eval_every=10, eval_users=2544, log_every=10),
    "beauty": dict(steps=1000, batch=128, micro=64, lr=1e-5, warmup=20, eval_every=100, eval_users=2000, log_every=10),
}


def divergence(teacher, student, kind):
    """teacher, student: (m, vocab) log-probabilities, fp32 -> (m,) nats.

    A log-probability of -inf becomes -1e4, whose exponential is 0 all the same: 0 x 1e4 is 0 in value and gradient,
    where 0 x inf is NaN."""
    teacher, student = teacher.clamp(min=-1e4), student.clamp(min=-1e4)

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)                          # sum over tokens of a (log a - log b)

    if kind == "forward":
        return kl(teacher, student)
    if kind == "reverse":
        return kl(student, teacher)
    middle = torch.logaddexp(teacher, student) - np.log(2)
    return (kl(teacher, middle) + kl(student, middle)) / 2


def distil(student, teacher, prompts, rollouts, w, tok, s):
    """Sum of w D over the committed tokens of some rollouts, w (n, length). No gradient reaches the teacher."""
    q, _, row, place = diffusion.replay(student, prompts, rollouts, tok, s.block_len)    # (m, vocab), (m,), (m,)
    with torch.no_grad():
        causal = diffusion.pack(prompts, [r.tokens for r in rollouts], tok, block_len=1)
        there = torch.arange(causal.target.shape[1]) < torch.tensor([len(r.tokens) for r in rollouts])[:, None]
        p, _ = diffusion.score(teacher, causal, there, tok)                              # one line a token, by (row, i)
        at = there.flatten().cumsum(0).view(there.shape).to(row.device)[row, place] - 1  # the line of (row, i)
    d = divergence(p[at].log_softmax(-1), q.log_softmax(-1), s.kl)                       # (m,)
    return (w.to(q.device)[row, place] * d).sum()


def main(argv=None):
    s = settings.parse(OPDSettings, PRESETS, __doc__, argv)
    sample.check_settings(s.block_len, s.tau, s.temperature)
    if s.temperature == 0 and s.group > 1:
        raise checkpoint.UserError("--temperature 0: all rollouts of a prompt would be the same; give --group 1")
    if s.kl not in KINDS:
        raise checkpoint.UserError(f"--kl {s.kl}: one of {', '.join(KINDS)}")
    folder, tok, summary = stage.load_data(s)
    k = summary["config"]["candidates"]
    checkpoint.need(s, s.start)
    checkpoint.need(s, s.teacher)
    model, s.block_len = checkpoint.open_student(s, s.start, tok, summary, s.block_len)
    teacher, _ = checkpoint.open_model(s, s.teacher, tok, summary)
    teacher.requires_grad_(False)
    stage.check_fits(model.cfg, prepare.Rows(folder / "all.npz"), s.block_len, k)
    run = stage.Run(s.name, s, model, tok, summary, noise=0.0)      # the least divergence, over thousands of tokens, is kept

    def roll_out(rows, chosen, *key):
        prompts, groups = stage.roll_out(model, rows, chosen, tok, s, k, *key)
        return [(prompt, r) for prompt, group in zip(prompts, groups) for r in group]

    def micro_batches(pairs):
        """One denominator over all: the weights are known before any forward is scored."""
        parts = []
        for lo in range(0, len(pairs), s.micro or len(pairs)):
            prompts, rollouts = map(list, zip(*pairs[lo:lo + (s.micro or len(pairs))]))
            w = diffusion.token_weights([r.tokens for r in rollouts], max(len(r.tokens) for r in rollouts), tok,
                                        s.reasoning, s.answer, 0.0)
            parts.append((lambda p=prompts, r=rollouts, w=w: distil(run.model, teacher, p, r, w, tok, s), float(w.sum())))
        return parts

    # === A step: decode, let the teacher read, score the student where it committed ======================
    rows = prepare.Rows(folder / "all.npz")
    alike = np.zeros(len(rows), dtype=int)                          # batches by length would be batches of like tasks

    def batch_loss(step):
        with run.autocast():                                        # as it validates, and as it is scored
            pairs = roll_out(rows, stage.batch_rows(alike, s.batch, s.seed, step), s.seed, step)
        tokens = sum(len(r.tokens) for _, r in pairs)
        run.log(rollout_tokens_per_nfe=tokens / sum(r.nfe for _, r in pairs),
                rollout_no_eos=sum(r.tokens[-1] != tok.eos for _, r in pairs))
        return micro_batches(pairs), diffusion.replay_tokens(*zip(*pairs), s.block_len)

    # === Validate: the divergence on the student's own outputs, and free greedy decoding =================
    # Validation prompts have all k candidates. Training rows that show fewer are the harder part of the training loss.
    prompts, targets = evaluate.validation_users(folder, s.eval_users)
    held = prepare.Rows(folder / "valid.npz")
    fixed = list(range(0, len(held), max(len(held) // 48, 1)))[:48]

    def validate(model):
        with torch.no_grad(), run.autocast():
            parts = micro_batches(roll_out(held, fixed, 12345))
            kl = sum(float(f()) for f, _ in parts) / stage.denominator(parts)
        decoded = evaluate.validate_by_decoding(model, tok, prompts, targets, k, s.block_len, s.tau, run.autocast())
        return {"kl": kl} | decoded | {"score": -kl}                # what this stage is for decides what is kept

    run.train(batch_loss, validate, start_competes=True)            # the curve begins where CFT ended
    evaluate.show_step(s, folder, tok, summary, run.autocast())


if __name__ == "__main__":
    settings.main(main)
