"""The conversion: the shift, the mask, the schedules, the loss and replay, each against something computed by hand."""
import itertools
import math

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


def test_at_block_length_one_the_loss_is_ar(model, prompts, tok):
    p, o = zip(*prompts)
    text = diffusion.pack(p, o, tok, block_len=1)
    w = diffusion.token_weights(o, text.target.shape[1], tok, 0.5, 1.0, 0.0)
    want = sum((ar_loss(model, a, b, tok) * w[r, :len(b)]).sum() for r, (a, b) in enumerate(prompts))
    assert torch.allclose(diffusion.text_loss(model, text, w, tok), want, rtol=1e-4)
    # With canvases but B = 1 nothing can be masked: each is the AR input again.
    hidden = torch.ones(1, *text.target.shape, dtype=torch.bool)
    assert torch.allclose(diffusion.canvas_loss(model, text, w[None], hidden, tok), want, rtol=1e-4)


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
    prompts, outputs, want = [[1, 2, 3], [4, 5, 6, 7, 8]], [[7] * 5, [7] * 8], [2 + torch.arange(8), 4 + torch.arange(8)]
    ar = diffusion.pack(prompts, outputs, tok, 1)
    logits, _ = diffusion.score(Clock(), ar, torch.ones(2, 8, dtype=torch.bool), tok)
    assert torch.equal(logits.argmax(-1), torch.cat(want))
    text = diffusion.pack(prompts, outputs, tok, 4)
    row, block = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 0, 1, 1])
    places = diffusion.canvas_states(Clock(), text, row, block, torch.ones(5, 4, dtype=torch.bool), tok)[..., 0]
    assert torch.equal(places, torch.stack([want[r].view(2, 4)[j] for r, j in zip(row, block)]).float())


def canvases(model, text, tok, hidden):
    """Hidden states of all canvases (blocks, B, width) of a text of one row, hidden (R,) applied to each block."""
    blocks = text.target.shape[1] // text.block_len
    return diffusion.canvas_states(model, text, torch.zeros(blocks, dtype=torch.long), torch.arange(blocks),
                                   hidden.view(blocks, -1), tok)


def test_perturbing_a_clean_block_moves_only_it_and_later_blocks(model, prompts, tok):
    prompt, output = prompts[5]
    text, hidden = diffusion.pack([prompt], [output[:12]], tok, 4), torch.ones(12, dtype=torch.bool)
    before = model(text.tokens, text.positions, text.mask), canvases(model, text, tok, hidden)
    text.tokens[0, text.start + 5] += 1                             # an input of block 1, at which its own canvas has <mask>
    moved = [(x - y)[:].abs().amax(-1) > 1e-6 for x, y in
             zip(before, (model(text.tokens, text.positions, text.mask), canvases(model, text, tok, hidden)))]
    assert not moved[0][0, :text.start + 4].any() and moved[0][0, text.start + 4:].all()    # block 1 as a whole, and 2
    assert not moved[1][:2].any() and moved[1][2].all()             # the canvas of block 2 reads it, no other canvas does


def test_perturbing_a_canvas_moves_nothing_else(model, prompts, tok):
    prompt, output = prompts[5]
    text, hidden = diffusion.pack([prompt], [output[:12]], tok, 4), torch.zeros(12, dtype=torch.bool)
    before = canvases(model, text, tok, hidden)
    hidden[5] = True                                                # masks an input of block 1
    moved = (canvases(model, text, tok, hidden) - before).abs().amax(-1) > 1e-6
    assert moved[1].all() and not moved[0].any() and not moved[2].any()


def test_a_revealed_canvas_is_plain_attention(model, prompts, tok):
    """One block with nothing hidden: bidirectional over the block, after a causal prompt; several: the text itself."""
    prompt, output = prompts[3][0], prompts[3][1][:8]
    text = diffusion.pack([prompt], [output], tok, 8)
    p = len(prompt) - 1
    x = torch.tensor([prompt + output[:-1]])
    mask = torch.ones(p + 8, p + 8, dtype=torch.bool).tril()
    mask[p:, p:] = True
    want = model(x, torch.arange(p + 8)[None], mask)[0, p:]
    assert torch.allclose(want, canvases(model, text, tok, torch.zeros(8, dtype=torch.bool))[0], atol=1e-5)
    text = diffusion.pack([prompt], [prompts[3][1][:12]], tok, 4)
    clean = model(text.tokens, text.positions, text.mask)[:, p:].unflatten(1, (-1, 4))[0]
    assert torch.allclose(clean, canvases(model, text, tok, torch.zeros(12, dtype=torch.bool)), atol=1e-5)


def test_canvases_equal_one_packed_row(model, prompts, tok):
    """Text and canvases in one long row, as BD3-LM trains: a canvas sees itself and the clean blocks before its own."""
    prompt, output = prompts[4][0], prompts[4][1][:12]
    text, p = diffusion.pack([prompt], [output], tok, 4), len(prompt) - 1
    hidden = torch.rand(12, generator=torch.Generator().manual_seed(0)) < 0.6
    view = diffusion.canvas(text.tokens[0, p:], hidden, tok.mask, 4)
    n, block, noisy = p + 24, torch.cat((text.block, text.block[p:])), torch.arange(p + 24) >= p + 12
    mask = torch.zeros(n, n, dtype=torch.bool)
    for q, k in itertools.product(range(n), range(n)):
        if noisy[k]:
            mask[q, k] = noisy[q] and block[q] == block[k]
        else:
            mask[q, k] = block[k] < block[q] if noisy[q] else block[k] <= block[q]
    tokens, places = torch.cat((text.tokens[0], view)), torch.cat((text.positions[0], text.positions[0, p:]))
    want = model(tokens[None], places[None], mask)[0, p + 12:]
    assert torch.allclose(want, canvases(model, text, tok, hidden).flatten(0, 1), atol=1e-5)


def test_padding_changes_nothing(model, prompts, tok):
    """Twelve rows of unequal prompts and outputs together, or one by one: the same loss of each row's own tokens."""
    p, o = zip(*prompts)
    together = diffusion.pack(p, o, tok, 4)
    hidden = torch.rand(2, *together.target.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    for r in (0, 4, 11):
        length = len(diffusion.pad_to_block(o[r], tok.eos, 4))
        w = torch.zeros_like(hidden, dtype=torch.float)
        w[:, r, :length] = hidden[:, r, :length].float()
        alone = diffusion.canvas_loss(model, diffusion.pack([p[r]], [o[r]], tok, 4), w[:, r:r + 1, :length],
                                      hidden[:, r:r + 1, :length], tok)
        loss = diffusion.canvas_loss(model, together, w, hidden, tok)
        assert torch.isfinite(loss) and torch.allclose(alone, loss, rtol=1e-4)
    assert torch.isfinite(model(together.tokens, together.positions, together.mask)).all()          # pads: no NaN


def test_mean_loss_over_masks_equals_enumeration(model, prompts, tok):
    """Two targets in one block, every pair of complementary masks: drawn at random or listed, the mean is the same."""
    prompt, output = prompts[2][0], prompts[2][1][:2]

    def loss(hidden):
        text = diffusion.pack([prompt], [output], tok, 2)
        return float(diffusion.canvas_loss(model, text, hidden.float(), hidden, tok).detach())
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
    text = diffusion.pack([prompts[0][0]], [prompts[0][1]], tok, 1)
    none = torch.zeros(1, *text.target.shape)
    loss = diffusion.text_loss(model, text, none[0], tok) + diffusion.canvas_loss(model, text, none, none.bool(), tok)
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
        assert abs(sum(tokens) - diffusion.replay_tokens(p, rollouts, b)) <= len(p) * (longest + b)     # but for padding


def test_naive_mask_starts_at_the_mean(model, tok):
    diffusion.convert(model, tok)
    others = torch.cat((model.embed.weight[:tok.mask], model.embed.weight[tok.mask + 1:]))
    assert torch.allclose(model.embed.weight[tok.mask], others.mean(0), atol=1e-6)


def test_the_smallest_noise_is_hidden_where_chance_hides_nothing():
    """The example in draw_hidden's docstring: noise of a block of 4 and of a shorter last one, t = .1 in both."""
    class Fixed:
        draws = [torch.tensor([[.2, .2]]), torch.tensor([[.7, .3, .9, .5, .6, .2]])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", lambda n, generator: torch.zeros(n))
        patch.setattr(torch, "rand", lambda *shape, generator: Fixed.draws.pop(0))
        hidden, weight = diffusion.draw_hidden(1, 6, 4, None, "linear")
    assert hidden[0, 0].tolist() == [False, True, False, False, False, True]
    assert torch.allclose(weight[0, 0], 1 / torch.tensor([.264025] * 4 + [.505] * 2))


# === Divergences ======================================================================================================

def test_divergences_by_hand():
    """Three tokens, one of which the teacher rules out; the order of the arguments matters."""
    p, q = torch.tensor([[.5, .5, 0.0]]).log(), torch.tensor([[.25, .5, .25]]).log()
    assert diffusion.divergence(p, q, "forward").item() == pytest.approx(.5 * math.log(2))
    assert diffusion.divergence(q, torch.tensor([[.5, .25, .25]]).log(), "reverse").item() == pytest.approx(.25 * math.log(2))
    middle = [.375, .5, .125]
    want = .5 * (.5 * math.log(.5 / .375)) + .5 * (.25 * math.log(.25 / .375) + .25 * math.log(.25 / .125))
    assert sum(middle) == 1 and diffusion.divergence(p, q, "jsd").item() == pytest.approx(want)
    impossible = torch.tensor([[.5, .5, 0.0]]).log()                # -inf in both, as <mask> and <pad> are
    for kind in diffusion.DIVERGENCES:
        assert diffusion.divergence(p, impossible, kind).item() == pytest.approx(0, abs=1e-6)
