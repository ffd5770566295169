"""The transformer: who sees whom is the caller's business, and the cache changes nothing."""
import pytest
import torch

from model import KVCache, ModelConfig, Transformer


def causal(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


def full(model, x):
    return model(x, torch.arange(x.shape[1]).expand_as(x), causal(x.shape[1]))


def test_cached_equals_uncached_in_pieces(model):
    """Prefill and then pieces of any size, with int and with tensor slots, equal one causal forward."""
    x = torch.randint(0, model.cfg.vocab, (3, 20))
    want = full(model, x)
    for slots in ("int", "tensor"):
        cache, got, at = KVCache(model.cfg, 3, 32), [], 0
        for n in (9, 1, 4, 6):
            where = at if slots == "int" else (at + torch.arange(n)).expand(3, n)
            mask = torch.ones(n, at + n, dtype=torch.bool).tril(diagonal=at)
            got.append(model(x[:, at:at + n], torch.arange(at, at + n).expand(3, n), mask, cache.at(where, at + n)))
            at += n
        assert torch.allclose(torch.cat(got, 1), want, atol=1e-5)


def test_rows_of_a_cache_may_stand_elsewhere(model):
    """Slots are only places: scattered ones, with a mask for the empty, give the same hidden states."""
    x = torch.randint(0, model.cfg.vocab, (2, 6))
    want = full(model, x)
    slots = torch.tensor([[0, 1, 2, 3, 4, 5], [2, 9, 4, 1, 7, 3]])
    seen = torch.zeros(2, 6, 10, dtype=torch.bool)
    for r in range(2):
        for q in range(6):
            seen[r, q, slots[r, :q + 1]] = True
    got = model(x, torch.arange(6).expand(2, 6), seen[:, None], KVCache(model.cfg, 2, 10).at(slots, 10))
    assert torch.allclose(got, want, atol=1e-5)


def test_the_future_is_not_seen_through_a_causal_mask(model):
    x = torch.randint(0, model.cfg.vocab, (1, 12))
    y = x.clone()
    y[0, 7] = (y[0, 7] + 1) % model.cfg.vocab
    a, b = full(model, x), full(model, y)
    assert torch.equal(a[:, :7], b[:, :7]) and not torch.allclose(a[:, 7:], b[:, 7:])


def test_positions_are_relative(model):
    """RoPE: attention depends on distances, so moving a whole row along changes nothing."""
    x = torch.randint(0, model.cfg.vocab, (1, 10))
    moved = model(x, torch.arange(50, 60)[None], causal(10))
    assert torch.allclose(moved, full(model, x), atol=1e-4)
    other = model(x, torch.arange(0, 20, 2)[None], causal(10))
    assert not torch.allclose(other, full(model, x), atol=1e-3)


def test_embedding_is_tied_and_sizes_add_up(model):
    body, embedding = model.size()
    assert body + embedding == sum(p.numel() for p in model.parameters())
    h = torch.randn(2, 3, model.cfg.width)
    assert torch.allclose(model.logits(h), h @ model.embed.weight.T)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="width"):
        Transformer(ModelConfig(vocab=10, width=30, heads=4))
    cache = KVCache(ModelConfig(vocab=10, width=8, layers=1, heads=1), 1, 4)
    with pytest.raises(ValueError, match="4 slots"):
        cache.at(0, 5)
