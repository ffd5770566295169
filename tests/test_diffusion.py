"""The conversion: the shift, the mask, the schedules, the loss and replay, each against something computed by hand."""
import itertools

import pytest
import torch
import torch.nn.functional as F

import diffusion
import sample


def ar_loss(model, prompt, output, tok):
    """Cross-entropy of an output by a plain causal forward over prompt and output, written without packing."""
    x = torch.tensor([prompt + output[:-1]])
    n = x.shape[1]
    hidden = model(x, torch.arange(n)[None], torch.ones(n, n, dtype=torch.bool).tril())[0, len(prompt) - 1:]
    return F.cross_entropy(diffusion.output_logits(model, hidden, tok), torch.tensor(output), reduction="none")


def test_at_block_length_one_the_packed_loss_is_ar(model, prompts, tok):
    p, o = zip(*prompts)
    packed = diffusion.pack(p, o, tok, block_len=1)
    w = diffusion.token_weights(o, packed.target.shape[1], tok, 0.5, 1.0, 0.0)[None]
    want = sum((ar_loss(model, a, b, tok) * w[0, r, :len(b)]).sum() for r, (a, b) in enumerate(prompts))
    assert torch.allclose(diffusion.loss_sum(model, packed, w, tok), want, rtol=1e-4)
    # With views but B = 1 nothing can be masked: each view is the AR input again.
    hidden = torch.ones(1, *packed.target.shape, dtype=torch.bool)
    views = diffusion.pack(p, o, tok, 1, hidden)
    assert torch.allclose(diffusion.loss_sum(model, views, w, tok), want, rtol=1e-4)


def test_canvas_by_hand():
    u = torch.tensor([9, 0, 1, 2, 3, 4, 5, 6])                      # 9 = last prompt token, then x_0 ... x_6
    hidden = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0]).bool()          # hide x_1, x_3 (ends a block), x_4, x_6
    assert diffusion.canvas(u, hidden, -1, 4).tolist() == [9, 0, -1, 2, 3, -1, 5, -1]
    assert diffusion.canvas(u, torch.ones(8).bool(), -1, 1).tolist() == u.tolist()
    assert diffusion.shift(torch.tensor([9]), torch.tensor([[0, 1, 2]])).tolist() == [[9, 0, 1]]


def test_alignment_with_a_model_whose_output_is_its_position(tok):
    """A stand-in whose hidden state is the position: target i must be scored at position P - 1 + i, in every view."""
    class Clock(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(1, 1)

        def forward(self, tokens, positions, mask, cache=None):
            return positions[..., None].float()

        def logits(self, hidden):
            return F.one_hot(hidden[..., 0].long(), tok.vocab).float() * 50
    prompts, outputs = [[1, 2, 3], [4, 5, 6, 7, 8]], [[7] * 5, [7] * 8]
    for b, views in ((1, None), (4, 2)):
        r = 8
        hidden = None if views is None else torch.ones(views, 2, r, dtype=torch.bool)
        packed = diffusion.pack(prompts, outputs, tok, b, hidden)
        logits, _ = diffusion.score(Clock(), packed, torch.ones(views or 1, 2, r, dtype=torch.bool), tok)
        want = torch.stack([2 + torch.arange(r), 4 + torch.arange(r)]).expand(views or 1, 2, r).flatten()
        assert torch.equal(logits.argmax(-1), want)


def perturb(model, packed, at):
    before = model(packed.tokens, packed.positions, packed.mask)
    tokens = packed.tokens.clone()
    tokens[0, at] = (tokens[0, at] + 1) % 200
    return (model(tokens, packed.positions, packed.mask) - before)[0].abs().amax(-1) > 1e-6


def test_perturbing_a_clean_block_moves_only_it_and_later_blocks(model, prompts, tok):
    prompt, output = prompts[5]
    b, hidden = 4, torch.ones(2, 1, 12, dtype=torch.bool)
    packed = diffusion.pack([prompt], [output[:12]], tok, b, hidden)
    p, r = len(prompt) - 1, 12
    moved = perturb(model, packed, p + 5)                           # an input of clean block 1
    assert packed.start == p + 8                                    # the last block's clean copy is left out
    assert not moved[:p + 4].any() and moved[p + 4:p + 8].all()     # block 1 as a whole
    for view in (0, 1):
        v = moved[p + 8 + view * r:p + 8 + (view + 1) * r]
        assert not v[:8].any() and v[8:].all()                      # views of block 2 read it, no other view does
    moved = perturb(model, diffusion.pack([prompt], [output[:12]], tok, b), p + 5)      # without views: all blocks
    assert not moved[:p + 4].any() and moved[p + 4:].all()


def test_perturbing_a_view_moves_nothing_else(model, prompts, tok):
    prompt, output = prompts[5]
    packed = diffusion.pack([prompt], [output[:12]], tok, 4, torch.zeros(2, 1, 12, dtype=torch.bool))
    p, r = len(prompt) - 1, 12
    moved = perturb(model, packed, packed.start + 6)                # view 1, block 1
    own = torch.arange(len(moved)) - packed.start
    assert packed.start == p + r - 4 and torch.equal(moved, (own >= 4) & (own < 8))


def test_one_revealed_block_is_plain_bidirectional_attention(model, prompts, tok):
    prompt, output = prompts[3][0], prompts[3][1][:8]
    packed = diffusion.pack([prompt], [output], tok, 8, torch.zeros(1, 1, 8, dtype=torch.bool))
    p = len(prompt) - 1
    view = model(packed.tokens, packed.positions, packed.mask)[0, packed.start:]
    x = torch.tensor([prompt + output[:-1]])
    mask = torch.ones(p + 8, p + 8, dtype=torch.bool).tril()
    mask[p:, p:] = True
    assert torch.allclose(model(x, torch.arange(p + 8)[None], mask)[0, p:], view, atol=1e-5)


def test_padding_changes_nothing(model, prompts, tok):
    p, o = zip(*prompts)
    hidden = torch.rand(2, len(p), max(len(diffusion.pad_to_block(x, tok.eos, 4)) for x in o)) < 0.5
    together = diffusion.pack(p, o, tok, 4, hidden)
    h = model(together.tokens, together.positions, together.mask)
    for r in (0, 4, 11):
        length = len(diffusion.pad_to_block(o[r], tok.eos, 4))
        alone = diffusion.pack([p[r]], [o[r]], tok, 4, hidden[:, r:r + 1, :length])
        a = model(alone.tokens, alone.positions, alone.mask)[0, alone.start:].view(2, length, -1)
        b = h[r, together.start:].view(2, -1, model.cfg.width)[:, :length]
        assert torch.allclose(a, b, atol=1e-5)
    assert torch.isfinite(h).all()                                  # pads look at themselves: no NaN


def test_mean_loss_over_masks_equals_enumeration(model, prompts, tok):
    """Two targets in one block, every pair of complementary masks: drawn at random or listed, the mean is the same."""
    prompt, output = prompts[2][0], prompts[2][1][:2]

    def loss(hidden):
        packed = diffusion.pack([prompt], [output], tok, 2, hidden)
        return float(diffusion.loss_sum(model, packed, hidden.float(), tok).detach())
    exact = {}
    for first in itertools.product([False, True], repeat=2):
        h = torch.tensor(first)[None]
        exact[first] = loss(torch.stack((h, ~h)))
    # With t uniform, P(k of 2 hidden) = 1/3 for each k; so P(mask) = 1/3, 1/6, 1/6, 1/3.
    want = (exact[False, False] + exact[True, True]) / 3 + (exact[False, True] + exact[True, False]) / 6
    g = torch.Generator().manual_seed(0)
    hidden, _ = diffusion.draw_hidden(6000, 2, 2, g)
    got = sum(exact[tuple(row.tolist())] for row in hidden[0]) / 6000
    assert abs(got - want) < 0.02 * abs(want)


@pytest.mark.parametrize("schedule", diffusion.SCHEDULES)
def test_schedules(schedule):
    g = torch.Generator().manual_seed(1)
    hidden, weight = diffusion.draw_hidden(400, 20, 8, g, schedule)
    assert hidden.shape == weight.shape == (2 if schedule == "complementary" else 1, 400, 20)
    if schedule == "complementary":
        assert torch.equal(hidden[0], ~hidden[1]) and (weight == 1).all()
        assert abs(hidden[0].float().mean() - 0.5) < 0.02           # stratified: the mean level is nearly exact
    else:
        blocks = F.pad(hidden[0], (0, 4)).view(400, 3, 8)
        assert blocks.any(-1).all()                                 # no supervised block is without a hidden target
        assert weight.max() <= 8.01 and (weight >= 0.99).all()      # never beyond B, where 1/t would explode
        assert abs((hidden * weight).mean() - 1) < 0.05             # unbiased: each target counts once on average
    full, _ = diffusion.draw_hidden(400, 16, 8, g, "complementary", full=1.0)
    assert full[0].all()
    with pytest.raises(ValueError, match="schedule"):
        diffusion.draw_hidden(1, 4, 4, g, "nonsense")


def test_weights_and_tail(tok):
    a, e = tok.answer, tok.eos
    outputs = [[5, 6, a, 7, e], [5, a, 7, 8, 9, 10, 11, e]]
    w = diffusion.limit_to_blocks(diffusion.token_weights(outputs, 12, tok, 0.5, 1.0, 0.1), outputs, 4)
    assert torch.allclose(w[0], torch.tensor([.5, .5, 1, 1, 1, .1, .1, .1, 0, 0, 0, 0]))
    assert torch.allclose(w[1], torch.tensor([.5, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]))


def test_no_supervised_token_gives_zero(model, prompts, tok):
    packed = diffusion.pack([prompts[0][0]], [prompts[0][1]], tok, 1)
    loss = diffusion.loss_sum(model, packed, torch.zeros(1, *packed.target.shape), tok)
    loss.backward()
    assert float(loss.detach()) == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_commit_rule():
    conf = torch.tensor([[.95, .2, .9, .99], [.1, .3, .2, .05], [.99, .99, .99, .99]])
    open_ = torch.tensor([[True, True, True, False], [True, False, True, True], [False] * 4])
    got = diffusion.commit(conf, open_, 0.9)
    assert got.tolist() == [[True, False, True, False], [False, False, True, False], [False] * 4]


@pytest.mark.parametrize("b,tau,temperature", [(1, 1.0, 1.0), (4, 0.3, 1.0), (8, 0.05, 0.7), (8, 1.0, 0.0)])
def test_replay_recomputes_the_recorded_log_probabilities(model, prompts, tok, b, tau, temperature):
    """One packed forward over all recorded canvases = the log-probabilities while decoding; so the first ratio is 1."""
    p = [x for x, _ in prompts[::3]]
    rollouts = sample.decode(model, p, tok, b, tau, 16, temperature, seeds=list(range(len(p))))
    tokens, inner = [], model.forward
    model.forward = lambda x, *rest, **kw: tokens.append(x.numel()) or inner(x, *rest, **kw)
    with torch.no_grad():
        logits, target, row, place = diffusion.replay(model, p, rollouts, tok, b)
    model.forward = inner
    logp = (logits / temperature if temperature else logits).log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert torch.equal(target, torch.tensor([rollouts[r].tokens[i] for r, i in zip(row, place)]))
    old = torch.tensor([rollouts[r].logprob[i] for r, i in zip(row, place)])
    assert torch.allclose(logp, old, atol=1e-5) and torch.allclose((logp - old).exp(), torch.ones(len(old)), atol=1e-5)
    assert len(place) == sum(len(r.tokens) for r in rollouts)       # every token is scored exactly once
    assert len({(int(r), int(i)) for r, i in zip(row, place)}) == len(place)
    if b > 1:                                                       # the text once, then each canvas once
        length, longest = max(len(r.canvas) for r in rollouts), max(map(len, p))
        assert tokens == [len(p) * (longest - 1 + length - b), b * sum(r.nfe for r in rollouts)]


def test_naive_mask_starts_at_the_mean(model, tok):
    diffusion.convert(model, tok)
    others = torch.cat((model.embed.weight[:tok.mask], model.embed.weight[tok.mask + 1:]))
    assert torch.allclose(model.embed.weight[tok.mask], others.mean(0), atol=1e-6)
