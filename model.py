"""The transformer and its KV cache. It knows nothing of autoregression, diffusion or ranking.

A pre-norm decoder as in LLaMA (Touvron et al., 2023): RMSNorm, rotary positions (Su et al., 2021), SwiGLU
(Shazeer, 2020), tied embedding, no biases, no dropout. One thing is unusual, and it is what makes the conversion of
Diffusion-GR2 (Section "Conversion") a matter of a few lines elsewhere: the model does not decide who sees whom, nor
where a token stands. The caller hands over `positions` and a boolean `mask`. So one forward serves

    AR training         positions 0..T-1, lower-triangular mask
    diffusion training  noisy copies of a text's blocks at the *same* positions, against the text's keys
    prefill, decoding   a cache, and no mask at all where every key is visible
    replay              recorded canvases, all at once, against the keys of the finished text

and "training mode" never picks an attention pattern. Left out against larger models: grouped-query attention (a cache
of 2 MB needs no shrinking), dropout (log-probabilities must be reproducible for the policy ratio of train_rl.py).
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class ModelConfig:
    vocab: int                 # token ids run from 0 to vocab - 1; none is reserved here
    width: int = 256           # channels of the residual stream
    layers: int = 6
    heads: int = 4
    ctx_len: int = 256         # longest row: positions run from 0 to ctx_len - 1
    rope_base: float = 10000.0


class KVCache:
    """Keys and values of all layers, allocated once: k[l], v[l] are (rows, heads, capacity, head_dim).

    `at(slots, used, some)` says where the next forward writes and how many slots it may read. With an int, tokens go to
    slots..slots+n-1 in every row (a plain copy); with a (rows, n) tensor, each row has places of its own (a scatter):
    rows of a batch need not be at the same block. Writing over a slot is how a canvas is replaced at each step. The
    forward's rows are all rows of the cache, or `some` (m,) of them.
    """

    def __init__(self, cfg, rows, capacity, device="cpu", dtype=torch.float32):
        shape = (cfg.layers, rows, cfg.heads, capacity, cfg.width // cfg.heads)
        self.k = torch.zeros(shape, device=device, dtype=dtype)     # zeros, not empty: a NaN times weight 0 is NaN
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.capacity = capacity

    def at(self, slots, used, some=None):
        if used > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} slots, {used} were asked for")
        self.slots, self.used, self.some = slots, used, some
        return self

    def update(self, layer, k, v):
        """Write k, v (rows, heads, n, head_dim) at the slots; return all `used` keys and values of the layer."""
        for store, new in ((self.k[layer], k), (self.v[layer], v)):
            if self.some is not None:
                store[self.some[:, None], :, self.slots] = new.transpose(1, 2).to(store.dtype)      # (m, n, heads, head_dim)
            elif isinstance(self.slots, int):
                store[:, :, self.slots:self.slots + new.shape[2]] = new
            else:
                store.scatter_(2, self.slots[:, None, :, None].expand_as(new), new.to(store.dtype))
        rows = slice(None) if self.some is None else self.some
        return self.k[layer][rows, :, :self.used], self.v[layer][rows, :, :self.used]

    def keep(self, rows):
        """Drop the finished rows of a batch: `rows` are the indices that stay."""
        self.k, self.v = self.k[:, rows], self.v[:, rows]


class Recorded:
    """Keys and values of one forward, with their gradients (a KVCache has none), for rows that continue its rows.

    The first forward that is given it records. Then `rows` (m,) says which of those rows each row of the next forward
    continues: it reads their keys before its own.
    """

    def __init__(self):
        self.k, self.v, self.rows = [], [], None

    def update(self, layer, k, v):
        if self.rows is None:
            self.k.append(k)
            self.v.append(v)
            return k, v
        # A row of keys is looked up as a row of an embedding is. index_select gives the same; its backward adds element by
        # element where embedding's adds whole rows, which on a CPU decides whether this costs a sixth of a step.
        old = (F.embedding(self.rows, x[layer].flatten(1)).unflatten(1, x[layer].shape[1:]) for x in (self.k, self.v))
        return tuple(torch.cat(pair, 2) for pair in zip(old, (k, v)))                    # each (m, heads, keys, head_dim)


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width, bias=False)
        self.out = nn.Linear(cfg.width, cfg.width, bias=False)

    def forward(self, x, rope, mask, cache, layer):
        rows, n, width = x.shape
        qkv = self.qkv(x).view(rows, n, 3, self.heads, width // self.heads)
        qk, v = qkv[:, :, :2], qkv[:, :, 2].transpose(1, 2)         # v: (rows, heads, n, head_dim)
        q, k = rotate(qk, rope).permute(2, 0, 3, 1, 4)              # each (rows, heads, n, head_dim)
        if cache is not None:
            k, v = cache.update(layer, k, v)                        # (rows, heads, used, head_dim)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(rows, n, width))


def rotate(x, rope):
    """Rotary positions: the pair (x_j, x_{j + d/2}) of each head turns by position * base^(-2j/d) (RoFormer, eq. 34).

    x: (rows, n, 2, heads, head_dim); rope: cos and sin, each (rows, n, 1, 1, head_dim).
    """
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)                      # angles may be finer than x


class MLP(nn.Module):
    """SwiGLU: down(silu(gate x) * up x). Two thirds of 4 x width keep the parameter count of a plain 4x MLP."""

    def __init__(self, cfg):
        super().__init__()
        hidden = (8 * cfg.width // 3 + 31) // 32 * 32
        self.gate_up = nn.Linear(cfg.width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, cfg.width, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(cfg.width, eps=1e-6), Attention(cfg)
        self.norm2, self.mlp = nn.RMSNorm(cfg.width, eps=1e-6), MLP(cfg)

    def forward(self, x, rope, mask, cache, layer):
        x = x + self.attention(self.norm1(x), rope, mask, cache, layer)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        if cfg.width % (2 * cfg.heads):
            raise ValueError(f"width {cfg.width} must be a multiple of twice the {cfg.heads} heads")
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, cfg.width)             # also the output matrix (tied)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.layers))
        self.norm = nn.RMSNorm(cfg.width, eps=1e-6)
        # Angles in fp32 for every position, once. Not a parameter, not in the checkpoint: it follows from the config.
        half = cfg.width // cfg.heads // 2
        angle = torch.arange(cfg.ctx_len)[:, None] * cfg.rope_base ** (-torch.arange(half) / half)   # (ctx_len, half)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.reset()

    def reset(self):
        """All weights N(0, 0.02); the two projections that add to the residual stream are scaled down by the square
        root of the number of additions, so that its variance does not grow with depth (GPT-2)."""
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * self.cfg.layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens, positions, mask=None, cache=None):
        """tokens, positions: (rows, n) integers. mask: boolean, True = may look, broadcastable to
        (rows, 1, n, keys), or None = every token sees every key. Returns hidden states (rows, n, width).

        Each row of a mask must allow at least one key (itself): softmax over nothing is NaN.
        """
        x = self.embed(tokens)
        shape = (*positions.shape, 1, 1, -1)
        rope = (self.cos[positions].view(shape).to(x.dtype), self.sin[positions].view(shape).to(x.dtype))
        for layer, block in enumerate(self.blocks):
            x = block(x, rope, mask, cache, layer)
        return self.norm(x)

    def logits(self, hidden):
        """(…, width) -> (…, vocab). Apart from forward, so that only positions with a target pay for the vocabulary."""
        return F.linear(hidden, self.embed.weight)

    def size(self):
        """Parameters of the layers, which a forward costs, and of the embedding."""
        embedding = self.embed.weight.numel()
        return sum(p.numel() for p in self.parameters()) - embedding, embedding
