"""Stage 3, reinforcement learning (RL) on the ranking reward, over denoising trajectories.

Paper, "The three stages", 3: GRPO (Shao et al., 2024) with DAPO's (Yu et al., 2025) token-level loss. G rollouts of a
prompt, decoded by the real parallel decoder; each is rewarded; the ones above their group's mean become more likely.

    reward      R = (rank before - rank after) / n + 0.2 if the target strictly rose, or stayed first      ranking.reward
                R = -1 for anything that is no permutation; such a rollout stays in its group
    advantage   A = (R - mean of the group) / std of the group;  a group with equal rewards says nothing and is dropped
    ratio       rho_i = exp(log p_theta(x_i | canvas) - log p_old(x_i | canvas)),  canvas = what the decoder saw at the
                step at which it committed token i                                                          diffusion.replay
    loss        - mean over kept groups of  sum_i min(rho_i A, clip(rho_i, 1 - eps, 1 + eps) A) / tokens of the group
    anchor      + beta times the mean over these tokens of KL(p_theta || p_start), GRPO's, exact over the vocabulary; the
                paper and DAPO have none (--kl-weight 0)

i runs over the committed tokens up to and including the first <eos>; p is at the rollouts' temperature. At block length 1 a
trajectory is a causal row, its replay the plain AR forward, and this same file is the AR teacher's RL, with which
train_ar.py ends.

    python train_rl.py --preset mini         # the whole chain, where a stage is missing
    python train_rl.py --preset mini --block-len 1 --start ar_sft --name ar

The policy chooses tokens; *when* they are committed is treated as given (TraceRL, Wang et al., 2025, does the same).
Left out: a value function, rollouts by older policies than the last phase's, and DAPO's dynamic sampling: dropped groups
are not replaced, so a step learns from those of its groups that are left. A run that is resumed between the steps of one
phase draws that phase's rollouts anew.
"""
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import checkpoint
import diffusion
import evaluate
import ranking
import sample
import settings
import stage
from data import prepare
from settings import flag
from train_opd import divergence


@dataclass
class RLSettings(settings.OnPolicySettings):
    UNUSED = ("micro", "reasoning", "answer")                      # of the flags that other stages have
    name: str = flag("rl", "name of the weights that are written, <out>/<name>.pt")
    start: str = flag("opd", "name of the weights to start from")
    dtype: str = flag("auto", "of decoded validation: float32, bfloat16, or auto; rollouts and ratios are float32")
    group: int = flag(8, "rollouts of a prompt")
    minibatches: int = flag(2, "optimiser steps of a phase, whose rollouts are of batch x minibatches prompts, each step on "
                               "its own share; with 1 the ratio is always 1 and --epsilon never acts")
    epsilon: float = flag(0.2, "the ratio is clipped to 1 - epsilon ... 1 + epsilon")
    kl_weight: float = flag(0.0, "beta, weight in the loss of KL(policy || start); 0: none, logged every --log-every steps")
    advantage: str = flag("std", "of a rollout: std, (R - mean) / std of its group; or mean, R - mean")


PRESETS = {
    "mini": dict(steps=10, batch=4, lr=1e-4, warmup=2, eval_every=10, eval_users=256, log_every=5, advantage="mean",
                 kl_weight=0.3, temperature=0.6),
    "small": dict(steps=60, batch=16, lr=3e-5, warmup=10, eval_every=60, eval_users=2544, log_every=10, advantage="mean",
                  kl_weight=0.3, temperature=0.6, tau=0.6),         # at .6, twice as many rollouts are invalid as at .9
    "beauty": dict(steps=600, batch=32, lr=5e-6, warmup=10, eval_every=50, eval_users=2000, log_every=10),
}


# === 1. What is computed from a batch of rollouts =====================================================================

def advantages(rewards, kind="std"):
    """(groups, G) rewards -> advantages (groups, G), and which groups to keep: those whose rewards differ.

    kind "std" is the paper's. It makes all groups weigh the same: one whose rollouts differ in a place or two of the
    target as much as one where a rollout is no permutation at all. "mean" (one half of Dr. GRPO, Liu et al., 2025; the
    other, no division by length, is not done here) leaves rewards in their unit: what costs most weighs most."""
    std = rewards.std(dim=1, correction=0, keepdim=True)
    keep = std[:, 0] > 1e-6
    above = rewards - rewards.mean(dim=1, keepdim=True)
    return above / std.clamp(min=1e-6) if kind == "std" else above, keep


def policy_loss(logp, old, advantage, epsilon):
    """The clipped objective of each token, (m,) each -> (m,); and which tokens the clip holds back (m,)."""
    ratio = (logp - old).exp()
    free, held = ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage
    return -torch.minimum(free, held), held < free


def replayed(model, prompts, rollouts, tok, s):
    """Log-probabilities of all committed tokens under `model`, on the canvases on which they were committed.

    Returns logp (m, vocab) at the rollouts' temperature, chosen (m,), row (m,) and the recorded log-probability (m,)."""
    logits, target, row, place = diffusion.replay(model, prompts, rollouts, tok, s.block_len)
    old = torch.tensor([rollouts[r].logprob[i] for r, i in zip(row.tolist(), place.tolist())])
    logp = (logits / s.temperature).log_softmax(-1)
    return logp, logp.gather(1, target[:, None])[:, 0], row, old.to(logp.device)


def group_loss(model, prompt, rollouts, advantage, tok, s, start=None):
    """Loss of one group: the sum over its tokens, divided by their number. Also what to watch, as sums over the tokens;
    with it, where `start` is given, KL(policy || start) on the same canvases, which --kl-weight adds to the loss."""
    prompts = [prompt] * len(rollouts)
    logp, chosen, row, old = replayed(model, prompts, rollouts, tok, s)
    loss, held = policy_loss(chosen, old, advantage.to(row.device)[row], s.epsilon)      # (m,), (m,)
    kl = None
    if start is not None:
        with torch.no_grad():
            other = replayed(start, prompts, rollouts, tok, s)[0]                        # (m, vocab)
        kl = divergence(other, logp, "reverse")                                          # (m,) exact, over the vocabulary
        loss = loss + s.kl_weight * kl
    with torch.no_grad():
        p = logp.exp()                                              # 0 for <mask> and <pad>, whose logp is -inf
        watch = {"tokens": len(old), "entropy": -float(torch.where(p > 0, p * logp, 0.0).sum()),
                 "clipped": float(held.sum()), "ratio_off": float(((chosen - old).exp() - 1).abs().max())}
        if kl is not None:
            watch["kl_to_start"] = float(kl.sum())
    return loss.sum() / len(old), watch


# === 2. Rollouts ======================================================================================================

@dataclass
class Batch:
    """Rollouts of one policy. version: the optimiser step at which they were made."""
    version: int
    prompts: list             # groups
    rollouts: list            # groups x G
    rewards: torch.Tensor     # (groups, G)
    parts: list               # groups x G, the same as dicts
    parsed: list              # groups x G
    targets: list

    def share(self, i, n):
        """The i-th of n equal shares of the groups."""
        size = len(self.prompts) // n
        cut = slice(i * size, (i + 1) * size)
        return Batch(self.version, *(x[cut] for x in (self.prompts, self.rollouts, self.rewards, self.parts, self.parsed,
                                                      self.targets)))


def roll_out(model, rows, chosen, tok, s, step, k):
    """G rollouts of each chosen row, judged. Noise is keyed by (seed, step, row, rollout)."""
    targets, counts = [int(rows.target[i]) for i in chosen], [int(rows.n[i]) for i in chosen]
    prompts, rollouts = stage.roll_out(model, rows, chosen, tok, s, k, s.seed, step)
    parsed = [[ranking.parse(r.tokens, tok, n) for r in group] for group, n in zip(rollouts, counts)]
    parts = [[ranking.reward(p, t, n) for p in group] for group, t, n in zip(parsed, targets, counts)]
    rewards = torch.tensor([[x["total"] for x in group] for group in parts])
    return Batch(step, prompts, rollouts, rewards, parts, parsed, targets)


def describe(b, kept, block_len):
    """What to watch beside the loss: parts of the reward, failures by kind, copies (apart for users whose input order
    was already best; a case without users is left out), tokens per forward, and the tokens that replay reads as a share
    of those of one forward a step, each over the prompt and the blocks up to the active one."""
    flat, parts = [p for group in b.parsed for p in group], [x for group in b.parts for x in group]
    copies = [(ranking.copied(p), t == 0) for group, t in zip(b.parsed, b.targets) for p in group]
    runs = [r for group in b.rollouts for r in group]
    prompts = [p for p, group in zip(b.prompts, b.rollouts) for _ in group]
    one_by_one = sum((max(r.step[end - block_len:end]) + 1) * (len(p) + end)
                     for p, r in zip(prompts, runs) for end in range(block_len, len(r.canvas) + 1, block_len))

    def share(values):
        return sum(values) / len(values)

    cases = {"target_first": [c for c, first in copies if first], "target_later": [c for c, first in copies if not first]}
    return {"reward": float(b.rewards.mean()), **{f"reward_{k}": share([x[k] for x in parts])
                                                  for k in ("rank", "format", "invalid")},
            "groups": len(kept), "dropped_groups": int((~kept).sum()), "valid": share([p.failure is None for p in flat]),
            "failures": {f: n for f in ranking.FAILURES if (n := sum(p.failure == f for p in flat))},
            **{f"copy_rate_{case}": share(values) for case, values in cases.items() if values},
            "tokens_per_nfe": sum(len(r.tokens) for r in runs) / sum(r.nfe for r in runs),
            "replay_share": diffusion.replay_tokens(prompts, runs, block_len) / one_by_one}


def main(argv=None):
    s = settings.parse(RLSettings, PRESETS, __doc__, argv)
    sample.check_settings(s.block_len, s.tau, s.temperature)
    if s.group < 2 or s.temperature == 0:
        raise checkpoint.UserError("--group at least 2 and --temperature above 0: rollouts must differ")
    if s.advantage not in ("std", "mean"):
        raise checkpoint.UserError(f"--advantage {s.advantage}: std or mean")
    folder, tok, summary = stage.load_data(s)
    checkpoint.need(s, s.start)
    k = summary["config"]["candidates"]
    (model, block_len), (start, _) = (checkpoint.open_student(s, s.start, tok, summary, s.block_len) for _ in range(2))
    start.requires_grad_(False)
    s.block_len = block_len

    # === 3. A step: its share of the groups, replayed ===================================================
    rows = prepare.Rows(folder / "all.npz")
    stage.check_fits(model.cfg, rows, s.block_len, k)
    hits = np.flatnonzero(rows.target >= 0)                         # without the target there is nothing to reward
    alike = np.zeros(len(hits), dtype=int)                          # batches by length would be batches of like tasks
    run = stage.Run(s.name, s, model, tok, summary, exact=True)     # first ratios are 1 to about 1e-5; in bf16, to 1e-2
    state = {"batch": None}

    def batch_loss(step):
        phase, share = divmod(step, s.minibatches)
        if share == 0 or state["batch"] is None:                    # after a resume within a phase: fresh rollouts
            chosen = np.concatenate([hits[stage.batch_rows(alike, s.batch, s.seed, phase * s.minibatches + j)]
                                     for j in range(s.minibatches)])
            state["batch"] = roll_out(model, rows, chosen, tok, s, step, k)
        b = state["batch"].share(share, s.minibatches)
        advantage, keep = advantages(b.rewards, s.advantage)
        kept = keep.nonzero()[:, 0].tolist()
        told = describe(b, keep, s.block_len) | {"version": b.version}
        if not kept:
            run.log(**told)                                         # all equal: nothing to learn in this step
        watched = []                                                # one a kept group: entropy and the like are of those

        def forward(i):
            loss, watch = group_loss(run.model, b.prompts[i], b.rollouts[i], advantage[i], tok, s,
                                     start if s.kl_weight or step % s.log_every == 0 else None)
            watched.append(watch)
            if len(watched) == len(kept):
                tokens = sum(w["tokens"] for w in watched)
                means = {key: sum(w[key] for w in watched) / tokens for key in watch if key not in ("tokens", "ratio_off")}
                run.log(**told, **means, ratio_off=max(w["ratio_off"] for w in watched))
            return loss

        tokens = sum(diffusion.replay_tokens([b.prompts[i]] * s.group, b.rollouts[i], s.block_len) for i in kept)
        return [(lambda i=i: forward(i), 1.0) for i in kept], tokens

    # === 4. Validate by free decoding, greedily; keep some rollouts as text ==============================
    prompts, targets = evaluate.validation_users(folder, s.eval_users)

    texts = Path(s.out) / f"{s.name}.rollouts.txt"
    if not s.resume:
        texts.unlink(missing_ok=True)

    def validate(model):
        if state["batch"]:
            with open(texts, "a") as f:
                for r, reward in zip(state["batch"].rollouts[0][:2], state["batch"].rewards[0]):
                    f.write(f"step {run.step}, reward {reward:.2f}, {r.nfe} forwards\n{tok.text(r.tokens)}\n\n")
        return evaluate.validate_by_decoding(model, tok, prompts, targets, k, s.block_len, s.tau, run.autocast())

    run.train(batch_loss, validate, start_competes=True)
    if s.block_len > 1:                                             # train_ar.py shows its own
        evaluate.show_step(s, folder, tok, summary, run.autocast())


if __name__ == "__main__":
    settings.main(main)
