"""The sampler against the plain loops that it must equal."""
import pytest
import torch

import diffusion
import sample
from plumbing import checkpoint, demo, speed
from sample import Decoder, decode


def plain_ar(model, prompt, tok, max_len):
    """One full forward per token, without a cache: the decoder at block length 1 must give the same."""
    tokens, n = list(prompt), 0
    while len(tokens) - len(prompt) < max_len:
        x = torch.tensor([tokens])
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        with torch.no_grad():
            h = model(x, torch.arange(x.shape[1])[None], mask)
        tokens.append(int(diffusion.output_logits(model, h[:, -1], tok).argmax()))
        n += 1
        if tokens[-1] == tok.eos:
            break
    return tokens[len(prompt):], n


def plain_blocks(model, prompt, tok, b, tau, blocks):
    """Block decoding without a cache: every step packs prompt, finished blocks and canvas anew, with training's mask.
    Returns the canvas, the log-probabilities and the number of forwards."""
    y, logp, nfe = [], [], 0
    for block in range(blocks):
        now, fixed = [tok.mask] * b, [False] * b
        lp = [0.0] * b
        while not all(fixed):
            out = torch.tensor(y + now)[None]
            u = diffusion.shift(torch.tensor([prompt[-1]]), out)
            hidden = torch.tensor([[False] * len(y) + [not f for f in fixed]])
            view = diffusion.canvas(u, hidden, tok.mask, b)
            head = prompt[:-1]
            tokens = torch.cat((torch.tensor([head]), u[:, :len(y)], view[:, len(y):]), 1)
            blk = torch.cat((torch.arange(len(head)) - len(head), torch.arange(len(y) + b) // b))
            mask = diffusion.may_look(blk, blk)
            with torch.no_grad():
                h = model(tokens, torch.arange(tokens.shape[1])[None], mask)
            lps, token = diffusion.output_logits(model, h[:, -b:], tok).log_softmax(-1).max(-1)
            commit = diffusion.commit(lps.exp(), ~torch.tensor([fixed]), tau)[0]
            nfe += 1
            for j in range(b):
                if commit[j]:
                    now[j], fixed[j], lp[j] = int(token[0, j]), True, lps[0, j].item()
        y, logp = y + now, logp + lp
        if tok.eos in now:
            break
    return y, logp, nfe


def test_block_length_one_is_ar(model, prompts, tok):
    for prompt, _ in prompts[:4]:
        [r] = decode(model, [prompt], tok, block_len=1, max_len=24)
        tokens, n = plain_ar(model, prompt, tok, 24)
        assert r.tokens == tokens and r.nfe == n


@pytest.mark.parametrize("b,tau", [(1, 1.0), (4, 1.0), (4, 0.05), (7, 0.02)])
def test_cached_equals_uncached(model, prompts, tok, b, tau):
    for prompt, _ in prompts[::5]:
        [r] = decode(model, [prompt], tok, block_len=b, tau=tau, max_len=3 * b)
        canvas, logp, nfe = plain_blocks(model, prompt, tok, b, tau, 3)
        assert r.canvas == canvas and r.nfe == nfe
        assert torch.allclose(torch.tensor(r.logprob), torch.tensor(logp), atol=1e-5)


@pytest.mark.parametrize("b", [1, 5])
def test_batch_equals_singles(model, prompts, tok, b):
    """Unequal prompts, rows that stop and commit at different steps."""
    batch = decode(model, [p for p, _ in prompts], tok, block_len=b, tau=0.03, max_len=20)
    for (prompt, _), r in zip(prompts, batch):
        [single] = decode(model, [prompt], tok, block_len=b, tau=0.03, max_len=20)
        assert r.tokens == single.tokens and r.nfe == single.nfe and r.step == single.step
        assert torch.allclose(torch.tensor(r.logprob), torch.tensor(single.logprob), atol=1e-4)


def test_rows_stop_at_eos_and_leave(model, prompts, tok):
    """With <eos> made likely, rows end early and at different blocks; nothing follows the first <eos>."""
    model.embed.weight.data[tok.eos] = model.embed.weight.data.mean(0) + 2.0
    batch = decode(model, [p for p, _ in prompts], tok, block_len=4, tau=0.5, max_len=40, temperature=1.5,
                   seeds=list(range(len(prompts))))
    ends = [len(r.tokens) for r in batch if r.tokens[-1] == tok.eos]
    assert len(set(ends)) > 1
    for r in batch:
        assert tok.eos not in r.tokens[:-1] and len(r.canvas) % 4 == 0 and len(r.step) == len(r.canvas)


def test_noise_belongs_to_the_row(model, prompts, tok):
    """Sampled outputs do not depend on how the prompts are split into batches, and differ between seeds."""
    p, seeds = [p for p, _ in prompts], list(range(12))
    one = decode(model, p, tok, 4, 0.2, 16, temperature=1.0, seeds=seeds, batch=12)
    many = decode(model, p, tok, 4, 0.2, 16, temperature=1.0, seeds=seeds, batch=5)
    assert [r.tokens for r in one] == [r.tokens for r in many]
    other = decode(model, p, tok, 4, 0.2, 16, temperature=1.0, seeds=[s + 99 for s in seeds])
    assert [r.tokens for r in one] != [r.tokens for r in other]


def test_mask_and_pad_are_never_committed(model, prompts, tok):
    model.embed.weight.data[tok.mask] = model.embed.weight.data[tok.pad] = 9.0      # as attractive as can be
    for r in decode(model, [p for p, _ in prompts[:4]], tok, 4, 0.1, 16, temperature=2.0, seeds=[0, 1, 2, 3]):
        assert tok.mask not in r.canvas and tok.pad not in r.canvas


def test_nfe_counts_forwards_and_each_step_commits(model, prompts, tok):
    calls = []
    inner = model.forward
    model.forward = lambda *a, **k: calls.append(a[0].shape) or inner(*a, **k)
    [r] = decode(model, [prompts[3][0]], tok, block_len=4, tau=1.0, max_len=12)
    model.forward = inner
    assert r.nfe == len(calls) - 1                                  # the first forward is the prefill
    for lo in range(0, len(r.step), 4):                             # tau = 1: one commit per step, all steps used
        assert sorted(r.step[lo:lo + 4]) == [0, 1, 2, 3]


def test_a_finished_block_is_read_once_and_only_for_its_own_row(model, prompts, tok):
    """Alone, a row's clean block shares the next block's first forward; in a batch, the rows that have just finished a
    block have a forward for themselves, and nobody else's tokens are read a second time."""
    inner = model.forward
    for batch, kinds in ((False, set()), (True, set())):
        for some in [prompts] if batch else [[p] for p in prompts]:
            shapes, waiting = [], [0]
            model.forward = lambda x, *a, **k: shapes.append(tuple(x.shape)) or inner(x, *a, **k)
            decoder = Decoder(model, [p for p, _ in some], tok, 4, 0.01, 20)
            shapes.clear()                                          # without the prefill

            def watch(d):
                n, finished = shapes[-1][0], waiting[0]
                before = [(finished, 4)] if 0 < finished < n else []
                assert shapes == before + [(n, 8 if finished == n else 4)]
                kinds.add("none" if not finished else "all" if finished == n else "some")
                waiting[0] = sum(row.last is not None for row in d.rows)
                shapes.clear()
            decoder.run(watch)
        assert kinds >= ({"none", "some"} if batch else {"none", "all"})


def test_only_the_active_block_changes(model, prompts, tok):
    """From step to step a committed token stays, a finished block stays, and so do the keys and values of all blocks
    but the active one and the one before it, whose clean values the next block's first step writes."""
    seen = []

    def watch(d):
        [row] = d.rows
        if row.alive:
            p, open_ = d.prompt_slots + 4 * (row.block - 1), torch.tensor([t == tok.mask for t in row.tokens])
            seen.append((row.block, list(row.out.canvas), torch.tensor(row.tokens), open_, p, d.cache.k.clone()))
    Decoder(model, [prompts[2][0]], tok, 4, 0.05, 16).run(watch)
    steps = 0
    for (block, canvas, tokens, open_, p, k), (block2, canvas2, tokens2, open2, _, k2) in zip(seen, seen[1:]):
        assert canvas2[:len(canvas)] == canvas and torch.equal(k[..., :p, :], k2[..., :p, :])
        if block == block2:
            steps += 1
            assert torch.equal(tokens[~open_], tokens2[~open_]) and not (open2 & ~open_).any()
    assert steps > 3 and block2 > 1


def test_when_a_token_is_committed_does_not_depend_on_the_draw(tok):
    """Two open positions, .6/.4 and .7/.3, at a threshold that neither reaches: the second is committed first, always,
    and holds its likelier token in 70% of the cases, as the recorded log-probability says."""
    logits = torch.tensor([[.6, .4], [.7, .3]]).log().expand(4000, 2, 2)
    now, token, logp = sample.choose(logits, torch.ones(4000, 2, dtype=torch.bool), 0.9, 1.0,
                                     [torch.Generator().manual_seed(i) for i in range(4000)])
    assert torch.equal(now, torch.tensor([False, True]).expand(4000, 2))
    assert abs((token[:, 1] == 0).float().mean() - .7) < .02
    assert torch.allclose(logp[:, 1].exp(), torch.where(token[:, 1] == 0, .7, .3))


def test_all_that_reach_the_threshold_are_committed():
    """Of three open positions at .95, .91 and .8, two at a threshold of .9, drawn or greedy; a closed one never."""
    logits = torch.tensor([[[.95, .05], [.91, .09], [.8, .2], [.99, .01]]]).log()
    for temperature in (0.0, 1.0):
        now, _, _ = sample.choose(logits, torch.tensor([[True, True, True, False]]), 0.9, temperature,
                                  [torch.Generator().manual_seed(0)])
        assert now.tolist() == [[True, True, False, False]]


def test_the_draw_reaches_the_tail_and_nothing_impossible():
    """A token of probability 1e-9, which 24 bits of a uniform number would never reach, and tokens of probability 0
    at both ends and between."""
    logp = torch.tensor([[0.0, 1e-9, 0.0, 1 - 1e-9, 0.0]], dtype=torch.float64).log().expand(4, 5)
    uniform = torch.tensor([0.0, 0.5, 1 - 2e-9, 1 - 2.0**-53], dtype=torch.float64)
    assert sample.draw(logp, uniform).tolist() == [3, 3, 3, 1]
    assert sample.draw(logp[:1], torch.tensor([1 - 5e-10], dtype=torch.float64)).tolist() == [1]


def test_bad_settings_are_named(model, prompts, tok):
    for kind in (dict(block_len=0), dict(tau=0.0), dict(tau=1.1), dict(temperature=-1.0)):
        with pytest.raises(ValueError, match=list(kind)[0].split("_")[0]):
            decode(model, [prompts[0][0]], tok, **{"block_len": 1, **kind})
    with pytest.raises(ValueError, match="ctx_len"):
        decode(model, [prompts[0][0]], tok, 1, max_len=1000)


@pytest.mark.parametrize("b", [1, 4])
def test_copies_of_one_prefill_equal_repeated_prompts(model, prompts, tok, b):
    """A group of rollouts from one prefill: the same as its prompt given three times, each row with its own noise."""
    p, seeds = [x for x, _ in prompts[::4]], list(range(9))
    group = Decoder(model, p, tok, b, 0.3, 16, 1.0, seeds, copies=3).run()
    plain = decode(model, [x for x in p for _ in range(3)], tok, b, 0.3, 16, 1.0, seeds)
    assert [r.tokens for r in group] == [r.tokens for r in plain]
    assert torch.allclose(torch.tensor(group[4].logprob), torch.tensor(plain[4].logprob), atol=1e-4)
    assert group[0].tokens != group[1].tokens                       # same prompt, other noise


def test_block_length_one_is_a_plain_cached_loop(model, prompts, tok):
    """Token for token, for untrained weights and for the AR weights of the clone on users that come with it."""
    for prompt, _ in prompts[:4]:
        [r] = decode(model, [prompt], tok, block_len=1, max_len=24)
        assert r.tokens == speed.plain_loop(model, prompt, tok, 24)[0][0].tokens
    users, tok, summary = demo.load("small")
    model, _ = checkpoint.load_model(checkpoint.SHIPPED / "small" / "ar.pt", tok, summary, "")
    for user in list(users.values())[:5]:
        [r] = decode(model, [user.prompt], tok, block_len=1, max_len=114)
        assert r.tokens == speed.plain_loop(model, user.prompt, tok, 114)[0][0].tokens and r.tokens[-1] == tok.eos


@pytest.mark.parametrize("b", [1, 4])
def test_the_device_is_asked_once_per_step(model, prompts, tok, b, monkeypatch):
    """A step reads one tensor back, whatever the batch: on a GPU every further look would wait for it."""
    looks = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, *a, real=real, name=name: looks.append(name) or real(x, *a))
    decoder = Decoder(model, [p for p, _ in prompts], tok, b, 0.05, 16)
    looks.clear()
    counts = []

    def watch(_):
        counts.append(len(looks))
        looks.clear()
    decoder.run(watch)
    assert len(counts) > 4 and set(counts) == {1}
