"""An LSTM language model of bytes."""

from __future__ import annotations

from torch import Tensor, nn


class ByteLSTM(nn.Module):
    """Embedding, LSTM, linear read-out; the state starts at zero in every window.

    `forward` maps symbols (batch, length) int64 to logits (batch, length, vocab). The default
    shape has 0.99 million parameters. There is no dropout, so that a step depends on nothing but
    the weights and the batch. PyTorch's own initialisation is kept: with it SGD was stable at
    learning rates 1 and 2 (gradient norms below 3, 600 steps, one seed), while small embeddings,
    orthogonal recurrent weights and open forget gates together met norms of 1e5 at 0.7.
    """

    def __init__(
        self, vocab: int = 256, embedding: int = 96, hidden: int = 416, layers: int = 1
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, symbols: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(symbols))
        logits: Tensor = self.head(states)
        return logits
