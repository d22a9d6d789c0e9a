"""The decoder: embedding, positions, blocks of attention and MLP with residuals around them, and an output head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .attention import Attention


@dataclass(frozen=True)
class Config:
    """Attributes:
    vocabulary: tokens.
    context: most tokens of a row.
    width: of the residual stream; heads divide it.
    """

    vocabulary: int
    context: int = 128
    layers: int = 2
    width: int = 64
    heads: int = 4

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} cannot be divided among {self.heads} heads")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): normalization before each part, as in GPT-2."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self._config, self._layer = config, layer
        self.attention_norm = nn.LayerNorm(config.width)
        self.to_qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.from_heads = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width), nn.GELU(), nn.Linear(4 * config.width, config.width)
        )

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """x: [documents, tokens, width]."""
        documents, tokens, width = x.shape
        qkv = self.to_qkv(self.attention_norm(x)).view(documents, tokens, 3, self._config.heads, self._config.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        out = attention(self._layer, query, key, value)
        x = x + self.from_heads(out.transpose(1, 2).reshape(documents, tokens, width))
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Decoder(nn.Module):
    """Next-token logits. Its random initial weights are torch's generator's: seed that first."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def embed(self, tokens: Tensor, start_position: int = 0) -> Tensor:
        """Tokens [documents, tokens], the first at ``start_position``, as [documents, tokens, width].

        Raises:
            ValueError: beyond the context.
        """
        end = start_position + tokens.shape[1]
        if end > self.config.context:
            raise ValueError(f"{end} tokens do not fit a context of {self.config.context}")
        embedded: Tensor = self.embedding(tokens) + self.positions(torch.arange(start_position, end))
        return embedded

    def logits(self, x: Tensor, attention: Attention) -> Tensor:
        """From embedded tokens, for tests that differentiate by them."""
        for block in self.blocks:
            x = block(x, attention)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def forward(self, tokens: Tensor, attention: Attention, start_position: int = 0) -> Tensor:
        """[documents, tokens, vocabulary]: at each token, of the next one.

        Tokens at ``start_position`` > 0 are new ones of a document whose earlier tokens the attention has stored.
        """
        return self.logits(self.embed(tokens, start_position), attention)

    @property
    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())
