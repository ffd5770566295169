"""Stage 3, reinforcement learning (RL) on the ranking reward, over denoising trajectories.

Paper, "The three stages", 3: GRPO (Shao et al., 2024) with DAPO's (Yu et al., 2025) token-level loss. G rollouts of a
prompt are decoded by the real parallel decoder. Each is rewarded, and those above the mean of their group become likelier:

    reward      R = (rank before - rank after) / n + 0.2 if the target strictly rose, or stayed first      ranking.reward
                R = -1 for anything that is no permutation; such a rollout stays in its group
    advantage   A = (R - mean of the group) / std of the group; a group with equal rewards teaches nothing and is dropped
    ratio       rho_i = exp(log p_theta(x_i | canvas) - log p_old(x_i | canvas)); the canvas is what the decoder saw at
                the step at which it committed token i                                                   diffusion.replay
    loss        - mean over kept groups of  sum_i min(rho_i A, clip(rho_i, 1 - eps, 1 + eps) A) / tokens of the group
    anchor      + beta times the mean over these tokens of KL(p_theta || p_start), which is GRPO's, exact over the
                vocabulary; the paper and DAPO have none (--kl-weight 0)

i runs over the committed tokens up to and including the first <eos>, and p is at the temperature of the rollouts. At block
length 1 a trajectory is a causal row and its replay is the plain AR forward, so this same file is the AR teacher's RL:

    python train_rl.py --preset mini         # the whole chain, where a stage is missing
    python train_rl.py --preset mini --block-len 1 --start ar_sft --name ar

The policy chooses tokens. *When* they are committed is treated as given (TraceRL, Wang et al., 2025, does the same).
Left out: a value function, older rollouts, and DAPO's dynamic sampling: a dropped group is not
replaced, so a step learns from those of its groups that are left. A run that is resumed between the steps of one phase
draws that phase's rollouts anew.
"""
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import diffusion
import ranking
from data.rows import Rows
from plumbing import chain, checkpoint, ladder, loop, settings
from plumbing.settings import UserError, flag
from sample import Rollout, check_settings


@dataclass
class RLSettings(settings.OnPolicySettings):
    UNUSED = ("reasoning", "answer")                                # flags of the other stages
    name: str = flag("rl", "name of the weights that are written, <out>/<name>.pt", pattern=r"\w[\w-]*")
    start: str = flag("opd", "name of the weights to start from", pattern=r"\w[\w-]*")
    dtype: str = flag("auto", "of decoded validation: float32, bfloat16, or auto; rollouts and ratios are float32",
                      choices=("auto", "float32", "bfloat16"))
    micro: int = flag(0, "only for the stages that run first; RL replays one group per forward", at_least=0)
    group: int = flag(8, "rollouts per prompt", at_least=2)
    minibatches: int = flag(2, "optimiser steps per phase of rollouts, each on its own share of them; with 1 the ratio is "
                               "always 1 and --epsilon never acts", at_least=1)
    epsilon: float = flag(0.2, "the ratio is clipped to 1 - epsilon ... 1 + epsilon", at_least=0)
    kl_weight: float = flag(0.0, "beta, the weight of KL(policy || start) in the loss; at 0 it is logged every --log-every "
                                 "steps", at_least=0)
    advantage: str = flag("std", "of a rollout: std, (R - mean) / std of its group; or mean, R - mean", choices=("std", "mean"))


PRESETS = {
    "mini": dict(steps=10, batch=4, lr=1e-4, warmup=2, eval_every=10, eval_users=256, log_every=5, advantage="mean",
                 kl_weight=0.3, temperature=0.6),
    "small": dict(steps=60, batch=16, lr=3e-5, warmup=10, eval_every=60, eval_users=2544, log_every=10, advantage="mean",
                  kl_weight=0.3, temperature=0.6, tau=0.6),         # at .6 twice as many rollouts are invalid as at .9
    "beauty": dict(steps=600, batch=32, lr=5e-6, warmup=10, eval_every=50, eval_users=2000, log_every=10),
}
AR_PRESETS = {                                                      # what differs at block length 1, for ar.pt
    "small": dict(steps=100, advantage="std", kl_weight=0.0, temperature=1.0),           # the paper's RL
    "beauty": dict(steps=300),
}


# === 1. Roll out and reward ===========================================================================================

@dataclass
class Episode:
    """One rollout and all that is known about it."""
    prompt: list              # tokens
    target: int               # position of the true next purchase among the candidates, from 0
    rollout: Rollout          # the trajectory: tokens, the step and the log-probability of each
    parsed: ranking.Parsed    # the order, or the name of the failure
    reward: dict              # parts and "total"
    advantage: float = 0.0


def play(model, rows, chosen, tok, s, step, n_candidates):
    """Roll out and reward the chosen rows: one group (a list of G Episodes) per row. Noise is keyed by (seed, step, row)."""
    prompts, rollouts = loop.rollout_groups(model, rows, chosen, tok, s, n_candidates, s.seed, step)
    groups = []
    for i, prompt, group in zip(chosen, prompts, rollouts):
        target, n_shown, episodes = int(rows.target[i]), int(rows.n_shown[i]), []
        for r in group:
            parsed = ranking.parse(r.tokens, tok, n_shown)
            episodes.append(Episode(prompt, target, r, parsed, ranking.reward(parsed, target, n_shown)))
        groups.append(episodes)
    return groups


# === 2. Normalise =====================================================================================================

def advantages(rewards, kind="std"):
    """Rewards (groups, G) -> advantages (groups, G), and which groups to keep (groups,): those whose rewards differ.

    "std" is the paper's. It makes all groups weigh the same: one whose target moved by a place as much as one in which a
    rollout is no permutation at all. "mean" leaves rewards in their unit, so what costs most weighs most (one half of Dr.
    GRPO, Liu et al., 2025; its other half, no division by length, is not done here).
    """
    std = rewards.std(dim=1, correction=0, keepdim=True)            # (groups, 1)
    above = rewards - rewards.mean(dim=1, keepdim=True)             # (groups, G)
    return above / std.clamp(min=1e-6) if kind == "std" else above, std[:, 0] > 1e-6


def normalise(groups, kind):
    """Write each Episode's advantage. Returns the groups to keep."""
    values, keep = advantages(torch.tensor([[e.reward["total"] for e in group] for group in groups]), kind)
    for group, row in zip(groups, values.tolist()):
        for e, value in zip(group, row):
            e.advantage = value
    return [group for group, kept in zip(groups, keep.tolist()) if kept]


# === 3. Update ========================================================================================================

def replayed(model, group, tok, s):
    """Log-probabilities of a group's committed tokens under `model`, on the canvases on which they were committed.

    Returns logp (m, vocab) at the temperature of the rollouts, chosen (m,), row (m,), the recorded log-probability (m,).
    """
    rollouts = [e.rollout for e in group]
    logits, target, row, place = diffusion.replay(model, [e.prompt for e in group], rollouts, tok, s.block_len)
    old = torch.tensor([rollouts[r].logprob[i] for r, i in zip(row.tolist(), place.tolist())])
    logp = (logits / s.temperature).log_softmax(-1)
    return logp, logp.gather(1, target[:, None])[:, 0], row, old.to(logp.device)


def policy_loss(logp, old, advantage, epsilon):
    """The clipped objective per token, (m,) each -> (m,); and which tokens the clip holds back, (m,) booleans."""
    ratio = (logp - old).exp()
    free, held = ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage
    return -torch.minimum(free, held), held < free


def group_loss(model, group, tok, s, start=None):
    """Loss of one group: the sum over all its tokens, divided by their number, so a longer rollout weighs more.

    start: the weights of the anchor, or None for none. Also returns what to watch, as sums over the tokens. Example, two
    rollouts of 3 and 2 tokens with advantages 1 and -1, before any update (all ratios are 1):

        loss = (-1 -1 -1 +1 +1) / 5 = -0.2
    """
    logp, chosen, row, old = replayed(model, group, tok, s)
    advantage = torch.tensor([e.advantage for e in group], device=row.device)[row]       # (m,)
    loss, held = policy_loss(chosen, old, advantage, s.epsilon)                          # (m,), (m,)
    kl = None
    if start is not None:
        with torch.no_grad():
            anchor = replayed(start, group, tok, s)[0]                                   # (m, vocab)
        kl = diffusion.divergence(anchor, logp, "reverse")                               # (m,) KL(policy || start)
        loss = loss + s.kl_weight * kl
    with torch.no_grad():
        p = logp.exp()                                              # 0 for <mask> and <pad>, whose logp is -inf
        watch = {"tokens": len(old), "entropy": -float(torch.where(p > 0, p * logp, 0.0).sum()),
                 "clipped": float(held.sum()), "ratio_off": float(((chosen - old).exp() - 1).abs().max())}
        if kl is not None:
            watch["kl_to_start"] = float(kl.sum())
    return loss.sum() / len(old), watch


# === 4. What to watch =================================================================================================

def describe(groups, kept, block_len):
    """Of all rollouts of a step: parts of the reward, failures, copies, tokens per forward, what replay reads.

    Copies are told apart by whether the input order was already best; a case without users is left out. replay_share: the
    tokens that replay reads, as a share of one forward per step over the prompt and the blocks up to the active one.
    """
    episodes = [e for group in groups for e in group]
    one_by_one = sum((max(e.rollout.step[end - block_len:end]) + 1) * (len(e.prompt) + end) for e in episodes
                     for end in range(block_len, len(e.rollout.canvas) + 1, block_len))
    read = diffusion.replay_tokens([e.prompt for e in episodes], [e.rollout for e in episodes], block_len)

    def share(values):
        return sum(values) / len(values)

    told = {"reward": float(torch.tensor([e.reward["total"] for e in episodes]).mean())}
    told |= {f"reward_{part}": share([e.reward[part] for e in episodes]) for part in ("rank", "format", "invalid")}
    told |= {"groups": len(groups), "dropped_groups": len(groups) - len(kept),
             "valid": share([e.parsed.failure is None for e in episodes]),
             "failures": {f: n for f in ranking.FAILURES if (n := sum(e.parsed.failure == f for e in episodes))}}
    for case, first in (("target_first", True), ("target_later", False)):
        if copies := [ranking.copied(e.parsed) for e in episodes if (e.target == 0) == first]:
            told[f"copy_rate_{case}"] = share(copies)
    return told | {"tokens_per_nfe": sum(len(e.rollout.tokens) for e in episodes) / sum(e.rollout.nfe for e in episodes),
                   "replay_share": read / one_by_one}


def means(watched):
    """What was watched in the groups of a step, as means over their tokens; ratio_off is the largest."""
    if not watched:
        return {}
    tokens = sum(w["tokens"] for w in watched)
    found = {key: sum(w[key] for w in watched) / tokens for key in watched[0] if key not in ("tokens", "ratio_off")}
    return found | {"ratio_off": max(w["ratio_off"] for w in watched)}


def write_texts(path, step, group, tok):
    """Two rollouts of a group as text, for a look at what earns which reward."""
    with open(path, "a", encoding="utf-8") as f:
        for e in group[:2]:
            f.write(f"step {step}, reward {e.reward['total']:.2f}, {e.rollout.nfe} forwards\n{tok.text(e.rollout.tokens)}\n\n")


# === 5. The stage =====================================================================================================

def main(argv=None):
    s = settings.parse(RLSettings, PRESETS, __doc__, argv, AR_PRESETS)
    check_settings(s.block_len, s.tau, s.temperature)
    if s.temperature == 0:
        raise UserError("--temperature 0: above 0, because the rollouts of a group must differ")
    folder, tok, summary = loop.load_data(s)
    n_candidates = summary["config"]["candidates"]
    chain.need(s, s.start, summary)
    start, _ = checkpoint.open_student(s, s.start, tok, summary, s.block_len)            # stays as it is, for the anchor
    model, s.block_len = checkpoint.open_student(s, s.start, tok, summary, s.block_len)
    start.requires_grad_(False)
    rows = Rows(folder / "all.npz")
    loop.check_fits(model.cfg, rows, s.block_len, n_candidates)
    hits = np.flatnonzero(rows.target >= 0)                         # without the target there is nothing to reward
    run = loop.Run(s.name, s, model, summary)
    batches = loop.Batches(np.zeros(len(hits), dtype=int), s.batch, s.seed)    # unsorted: by length, tasks would be alike
    users, texts = ladder.validation_users(folder, s.eval_users), Path(s.out) / f"{s.name}.rollouts.txt"
    if not s.resume:
        texts.unlink(missing_ok=True)
    phase = None                                                    # the groups of the current phase

    def validate(model):
        if phase:
            write_texts(texts, run.step, phase[0], tok)
        return ladder.validate_by_decoding(model, tok, *users, n_candidates, s.block_len, s.tau, run.autocast())

    # With --minibatches 2, step 0 rolls out two batches of prompts and learns from the first; step 1 learns from the
    # second, by then with weights that have moved on; step 2 begins the next phase.
    for step in run.steps(validate, validate_first=True):
        share = step % s.minibatches
        if share == 0 or phase is None:                             # after a resume within a phase: fresh rollouts
            chosen = [hits[batches[step - share + j]] for j in range(s.minibatches)]
            phase, version = play(model, rows, np.concatenate(chosen), tok, s, step, n_candidates), step
        size = len(phase) // s.minibatches                          # groups per step
        groups = phase[share * size:(share + 1) * size]
        kept = normalise(groups, s.advantage)
        anchor = start if s.kl_weight or step % s.log_every == 0 else None
        watched = []
        for group in kept:                                          # float32: the first ratios are 1 to about 1e-5
            loss, watch = group_loss(model, group, tok, s, anchor)
            loss = loss / len(kept)
            loss.backward()
            rollouts = [e.rollout for e in group]
            run.count(loss, diffusion.replay_tokens([e.prompt for e in group], rollouts, s.block_len))
            watched.append(watch)
        run.log(**describe(groups, kept, s.block_len), version=version, **means(watched))

    ladder.show_step(s, folder, tok, summary, run.autocast())


if __name__ == "__main__":
    settings.main(main)
