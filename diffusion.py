"""The conversion: an autoregressive (AR) model read as a block-diffusion one, on the same weights.

Paper: "The conversion"; block diffusion is from Arriola et al., 2025 (BD3-LM). Everything that is *about* the conversion
has its one home here: the token shift, canvases, the rule of who may look at whom, masking schedules, the losses, the
divergences, the commit rule and replay. Training, sampling and RL all call these functions.

**The shift.** An AR model predicts token i at position i - 1. Take its own inputs and targets for a prompt and output x:

    inputs    u_0 = last prompt token, u_i = x_{i-1}          targets    y_i = x_i          i = 0 ... R - 1

and cut i into blocks of B. To hide target i from its own block, put <mask> at u_{i+1}. If i + 1 opens a block there is
nothing to mask, because x_i is not an input of this block at all. So every block opens with a real token and predicts B
targets from B inputs. With B = 1 nothing is ever masked, and every line below is plain AR.

                         block 0                 block 1                      B = 4, x = "w e   a r e   o n e"
    inputs   u:   p_last  x0   x1   x2  |  x3   x4   x5   x6
    targets  y:   x0      x1   x2   x3  |  x4   x5   x6   x7
    hide x1, x3:  p_last  x0  <m>   x2  |                            (x3 opens the next block: nothing to mask here)

**Who may look at whom.** Every position has a block number. Each prompt token is a block of its own, numbered below 0.
One rule then serves causal prompts, AR, block diffusion, training, cached decoding and replay:

    q may look at k   <=>   the block of k is not later than the block of q.

**Text and canvases.** A canvas is a copy of one block in which some targets are hidden. Training and replay score many
canvases of one text. BD3-LM packs the text and its noisy copies into one long row. Here the text goes through the model
once and its keys and values are kept; then every canvas is a row of its own, which reads the keys of the blocks before
it, exactly as a canvas does while decoding. The numbers are the same, and attention does not pay for pairs of canvases
that may not see each other:

    forward 1    prompt | x_0 ... (clean)                                     n rows of P + R - B tokens
    forward 2    canvas of block j of row r, after the blocks < j of row r    m rows of B tokens

Left out: a time embedding (the masks themselves say how noisy a canvas is), the 1/t weight where complementary views
make it unnecessary (each target is hidden exactly once), and a bidirectional prompt (AR's cache must stay valid).
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from model import Recorded

BLOCK_LEN = 32                      # targets per block where nothing else is said (the paper's)
SCHEDULES = ("complementary", "linear", "cosine")
DIVERGENCES = ("forward", "reverse", "jsd")


# === 1. Canvases ======================================================================================================

def pad_to_block(output, eos, block_len):
    """An output with its tail: <eos> up to the end of the last block, and nothing after that."""
    return output + [eos] * (-len(output) % block_len)


def convert(model, tok):
    """Turn AR weights into a model that can read canvases. Every tensor stays, except one row of the embedding.

    AR never used <mask>. A new token starts at the mean of the others, so it looks like "some token" and not like noise.
    """
    with torch.no_grad():
        known = torch.arange(tok.vocab, device=model.embed.weight.device) != tok.mask
        model.embed.weight[tok.mask] = model.embed.weight[known].mean(0)


def shift(prompt_last, outputs):
    """The token shift, in its one place. prompt_last (n,), outputs (n, R) -> inputs u (n, R)."""
    return torch.cat((prompt_last[:, None], outputs[:, :-1]), dim=1)


def canvas(inputs, hidden, mask_id, block_len):
    """Inputs u (..., R), with the hidden targets (..., R) masked out of their own blocks. R is a multiple of B."""
    before = torch.cat((torch.zeros_like(hidden[..., :1]), hidden[..., :-1]), dim=-1)    # was target i - 1 hidden?
    opens = torch.arange(inputs.shape[-1], device=inputs.device) % block_len == 0        # its first token stays real
    return torch.where(before & ~opens, mask_id, inputs)


def may_look(q_block, k_block):
    """The rule above. Block numbers (..., q) and (..., k) -> booleans (..., q, k)."""
    return k_block[..., None, :] <= q_block[..., :, None]


# === 2. Masking schedules =============================================================================================

def draw_hidden(n, length, block_len, generator, schedule="complementary", full=0.0):
    """Draw which targets are hidden. Returns hidden (views, n, length), and the weight of the hidden ones, same shape.

    Each block gets a level t, and each of its targets is hidden with probability t. The levels are stratified over the
    blocks of the whole batch, because evenly spread levels vary less than independent ones.

    complementary  There are two views, and what one hides the other shows. Each target is hidden exactly once, so its
                   weight is 1, and there is no division by t (1/t explodes near 0). A share `full` of the blocks has
                   t = 1: everything is hidden, which is where decoding starts.
    linear         There is one view, with weight 1/t (MDLM, Sahoo et al., 2024, eq. 10, for alpha_t = 1 - t) and one
                   repair: where chance hides nothing in a block, the target with the smallest noise is hidden
                   anyway. A target in a block of B is then hidden with probability p = t + (1 - t)^B / B, and the weight
                   is 1/p. That is unbiased, and at most B where 1/t would explode.
    cosine         As linear, with t = cos(pi/2 (1 - u)), which hides many targets more often than few (MaskGIT).

    Example of the repair, with B = 4, length 6 and t = .1, so the last block has only 2 targets:
        noise     .7 .3 .9 .5 | .6 .2            no noise is below t, so chance hides nothing
        hidden     0  1  0  0 |  0  1            the smallest of each block is hidden
        1/p       p = .1 + .9^4 / 4 = .264 | p = .1 + .9^2 / 2 = .505
    """
    blocks = -(-length // block_len)
    strata = torch.randperm(n * blocks, generator=generator).view(n, blocks)
    u = (strata + torch.rand(n, blocks, generator=generator)) / (n * blocks)             # (n, blocks) in (0, 1)
    if schedule == "cosine":
        u = torch.cos(torch.pi / 2 * (1 - u))
    elif schedule == "complementary":
        u = torch.where(torch.rand(n, blocks, generator=generator) < full, 1.0, u)
    elif schedule != "linear":
        raise ValueError(f"unknown schedule {schedule!r}; one of {', '.join(SCHEDULES)}")
    t = u.repeat_interleave(block_len, dim=1)[:, :length]                                 # (n, length)
    noise = torch.rand(n, length, generator=generator)
    hidden = noise < t
    if schedule == "complementary":
        return torch.stack((hidden, ~hidden)), torch.ones(2, n, length)
    padded = F.pad(noise, (0, blocks * block_len - length), value=2.0).view(n, blocks, block_len)   # 2: never smallest
    smallest = F.one_hot(padded.argmin(-1), block_len).bool().flatten(1)[:, :length]      # (n, length)
    in_block = (padded < 2).sum(-1).repeat_interleave(block_len, dim=1)[:, :length]       # targets in the block of each
    return (hidden | smallest)[None], (1 / (t + (1 - t) ** in_block / in_block))[None]


# === 3. Text and canvases =============================================================================================

@dataclass
class Text:
    """Prompts and outputs, clean and ready for one forward: [prompt | output inputs u], left-padded so outputs line up.

    P' is the padded prompt length without the last prompt token, which is u_0, and T = P' + R.
    """
    tokens: torch.Tensor      # (n, T)
    positions: torch.Tensor   # (n, T)
    not_pad: torch.Tensor     # (n, T) booleans
    block: torch.Tensor       # (T,) block numbers
    mask: torch.Tensor        # (T, T), or (n, 1, T, T) where there are pads
    target: torch.Tensor      # (n, R) y
    start: int                # P'
    block_len: int            # B

    def to(self, device):
        return Text(*(x.to(device) if torch.is_tensor(x) else x for x in vars(self).values()))

    def blocks(self, x):
        """(n, T) -> (n, blocks, B): the part that belongs to the output, cut into blocks."""
        return x[:, self.start:].unflatten(1, (-1, self.block_len))


def pad_prompts(prompts, pad_id):
    """Lists of tokens -> (tokens (n, P), not_pad (n, P)), left-padded.

    The validity mask is explicit. It is never guessed from the pad id, which could also be content.
    """
    longest = max(map(len, prompts))
    tokens = torch.tensor([[pad_id] * (longest - len(p)) + p for p in prompts])
    not_pad = torch.tensor([[False] * (longest - len(p)) + [True] * len(p) for p in prompts])
    return tokens, not_pad


def pack(prompts, outputs, tok, block_len):
    """prompts, outputs: lists of token lists -> Text. R is the longest output in whole blocks.

    Shorter outputs are filled with <eos>. Whether a filled place counts is decided by its weight in the loss.
    """
    length = max(len(pad_to_block(o, tok.eos, block_len)) for o in outputs)
    prompt, not_pad = pad_prompts(prompts, tok.pad)
    target = torch.tensor([o + [tok.eos] * (length - len(o)) for o in outputs])           # (n, R)
    u = shift(prompt[:, -1], target)                                                      # (n, R)
    prompt, not_pad = prompt[:, :-1], not_pad[:, :-1]                                     # u_0 is the last prompt token
    n, p = prompt.shape
    prompt_len = not_pad.sum(1, keepdim=True)                                             # (n, 1) without pads
    place = (torch.arange(p) - p + prompt_len).clamp(min=0)                               # (n, P') pads sit at 0
    block = torch.cat((torch.arange(p) - p, torch.arange(length) // block_len))           # (T,)
    not_pad = torch.cat((not_pad, torch.ones(n, length, dtype=torch.bool)), dim=1)        # (n, T)
    mask = may_look(block, block)                                                         # (T, T)
    if not not_pad.all():                                           # a pad is seen by itself alone (no empty softmax)
        mask = (mask & not_pad[:, None, :] | torch.eye(p + length, dtype=torch.bool))[:, None]      # (n, 1, T, T)
    positions = torch.cat((place, prompt_len + torch.arange(length)), dim=1)              # (n, T)
    return Text(torch.cat((prompt, u), dim=1), positions, not_pad, block, mask, target, p, block_len)


def canvas_states(model, text, row, block, hidden, tok):
    """Hidden states (m, B, width) of m canvases. Canvas i is block[i] of row[i], with its hidden targets (m, B) masked."""
    keys = text.tokens.shape[1] - text.block_len                    # nobody reads the keys of the last block
    cache = Recorded()
    model(text.tokens[:, :keys], text.positions[:, :keys], text.mask[..., :keys, :keys], cache)
    cache.rows = row
    earlier = (text.block[:keys] < block[:, None]) & text.not_pad[row, :keys]             # (m, keys)
    mask = torch.cat((earlier, torch.ones_like(hidden)), 1)[:, None, None]                # (m, 1, 1, keys + B)
    inputs = canvas(text.blocks(text.tokens)[row, block], hidden, tok.mask, text.block_len)
    return model(inputs, text.blocks(text.positions)[row, block], mask, cache)


def token_weights(outputs, length, tok, reasoning, answer, tail):
    """Loss weights (n, length): reasoning up to <answer>, the answer from <answer> to the first <eos>, and the tail that
    fills the last block. Paper: reasoning < answer, values unpublished."""
    w = torch.zeros(len(outputs), length)
    for r, o in enumerate(outputs):
        split = o.index(tok.answer) if tok.answer in o else len(o)
        w[r, :split], w[r, split:len(o)], w[r, len(o):] = reasoning, answer, tail
    return w


def limit_to_blocks(weight, outputs, block_len):
    """Weight (..., n, R), with 0 after the block in which an output ends (the rows of a batch differ in length)."""
    ends = torch.tensor([len(o) + (-len(o) % block_len) for o in outputs])
    return weight * (torch.arange(weight.shape[-1]) < ends[:, None])


# === 4. Scores, losses, divergences ===================================================================================

def output_logits(model, hidden, tok):
    """Logits in fp32. The two ids that are never a possible output, <mask> and <pad>, are at -inf, in every loss and in
    the sampler alike."""
    logits = model.logits(hidden).float()
    logits[..., tok.mask] = float("-inf")
    logits[..., tok.pad] = float("-inf")
    return logits


def score(model, text, supervised, tok):
    """Score a text by its own hidden states; at block length 1 this is AR.

    Returns logits (m, vocab) and targets (m,) at the supervised (n, R) positions, in the order of supervised.nonzero().
    """
    device = model.embed.weight.device
    text, supervised = text.to(device), supervised.to(device)
    hidden = model(text.tokens, text.positions, text.mask)[:, text.start:]                # (n, R, width)
    return output_logits(model, hidden[supervised], tok), text.target[supervised]


def score_canvases(model, text, row, block, hidden, scored, tok):
    """The same for canvases: block[i] of row[i], with hidden and scored (m, B)."""
    states = canvas_states(model, text, row, block, hidden, tok)                          # (m, B, width)
    target = text.target.unflatten(1, (-1, text.block_len))[row, block]                   # (m, B)
    return output_logits(model, states[scored], tok), target[scored]


def text_loss(model, text, weight, tok):
    """AR's loss: the sum over targets of weight (n, R) * cross-entropy (nats).

    It is *not* divided. The caller divides by one denominator over all micro-batches, so that splitting a batch changes
    nothing. Weight 0 means not supervised; where nothing is supervised the sum is 0, and so is its gradient.
    """
    logits, target = score(model, text, weight > 0, tok)
    weight = weight[weight > 0].to(target.device)                                         # (m,)
    return (F.cross_entropy(logits, target, reduction="none") * weight).sum()


def canvas_loss(model, text, weight, hidden, tok):
    """CFT's loss: the same sum over the canvases of a text; weight and hidden are (views, n, R).

    Every block of every view is one canvas. A canvas without a weight (nothing is hidden in it) is left out:

        view 0 of a row    block 0: hides x1, x3     block 1: hides nothing     ->  1 canvas, scored at x1, x3
        view 1 of it       block 0: hides x0, x2     block 1: hides x4 ... x7   ->  2 canvases
    """
    device = model.embed.weight.device
    text = text.to(device)
    weight, hidden = (x.to(device).unflatten(-1, (-1, text.block_len)) for x in (weight, hidden))  # (views, n, blocks, B)
    view, row, block = (weight > 0).any(-1).nonzero().T             # (m,) each
    if not len(row):
        return model.embed.weight.sum() * 0.0
    weight, hidden = weight[view, row, block], hidden[view, row, block]                   # (m, B)
    logits, target = score_canvases(model, text, row, block, hidden, weight > 0, tok)
    return (F.cross_entropy(logits, target, reduction="none") * weight[weight > 0]).sum()


def divergence(teacher, student, kind):
    """Divergence of log-probabilities teacher and student (m, vocab), fp32 -> (m,) nats.

    forward   KL(teacher || student) = sum_v p(v) (log p(v) - log q(v)), the paper's (Hinton et al., 2015)
    reverse   KL(student || teacher)
    jsd       the mean of both divergences to the middle of p and q (GKD, Agarwal et al., 2024)

    A log-probability of -inf becomes -1e4. Its exponential is 0 all the same, and 0 * 1e4 is 0 in value and gradient,
    where 0 * inf would be NaN.
    """
    teacher, student = teacher.clamp(min=-1e4), student.clamp(min=-1e4)

    def kl(a, b):
        return (a.exp() * (a - b)).sum(-1)                          # sum over the vocabulary of a (log a - log b)

    if kind == "forward":
        return kl(teacher, student)
    if kind == "reverse":
        return kl(student, teacher)
    middle = torch.logaddexp(teacher, student) - math.log(2)
    return (kl(teacher, middle) + kl(student, middle)) / 2


# === 5. The commit rule and replay ====================================================================================

def commit(confidence, open_, tau):
    """The commit rule: which open targets of each row are fixed now. confidence, open_ (n, B) -> booleans (n, B).

    They are all with confidence >= tau, and the single most confident one, so that progress is certain. A row in which
    nothing is open commits nothing.
    """
    confidence = torch.where(open_, confidence, -1.0)               # a fixed target reaches no tau
    best = confidence.argmax(dim=1, keepdim=True)                                         # (n, 1)
    return (confidence >= tau).scatter_(1, best, True) & open_


def replay(model, prompts, rollouts, tok, block_len):
    """Score trajectories again: each token on the canvas on which it was committed (sample.Rollout: tokens, canvas, step).

    Tokens up to and including the first <eos> are scored; what follows gets no reward, no KL and no gradient. Example, a
    block of 4 whose tokens were committed at steps 0 2 0 1. It had three canvases, and each token is scored once:

        step       0 2 0 1
        canvas 0   h h h h      all hidden (step >= 0);                scored: tokens 0 and 2 (step == 0)
        canvas 1   . h . h      hidden are those with step >= 1;       scored: token 3
        canvas 2   . h . .      hidden are those with step >= 2;       scored: token 1

    Returns logits (m, vocab), target (m,), row (m,), place in the output (m,). Its cost is `replay_tokens`.
    """
    device = model.embed.weight.device
    text = pack(prompts, [r.canvas for r in rollouts], tok, block_len).to(device)
    length = text.target.shape[1]
    ends = torch.tensor([len(r.tokens) for r in rollouts], device=device)
    if block_len == 1:                                              # a canvas of one token is the text itself
        scored = torch.arange(length, device=device) < ends[:, None]                      # (n, R)
        return *score(model, text, scored, tok), *scored.nonzero().T
    step = torch.tensor([r.step + [-1] * (length - len(r.step)) for r in rollouts], device=device)  # -1: no such block
    step = step.unflatten(1, (-1, block_len))                       # (n, blocks, B)
    nth = torch.arange(int(step.max()) + 1, device=device)
    row, block, nth = (nth <= step.amax(-1, keepdim=True)).nonzero().T                    # (m,) each: one per canvas
    step = step[row, block]                                         # (m, B)
    place = block[:, None] * block_len + torch.arange(block_len, device=device)           # (m, B) in the output
    scored = (step == nth[:, None]) & (place < ends[row, None])     # (m, B)
    return (*score_canvases(model, text, row, block, step >= nth[:, None], scored, tok),
            row[:, None].expand_as(place)[scored], place[scored])


def replay_tokens(prompts, rollouts, block_len):
    """Number of tokens that replay reads: each text once and each canvas once, P + R + NFE * B per rollout.

    One forward per step would read the prompt and all blocks up to the active one each time.
    """
    canvases = sum(r.nfe for r in rollouts) * block_len * (block_len > 1)
    return sum(len(p) + len(r.canvas) for p, r in zip(prompts, rollouts)) + canvases
