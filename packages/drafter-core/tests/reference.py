"""SuffixDecoding written to be obviously right: what the compiled drafter is compared with.

Every word of at most `depth` tokens is a key of a dictionary; nothing is shared, split or linked.
Costs depth * depth per token. The rules are those of docs/drafter.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

f32 = np.float32


@dataclass
class Node:
    """One word: how often it occurs, and what follows it (token -> occurrences)."""

    count: int = 0
    children: dict[int, int] = field(default_factory=dict)
    first: int = -1


class Tree:
    """All words of at most `depth` tokens of some texts."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.nodes: dict[tuple[int, ...], Node] = {(): Node()}

    def add(self, text: list[int], token: int) -> None:
        """One more occurrence of every word that ends at the token that follows the text."""
        text = [*text, token]
        for length in range(1, min(len(text), self.depth) + 1):
            word = tuple(text[len(text) - length :])
            self.nodes.setdefault(word, Node()).count += 1
            parent = self.nodes[word[:-1]]
            parent.children[token] = parent.children.get(token, 0) + 1
            if parent.first < 0 or parent.children[token] >= parent.children[parent.first]:
                parent.first = token

    def remove(self, text: list[int]) -> None:
        """Take out every occurrence of a whole text, back to front."""
        for end in range(len(text), 0, -1):
            token = text[end - 1]
            for length in range(1, min(end, self.depth) + 1):
                word = tuple(text[end - length : end])
                self.nodes[word].count -= 1
                if self.nodes[word].count == 0:
                    del self.nodes[word]
                parent = self.nodes[word[:-1]]
                parent.children[token] -= 1
                if parent.children[token] == 0:
                    del parent.children[token]
                if parent.first == token:
                    self._choose_first(parent)

    @staticmethod
    def _choose_first(node: Node) -> None:
        if not node.children:
            node.first = -1
            return
        best = min(node.children, key=lambda token: (-node.children[token], token))
        if node.first not in node.children or node.children[best] > node.children[node.first]:
            node.first = best

    def draft(
        self,
        context: list[int],
        max_tokens: int,
        factor: float,
        offset: float,
        min_prob: float,
    ) -> tuple[list[int], list[float], float, int]:
        """The best draft over every suffix of the context; the longest match among equals."""
        best: tuple[list[int], list[float], float, int] | None = None
        for length in range(min(len(context), self.depth), 0, -1):
            word = tuple(context[len(context) - length :])
            if word not in self.nodes:
                continue
            wanted = float(f32(length) * f32(factor) + f32(offset)) + 1e-6
            cap = min(math.floor(wanted), max_tokens)
            tokens: list[int] = []
            probs: list[float] = []
            prob, score = f32(1), f32(0)
            while len(tokens) < cap:
                word = word[max(0, len(word) - self.depth + 1) :]  # room for one more token
                node = self.nodes[word]
                if node.first < 0 or not word:
                    break
                prob = prob * (f32(node.children[node.first]) / f32(node.count))
                if prob < f32(min_prob):
                    break
                tokens.append(node.first)
                probs.append(float(prob))
                score = score + prob
                word = (*word, node.first)
            if best is None or score > best[2]:
                best = (tokens, probs, float(score), length)
        return best or ([], [], 0.0, 0)


class ReferenceDrafter:
    """The interface of SuffixDrafter, slowly."""

    def __init__(self, max_depth: int, max_cached_requests: int) -> None:
        self.depth = max_depth
        self.limit = max_cached_requests
        self.tree = Tree(max_depth)
        self.local: dict[object, Tree] = {}
        self.context: dict[object, list[int]] = {}
        self.responses: dict[object, list[int]] = {}
        self.teaching: set[object] = set()

    def start_request(self, request_id: object, prompt: list[int]) -> None:
        if self.limit != 0:
            if request_id in self.responses:
                self.evict_cached_response(request_id)
            while 0 < self.limit <= len(self.responses):
                self.evict_cached_response(next(iter(self.responses)))
            self.responses[request_id] = []
            self.teaching.add(request_id)
        self.local[request_id] = Tree(self.depth)
        self.context[request_id] = []
        self._feed(request_id, prompt)

    def _feed(self, request_id: object, tokens: list[int]) -> None:
        for token in tokens:
            self.local[request_id].add(self.context[request_id], token)
            self.context[request_id].append(token)

    def append(self, request_id: object, tokens: list[int]) -> None:
        self._feed(request_id, tokens)
        if request_id in self.teaching:
            for token in tokens:
                self.tree.add(self.responses[request_id], token)
                self.responses[request_id].append(token)

    def draft(
        self,
        request_id: object,
        max_tokens: int,
        factor: float,
        offset: float,
        min_prob: float,
    ) -> tuple[list[int], list[float], float, int]:
        arguments = (self.context[request_id], max_tokens, factor, offset, min_prob)
        local = self.local[request_id].draft(*arguments)
        shared = self.tree.draft(*arguments)
        return shared if shared[2] > local[2] else local

    def stop_request(self, request_id: object) -> None:
        del self.local[request_id], self.context[request_id]
        self.teaching.discard(request_id)

    def evict_cached_response(self, request_id: object) -> None:
        self.teaching.discard(request_id)
        self.tree.remove(self.responses.pop(request_id))
