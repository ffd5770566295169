"""Semantic IDs: every item as four small numbers, the first the broadest (TIGER, Rajput et al., 2023; paper,
"The task": 4 tokens, at least 99% unique).

Residual k-means on item vectors: cluster, subtract the centre, cluster what is left, three times. Similar items share
their first codes, so a model can generalise from one to the other, which opaque numbers forbid. A fourth code counts
the items of an equal triple apart: 100% unique by construction. TIGER learns the quantiser (RQ-VAE); k-means on
[co-visitation | content] vectors has no training to collapse, and is what several re-implementations fell back on.
"""
import numpy as np
import torch
import torch.nn.functional as F

CODES, LEVELS, DIMS = 64, 3, 16


def vectors(retriever):
    """(items, 2 * DIMS): the leading singular directions of similarity and of likeness, each to unit length. Few of
    them: k-means spreads items over its codes best where there are not many directions to be far apart in."""
    parts = []
    for matrix in (retriever.s, retriever.like):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)                                    # svd_lowrank draws from the global generator
            u, _, _ = torch.svd_lowrank(matrix, q=DIMS, niter=2)
        parts.append(F.normalize(u, dim=1))
    return torch.cat(parts, dim=1)


def kmeans(x, k, generator, rounds=15):
    """Lloyd's algorithm. x (n, d) -> (assignment (n,), centres (k, d)); an empty cluster restarts at a random point."""
    centre = x[torch.randperm(len(x), generator=generator)[:k]].clone()
    for _ in range(rounds):
        near = torch.cdist(x, centre).argmin(1)                     # (n,)
        total = torch.zeros_like(centre).index_add_(0, near, x)
        count = torch.bincount(near, minlength=len(centre))
        spare = x[torch.randint(len(x), (len(centre),), generator=generator)]
        centre = torch.where(count[:, None] > 0, total / count.clamp(min=1)[:, None], spare)
    return torch.cdist(x, centre).argmin(1), centre


def semantic_ids(x, seed=0):
    """(items, d) vectors -> ((items, 4) codes, share of items whose first three codes are theirs alone)."""
    g = torch.Generator().manual_seed(seed)
    residual, codes = x, []
    for _ in range(LEVELS):
        near, centre = kmeans(residual, min(CODES, len(x)), g)
        residual = residual - centre[near]                          # what the next level has to explain
        codes.append(near.numpy())
    triples = np.stack(codes, axis=1)                               # (items, 3)
    _, group, size = np.unique(triples, axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    seen, last = np.zeros(len(size), dtype=int), np.zeros(len(x), dtype=int)
    for i, g_i in enumerate(group):
        last[i], seen[g_i] = seen[g_i], seen[g_i] + 1
    return np.column_stack([triples, last]), float((size[group] == 1).mean())
