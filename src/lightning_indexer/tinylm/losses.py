"""What training minimises: next bytes, drafted bytes, and the indexer's distance to attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .model import TinyLM
from .window import run_layer


@dataclass(frozen=True)
class Losses:
    """Nats a byte of the target and of each draft step, and the indexers' mean loss."""

    target: torch.Tensor
    drafts: tuple[torch.Tensor, ...]
    index: torch.Tensor


def window_losses(
    lm: TinyLM, ids: torch.Tensor, *, depth: int, sparse: bool, share: bool, learn_index: bool
) -> Losses:
    """Losses of a batch of windows.

    Args:
        lm: the model.
        ids: [B, T + 2] bytes; the target predicts T of them, T ≤ max_model_len.
        depth: draft steps; each is fed the hidden states that the one before gave.
        sparse: False during the dense warm-up.
        share: draft steps after the first reuse its keys and selection, as sharing does;
            otherwise each makes its own.
        learn_index: whether to compute the indexers' loss (else 0).
    """
    rows = ids.shape[1] - 2
    positions = torch.arange(rows)
    hidden = lm.model.embed_tokens(ids[:, :rows])
    mask, index_losses = None, []
    for layer in lm.hidden_layers:
        shared: torch.Tensor | None = mask if layer.self_attn.indexer is None else None
        out = run_layer(
            layer, hidden, positions, sparse=sparse, learn_index=learn_index, mask=shared
        )
        hidden, mask = out.rows, out.keys.mask
        index_losses.append(out.index_loss)
    hidden = lm.model.norm(hidden)
    target = _nats(lm, hidden, ids[:, 1 : rows + 1])

    drafts, keys = [], None
    for step in range(depth):
        # Step s moves each query s positions on; the last ones would leave the context.
        kept = rows - step
        embedded = lm.model.embed_tokens(ids[:, step + 1 : rows + 1])
        out = run_layer(
            lm.mtp_layer,
            lm.mtp_layer.combine(embedded, hidden[:, :kept]),
            positions[step:],
            sparse=sparse,
            learn_index=learn_index and step == 0,
            keys=keys.of_first(kept) if share and keys else None,
        )
        hidden, keys = lm.mtp_layer.shared_head.norm(out.rows), out.keys
        drafts.append(_nats(lm, hidden, ids[:, step + 2 :]))
        index_losses.append(out.index_loss)
    found = [loss for loss in index_losses if loss is not None]
    index = torch.stack(found).mean() if found else torch.zeros(())
    return Losses(target, tuple(drafts), index)


def _nats(lm: TinyLM, hidden: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(lm.lm_head(hidden).flatten(0, 1), expected.flatten())
