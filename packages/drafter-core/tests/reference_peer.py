"""What arctic-inference 0.3.0 drafts, restated in plain Python, as slowly and plainly as can be.

Inferred from outside by running the peer: `nox -s parity` checks this module against the real
one, and the exact mode of drafter_core is checked against this module where the peer is not
installed. It must import nothing of drafter_core: it is the yardstick.

The rules, in the order in which they apply:

- A tree counts every substring of at most `max_depth` tokens of every sequence it holds, once per
  occurrence.
- Children of one node are kept in order of falling count. The order within equal counts depends
  on history: a new child goes last; a child whose count rises goes to the end of the group above,
  unless it led its own group, in which case it leads the group above; a child whose count falls
  leads the group below.
- Matches are the suffixes of the context that are strictly shorter than the context; the context
  is first cut to its last `max_depth` tokens.
- Every match drafts at most `min(max_spec_tokens, int(match_len * factor + offset + 1e-6))`
  tokens, computed in float32 up to the last addition. The draft with the highest score wins, the
  longest match among equals, the request's own tree before the global one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, KeysView, Sequence
from dataclasses import dataclass, field

import numpy as np

float32 = np.float32


@dataclass
class ReferenceDraft:
    """One draft.

    `parents[i]` is the index of the token before `token_ids[i]`, or -1 for the end of the context.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    score: float = 0.0
    match_len: int = 0


class Node:
    """A substring, how often it occurs, and its one-token extensions in the peer's order."""

    __slots__ = ("children", "count", "order", "token")

    def __init__(self, token: int) -> None:
        self.token = token
        self.count = 0
        self.children: dict[int, Node] = {}
        self.order: list[Node] = []

    def first_of_group(self, count: int) -> int:
        """The index of the first child with at most `count` occurrences."""
        low, high = 0, len(self.order)
        while low < high:
            middle = (low + high) // 2
            if self.order[middle].count > count:
                low = middle + 1
            else:
                high = middle
        return low

    def only_way_on(self) -> Node | None:
        """The extension that follows every occurrence, if there is one."""
        first = self.order[0] if self.order else None
        return first if first is not None and first.count == self.count else None

    def index(self, child: Node) -> int:
        """Where `child` stands among its siblings."""
        return self.order.index(child, self.first_of_group(child.count))

    def count_up(self, token: int) -> Node:
        """Count one more occurrence of the extension by `token`."""
        child = self.children.get(token)
        if child is None:
            child = self.children[token] = Node(token)
            self.order.append(child)
            child.count = 1
            return child
        first = self.first_of_group(child.count)
        at = self.index(child)
        above = self.first_of_group(child.count + 1)
        del self.order[at]
        self.order.insert(above if at == first else first, child)
        child.count += 1
        return child

    def count_down(self, token: int) -> Node:
        """Count one occurrence of the extension by `token` less; forget it when none is left."""
        child = self.children[token]
        at = self.index(child)
        behind = self.first_of_group(child.count - 1)
        del self.order[at]
        child.count -= 1
        if child.count:
            self.order.insert(behind - 1, child)
        else:
            del self.children[token]
        return child


class ReferenceTree:
    """The suffixes of some sequences, cut to `max_depth` tokens, as a plain trie."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self.root = Node(-1)
        self.sequences: dict[int, list[int]] = {}
        self.ends: dict[int, deque[Node]] = {}

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        """Append `tokens` to the sequence, which need not exist yet."""
        held = self.sequences.setdefault(sequence, [])
        ends = self.ends.setdefault(sequence, deque())
        for token in tokens:
            held.append(token)
            ends.append(self.root)
            if len(ends) > self.max_depth:
                ends.popleft()
            for _ in range(len(ends)):
                ends.append(ends.popleft().count_up(token))

    def remove(self, sequence: int) -> None:
        """Take back every occurrence that the sequence has contributed."""
        tokens = self.sequences.pop(sequence, [])
        self.ends.pop(sequence, None)
        for start in range(len(tokens)):
            node = self.root
            for token in tokens[start : start + self.max_depth]:
                node = node.count_down(token)

    def find(self, tokens: Sequence[int]) -> Node | None:
        """The node of `tokens`, or None when they do not occur."""
        node: Node | None = self.root
        for token in tokens:
            node = node.children.get(token) if node is not None else None
        return node

    def speculate(
        self,
        context: Sequence[int],
        max_spec_tokens: int,
        max_spec_factor: float,
        max_spec_offset: float,
        min_token_prob: float,
        use_tree_spec: bool,
    ) -> ReferenceDraft:
        """The best draft over all matches of `context` in this tree."""
        best = ReferenceDraft()
        for match_len in range(1, len(context)):
            node = self.find(context[len(context) - match_len :])
            if node is None:
                break
            limit = draft_limit(match_len, max_spec_tokens, max_spec_factor, max_spec_offset)
            grow = draft_tree if use_tree_spec else draft_path
            draft = grow(node, limit, float32(min_token_prob))
            if draft.score >= best.score:
                best = draft
                best.match_len = match_len
        return best


def draft_limit(match_len: int, most: int, factor: float, offset: float) -> int:
    """How many tokens a match of `match_len` tokens may draft."""
    wanted = float(float32(match_len) * float32(factor) + float32(offset)) + 1e-6
    if not -(2.0**31) <= wanted < 2.0**31:
        return 0  # also infinities and nan
    return max(0, min(most, int(wanted)))


def draft_path(node: Node, limit: int, min_prob: np.float32) -> ReferenceDraft:
    """Follow the first child while the probability of the whole path is at least `min_prob`."""
    draft = ReferenceDraft()
    prob, score = float32(1.0), float32(0.0)
    while len(draft.token_ids) < limit and node.order:
        child = node.order[0]
        prob = prob * (float32(child.count) / float32(node.count))
        if not prob >= min_prob:  # nan drafts nothing
            break
        draft.token_ids.append(child.token)
        draft.parents.append(len(draft.token_ids) - 2)
        draft.probs.append(float(prob))
        score = score + prob
        node = child
    draft.score = float(score)
    return draft


def draft_tree(node: Node, limit: int, min_prob: np.float32) -> ReferenceDraft:
    """Take the most probable continuation of anything taken so far, again and again.

    Where the text can go on in one way only, that way is the next candidate. Where it branches or
    may end, the place itself waits in the heap, and its continuations join only when it is taken
    out; that extra turn decides the order among equal probabilities.
    """
    draft = ReferenceDraft()
    score = float32(0.0)
    heap = [what_follows(node, float32(1.0), -1)]
    while len(draft.token_ids) < limit and heap:
        taken = pop(heap)
        if taken.after is not None:
            for child in taken.after.order:
                prob = taken.prob * float32(child.count) / float32(taken.after.count)
                if prob < min_prob:  # nan drafts everything
                    break
                push(heap, Candidate(prob, child, taken.parent))
            continue
        draft.token_ids.append(taken.node.token)
        draft.parents.append(taken.parent)
        draft.probs.append(float(taken.prob))
        score = score + taken.prob
        push(heap, what_follows(taken.node, taken.prob, len(draft.token_ids) - 1))
    draft.score = float(score)
    return draft


@dataclass
class Candidate:
    """What a tree draft may take next: the token of `node`, or whatever may come after it."""

    prob: np.float32
    node: Node
    parent: int
    after: Node | None = None


def what_follows(node: Node, prob: np.float32, at: int) -> Candidate:
    """The one way on from `node`, or its end as a place that may branch."""
    only = node.only_way_on()
    if only is not None:
        return Candidate(prob, only, at)
    return Candidate(prob, node, at, after=node)


def push(heap: list[Candidate], item: Candidate) -> None:
    """Sift `item` up past strictly smaller parents, as push_heap of the GNU C++ library does."""
    heap.append(item)
    at = len(heap) - 1
    while at and heap[(at - 1) // 2].prob < item.prob:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = item


def pop(heap: list[Candidate]) -> Candidate:
    """Take the largest: move the hole down to a leaf, then sift the last item up from there."""
    top = heap[0]
    last = heap.pop()
    if not heap:
        return top
    at, size = 0, len(heap)
    while 2 * at + 2 < size:
        child = 2 * at + 2
        if heap[child].prob < heap[child - 1].prob:
            child -= 1
        heap[at] = heap[child]
        at = child
    if 2 * at + 1 < size and 2 * at + 2 == size:
        heap[at] = heap[2 * at + 1]
        at = 2 * at + 1
    while at and heap[(at - 1) // 2].prob < last.prob:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = last
    return top


class ReferenceCache:
    """The peer's cache.

    One tree per running request holds its prompt and response, one for all holds the responses.
    """

    def __init__(self, max_tree_depth: int = 64, max_cached_requests: int = -1) -> None:
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        self.global_tree = ReferenceTree(max_tree_depth)
        self.local_trees: dict[Hashable, ReferenceTree] = {}
        self.cached: dict[Hashable, int] = {}
        self.sequence_ids: Iterator[int] = iter(range(1 << 62))

    @property
    def active_requests(self) -> KeysView[Hashable]:
        return self.local_trees.keys()

    @property
    def cached_requests(self) -> KeysView[Hashable]:
        return self.cached.keys()

    def start_request(self, req_id: Hashable, prompt_token_ids: Sequence[int]) -> None:
        if req_id in self.local_trees:
            raise ValueError(f"Request '{req_id}' is already active")
        tree = self.local_trees[req_id] = ReferenceTree(self.max_tree_depth)
        tree.extend(0, prompt_token_ids)
        if self.max_cached_requests == 0:
            return
        if req_id in self.cached:
            self.evict_cached_response(req_id)
        while 0 < self.max_cached_requests <= len(self.cached):
            self.evict_cached_response(next(iter(self.cached)))
        self.cached[req_id] = next(self.sequence_ids)

    def stop_request(self, req_id: Hashable) -> None:
        if req_id not in self.local_trees:
            raise ValueError(f"Request '{req_id}' is not active")
        del self.local_trees[req_id]

    def add_active_response(self, req_id: Hashable, token_ids: Sequence[int]) -> None:
        if req_id not in self.local_trees:
            raise ValueError(f"Request '{req_id}' is not active")
        self.local_trees[req_id].extend(0, token_ids)
        if req_id in self.cached:
            self.global_tree.extend(self.cached[req_id], token_ids)

    def evict_cached_response(self, req_id: Hashable) -> None:
        if req_id not in self.cached:
            raise ValueError(f"Request '{req_id}' is not cached")
        self.global_tree.remove(self.cached.pop(req_id))

    def speculate(
        self,
        req_id: Hashable,
        context: Sequence[int],
        max_spec_tokens: int | None = None,
        max_spec_factor: float = 1.0,
        max_spec_offset: float = 0.0,
        min_token_prob: float = 0.1,
        use_tree_spec: bool = False,
    ) -> ReferenceDraft:
        if req_id not in self.local_trees:
            raise ValueError(f"Request '{req_id}' is not active")
        most = self.max_tree_depth if max_spec_tokens is None else max_spec_tokens
        context = list(context)[-self.max_tree_depth :] if self.max_tree_depth > 0 else []
        settings = (context, most, max_spec_factor, max_spec_offset, min_token_prob, use_tree_spec)
        own = self.local_trees[req_id].speculate(*settings)
        shared = self.global_tree.speculate(*settings)
        return own if own.score >= shared.score else shared
