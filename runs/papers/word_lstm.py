"""A word-level LSTM whose state is carried from one batch to the next."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

State = tuple[Tensor, Tensor]
"""Hidden and cell states, (layers, batch, hidden) each."""


class WordLSTM(nn.Module):
    """A word-level language model: dropout behind the embedding and behind each LSTM layer, and a
    read-out that shares the embedding's weights if it is `tied` (Press and Wolf 2017).

    `forward` maps symbols (batch, length) int64 to logits (batch, length, vocab). In training mode
    the state at the end of a call is where the next one of as many rows begins; gradients end
    there. `restart` begins anew, and `continued` tells the state after some symbols without
    touching what training carries. What is carried is this rank's own: neither a parameter nor a
    buffer, which DDP would overwrite with rank 0's, but part of the `state_dict`, so that a run
    that resumes goes on with it.
    """

    def __init__(
        self,
        vocab: int = 10_000,
        hidden: int = 128,
        dropout: float = 0.2,
        layers: int = 2,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True, dropout=dropout)
        self.head = None if tied else nn.Linear(hidden, vocab)
        self.dropout = nn.Dropout(dropout)
        self._carried: State | None = None
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, symbols: Tensor) -> Tensor:
        carried = self._carried
        if not self.training or (carried is not None and carried[0].shape[1] != len(symbols)):
            carried = None
        logits, (hidden, cell) = self.continued(symbols, carried)
        if self.training:
            self._carried = hidden.detach(), cell.detach()
        return logits

    def continued(self, symbols: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Logits, and the state after these symbols; state: that before them (None: zeros)."""
        states, after = self.lstm(self.dropout(self.embedding(symbols)), state)
        states = self.dropout(states)
        logits = F.linear(states, self.embedding.weight) if self.head is None else self.head(states)
        return logits, after

    def restart(self) -> None:
        """The next symbols do not follow on those before."""
        self._carried = None

    def get_extra_state(self) -> Tensor:
        """What is carried, both states stacked; empty: nothing."""
        return torch.empty(0) if self._carried is None else torch.stack(self._carried)

    def set_extra_state(self, state: Tensor) -> None:
        hidden_and_cell = state.to(self.embedding.weight.device, copy=True)
        self._carried = (hidden_and_cell[0], hidden_and_cell[1]) if state.numel() else None
