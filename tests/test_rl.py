"""RL and distillation: their arithmetic by hand, and one step of each whose effect has a known direction."""
import copy
import math

import pytest
import torch

import diffusion
import ranking
import sample
import train_cft
import train_opd
import train_rl
from conftest import link
from data.rows import Rows
from plumbing.settings import UserError
from train_rl import Episode


class Settings:
    block_len, temperature, tau, group, seed, kl, reasoning, answer = 4, 1.0, 0.3, 4, 0, "forward", 0.5, 1.0


# === RL ===============================================================================================================

def test_advantages_by_hand():
    """Centred and scaled within each group; equal rewards, even all of them -1, mark a group to be dropped."""
    a, keep = train_rl.advantages(torch.tensor([[1.0, 0, 0, -1], [.2, .2, .2, .2], [-1, -1, -1, -1]]))
    assert keep.tolist() == [True, False, False]
    assert torch.allclose(a[0], torch.tensor([1.0, 0, 0, -1]) / math.sqrt(.5)) and not a[1:].any()


def test_advantages_in_the_unit_of_the_reward():
    """Without the division a group with an invalid rollout weighs more than one whose target moved by a place."""
    rewards = torch.tensor([[.3, .3, .3, -1], [.3, .3, .3, .2], [0.0, 0, 0, 0]])
    a, keep = train_rl.advantages(rewards, "mean")
    assert keep.tolist() == [True, True, False]
    assert torch.allclose(a[:2, 3], torch.tensor([-.975, -.075])) and torch.allclose(a.sum(1), torch.zeros(3), atol=1e-6)
    scaled, _ = train_rl.advantages(rewards)
    assert torch.allclose(scaled[0], scaled[1])


def test_clipped_loss_by_hand():
    """Beyond the clip a token is held back only in the direction in which it has gone too far already."""
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    advantage = torch.tensor([2.0, 1.0, -1.0, 1.0, -1.0])
    logp = ratio.log().requires_grad_()
    loss, held = train_rl.policy_loss(logp, torch.zeros(5), advantage, 0.2)
    assert torch.allclose(loss, torch.tensor([-2.0, -1.2, 1.5, -0.5, 0.8]))
    assert held.tolist() == [False, True, False, False, True]
    loss.sum().backward()
    assert torch.allclose(logp.grad, torch.tensor([-2.0, 0, 1.5, -0.5, 0]))


@pytest.fixture
def play(model, rows, tok):
    """Settings -> groups of three prompts with a purchase among the candidates, <eos> made likely so that rows end."""
    model.embed.weight.data[tok.eos] = model.embed.weight.data.mean(0) + 1.0
    r = Rows(rows / "data" / "all.npz")
    chosen = [i for i in range(len(r)) if r.target[i] >= 0][:3]
    return lambda s: train_rl.play(model, r, chosen, tok, s, 7, 3)


@pytest.fixture
def groups(play):
    return play(Settings)


def give(group, advantages):
    """The group, with these advantages."""
    for e, a in zip(group, advantages):
        e.advantage = a
    return group


def test_rollouts_are_judged_and_kept(groups, tok):
    """Four per prompt, all different; what is no permutation has -1 and is still there."""
    assert [len(group) for group in groups] == [4, 4, 4]
    for group in groups:
        [n_shown] = ranking.shown_counts([group[0].prompt], tok)
        assert len({tuple(e.rollout.tokens) for e in group}) > 1
        for e in group:
            assert e.prompt == group[0].prompt and e.target == group[0].target
            assert e.parsed == ranking.parse(e.rollout.tokens, tok, n_shown)
            assert e.reward == ranking.reward(e.parsed, e.target, n_shown)
    told = train_rl.describe(groups, groups[:2], 4)
    replayed = one_by_one = 0
    for e in (e for group in groups for e in group):                # one forward per step: over all up to the active block
        steps = [max(e.rollout.step[at:at + 4]) + 1 for at in range(0, len(e.rollout.canvas), 4)]
        assert sum(steps) == e.rollout.nfe
        replayed += len(e.prompt) + len(e.rollout.canvas) + 4 * e.rollout.nfe
        one_by_one += sum(n * (len(e.prompt) + 4 * (block + 1)) for block, n in enumerate(steps))
    assert told["replay_share"] == pytest.approx(replayed / one_by_one)
    assert told["groups"] == 3 and told["dropped_groups"] == 1
    assert told["valid"] == 0 and told["reward"] == told["reward_invalid"] == -1


def test_groups_are_normalised_and_dropped(groups):
    """Each Episode gets its own advantage; a group with equal rewards is not among those that are kept."""
    for group, totals in zip(groups, ([1.0, 0, 0, -1], [-1.0] * 4, [.3, .3, .3, -1])):
        for e, total in zip(group, totals):
            e.reward = {"total": total}
    assert train_rl.normalise(groups, "mean") == [groups[0], groups[2]]
    assert [e.advantage for e in groups[2]] == pytest.approx([.325] * 3 + [-.975])
    train_rl.normalise(groups, "std")
    assert [e.advantage for e in groups[0]] == pytest.approx([math.sqrt(2), 0, 0, -math.sqrt(2)])


def test_copies_are_counted_by_case():
    """Apart where the target was first already; a case that no user is of is not said to be 0."""
    copy, other = ranking.Parsed([0, 1, 2], None), ranking.Parsed([2, 1, 0], None)
    run = sample.Rollout(tokens=[5], canvas=[5], step=[0], logprob=[0.0], nfe=1)
    nothing = dict(rank=0.0, format=0.0, invalid=0.0, total=0.0)

    def told(targets, parsed):
        groups = [[Episode([1, 2], t, run, p, nothing) for p in group] for t, group in zip(targets, parsed)]
        return train_rl.describe(groups, groups, 1)
    found = told([0, 2], [[copy, copy], [copy, other]])
    assert found["copy_rate_target_first"] == 1 and found["copy_rate_target_later"] == .5
    found = told([2], [[copy, other]])
    assert "copy_rate_target_first" not in found and found["copy_rate_target_later"] == .5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_ratio_is_one_and_stops_at_eos(model, play, tok, temperature):
    """Before any update the replay gives what was recorded, at the temperature at which it was drawn, for each token up
    to and with <eos> and none beyond it."""
    s = type("S", (Settings,), {"temperature": temperature})
    groups = play(s)
    for group in groups:
        logp, chosen, row, old = train_rl.replayed(model, group, tok, s)
        assert torch.allclose((chosen - old).exp(), torch.ones_like(old), atol=1e-5)
        assert torch.bincount(row, minlength=4).tolist() == [len(e.rollout.tokens) for e in group]
    rollouts = [e.rollout for group in groups for e in group]
    assert any(r.tokens[-1] == tok.eos and len(r.tokens) < len(r.canvas) for r in rollouts)     # a tail to leave out


def test_a_step_makes_the_better_rollout_likelier(model, groups, tok):
    """Plain gradient on one group: what had the higher reward gains probability against what had the lower."""
    group = groups[0]
    advantage, _ = train_rl.advantages(torch.tensor([[1.0, -1.0, 0.0, 0.0]]))

    def likely():
        _, chosen, row, old = train_rl.replayed(model, group, tok, Settings)
        return torch.stack([chosen[row == r].sum() for r in range(4)]), chosen, row, old
    before, chosen, row, old = likely()
    loss, _ = train_rl.policy_loss(chosen, old, advantage[0][row], 0.2)
    (loss.sum() / len(old)).backward()
    length = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert length > 0
    with torch.no_grad():
        for p in model.parameters():
            p -= 1e-3 * p.grad                                      # a short step: the slope is meant, not the landscape
        after = likely()[0]
    assert after[0] - before[0] > 0 > after[1] - before[1]


def test_group_loss_by_hand(model, groups, tok):
    """The sum over all tokens of a group, divided by their number: a longer rollout weighs more. Entropy and the KL to
    other weights against a plain sum over the vocabulary."""
    other = copy.deepcopy(model)
    for p in other.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3))
    group, advantage = groups[0], [1.0, -2.0, 0.5, 0.5]
    s = type("S", (Settings,), {"epsilon": 0.2, "kl_weight": 0.0})
    loss, watch = train_rl.group_loss(model, give(group, advantage), tok, s, other)
    n = [len(e.rollout.tokens) for e in group]
    assert len(set(n)) > 1                                          # or the mean of means would do as well
    assert loss.item() == pytest.approx(-sum(k * a for k, a in zip(n, advantage)) / sum(n), abs=1e-4)
    p, q = (train_rl.replayed(m, group, tok, Settings)[0].double() for m in (model, other))
    finite = p > -1e30
    assert watch["tokens"] == sum(n) and watch["clipped"] == 0 and watch["ratio_off"] < 1e-5
    assert watch["entropy"] == pytest.approx(-(p.exp() * p)[finite].sum().item(), rel=1e-4)
    kl = (p.exp() * (p - q))[finite].sum().item()
    assert watch["kl_to_start"] == pytest.approx(kl, rel=1e-3) and kl > 0
    s.kl_weight = 2.0
    anchored, _ = train_rl.group_loss(model, group, tok, s, other)
    assert (anchored - loss).item() == pytest.approx(2 * kl / sum(n), rel=1e-3)
    model.zero_grad()
    train_rl.group_loss(model, give(group, [0.0] * 4), tok, s, other)[0].backward()      # the anchor alone pulls
    assert all(torch.isfinite(p.grad).all() for p in model.parameters()) and any(p.grad.any() for p in model.parameters())
    assert all(p.grad is None for p in other.parameters())          # nor does <mask>, impossible in both, give NaN above


def test_means_weigh_groups_by_their_tokens():
    watched = [{"tokens": 3, "entropy": 6.0, "ratio_off": .1}, {"tokens": 1, "entropy": 6.0, "ratio_off": .3}]
    assert train_rl.means(watched) == {"entropy": 3.0, "ratio_off": .3} and train_rl.means([]) == {}


# === Distillation =====================================================================================================

@pytest.mark.parametrize("kind", diffusion.DIVERGENCES)
def test_distil_equals_a_plain_loop(model, groups, tok, kind):
    """Token by token: the teacher's causal distribution against the student's on the canvas, weighted; nothing after
    <eos>; the teacher gets no gradient."""
    s = type("S", (Settings,), {"kl": kind})
    teacher = copy.deepcopy(model)
    for p in teacher.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3))
    pair = groups[0][0], groups[1][1]
    prompts, rollouts = [e.prompt for e in pair], [e.rollout for e in pair]
    w = diffusion.token_weights([r.tokens for r in rollouts], max(len(r.tokens) for r in rollouts), tok, 0.5, 1.0, 0.0)
    loss = train_opd.distil(model, teacher, prompts, rollouts, w, tok, s)
    want = 0.0
    for prompt, r in zip(prompts, rollouts):
        x = torch.tensor([prompt + r.tokens[:-1]])
        n = x.shape[1]
        hidden = teacher(x, torch.arange(n)[None], torch.ones(n, n, dtype=torch.bool).tril())[0, len(prompt) - 1:]
        p = diffusion.output_logits(teacher, hidden, tok).log_softmax(-1)
        q, _, _, place = diffusion.replay(model, [prompt], [r], tok, 4)
        for i, student in zip(place.tolist(), q.log_softmax(-1)):
            w = 1.0 if tok.answer in r.tokens[:i + 1] else 0.5
            want += w * diffusion.divergence(p[i][None], student[None], kind).item()
        assert sorted(place.tolist()) == list(range(len(r.tokens)))
    assert loss.item() == pytest.approx(want, rel=1e-3)
    loss.backward()
    assert all(p.grad is None for p in teacher.parameters()) and any(p.grad.any() for p in model.parameters())
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("main,flags,says", [(train_rl.main, ["--group", "1"], "--group"), (train_opd.main, ["--kl", "x"], "--kl x"),
                                             (train_rl.main, ["--temperature", "0"], "--temperature"),
                                             (train_rl.main, ["--start", "nothing"], "nothing.pt is missing"),
                                             (train_rl.main, ["--epsilon", "-1"], "--epsilon -1"),
                                             (train_rl.main, ["--advantage", "x"], "--advantage x"),
                                             (train_rl.main, ["--block-len", "1"], "--start ar_sft"),
                                             (train_cft.main, ["--block-len", "1"], "--block-len 1"),
                                             (train_rl.main, ["--temperature", "nan"], "temperature nan"),
                                             (train_rl.main, ["--temperature", "inf"], "temperature inf"),
                                             (train_rl.main, ["--name", "floor"], "--name floor"),
                                             (train_opd.main, ["--temperature", "0"], "--temperature 0"),
                                             (train_opd.main, ["--group", "0"], "--group 0"),
                                             (train_opd.main, ["--temperature", "0.0005"], "temperature 0.0005"),
                                             (train_rl.main, ["--temperature", "0.0005"], "temperature 0.0005"),
                                             (train_opd.main, ["--name", "../x"], "--name ../x"),
                                             (train_opd.main, ["--name", "cft"], "--name cft: the stage works from these weights"),
                                             (train_cft.main, ["--name", "ar"], "--name ar: the stage works from these weights"),
                                             (train_cft.main, ["--hide-all", "7"], "--hide-all 7"),
                                             (train_cft.main, ["--tail", "-1"], "--tail -1")])
def test_mistakes_are_named(main, flags, says, rows, tmp_path):
    link(rows, tmp_path, "data")
    with pytest.raises(UserError, match=says):
        main(["--preset", "mini", "--out", str(tmp_path), "--device", "cpu", *flags])
