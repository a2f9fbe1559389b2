"""The compiled part: a depth-truncated suffix automaton in flat arrays.

Knows nothing of request ids, Python objects or vLLM. Every function is free and works on the arrays
that `drafter.py` owns; all kernels live in this one module because Numba's cache does not notice an
edit in another one. docs/drafter.md explains the structure; in short:

- A *word* is a run of at most `depth` tokens. Words that end at exactly the same places share a
  *state*; a state holds the words of lengths `LEN[LINK] + 1 .. LEN`, which are suffixes of each
  other. `COUNT` is how often they occur. The link leads to the longest suffix that occurs more.
- Word + token = longer word: an *edge*. The edge to the successor that occurs most is kept in the
  state itself (`TOK`, `DST`), the others in a block.
- All trees share the arrays. Tree 0 is the global tree over responses; every running request has
  one of its own over prompt and response.

Arrays
    S      int32 [states, 6]     LINK, COUNT, TOK, DST, BLK, META
    B      int32 [pairs, 2]      blocks of edges (token, state)
    T      int32 [chunks * 64]   texts of the responses in the global tree
    C      int32 [chunks, 2]     successor of a state chunk, successor of a text chunk
    R      int64 [trees, 16]     one row per tree: row 0 the global one, others per handle
    Q      int64 [sequences, 4]  one row per response in the global tree
    W      int32 [trees, depth]  the last tokens that each request was given, right-aligned
    G      int64 [64]            sizes, free lists, counters
"""

# Argument lists stay on few lines here: the same eight arrays lead each of them.
# fmt: off
# Array elements are Any to mypy.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit

# fields of S
LINK, COUNT, TOK, DST, BLK, META = 0, 1, 2, 3, 4, 5
STATE_FIELDS = 6
LEN_MASK = 0xFFFF
CLASS_SHIFT = 16

# fields of R
R_ALIVE, R_ROOT, R_STATE, R_NEXT, R_END, R_CHUNK = 0, 1, 2, 3, 4, 5
R_FED, R_SEQ, R_GSTATE, R_RLEN, R_STATES = 6, 7, 8, 9, 10
TREE_FIELDS = 16

# fields of Q
Q_FIRST, Q_LAST, Q_LEN, Q_ALIVE = 0, 1, 2, 3
SEQ_FIELDS = 4

# fields of G
G_DEPTH, G_SCHUNKS, G_SFREE, G_STATEFREE, G_BNEXT, G_TCHUNKS, G_TFREE = 0, 1, 2, 3, 4, 5, 6
G_SCAP, G_BCAP, G_TCAP, G_TOPCLASS, G_STATES, G_TOKENS = 7, 8, 9, 10, 11, 12
G_BFREE = 32  # 32 free lists of blocks, one per size class
HEADER_FIELDS = 64

CHUNK = 64
"""States per state chunk, tokens per text chunk."""

SMALL = 3
"""Blocks of up to 2**SMALL edges are scanned; larger ones are hash tables with a header pair:
(edges in the table, a bound of their counts)."""

UNKNOWN = 2147483647
"""The bound of a table whose counts were not looked at yet."""

# results
OK, MISMATCH, BAD_TOKEN, BAD_HANDLE, FULL, CORRUPT = 0, 1, 2, 3, 4, 5

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _jit(function: _Function) -> _Function:
    return njit(cache=True, nogil=True, error_model="numpy")(function)


# -- edges -----------------------------------------------------------------------------------------


@_jit
def _hash(token: int, mask: int) -> int:
    """The home slot of a token: Fibonacci hashing, so that runs of ids do not cluster."""
    return ((token * 0x9E3779B1) >> 12) & mask


@_jit
def _pairs(size_class: int) -> int:
    """How many pairs a block of the class takes."""
    return (1 << size_class) + (1 if size_class > SMALL else 0)


@_jit
def _new_block(B: Any, G: Any, size_class: int) -> int:
    """A block with no edges."""
    block = G[G_BFREE + size_class]
    pairs = _pairs(size_class)
    if block >= 0:
        G[G_BFREE + size_class] = B[block, 1]
    else:
        block = G[G_BNEXT]
        G[G_BNEXT] = block + pairs
        if size_class > G[G_TOPCLASS]:
            G[G_TOPCLASS] = size_class
    for i in range(block, block + pairs):
        B[i, 0] = -1
    if size_class > SMALL:
        B[block, 0] = 0
        B[block, 1] = UNKNOWN
    return block


@_jit
def _free_block(B: Any, G: Any, block: int, size_class: int) -> None:
    B[block, 1] = G[G_BFREE + size_class]
    G[G_BFREE + size_class] = block


@_jit
def _slot(B: Any, block: int, size_class: int, token: int) -> int:
    """Index of the pair that holds the token, or -1."""
    if size_class <= SMALL:
        for i in range(block, block + (1 << size_class)):
            if B[i, 0] == token:
                return i
            if B[i, 0] < 0:
                return -1
        return -1
    mask = (1 << size_class) - 1
    i = _hash(token, mask)
    while True:
        held = B[block + 1 + i, 0]
        if held == token:
            return block + 1 + i
        if held < 0:
            return -1
        i = (i + 1) & mask


@_jit
def _put(B: Any, block: int, size_class: int, token: int, state: int) -> None:
    """Add an edge to a block that has room and does not hold the token."""
    if size_class <= SMALL:
        i = block
        while B[i, 0] >= 0:
            i += 1
    else:
        mask = (1 << size_class) - 1
        h = _hash(token, mask)
        while B[block + 1 + h, 0] >= 0:
            h = (h + 1) & mask
        i = block + 1 + h
        B[block, 0] += 1
    B[i, 0] = token
    B[i, 1] = state


@_jit
def _resize(S: Any, B: Any, G: Any, v: int, old_class: int, new_class: int) -> int:
    """Move the edges of a state's block to a block of another class."""
    old = S[v, BLK]
    new = _new_block(B, G, new_class)
    first = old + (1 if old_class > SMALL else 0)
    for i in range(first, first + (1 << old_class)):
        if B[i, 0] >= 0:
            _put(B, new, new_class, B[i, 0], B[i, 1])
    if old_class > SMALL and new_class > SMALL:
        B[new, 1] = B[old, 1]
    _free_block(B, G, old, old_class)
    S[v, BLK] = new
    S[v, META] = (S[v, META] & LEN_MASK) | (new_class << CLASS_SHIFT)
    return new


@_jit
def _find(S: Any, B: Any, v: int, token: int) -> int:
    """The state that token leads to from v, or -1."""
    if S[v, TOK] == token:
        return S[v, DST]
    block = S[v, BLK]
    if block < 0:
        return -1
    i = _slot(B, block, S[v, META] >> CLASS_SHIFT, token)
    return B[i, 1] if i >= 0 else -1


@_jit
def _add(S: Any, B: Any, G: Any, v: int, token: int, state: int) -> None:
    """Add an edge that v does not have."""
    if S[v, TOK] < 0:
        S[v, TOK] = token
        S[v, DST] = state
        return
    block = S[v, BLK]
    if block < 0:
        block = _new_block(B, G, 0)
        S[v, BLK] = block
        S[v, META] &= LEN_MASK
        B[block, 0] = token
        B[block, 1] = state
        return
    size_class = S[v, META] >> CLASS_SHIFT
    if size_class <= SMALL:
        if B[block + (1 << size_class) - 1, 0] >= 0:
            size_class += 1
            if size_class > SMALL:
                size_class += 1
            block = _resize(S, B, G, v, S[v, META] >> CLASS_SHIFT, size_class)
    elif (B[block, 0] + 1) * 4 > 3 << size_class:
        block = _resize(S, B, G, v, size_class, size_class + 1)
        size_class += 1
    _put(B, block, size_class, token, state)


@_jit
def _redirect(S: Any, B: Any, v: int, token: int, state: int) -> None:
    """Let the edge that v has for the token lead to another state."""
    if S[v, TOK] == token:
        S[v, DST] = state
    else:
        B[_slot(B, S[v, BLK], S[v, META] >> CLASS_SHIFT, token), 1] = state


@_jit
def _take(S: Any, B: Any, G: Any, v: int, i: int) -> None:
    """Remove pair i from the block of v; give the block back when it is empty."""
    block = S[v, BLK]
    size_class = S[v, META] >> CLASS_SHIFT
    if size_class <= SMALL:
        last = i
        end = block + (1 << size_class)
        while last + 1 < end and B[last + 1, 0] >= 0:
            last += 1
        B[i, 0] = B[last, 0]
        B[i, 1] = B[last, 1]
        B[last, 0] = -1
        if last == block:
            _free_block(B, G, block, size_class)
            S[v, BLK] = -1
        return
    mask = (1 << size_class) - 1
    base = block + 1
    hole = i - base
    j = hole
    while True:  # close the gap: whatever probed past it moves back
        j = (j + 1) & mask
        if B[base + j, 0] < 0:
            break
        home = _hash(B[base + j, 0], mask)
        if ((j - home) & mask) >= ((j - hole) & mask):
            B[base + hole, 0] = B[base + j, 0]
            B[base + hole, 1] = B[base + j, 1]
            hole = j
    B[base + hole, 0] = -1
    B[block, 0] -= 1
    if B[block, 0] * 8 <= 1 << size_class:
        smaller = size_class - 1
        if smaller <= SMALL + 1:
            smaller = SMALL
        _resize(S, B, G, v, size_class, smaller)


@_jit
def _swap_first(S: Any, B: Any, v: int, i: int) -> None:
    """Exchange the edge in the state with pair i of its block, which is a hash slot or a cell."""
    token = S[v, TOK]
    state = S[v, DST]
    S[v, TOK] = B[i, 0]
    S[v, DST] = B[i, 1]
    block = S[v, BLK]
    size_class = S[v, META] >> CLASS_SHIFT
    if size_class <= SMALL:
        B[i, 0] = token
        B[i, 1] = state
        return
    mask = (1 << size_class) - 1
    base = block + 1
    hole = i - base
    j = hole
    while True:
        j = (j + 1) & mask
        if B[base + j, 0] < 0:
            break
        home = _hash(B[base + j, 0], mask)
        if ((j - home) & mask) >= ((j - hole) & mask):
            B[base + hole, 0] = B[base + j, 0]
            B[base + hole, 1] = B[base + j, 1]
            hole = j
    B[base + hole, 0] = -1
    B[block, 0] -= 1
    _put(B, block, size_class, token, state)
    B[block, 1] = max(B[block, 1], S[state, COUNT])


@_jit
def _raise_first(S: Any, B: Any, v: int, token: int, state: int) -> None:
    """After the count of an edge of v rose: it comes first if it now occurs more than the first.

    First to reach a count stays first among equals.
    """
    if S[v, TOK] == token:
        return
    count = S[state, COUNT]
    others = S[S[v, DST], COUNT]
    if count > others:
        _swap_first(S, B, v, _slot(B, S[v, BLK], S[v, META] >> CLASS_SHIFT, token))
    elif (S[v, META] >> CLASS_SHIFT) > SMALL and count > B[S[v, BLK], 1]:
        B[S[v, BLK], 1] = count


@_jit
def _best_of_block(S: Any, B: Any, v: int) -> int:
    """The pair of the block with the highest count, the smallest token among equals."""
    block = S[v, BLK]
    size_class = S[v, META] >> CLASS_SHIFT
    first = block + (1 if size_class > SMALL else 0)
    best = -1
    best_count = -1
    for i in range(first, first + (1 << size_class)):
        token = B[i, 0]
        if token < 0:
            if size_class <= SMALL:
                break
            continue
        count = S[B[i, 1], COUNT]
        if count > best_count or (count == best_count and token < B[best, 0]):
            best = i
            best_count = count
    return best


@_jit
def _lower_first(S: Any, B: Any, v: int) -> None:
    """After the count of the first edge of v fell: another comes first if it now occurs more.

    A hash table keeps a bound of the counts in it, so that it is scanned only when it may matter.
    """
    block = S[v, BLK]
    if block < 0:
        return
    count = S[S[v, DST], COUNT]
    is_table = (S[v, META] >> CLASS_SHIFT) > SMALL
    if is_table and B[block, 1] <= count:
        return
    i = _best_of_block(S, B, v)
    best = S[B[i, 1], COUNT]
    if best > count:
        _swap_first(S, B, v, i)
    elif is_table:
        B[block, 1] = best


@_jit
def _remove(S: Any, B: Any, G: Any, v: int, token: int) -> None:
    """Remove an edge of v."""
    block = S[v, BLK]
    if S[v, TOK] == token:
        if block < 0:
            S[v, TOK] = -1
            return
        i = _best_of_block(S, B, v)
        S[v, TOK] = B[i, 0]
        S[v, DST] = B[i, 1]
        _take(S, B, G, v, i)
    else:
        _take(S, B, G, v, _slot(B, block, S[v, META] >> CLASS_SHIFT, token))


# -- states ----------------------------------------------------------------------------------------


@_jit
def _new_chunk(C: Any, G: Any) -> int:
    chunk = G[G_SFREE]
    if chunk >= 0:
        G[G_SFREE] = C[chunk, 0]
    else:
        chunk = G[G_SCHUNKS]
        G[G_SCHUNKS] = chunk + 1
    return chunk


@_jit
def _new_state(S: Any, C: Any, R: Any, G: Any, tree: int, length: int) -> int:
    v = np.int64(-1)
    if tree == 0 and G[G_STATEFREE] >= 0:
        v = G[G_STATEFREE]
        G[G_STATEFREE] = S[v, LINK]
    else:
        v = R[tree, R_NEXT]
        if v == R[tree, R_END]:
            chunk = _new_chunk(C, G)
            C[chunk, 0] = R[tree, R_CHUNK]
            R[tree, R_CHUNK] = chunk
            v = chunk * CHUNK
            R[tree, R_END] = v + CHUNK
        R[tree, R_NEXT] = v + 1
    S[v, COUNT] = 0
    S[v, TOK] = -1
    S[v, BLK] = -1
    S[v, META] = length
    R[tree, R_STATES] += 1
    return v


@_jit
def _free_state(S: Any, R: Any, G: Any, v: int) -> None:
    """Give a state of the global tree back. It has no edges any more."""
    S[v, LINK] = G[G_STATEFREE]
    G[G_STATEFREE] = v
    R[0, R_STATES] -= 1


@_jit
def _split(S: Any, B: Any, C: Any, R: Any, G: Any, tree: int, q: int, length: int) -> int:
    """Move the words of q of up to `length` tokens into a state of their own; return it."""
    depth = G[G_DEPTH]
    r = _new_state(S, C, R, G, tree, length)
    S[r, LINK] = S[q, LINK]
    S[r, COUNT] = S[q, COUNT]
    S[r, TOK] = S[q, TOK]
    S[r, DST] = S[q, DST]
    S[q, LINK] = r
    block = S[q, BLK]
    size_class = S[q, META] >> CLASS_SHIFT
    if length == depth - 1 and S[q, META] & LEN_MASK == depth:
        # Only the words of full depth stay in q, and those have no successors.
        S[q, TOK] = -1
        S[q, BLK] = -1
        S[r, BLK] = block
        S[r, META] = length | (size_class << CLASS_SHIFT)
    elif block >= 0:
        copy = _new_block(B, G, size_class)
        for i in range(_pairs(size_class)):
            B[copy + i, 0] = B[block + i, 0]
            B[copy + i, 1] = B[block + i, 1]
        S[r, BLK] = copy
        S[r, META] = length | (size_class << CLASS_SHIFT)
    return r


@_jit
def _extendable(S: Any, G: Any, a: int) -> int:
    """The state of the longest suffix of a's longest word that has room for one more token."""
    if S[a, META] & LEN_MASK == G[G_DEPTH]:
        link = S[a, LINK]
        if S[link, META] & LEN_MASK == G[G_DEPTH] - 1:
            return link
    return a


@_jit
def _extend(S: Any, B: Any, C: Any, R: Any, G: Any, tree: int, a: int, token: int) -> int:
    """Append a token to the text whose longest word is that of state a; return its new state.

    Classic on-line construction of a suffix automaton for several texts, cut at the depth, then
    one more occurrence for every suffix.
    """
    limit = G[G_DEPTH] - 1
    start = _extendable(S, G, a)
    p = start
    q = _find(S, B, p, token)
    length = min(S[p, META] & LEN_MASK, limit) + 1
    if q >= 0:
        new = q
        if S[q, META] & LEN_MASK != length:
            new = _split(S, B, C, R, G, tree, q, length)
            while p >= 0 and _find(S, B, p, token) == q:
                _redirect(S, B, p, token, new)
                p = S[p, LINK]
    else:
        new = _new_state(S, C, R, G, tree, length)
        while p >= 0:
            q = _find(S, B, p, token)
            if q >= 0:
                break
            _add(S, B, G, p, token, new)
            p = S[p, LINK]
        if p < 0:
            S[new, LINK] = R[tree, R_ROOT]
        elif S[q, META] & LEN_MASK == (S[p, META] & LEN_MASK) + 1:
            S[new, LINK] = q
        else:
            r = _split(S, B, C, R, G, tree, q, (S[p, META] & LEN_MASK) + 1)
            S[new, LINK] = r
            while p >= 0 and _find(S, B, p, token) == q:
                _redirect(S, B, p, token, r)
                p = S[p, LINK]
    w = new
    while S[w, LINK] >= 0:
        S[w, COUNT] += 1
        w = S[w, LINK]
    p = start
    w = new
    while S[p, LINK] >= 0:  # the root needs no first child: nothing is drafted from it
        if S[p, TOK] != token:
            length = min(S[p, META] & LEN_MASK, limit) + 1
            while S[S[w, LINK], META] & LEN_MASK >= length:
                w = S[w, LINK]
            _raise_first(S, B, p, token, w)
        p = S[p, LINK]
    return new


@_jit
def _new_tree(S: Any, C: Any, R: Any, G: Any, tree: int) -> None:
    R[tree, R_ALIVE] = 1
    R[tree, R_NEXT] = 0
    R[tree, R_END] = 0
    R[tree, R_CHUNK] = -1
    R[tree, R_STATES] = 0
    root = _new_state(S, C, R, G, tree, 0)
    S[root, LINK] = -1
    R[tree, R_ROOT] = root
    R[tree, R_STATE] = root
    R[tree, R_FED] = 0
    R[tree, R_SEQ] = -1
    R[tree, R_RLEN] = 0
    R[tree, R_GSTATE] = R[0, R_ROOT]


@_jit
def _free_tree(S: Any, B: Any, C: Any, R: Any, G: Any, tree: int) -> None:
    """Give back the states and blocks of a request's tree."""
    end = R[tree, R_NEXT]
    chunk = R[tree, R_CHUNK]
    while True:
        for v in range(chunk * CHUNK, end):
            block = S[v, BLK]
            if block >= 0:
                _free_block(B, G, block, S[v, META] >> CLASS_SHIFT)
        following = C[chunk, 0]
        if following < 0:
            C[chunk, 0] = G[G_SFREE]
            G[G_SFREE] = R[tree, R_CHUNK]
            break
        chunk = following
        end = chunk * CHUNK + CHUNK
    R[tree, R_ALIVE] = 0


# -- responses in the global tree ------------------------------------------------------------------


@_jit
def _store_token(T: Any, C: Any, Q: Any, G: Any, seq: int, token: int) -> None:
    offset = Q[seq, Q_LEN] % CHUNK
    if offset == 0:
        chunk = G[G_TFREE]
        if chunk >= 0:
            G[G_TFREE] = C[chunk, 1]
        else:
            chunk = G[G_TCHUNKS]
            G[G_TCHUNKS] = chunk + 1
        C[chunk, 1] = -1
        if Q[seq, Q_LEN] == 0:
            Q[seq, Q_FIRST] = chunk
        else:
            C[Q[seq, Q_LAST], 1] = chunk
        Q[seq, Q_LAST] = chunk
    T[Q[seq, Q_LAST] * CHUNK + offset] = token
    Q[seq, Q_LEN] += 1
    G[G_TOKENS] += 1


@_jit
def _evict(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, G: Any, seq: int
) -> int:
    """Take every occurrence of a response out of the global tree and free its text."""
    limit = G[G_DEPTH] - 1
    root = R[0, R_ROOT]
    dying = np.empty(G[G_DEPTH], np.int64)  # died at the token before; they still carry edges
    died = np.empty(G[G_DEPTH], np.int64)
    n_dying = 0
    a = root
    chunk = Q[seq, Q_FIRST]
    for position in range(Q[seq, Q_LEN]):
        offset = position % CHUNK
        token = T[chunk * CHUNK + offset]
        if offset == CHUNK - 1:
            chunk = C[chunk, 1]
        start = _extendable(S, G, a)
        new = _find(S, B, start, token)
        if new < 0:
            return CORRUPT
        n_died = 0
        w = new
        while w != root:
            S[w, COUNT] -= 1
            if S[w, COUNT] == 0:
                died[n_died] = w
                n_died += 1
            w = S[w, LINK]
        p = start
        w = new
        while p >= 0:
            length = min(S[p, META] & LEN_MASK, limit) + 1
            while S[S[w, LINK], META] & LEN_MASK >= length:
                w = S[w, LINK]
            if S[w, COUNT] == 0:
                _remove(S, B, G, p, token)
            elif S[p, TOK] == token and p != root:
                _lower_first(S, B, p)
            p = S[p, LINK]
        for i in range(n_dying):
            _free_state(S, R, G, dying[i])
        dying, died = died, dying
        n_dying = n_died
        a = new
    for i in range(n_dying):
        _free_state(S, R, G, dying[i])
    if Q[seq, Q_LEN] > 0:
        C[Q[seq, Q_LAST], 1] = G[G_TFREE]
        G[G_TFREE] = Q[seq, Q_FIRST]
    G[G_TOKENS] -= Q[seq, Q_LEN]
    Q[seq, Q_LEN] = 0
    Q[seq, Q_ALIVE] = 0
    return OK


# -- requests --------------------------------------------------------------------------------------


@_jit
def _has_room(G: Any) -> bool:
    """Whether one more token surely fits in the tables, whatever it splits and rehashes."""
    return (
        G[G_SCHUNKS] + 8 < G[G_SCAP] // CHUNK
        and G[G_TCHUNKS] + 8 < G[G_TCAP] // CHUNK
        and G[G_BNEXT] + ((4 * G[G_DEPTH] + 8) << (G[G_TOPCLASS] + 1)) < G[G_BCAP]
    )


@_jit
def _remember(R: Any, W: Any, G: Any, tree: int, tokens: Any, n: int) -> None:
    """Shift the last tokens of the request into its window."""
    depth = G[G_DEPTH]
    kept = max(depth - n, 0)
    for i in range(kept):
        W[tree, i] = W[tree, i + n]
    for i in range(kept, depth):
        W[tree, i] = tokens[n - depth + i]


@_jit
def _feed(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, W: Any, G: Any,
    tree: int, tokens: Any, response: bool,
) -> int:
    """Append checked tokens to a request; return how many fitted."""
    n = len(tokens)
    seq = R[tree, R_SEQ] if response else np.int64(-1)
    local = R[tree, R_STATE]
    shared = R[tree, R_GSTATE]
    fed = 0
    while fed < n and _has_room(G):
        local = _extend(S, B, C, R, G, tree, local, tokens[fed])
        if seq >= 0:
            shared = _extend(S, B, C, R, G, 0, shared, tokens[fed])
            _store_token(T, C, Q, G, seq, tokens[fed])
        fed += 1
    R[tree, R_STATE] = local
    R[tree, R_FED] += fed
    _remember(R, W, G, tree, tokens, fed)
    if seq >= 0:
        R[tree, R_GSTATE] = shared
        R[tree, R_RLEN] += fed
    return fed


@_jit
def _match_from_root(
    S: Any, B: Any, R: Any, W: Any, G: Any, tree: int
) -> tuple[int, int]:
    """State and length of the longest suffix of the request's tokens that is in the global tree."""
    depth = G[G_DEPTH]
    v = R[0, R_ROOT]
    matched = np.int64(0)
    for i in range(depth - min(R[tree, R_FED], depth), depth):
        token = W[tree, i]
        q = _find(S, B, v, token)
        while q < 0 and S[v, LINK] >= 0:
            v = np.int64(S[v, LINK])
            matched = np.int64(S[v, META] & LEN_MASK)
            q = _find(S, B, v, token)
        if q >= 0:
            v = np.int64(q)
            matched += 1
    return v, matched


@_jit
def _cap(length: int, depth: int, max_tokens: int, factor: float, offset: float) -> int:
    """How many tokens may follow a match of this length."""
    by_length = int(np.floor(length * factor + offset + 1e-6))
    return max(min(by_length, max_tokens, depth - length), 0)


@_jit
def _draft_from(
    S: Any, G: Any, v: int, matched: int,
    max_tokens: int, factor: float, offset: float, min_prob: float,
    tokens: Any, probs: Any, prefix: Any, best_tokens: Any, best_probs: Any,
) -> tuple[int, float, int]:
    """The best draft over all suffixes of the word of `matched` tokens in state v.

    Writes it into best_tokens, best_probs; returns its length, its score and its match length.
    Descends from the longest match and stops when no shorter one can score higher.
    """
    depth = G[G_DEPTH]
    best_n = 0
    best_score = np.float32(0.0)
    best_match = matched
    while S[v, LINK] >= 0:
        high = matched
        low = (S[S[v, LINK], META] & LEN_MASK) + 1
        bound = max_tokens
        if factor >= 0.0:
            bound = min(max_tokens, int(np.floor(high * factor + offset + 1e-6)))
        if best_score >= bound:
            break
        longest = 0
        for length in range(low, high + 1):
            longest = max(longest, _cap(length, depth, max_tokens, factor, offset))
        n = 0
        prob = np.float32(1.0)
        score = np.float32(0.0)
        w = v
        while n < longest and S[w, TOK] >= 0:
            d = S[w, DST]
            prob *= np.float32(S[d, COUNT]) / np.float32(S[w, COUNT])
            if prob < min_prob:
                break
            tokens[n] = S[w, TOK]
            probs[n] = prob
            score += prob
            n += 1
            prefix[n] = score
            w = d
        if n > 0 and prefix[n] > best_score:
            improved = False
            for length in range(high, low - 1, -1):
                m = min(n, _cap(length, depth, max_tokens, factor, offset))
                if m > 0 and prefix[m] > best_score:
                    best_score = prefix[m]
                    best_n = m
                    best_match = length
                    improved = True
            if improved:
                for i in range(best_n):
                    best_tokens[i] = tokens[i]
                    best_probs[i] = probs[i]
        v = S[v, LINK]
        matched = S[v, META] & LEN_MASK
    return best_n, best_score, best_match


@_jit
def _draft(
    S: Any, B: Any, R: Any, W: Any, G: Any, tree: int,
    max_tokens: int, factor: float, offset: float, min_prob: float,
    out_tokens: Any, out_probs: Any, scratch_tokens: Any, scratch_probs: Any,
) -> tuple[int, float, int]:
    """The better of the local and the global draft, the local one where they score the same.

    out_* hold one row of at least `depth` entries; scratch_tokens int32 [2, depth], scratch_probs
    float32 [3, depth + 1].
    """
    depth = G[G_DEPTH]
    max_tokens = min(max_tokens, depth)
    limit = np.float32(min_prob)
    n, score, match = _draft_from(
        S, G, R[tree, R_STATE], min(R[tree, R_FED], depth), max_tokens, factor, offset, limit,
        scratch_tokens[0], scratch_probs[0], scratch_probs[2], out_tokens, out_probs,
    )
    if R[tree, R_SEQ] >= 0 and R[tree, R_RLEN] >= depth:
        v = R[tree, R_GSTATE]
        matched = depth
    else:
        v, matched = _match_from_root(S, B, R, W, G, tree)
    global_n, global_score, global_match = _draft_from(
        S, G, v, matched, max_tokens, factor, offset, limit,
        scratch_tokens[0], scratch_probs[0], scratch_probs[2], scratch_tokens[1], scratch_probs[1],
    )
    if global_score > score:
        for i in range(global_n):
            out_tokens[i] = scratch_tokens[1, i]
            out_probs[i] = scratch_probs[1, i]
        return global_n, global_score, global_match
    return n, score, match


@_jit
def _first_bad(tokens: Any) -> int:
    """Position of the first entry that is no token id, or -1."""
    for i in range(len(tokens)):
        if tokens[i] < 0 or tokens[i] == 2147483647:
            return i
    return -1


# -- entry points: each is one compiled call from Python -------------------------------------------


@_jit
def init(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, W: Any, G: Any, depth: int
) -> None:
    """Set up empty tables and the global tree."""
    G[:] = 0
    G[G_DEPTH] = depth
    G[G_SFREE] = -1
    G[G_STATEFREE] = -1
    G[G_TFREE] = -1
    G[G_BFREE : G_BFREE + 32] = -1
    G[G_SCAP] = len(S)
    G[G_BCAP] = len(B)
    G[G_TCAP] = len(T)
    R[0, R_ROOT] = 0
    _new_tree(S, C, R, G, 0)


@_jit
def start(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, W: Any, G: Any, tree: int, seq: int
) -> None:
    """Begin an empty request in row `tree`, with response row `seq` or none (-1)."""
    _new_tree(S, C, R, G, tree)
    R[tree, R_SEQ] = seq
    if seq >= 0:
        Q[seq, Q_LEN] = 0
        Q[seq, Q_ALIVE] = 1


@_jit
def feed(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, W: Any, G: Any,
    tree: int, tokens: Any, response: bool,
) -> int:
    """Append int32 tokens; return how many fitted, or -1 - position of the first bad token id."""
    bad = _first_bad(tokens)
    if bad >= 0:
        return -1 - bad
    return _feed(S, B, T, C, R, Q, W, G, tree, tokens, response)


@_jit
def draft(
    S: Any, B: Any, R: Any, W: Any, G: Any, tree: int,
    max_tokens: int, factor: float, offset: float, min_prob: float,
    out_tokens: Any, out_probs: Any, scratch_tokens: Any, scratch_probs: Any,
) -> tuple[int, float, int]:
    """Draft for one request: length, score, match length; tokens and probabilities into out_*."""
    return _draft(
        S, B, R, W, G, tree, max_tokens, factor, offset, min_prob,
        out_tokens, out_probs, scratch_tokens, scratch_probs,
    )


@_jit
def stop(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, W: Any, G: Any, tree: int
) -> None:
    """End a request; its response stays in the global tree."""
    _free_tree(S, B, C, R, G, tree)


@_jit
def evict(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, W: Any, G: Any, seq: int
) -> int:
    """Forget a response. A request that still writes to it goes on without."""
    return _evict(S, B, T, C, R, Q, G, seq)


@_jit
def step(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, W: Any, G: Any,
    handles: Any, rows: Any, token_ids: Any, num_tokens: Any, max_tokens: Any,
    factor: float, offset: float, min_prob: float,
    out_tokens: Any, out_probs: Any, out_lengths: Any, out_matches: Any, out_scores: Any,
    out_status: Any, scratch_tokens: Any, scratch_probs: Any, begin: int,
) -> int:
    """Append what is new and draft, request by request; return the first one that had no room."""
    depth = G[G_DEPTH]
    for i in range(begin, len(handles)):
        out_lengths[i] = 0
        out_matches[i] = 0
        out_scores[i] = 0.0
        tree = handles[i]
        row = rows[i]
        if tree <= 0 or tree >= len(R) or R[tree, R_ALIVE] == 0:
            out_status[i] = BAD_HANDLE
            continue
        n = num_tokens[row]
        fed = R[tree, R_FED]
        status = OK
        if n < fed:
            status = MISMATCH
        else:
            for k in range(max(fed - depth, 0), fed):
                if token_ids[row, k] != W[tree, depth - fed + k]:
                    status = MISMATCH
                    break
        if status == OK and n > fed:
            tokens = token_ids[row, fed:n]
            if _first_bad(tokens) >= 0:
                status = BAD_TOKEN
            elif _feed(S, B, T, C, R, Q, W, G, tree, tokens, True) < n - fed:
                return i
        out_status[i] = status
        limit = min(max_tokens[i], out_tokens.shape[1])
        if status == OK and limit > 0:
            length, score, match = _draft(
                S, B, R, W, G, tree, limit, factor, offset, min_prob,
                out_tokens[i], out_probs[i], scratch_tokens, scratch_probs,
            )
            out_lengths[i] = length
            out_scores[i] = score
            out_matches[i] = match
    return len(handles)
