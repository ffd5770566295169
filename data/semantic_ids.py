"""Semantic IDs: every item as four small numbers, the broadest first (TIGER, Rajput et al., 2023; paper, "The task":
4 tokens, at least 99% unique).

The method is residual k-means on item vectors: cluster the vectors, subtract from each the centre of its cluster, and
cluster what is left, three times. Similar items share their first codes, so a model can generalise from one to another.
A fourth code counts the items that share all three, so the IDs are 100% unique by construction. TIGER learns its
quantiser (RQ-VAE); k-means has no training that could collapse, and several re-implementations fell back on it.
"""
import numpy as np
import torch
import torch.nn.functional as F

CODES, LEVELS, DIMS = 64, 3, 16


def vectors(retriever):
    """(items, 2 * DIMS): the leading singular directions of similarity and of likeness, each part to unit length. They
    are few, because k-means spreads items best over its codes where few directions can set them apart."""
    parts = []
    for matrix in (retriever.s, retriever.like):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)                                    # svd_lowrank draws from the global generator
            u, _, _ = torch.svd_lowrank(matrix, q=DIMS, niter=2)    # (items, DIMS)
        parts.append(F.normalize(u, dim=1))
    return torch.cat(parts, dim=1)


def kmeans(x, clusters, generator, rounds=15):
    """Lloyd's algorithm. x (n, d) -> nearest cluster of each (n,), centres (clusters, d). An empty cluster starts again
    at a random point."""
    centre = x[torch.randperm(len(x), generator=generator)[:clusters]].clone()
    for _ in range(rounds):
        near = torch.cdist(x, centre).argmin(1)                     # (n,)
        total = torch.zeros_like(centre).index_add_(0, near, x)
        count = torch.bincount(near, minlength=len(centre))
        spare = x[torch.randint(len(x), (len(centre),), generator=generator)]
        centre = torch.where(count[:, None] > 0, total / count.clamp(min=1)[:, None], spare)
    return torch.cdist(x, centre).argmin(1), centre


def semantic_ids(x, seed=0):
    """Vectors (items, d) -> codes (items, 4), and the share of items whose first three codes no other item has."""
    g = torch.Generator().manual_seed(seed)
    residual, codes = x, []
    for _ in range(LEVELS):
        near, centre = kmeans(residual, min(CODES, len(x)), g)
        residual = residual - centre[near]                          # this is left for the next level to explain
        codes.append(near.numpy())
    triples = np.stack(codes, axis=1)                               # (items, 3)
    _, group, size = np.unique(triples, axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)                                       # (items,): which items share their triple
    seen, last = np.zeros(len(size), dtype=int), np.zeros(len(x), dtype=int)
    for i, g_i in enumerate(group):                                 # the fourth code: 0, 1, 2 ... within a group
        last[i], seen[g_i] = seen[g_i], seen[g_i] + 1
    return np.column_stack([triples, last]), float((size[group] == 1).mean())
