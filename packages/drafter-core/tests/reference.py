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
            if parent.first < 0 or parent.children[token] > parent.children[parent.first]:
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

    def path(
        self,
        word: tuple[int, ...],
        cap: int,
        most: int,
        bounds: tuple[float, float],
        shared: int,
        calibration: Calibration,
    ) -> tuple[list[int], list[float], list[tuple[int, ...]], float]:
        """Tokens, probabilities, cells and score of the draft that rests on a word.

        A token that was not probable enough comes last, with a cell and without a probability.
        """
        tokens: list[int] = []
        probs: list[float] = []
        cells: list[tuple[int, ...]] = []
        matched, prob, score = len(word), 1.0, 0.0
        while len(tokens) < most:
            word = word[max(0, len(word) - self.depth + 1) :]  # room for one more token
            node = self.nodes[word]
            if node.first < 0 or not word or (shared and node.first >= 2**30):
                break
            length, chosen = matched + len(tokens), node.children[node.first]
            cell = cell_of(shared, length, node.count, chosen, len(tokens))
            prob *= calibration.probability(cell, chosen / (node.count + 1.5 / length))
            likely = prob >= bounds[len(tokens) >= cap]
            tokens.append(node.first)
            cells.append(cell)
            if not likely:
                break
            probs.append(float(f32(prob)))
            score += prob
            word = (*word, node.first)
        return tokens, probs, cells, score


def cell_of(shared: int, length: int, count: int, chosen: int, at: int) -> tuple[int, ...]:
    """What the calibration distinguishes."""
    share = chosen / count
    return (
        shared,
        sum(length > bound for bound in (1, 2, 3, 4, 5, 6, 9, 15)),
        sum(count > bound for bound in (1, 2, 4, 8)),
        sum(share < bound for bound in (1.0, 0.8, 0.6, 0.3, 0.15)),
        min(at, 1),
    )


class Calibration:
    """How often drafted tokens were right, of each kind and of all."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, ...], list[int]] = {}
        self.drafted, self.accepted = 1024, 512

    def probability(self, cell: tuple[int, ...], prior: float) -> float:
        tried, right = self.cells.get(cell, (0, 0))
        return (right + 8.0 * prior) / (tried + 8.0)

    def learn(
        self, tokens: list[int], cells: list[tuple[int, ...]], given: int, came: list[int]
    ) -> None:
        """Compare a draft, of which so many tokens were given, with what came."""
        tokens, given = tokens[:64], min(given, 64)
        agreed = 0
        for token, cell, real in zip(tokens, cells, came, strict=False):
            found = self.cells.setdefault(cell, [0, 0])
            found[0] += 1
            found[1] += token == real
            if found[0] >= 4096:
                found[:] = found[0] // 2, found[1] // 2
            if token != real:
                break
            agreed += 1
        if not tokens:
            return
        self.accepted += min(agreed, given)
        self.drafted += given if agreed < len(came) else min(agreed, given)
        if self.drafted >= 4096:
            self.drafted //= 2
            self.accepted //= 2


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
        self.calibration = Calibration()
        self.drafts: dict[object, tuple[list[int], list[tuple[int, ...]], int]] = {}

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
        if not tokens:
            return
        self.calibration.learn(*self.drafts.pop(request_id, ([], [], 0)), tokens)
        before = self.context[request_id][-self.depth :]
        self._feed(request_id, tokens)
        if request_id in self.teaching:
            if not self.responses[request_id]:  # the end of the prompt leads to the response
                marked = [token + 2**30 for token in before]
                tokens = [*(marked if max(marked, default=0) < 2**31 - 1 else []), *tokens]
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
        context = self.context[request_id][-self.depth :]
        least = 0.5 * float(f32(min_prob))
        rate = self.calibration.accepted / max(self.calibration.drafted, 1)
        bounds = least, max(least, 0.8 * rate)
        best: tuple[list[int], list[float], float, int] = [], [], 0.0, 0
        judged: list[int] = []
        cells: list[tuple[int, ...]] = []
        for shared, tree in enumerate([self.local[request_id], self.tree]):
            tried, before = 0, -1
            if shared and request_id in self.teaching and self.responses[request_id]:
                context = self.responses[request_id][-self.depth :]
            for length in range(min(len(context), self.depth - 1), 0, -1):
                word = tuple(context[len(context) - length :])
                node = tree.nodes.get(word)
                if tried == 3 or node is None or node.first < 0 or node.count == before:
                    continue
                wanted = float(f32(length) * f32(factor) + f32(offset)) + 1e-6
                cap = max(min(math.floor(wanted), max_tokens), 0)
                if factor >= 0 and best[2] >= cap:
                    break
                tried, before = tried + 1, node.count
                most = max_tokens if cap else 0
                tokens, probs, found, score = tree.path(
                    word, cap, most, bounds, shared, self.calibration
                )
                if score > best[2] or (tokens and not judged):
                    n = len(probs)
                    best = tokens[:n], probs, score, length if n else 0
                    judged, cells = tokens, found
        self.drafts[request_id] = judged, cells, len(best[0])
        return best[0], best[1], float(f32(best[2])), best[3]

    def stop_request(self, request_id: object) -> None:
        del self.local[request_id], self.context[request_id]
        self.drafts.pop(request_id, None)
        self.teaching.discard(request_id)

    def evict_cached_response(self, request_id: object) -> None:
        self.teaching.discard(request_id)
        self.tree.remove(self.responses.pop(request_id))
