"""Scores by a similarity of the user's own, whose derivative only autograd knows: the slow way of ``similarity.py``.

One chunk of scores has a graph at a time; the derivative by the scores stays in closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from st_cached_extras.distributed.world import World
from st_cached_extras.objectives.similarity import ScoreBlock, Scores


class AutogradScores(Scores):
    """Any ``similarity_fct(a [n, D], b [m, D]) -> [n, m]`` that scores each pair by itself.

    Args:
        similarity_fct: the similarity; its argument order is that of sentence-transformers, queries first.
        parameters: the learnable parameters of it, by the names under which their derivatives are reported.
    """

    def __init__(
        self,
        columns: Sequence[Tensor],
        rows: Tensor | None,
        world: World,
        dtype: torch.dtype,
        *,
        similarity_fct: Callable[[Tensor, Tensor], Tensor],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__(columns, rows, world, dtype)
        self.similarity_fct = similarity_fct
        self.parameters = dict(parameters)
        self.parameter_gradients = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self.gradient = torch.zeros_like(self.keys)  # [C, N, D]
        self._graphs: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def forward(self, block: ScoreBlock, begin: int, end: int, factor: float, out: Tensor) -> None:
        # Fresh leaves over the same memory: a block's graph ends there, and autograd.grad touches no .grad.
        rows = self.own(block.row_column, begin, end).detach().requires_grad_()  # [b, D]
        keys = self.keys[block.key_columns].flatten(0, 1).detach().requires_grad_()  # [k·N, D]
        first, second = (keys, rows) if block.keys_first else (rows, keys)
        with torch.enable_grad():
            scores = self.similarity_fct(first, second)
        if scores.shape != (len(first), len(second)):
            raise ValueError(
                f"similarity_fct returned shape {tuple(scores.shape)} for {len(first)} and {len(second)} embeddings, "
                f"expected ({len(first)}, {len(second)}). Give a function that scores every pair, as "
                "sentence_transformers.util.cos_sim does, not a pairwise one."
            )
        if begin == 0:
            self._check_leaves(scores, (rows, keys))
        self._graphs[block.name] = (scores, rows, keys)
        torch.mul(scores.detach().T if block.keys_first else scores.detach(), factor, out=out)

    def _check_leaves(self, scores: Tensor, embeddings: tuple[Tensor, Tensor]) -> None:
        """Refuse parameters that the loss does not know: they would train nowhere, without a word."""
        known = {id(leaf) for leaf in (*embeddings, *self.parameters.values())}
        nodes, seen = [scores.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                raise ValueError(
                    f"similarity_fct uses a parameter of shape {list(leaf.shape)} that the loss does not hold, so it "
                    "would get no gradient. Give an nn.Module that owns the parameter as similarity_fct."
                )
            nodes.extend(function for function, _ in node.next_functions)

    def backward(self, block: ScoreBlock, begin: int, end: int, derivative: Tensor, weight: Tensor) -> None:
        scores, rows, keys = self._graphs.pop(block.name)
        if not scores.requires_grad:
            raise ValueError(
                "similarity_fct returned scores without a graph, expected ones that autograd can follow to the "
                "embeddings. Use torch operations only, without detach() or no_grad()."
            )
        d_scores = derivative * weight[:, None]  # [b, k·N]
        d_scores = (d_scores.T if block.keys_first else d_scores).to(scores.dtype)
        if self.log_scale_gradient is not None:
            self.log_scale_gradient += (scores.detach() * d_scores).sum()
        leaves = [rows, keys, *self.parameters.values()]
        d_rows, d_keys, *d_parameters = torch.autograd.grad(scores, leaves, d_scores, allow_unused=True)
        if d_rows is not None:
            self.gradient[block.row_column, self.offset + begin : self.offset + end].add_(d_rows)
        if d_keys is not None:
            self.gradient[block.key_columns].flatten(0, 1).add_(d_keys)
        for total, d_parameter in zip(self.parameter_gradients.values(), d_parameters, strict=True):
            if d_parameter is not None:
                total.add_(d_parameter)

    def cotangents(self) -> list[Tensor]:
        gradient = self.gradient if self.wanted is None else self.gradient.index_select(1, self.wanted)
        return list(self._reduce(gradient))  # C × [b, D]
