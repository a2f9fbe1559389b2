"""Whether the arrays of a drafter agree with each other, by the invariants of docs/drafter.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from drafter_core import SuffixDrafter
from drafter_core import _kernels as k


def check_integrity(
    drafter: SuffixDrafter, requests: Mapping[Hashable, Sequence[int]] | None = None
) -> int:
    """Walk every tree from its root and check every invariant; return how many states there are.

    What the trees hold is counted anew from the texts: the cached responses, and of each request in
    `requests` the tokens that it was given, prompt and response.
    """
    drafter._run(k.FREE, 0, 0)  # requests that were stopped may still have their trees
    tables = drafter._tables
    handles = [0, *drafter._handles.values()]
    states: set[int] = set()
    spans: dict[int, int] = {}  # tables and pair chunks, by their size class
    texts = _check_texts(drafter)
    given = {drafter._handles[name]: tokens for name, tokens in (requests or {}).items()}
    for tree in handles:
        root = int(tables.trees[tree, k.R_ROOT])
        found = {v: dict(_edges(tables, v)) for v in _tree_states(tables, root)}
        if tree == 0:
            ends = _check_counts(tables, root, found, texts.values())
            _check_shared_ends(drafter, dict(zip(texts, ends, strict=True)))
        elif tree in given:
            (end,) = _check_counts(tables, root, found, [given[tree]])
            assert tables.trees[tree, k.R_STATE] == end, "not the state of the request's last words"
            assert tables.trees[tree, k.R_FED] == len(given[tree])
        assert len(found) == tables.trees[tree, k.R_STATES], "states are lost or left over"
        assert not states & found.keys(), "two trees share a state"
        states |= found.keys()
        small: dict[int, int] = {}
        for v in found:
            _check_state(tables, v, root)
            if _is_table(tables, v):
                spans[int(tables.states[v, k.BLK])] = _kind(tables, v)
            elif tables.states[v, k.BLK] >= 0:
                small[int(tables.states[v, k.BLK])] = _size_class(tables, v)
        spans |= dict.fromkeys(_check_small_blocks(tables, tree, small), k.PAIR_CHUNKS)
    chunk = int(tables.header[k.G_SFREE])
    while chunk >= 0:  # what stopped requests left behind keeps its tables until it is used again
        for v in range(chunk * k.CHUNK, (chunk + 1) * k.CHUNK):
            if _is_table(tables, v):
                spans[int(tables.states[v, k.BLK])] = _kind(tables, v)
        chunk = int(tables.chunks[chunk, 0])
    _check_pool(tables, spans)
    _check_free_states(tables, states)
    return len(states)


def _check_texts(drafter: SuffixDrafter) -> dict[int, list[int]]:
    """The text of each response in the global tree; their chunks and the free ones are all."""
    tables = drafter._tables
    texts, used = {}, []
    for sequence in [*drafter._sequences.values(), *drafter._leaving]:
        assert sequence not in texts, "two responses share a text"
        texts[sequence] = drafter._text(sequence).tolist()
        chunk = int(tables.sequences[sequence, k.Q_LAST])
        for _ in range(-(-len(texts[sequence]) // k.CHUNK)):
            used.append(chunk)
            chunk = int(tables.chunks[chunk, 1])
    assert sum(map(len, texts.values())) == drafter.stats().cached_tokens
    chunk = int(tables.header[k.G_TFREE])
    while chunk >= 0:
        assert len(used) < tables.header[k.G_TCHUNKS], "a text chunk that is free twice or in use"
        used.append(chunk)
        chunk = int(tables.chunks[chunk, 1])
    assert sorted(used) == list(range(int(tables.header[k.G_TCHUNKS]))), "text chunks are lost"
    return texts


def _check_counts(
    tables, root: int, edges: dict[int, dict[int, int]], texts: Iterable[Sequence[int]]
) -> list[int]:
    """Count every word of the texts anew, and return the state of the end of each.

    Where a prefix of a text ends, so do the words of its state and of those that its links lead to,
    and no others.
    """
    depth = int(tables.header[k.G_DEPTH])
    length = {v: _length(tables, v) for v in edges}
    link = {v: int(tables.states[v, k.LINK]) for v in edges}
    passed: Counter[int] = Counter()
    ends = []
    for text in texts:
        v = root
        for place, token in enumerate(text, 1):
            if length[v] == depth and length[link[v]] == depth - 1:
                v = link[v]
            assert token in edges[v], "a word of a text is missing"
            v = edges[v][token]
            assert length[v] == min(place, depth), "the last words of a text are not its state's"
            passed[v] += 1
        ends.append(v)
    for v in sorted(edges, key=length.__getitem__, reverse=True):
        if v != root:
            assert tables.states[v, k.COUNT] == passed[v], "a wrong number of occurrences"
            passed[link[v]] += passed[v]
    return ends


def _check_shared_ends(drafter: SuffixDrafter, ends: dict[int, int]) -> None:
    """A running request goes on in the global tree where its response ends."""
    for handle in drafter._handles.values():
        tree = drafter._tables.trees[handle]
        if tree[k.R_SEQ] >= 0:
            assert tree[k.R_GSTATE] == ends[int(tree[k.R_SEQ])], "not the state of a response's end"


def _size_class(tables, v: int) -> int:
    return int(tables.states[v, k.META]) >> k.CLASS_SHIFT


def _is_table(tables, v: int) -> bool:
    return bool(tables.states[v, k.BLK] >= 0 and _size_class(tables, v) > k.SMALL)


def _kind(tables, v: int) -> int:
    """The list of free tables that a table belongs to: one in order is twice as large."""
    ordered = tables.header[k.G_EXACT] and tables.states[v, k.LINK] >= 0
    return _size_class(tables, v) + bool(ordered)


def _edges(tables, v: int) -> list[tuple[int, int]]:
    if tables.states[v, k.TOK] < 0:
        assert tables.states[v, k.BLK] < 0, "a block without a first edge"
        return []
    edges = [(int(tables.states[v, k.TOK]), int(tables.states[v, k.DST]))]
    block = int(tables.states[v, k.BLK])
    if block >= 0:
        first = block + k.HEADER * _is_table(tables, v)
        pairs = tables.blocks[first : first + (1 << _size_class(tables, v))]
        edges += [(int(t), int(d)) for t, d in pairs if t >= 0]
        assert len(edges) > 1, "an empty block"
    return edges


def _find(tables, v: int, token: int) -> int:
    """Where the token leads to, searched as the kernels do."""
    if tables.states[v, k.TOK] == token:
        return int(tables.states[v, k.DST])
    block = int(tables.states[v, k.BLK])
    at, first, size = 0, block, 1 << _size_class(tables, v)
    if _is_table(tables, v):
        first += k.HEADER
        at = ((token * 0x9E3779B1) >> 12) & (size - 1)
    for _ in range(size):
        if tables.blocks[first + at, 0] in (token, -1):
            break
        at = (at + 1) % size
    return int(tables.blocks[first + at, 1]) if tables.blocks[first + at, 0] == token else -1


def _length(tables, v: int) -> int:
    return int(tables.states[v, k.META]) & k.LEN_MASK


def _tree_states(tables, root: int) -> set[int]:
    found = {root}
    waiting = [root]
    while waiting:
        v = waiting.pop()
        for _, d in _edges(tables, v):
            if d not in found:
                found.add(d)
                waiting.append(d)
    return found


def _check_state(tables, v: int, root: int) -> None:
    depth = int(tables.header[k.G_DEPTH])
    length = _length(tables, v)
    count = int(tables.states[v, k.COUNT])
    edges = _edges(tables, v)
    shortest = 0
    if v == root:
        assert length == 0
        assert tables.states[v, k.LINK] < 0
    else:
        link = int(tables.states[v, k.LINK])
        shortest = _length(tables, link) + 1
        assert shortest <= length <= depth
        assert count > 0
        assert link == root or int(tables.states[link, k.COUNT]) >= count
        assert sum(int(tables.states[d, k.COUNT]) for _, d in edges) <= count
        if edges:
            counts = [int(tables.states[d, k.COUNT]) for _, d in edges]
            assert counts[0] == max(counts), "the first edge is not the most frequent"
    assert len({t for t, _ in edges}) == len(edges), "a token twice"
    assert not edges or shortest < depth, "an edge beyond the depth"
    for token, d in edges:
        assert _find(tables, v, token) == d, "an edge that a search does not reach"
        longest = min(length, depth - 1) + 1
        below = _length(tables, int(tables.states[d, k.LINK]))
        assert below < shortest + 1, "an edge to a state that lacks the shortest word"
        assert longest <= _length(tables, d), "an edge to a state that lacks the longest word"
    if int(tables.states[v, k.BLK]) >= 0:
        _check_block(tables, v, root, len(edges) - 1)


def _check_block(tables, v: int, root: int, held: int) -> None:
    block = int(tables.states[v, k.BLK])
    counts = [int(tables.states[d, k.COUNT]) for _, d in _edges(tables, v)[1:]]
    in_order = tables.header[k.G_EXACT] and v != root
    if not _is_table(tables, v):
        cells = tables.blocks[block : block + (1 << _size_class(tables, v))]
        assert (cells[:held, 0] >= 0).all(), "a gap in a small block"
        assert (cells[held:, 0] < 0).all()
        if in_order:
            assert counts == sorted(counts, reverse=True), "siblings out of order"
        return
    assert tables.blocks[block, 0] == held, "a wrong number of edges in the header"
    if in_order:
        _check_order(tables, v, block, held)
    elif not tables.header[k.G_EXACT]:
        assert tables.blocks[block, k.BOUND] >= max(counts) or v == root, "a bound below a count"


def _check_order(tables, v: int, block: int, held: int) -> None:
    """The list through a table, and the first sibling of each of the lowest counts."""
    first = block + k.HEADER
    links = first + (1 << _size_class(tables, v))
    place, before, order, leaders = int(tables.blocks[block, k.HEAD]), -1, [], {}
    while place >= 0:
        assert len(order) <= held, "a loop in the order of siblings"
        assert tables.blocks[links + place, k.BEFORE] == before
        order.append(int(tables.states[tables.blocks[first + place, 1], k.COUNT]))
        leaders.setdefault(order[-1], place)
        before, place = place, int(tables.blocks[links + place, k.AFTER])
    assert tables.blocks[block + 1, k.TAIL] == before
    assert len(order) == held, "the order of siblings misses some"
    assert order == sorted(order, reverse=True), "siblings out of order"
    header = tables.blocks[block:first].ravel()
    for count in range(1, k.LEADS + 1):
        found = header[k.LEAD_FIELD + count]
        assert found == leaders.get(count, -1), f"a wrong leader of {count}"


def _check_small_blocks(tables, tree: int, used: dict[int, int]) -> list[int]:
    """Small blocks in use and free ones fill the pair chunks of a tree; return those."""
    chunks = []
    chunk = int(tables.trees[tree, k.R_BCHUNK])
    while chunk >= 0:
        chunks.append(chunk)
        chunk = int(tables.blocks[chunk, 1])
    assert not chunks or chunks[-1] == tables.trees[tree, k.R_BTAIL]
    spans = dict(used)
    for size_class in range(k.SMALL + 1):
        block = int(tables.trees[tree, k.R_BFREE + size_class])
        while block >= 0:
            assert block not in spans, "a block that is both free and in use, or free twice"
            spans[block] = size_class
            block = int(tables.blocks[block, 1])
    covered = dict.fromkeys(chunks, "the link")
    rest = range(int(tables.trees[tree, k.R_BNEXT]), int(tables.trees[tree, k.R_BEND]))
    for block, size in [*((b, 1 << c) for b, c in spans.items()), *((b, 1) for b in rest)]:
        for pair in range(block, block + size):
            assert pair not in covered, "blocks overlap"
            covered[pair] = "a block"
    assert sorted(covered) == [c + i for c in sorted(chunks) for i in range(k.PAIRS)]
    return chunks


def _check_pool(tables, used: dict[int, int]) -> None:
    """Tables and pair chunks, in use and free, fill the space handed out, without overlap."""
    spans = dict(used)
    for size_class in range(32):
        block = int(tables.header[k.G_BFREE + size_class])
        while block >= 0:
            assert block not in spans, "a block that is both free and in use, or free twice"
            spans[block] = size_class
            block = int(tables.blocks[block, 1])
    at = 0
    for block in sorted(spans):
        assert block == at, "blocks overlap or are lost"
        pairs = k.PAIRS if spans[block] == k.PAIR_CHUNKS else (1 << spans[block]) + k.HEADER
        at += -(-pairs // k.LINE) * k.LINE
    assert at == tables.header[k.G_BNEXT]


def _check_free_states(tables, states: set[int]) -> None:
    free = set()
    v = int(tables.header[k.G_STATEFREE])
    while v >= 0:
        assert v not in states, "a state that is both free and in use"
        assert v not in free, "a state that is free twice"
        free.add(v)
        v = int(tables.states[v, k.LINK])
    chunks = set(np.array(sorted(states | free), np.int64) // k.CHUNK)
    chunk = int(tables.header[k.G_SFREE])
    while chunk >= 0:
        assert chunk not in chunks, "a chunk that is both free and in use"
        chunks.add(chunk)
        chunk = int(tables.chunks[chunk, 0])
    assert len(chunks) == tables.header[k.G_SCHUNKS], "chunks are lost"
