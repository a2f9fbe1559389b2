"""The compiled part: a depth-limited suffix automaton in flat arrays.

Knows nothing of request ids, Python objects or vLLM. Every function is free and works on the arrays
that `drafter.py` owns; all kernels live in this one module because Numba's cache does not notice an
edit in another one. docs/drafter.md explains the structure; in short:

- A *word* is a run of at most `depth` tokens. Words that end at exactly the same places share a
  *state*; a state holds the words of lengths `LEN[LINK] + 1 .. LEN`, which are suffixes of each
  other. `COUNT` is how often they occur. The link leads to the longest suffix that occurs more.
- Word + token = longer word: an *edge*. The first edge, to the successor that occurs most, is kept
  in the state itself (`TOK`, `DST`), the others in a block.
- All trees share the arrays. Tree 0 is the global tree over responses; every running request has
  one of its own over prompt and response.
- In exact mode the edges of a state are also kept in the order in which arctic-inference keeps
  siblings: the first edge, then a list through the pairs of the block.

Arrays
    S      int32 [states, 6]     LINK, COUNT, TOK, DST, BLK, META
    B      int32 [pairs, 2]      blocks of edges (token, state)
    T      int32 [chunks * 64]   texts of the responses in the global tree
    C      int32 [chunks, 2]     the state chunk after, the text chunk before this one
    R      int64 [trees, 16]     one row per tree: row 0 the global one, others per handle
    Q      int64 [sequences, 2]  last text chunk and length of each response in the global tree
    W      int32 [trees, depth]  the last tokens that each request was given, right-aligned
    G      int64 [64]            sizes, free lists, counters
    P, H                         B and S in exact mode, where they have two columns more; or None

What keeps compiling short: one entry point (`run`), helpers without Python wrappers and without
reference counts, and int64 for every scalar, so that each helper is compiled once. Numba drops the
branches under `if P is not None` (exact mode) and `if heap is not None` (drafts that are trees)
before it types them, so these cost the default mode nothing.
"""

# Argument lists stay on few lines here: the same arrays lead each of them.
# fmt: off
# Numba drops a branch only where `is not None` stands alone.
# ruff: noqa: SIM102
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
HEAD, TAIL = 6, 7  # exact mode: first and last pair in the order of siblings

# fields of B: token, state
BEFORE, AFTER = 2, 3  # exact mode: pair before and after in the order of siblings
LEN_MASK = 0xFFFF
CLASS_SHIFT = 16

# fields of R
R_ALIVE, R_ROOT, R_STATE, R_NEXT, R_END, R_CHUNK = 0, 1, 2, 3, 4, 5
R_FED, R_SEQ, R_GSTATE, R_RLEN, R_STATES, R_TAIL = 6, 7, 8, 9, 10, 11
TREE_FIELDS = 16

# fields of Q
Q_LAST, Q_LEN = 0, 1
SEQ_FIELDS = 2

# fields of G
G_DEPTH, G_SCHUNKS, G_SFREE, G_STATEFREE, G_BNEXT, G_TCHUNKS, G_TFREE = 0, 1, 2, 3, 4, 5, 6
G_SCAP, G_BCAP, G_TCAP, G_TOPCLASS, G_TOKENS, G_EXACT = 7, 8, 9, 10, 11, 12
G_BFREE = 32  # 32 free lists of blocks, one per size class
HEADER_FIELDS = 64

CHUNK = 64
"""States per state chunk, tokens per text chunk."""

SMALL = 3
"""Blocks of up to 2**SMALL edges are scanned; larger ones are hash tables with a header pair:
(edges in the table, a bound of their counts)."""

UNKNOWN = 2147483647
"""The bound of a table whose counts were not looked at yet."""

# operations of `run`
INIT, START, FEED, STEP, STOP, EVICT, SPECULATE = 0, 1, 2, 3, 4, 5, 6

# results per request
OK, MISMATCH, BAD_TOKEN, BAD_HANDLE, CORRUPT, SCRATCH = 0, 1, 2, 3, 4, 5

# rows of the integer results
OUT_LENGTH, OUT_MATCH, OUT_STATUS = 0, 1, 2
OUT_ROWS = 3

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _inner(function: _Function) -> _Function:
    return njit(
        error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False
    )(function)


def _entry(function: _Function) -> _Function:
    # The GIL is kept: a step is shorter than the wait for getting it back.
    options = {"error_model": "numpy", "no_cfunc_wrapper": True}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no directory to keep the compiled code in: compile in every process
        return njit(**options)(function)


# -- blocks of edges -------------------------------------------------------------------------------


@_inner
def _slot(B: Any, block: int, size_class: int, token: int) -> int:
    """Index of the pair that holds the token, or -1 - the empty pair where it would go.

    A small block without room returns -1 - (the pair behind it).
    """
    if size_class <= SMALL:
        end = block + (1 << size_class)
        i = block
        while i < end:
            held = B[i, 0]
            if held == token:
                return i
            if held < 0:
                break
            i += 1
        return -1 - i
    mask = (1 << size_class) - 1
    base = block + 1
    h = ((token * 0x9E3779B1) >> 12) & mask
    while True:
        held = B[base + h, 0]
        if held == token:
            return base + h
        if held < 0:
            return -1 - (base + h)
        h = (h + 1) & mask


@_inner
def _new_block(B: Any, G: Any, size_class: int) -> int:
    """A block with no edges."""
    pairs = (1 << size_class) + (1 if size_class > SMALL else 0)
    block = G[G_BFREE + size_class]
    if block >= 0:
        G[G_BFREE + size_class] = B[block, 1]
    else:
        block = G[G_BNEXT]
        G[G_BNEXT] = block + pairs
        G[G_TOPCLASS] = max(G[G_TOPCLASS], size_class)
    for i in range(block, block + pairs):
        B[i, 0] = -1
    if size_class > SMALL:
        B[block, 0] = 0
        B[block, 1] = UNKNOWN
    return block


@_inner
def _free_block(B: Any, G: Any, block: int, size_class: int) -> None:
    B[block, 1] = G[G_BFREE + size_class]
    G[G_BFREE + size_class] = block


@_inner
def _put(B: Any, block: int, size_class: int, token: int, state: int) -> int:
    """Add an edge to a block that has room and does not hold the token; return its pair."""
    i = -1 - _slot(B, block, size_class, token)
    B[i, 0] = token
    B[i, 1] = state
    if size_class > SMALL:
        B[block, 0] += 1
    return i


@_inner
def _link_after(P: Any, H: Any, v: int, i: int, j: int) -> None:
    """Put pair i behind pair j in the order of v's siblings; behind the first edge for j = -1."""
    following = P[j, AFTER] if j >= 0 else H[v, HEAD]
    P[i, BEFORE] = j
    P[i, AFTER] = following
    if j >= 0:
        P[j, AFTER] = i
    else:
        H[v, HEAD] = i
    if following >= 0:
        P[following, BEFORE] = i
    else:
        H[v, TAIL] = i


@_inner
def _unlink(P: Any, H: Any, v: int, i: int) -> None:
    """Take pair i out of the order of v's siblings."""
    before = P[i, BEFORE]
    after = P[i, AFTER]
    if before >= 0:
        P[before, AFTER] = after
    else:
        H[v, HEAD] = after
    if after >= 0:
        P[after, BEFORE] = before
    else:
        H[v, TAIL] = before


@_inner
def _move_pair(B: Any, P: Any, H: Any, ordered: bool, v: int, i: int, j: int) -> None:
    """Move pair i of v to the empty pair j."""
    B[j, 0] = B[i, 0]
    B[j, 1] = B[i, 1]
    if P is not None:
        if ordered:
            before = P[i, BEFORE]
            after = P[i, AFTER]
            P[j, BEFORE] = before
            P[j, AFTER] = after
            if before >= 0:
                P[before, AFTER] = j
            else:
                H[v, HEAD] = j
            if after >= 0:
                P[after, BEFORE] = j
            else:
                H[v, TAIL] = j


@_inner
def _clear_pair(
    S: Any, B: Any, P: Any, H: Any, ordered: bool, v: int, i: int
) -> None:
    """Take pair i out of v's block and close the gap."""
    block = np.int64(S[v, BLK])
    size_class = S[v, META] >> CLASS_SHIFT
    if P is not None:
        if ordered:
            _unlink(P, H, v, i)
    hole = i
    if size_class <= SMALL:
        end = block + (1 << size_class)
        last = i
        while last + 1 < end and B[last + 1, 0] >= 0:
            last += 1
        if last != i:
            _move_pair(B, P, H, ordered, v, last, i)
            hole = last
    else:
        mask = (1 << size_class) - 1
        base = block + 1
        j = i - base
        while True:  # whatever probed past the gap moves back
            j = (j + 1) & mask
            token = np.int64(B[base + j, 0])
            if token < 0:
                break
            home = ((token * 0x9E3779B1) >> 12) & mask
            if ((j - home) & mask) >= ((j - (hole - base)) & mask):
                _move_pair(B, P, H, ordered, v, base + j, hole)
                hole = base + j
        B[block, 0] -= 1
    B[hole, 0] = -1


@_inner
def _resize(
    S: Any, B: Any, G: Any, P: Any, H: Any, ordered: bool, v: int, new_class: int
) -> None:
    """Move the edges of v's block to a block of another class."""
    old = np.int64(S[v, BLK])
    old_class = S[v, META] >> CLASS_SHIFT
    new = _new_block(B, G, new_class)
    if P is not None:
        if ordered:
            i = np.int64(H[v, HEAD])
            H[v, HEAD] = -1
            H[v, TAIL] = -1
            while i >= 0:
                j = _put(B, new, new_class, np.int64(B[i, 0]), np.int64(B[i, 1]))
                _link_after(P, H, v, j, np.int64(H[v, TAIL]))
                i = np.int64(P[i, AFTER])
    if not ordered:
        first = old + (1 if old_class > SMALL else 0)
        for i in range(first, first + (1 << old_class)):
            if B[i, 0] >= 0:
                _put(B, new, new_class, np.int64(B[i, 0]), np.int64(B[i, 1]))
    if old_class > SMALL and new_class > SMALL:
        B[new, 1] = B[old, 1]
    _free_block(B, G, old, old_class)
    S[v, BLK] = new
    S[v, META] = (S[v, META] & LEN_MASK) | (new_class << CLASS_SHIFT)


# -- edges of a state ------------------------------------------------------------------------------


@_inner
def _find(S: Any, B: Any, v: int, token: int) -> int:
    """The state that the token leads to from v, or -1."""
    if S[v, TOK] == token:
        return np.int64(S[v, DST])
    block = np.int64(S[v, BLK])
    if block < 0:
        return np.int64(-1)
    i = _slot(B, block, S[v, META] >> CLASS_SHIFT, token)
    return np.int64(B[i, 1]) if i >= 0 else np.int64(-1)


@_inner
def _add(
    S: Any, B: Any, G: Any, P: Any, H: Any, ordered: bool, v: int, token: int, state: int
) -> None:
    """Add an edge that v does not have; it comes last in the order."""
    if S[v, TOK] < 0:
        S[v, TOK] = token
        S[v, DST] = state
        return
    size_class = S[v, META] >> CLASS_SHIFT
    block = np.int64(S[v, BLK])
    if block < 0:
        size_class = np.int64(0)
        block = _new_block(B, G, size_class)
        S[v, BLK] = block
        S[v, META] &= LEN_MASK
        if P is not None:
            if ordered:
                H[v, HEAD] = -1
                H[v, TAIL] = -1
    else:
        grown = size_class
        if size_class > SMALL:
            if (B[block, 0] + 1) * 4 > 3 << size_class:
                grown += 1
        elif B[block + (1 << size_class) - 1, 0] >= 0:
            grown += 1 if size_class < SMALL else 2
        if grown != size_class:
            _resize(S, B, G, P, H, ordered, v, grown)
            block = np.int64(S[v, BLK])
            size_class = grown
    i = _put(B, block, size_class, token, state)
    if P is not None:
        if ordered:
            _link_after(P, H, v, i, np.int64(H[v, TAIL]))


@_inner
def _redirect(S: Any, B: Any, v: int, token: int, state: int, onto: int) -> bool:
    """Let the edge of v for the token lead onto another state, if it leads to this one."""
    if S[v, TOK] == token:
        if S[v, DST] != state:
            return False
        S[v, DST] = onto
        return True
    i = _slot(B, np.int64(S[v, BLK]), S[v, META] >> CLASS_SHIFT, token)
    if B[i, 1] != state:
        return False
    B[i, 1] = onto
    return True


@_inner
def _make_first(
    S: Any, B: Any, P: Any, H: Any, ordered: bool, v: int, i: int
) -> int:
    """Make pair i the first edge; the edge that was first goes into the block: return its pair.

    In the order of siblings that one is then unlinked.
    """
    token = np.int64(S[v, TOK])
    state = np.int64(S[v, DST])
    S[v, TOK] = B[i, 0]
    S[v, DST] = B[i, 1]
    _clear_pair(S, B, P, H, ordered, v, i)
    block = np.int64(S[v, BLK])
    size_class = S[v, META] >> CLASS_SHIFT
    if size_class > SMALL:
        B[block, 1] = max(B[block, 1], S[state, COUNT])
    return _put(B, block, size_class, token, state)


@_inner
def _best_pair(S: Any, B: Any, v: int) -> int:
    """The pair of v's block with the highest count, the smallest token among equals."""
    block = np.int64(S[v, BLK])
    size_class = S[v, META] >> CLASS_SHIFT
    first = block + (1 if size_class > SMALL else 0)
    best = np.int64(-1)
    best_count = np.int64(-1)
    for i in range(first, first + (1 << size_class)):
        token = B[i, 0]
        if token < 0:
            continue
        count = S[B[i, 1], COUNT]
        if count > best_count or (count == best_count and token < B[best, 0]):
            best = i
            best_count = np.int64(count)
    return best


@_inner
def _rise(
    S: Any, B: Any, P: Any, H: Any, ordered: bool, v: int, token: int, state: int
) -> None:
    """Put an edge of v in its place after the count of its state rose by one.

    Unordered: it comes first when it occurs at least as often as the first: the last to reach a
    count is first among equals. Ordered, as the peer does it: the leader of a group of equals leads
    the group above, any other goes to the end of the group above.
    """
    if S[v, TOK] == token:
        return
    count = np.int64(S[state, COUNT])
    top = np.int64(S[S[v, DST], COUNT])
    block = np.int64(S[v, BLK])
    size_class = S[v, META] >> CLASS_SHIFT
    if P is not None:
        if ordered:
            if count == 1:  # new, and last already
                return
            i = _slot(B, block, size_class, token)
            j = np.int64(P[i, BEFORE])
            above = np.int64(S[B[j, 1], COUNT]) if j >= 0 else top
            passed = count - 1 if above == count - 1 else count
            while j >= 0 and S[B[j, 1], COUNT] == passed:
                j = np.int64(P[j, BEFORE])
            if j < 0 and top == passed:
                _link_after(P, H, v, _make_first(S, B, P, H, ordered, v, i), np.int64(-1))
            elif j != P[i, BEFORE]:
                _unlink(P, H, v, i)
                _link_after(P, H, v, i, j)
            return
    if count >= top:
        _make_first(S, B, P, H, ordered, v, _slot(B, block, size_class, token))
    elif size_class > SMALL and count > B[block, 1]:
        B[block, 1] = count


@_inner
def _fall(
    S: Any, B: Any, P: Any, H: Any, ordered: bool, v: int, token: int, state: int
) -> None:
    """Put an edge of v in its place after the count of its state fell by one, not to zero.

    Unordered: when the first falls below another, the most frequent comes first, the smallest token
    among equals. Ordered: it leads the group below.
    """
    block = np.int64(S[v, BLK])
    if block < 0:
        return
    count = np.int64(S[state, COUNT])
    is_first = S[v, TOK] == token
    if P is not None:
        if ordered:
            j = np.int64(-1)
            if is_first:
                following = np.int64(H[v, HEAD])
                if S[B[following, 1], COUNT] != count + 1:
                    return
                i = _make_first(S, B, P, H, ordered, v, following)
                following = np.int64(H[v, HEAD])
            else:
                i = _slot(B, block, S[v, META] >> CLASS_SHIFT, token)
                j = np.int64(P[i, BEFORE])
                following = np.int64(P[i, AFTER])
                if following < 0 or S[B[following, 1], COUNT] != count + 1:
                    return
                _unlink(P, H, v, i)
            while following >= 0 and S[B[following, 1], COUNT] == count + 1:
                j = following
                following = np.int64(P[j, AFTER])
            _link_after(P, H, v, i, j)
            return
    if not is_first:
        return
    is_table = (S[v, META] >> CLASS_SHIFT) > SMALL
    if is_table and B[block, 1] <= count:
        return
    i = _best_pair(S, B, v)
    best = np.int64(S[B[i, 1], COUNT])
    if best > count:
        _make_first(S, B, P, H, ordered, v, i)
    elif is_table:
        B[block, 1] = best


@_inner
def _remove(
    S: Any, B: Any, G: Any, P: Any, H: Any, ordered: bool, v: int, token: int
) -> None:
    """Remove an edge of v; give memory back that is not needed any more."""
    block = np.int64(S[v, BLK])
    size_class = S[v, META] >> CLASS_SHIFT
    if S[v, TOK] == token:
        if block < 0:
            S[v, TOK] = -1
            return
        i = np.int64(-1)
        if P is not None:
            if ordered:
                i = np.int64(H[v, HEAD])
        if not ordered:
            i = _best_pair(S, B, v)
        S[v, TOK] = B[i, 0]
        S[v, DST] = B[i, 1]
    else:
        i = _slot(B, block, size_class, token)
    _clear_pair(S, B, P, H, ordered, v, i)
    if size_class <= SMALL:
        if B[block, 0] < 0:
            _free_block(B, G, block, size_class)
            S[v, BLK] = -1
    elif B[block, 0] * 8 <= 1 << size_class:
        _resize(S, B, G, P, H, ordered, v, size_class - 1 if size_class > SMALL + 2 else SMALL)


# -- states ----------------------------------------------------------------------------------------


@_inner
def _new_state(S: Any, B: Any, C: Any, R: Any, G: Any, tree: int, length: int) -> int:
    if tree == 0 and G[G_STATEFREE] >= 0:
        v = G[G_STATEFREE]
        G[G_STATEFREE] = S[v, LINK]
    else:
        v = R[tree, R_NEXT]
        if v == R[tree, R_END]:
            chunk = G[G_SFREE]
            if chunk >= 0:
                G[G_SFREE] = C[chunk, 0]
                for u in range(chunk * CHUNK, chunk * CHUNK + CHUNK):
                    if S[u, BLK] >= 0:
                        _free_block(B, G, np.int64(S[u, BLK]), S[u, META] >> CLASS_SHIFT)
            else:
                chunk = G[G_SCHUNKS]
                G[G_SCHUNKS] = chunk + 1
            if R[tree, R_CHUNK] < 0:
                R[tree, R_TAIL] = chunk
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


@_inner
def _split(
    S: Any, B: Any, C: Any, R: Any, G: Any, P: Any, H: Any,
    ordered: bool, tree: int, q: int, length: int, p: int, token: int,
) -> int:
    """Move the words of q of up to `length` tokens into a state of their own; return it.

    p is the state from which the token leads to the longest of them.
    """
    depth = G[G_DEPTH]
    r = _new_state(S, B, C, R, G, tree, length)
    S[r, LINK] = S[q, LINK]
    S[r, COUNT] = S[q, COUNT]
    S[r, TOK] = S[q, TOK]
    S[r, DST] = S[q, DST]
    S[q, LINK] = r
    block = np.int64(S[q, BLK])
    size_class = S[q, META] >> CLASS_SHIFT
    copy = block
    if length == depth - 1 and S[q, META] & LEN_MASK == depth:
        # Only the words of full depth stay in q, and those have no successors.
        S[q, TOK] = -1
        S[q, BLK] = -1
    elif block >= 0:
        copy = _new_block(B, G, size_class)
        for i in range((1 << size_class) + (1 if size_class > SMALL else 0)):
            B[copy + i, 0] = B[block + i, 0]
            B[copy + i, 1] = B[block + i, 1]
    S[r, BLK] = copy
    S[r, META] = length | (size_class << CLASS_SHIFT)
    if P is not None:
        if ordered and block >= 0:
            shift = copy - block
            H[r, HEAD] = H[q, HEAD] + shift
            H[r, TAIL] = H[q, TAIL] + shift
            if shift != 0:
                i = np.int64(H[q, HEAD])
                while i >= 0:
                    P[i + shift, BEFORE] = P[i, BEFORE] + shift if P[i, BEFORE] >= 0 else -1
                    P[i + shift, AFTER] = P[i, AFTER] + shift if P[i, AFTER] >= 0 else -1
                    i = np.int64(P[i, AFTER])
    while p >= 0 and _redirect(S, B, p, token, q, r):
        p = np.int64(S[p, LINK])
    return r


@_inner
def _extendable(S: Any, G: Any, a: int) -> int:
    """The state of the longest suffix of a's longest word that has room for one more token."""
    if S[a, META] & LEN_MASK == G[G_DEPTH]:
        link = np.int64(S[a, LINK])
        if S[link, META] & LEN_MASK == G[G_DEPTH] - 1:
            return link
    return a


@_inner
def _extend(
    S: Any, B: Any, C: Any, R: Any, G: Any, P: Any, H: Any, tree: int, a: int, token: int
) -> int:
    """Append a token to the text whose longest word is that of state a; return its new state.

    Classic on-line construction of a suffix automaton for several texts, cut at the depth, then
    one more occurrence for every suffix.
    """
    limit = G[G_DEPTH] - 1
    root = R[tree, R_ROOT]
    ordered = G[G_EXACT] != 0
    start = _extendable(S, G, a)
    p = start
    length = min(S[p, META] & LEN_MASK, limit) + 1
    q = _find(S, B, p, token)
    new = q
    if q < 0:
        new = _new_state(S, B, C, R, G, tree, length)
        while True:
            _add(S, B, G, P, H, ordered and p != root, p, token, new)
            p = np.int64(S[p, LINK])
            if p < 0:
                break
            q = _find(S, B, p, token)
            if q >= 0:
                break
        if p >= 0:
            length = (S[p, META] & LEN_MASK) + 1
    suffix = root
    if q >= 0:
        suffix = q
        if S[q, META] & LEN_MASK != length:
            suffix = _split(S, B, C, R, G, P, H, ordered, tree, q, length, p, token)
    if new == q:
        new = suffix
    else:
        S[new, LINK] = suffix
    w = new
    while w != root:
        S[w, COUNT] += 1
        w = np.int64(S[w, LINK])
    p = _extendable(S, G, a)  # a split may have moved the edges of start
    w = new
    while p != root:  # the root keeps no order: nothing is drafted from it
        if S[p, TOK] != token:
            length = min(S[p, META] & LEN_MASK, limit) + 1
            while S[S[w, LINK], META] & LEN_MASK >= length:
                w = np.int64(S[w, LINK])
            _rise(S, B, P, H, ordered, p, token, w)
        p = np.int64(S[p, LINK])
    return new


@_inner
def _new_tree(S: Any, B: Any, C: Any, R: Any, G: Any, tree: int) -> None:
    R[tree, R_ALIVE] = 1
    R[tree, R_NEXT] = 0
    R[tree, R_END] = 0
    R[tree, R_CHUNK] = -1
    R[tree, R_STATES] = 0
    root = _new_state(S, B, C, R, G, tree, np.int64(0))
    S[root, LINK] = -1
    R[tree, R_ROOT] = root
    R[tree, R_STATE] = root
    R[tree, R_FED] = 0
    R[tree, R_SEQ] = -1
    R[tree, R_RLEN] = 0
    R[tree, R_GSTATE] = R[0, R_ROOT]


@_inner
def _free_tree(S: Any, C: Any, R: Any, G: Any, tree: int) -> None:
    """Give back the states of a request's tree, in constant time.

    Their blocks are given back when a chunk of states is used again.
    """
    for v in range(R[tree, R_NEXT], R[tree, R_END]):
        S[v, BLK] = -1
    C[R[tree, R_TAIL], 0] = G[G_SFREE]
    G[G_SFREE] = R[tree, R_CHUNK]
    R[tree, R_ALIVE] = 0


# -- responses in the global tree ------------------------------------------------------------------


@_inner
def _store_token(T: Any, C: Any, Q: Any, G: Any, seq: int, token: int) -> None:
    offset = Q[seq, Q_LEN] % CHUNK
    if offset == 0:
        chunk = G[G_TFREE]
        if chunk >= 0:
            G[G_TFREE] = C[chunk, 1]
        else:
            chunk = G[G_TCHUNKS]
            G[G_TCHUNKS] = chunk + 1
        C[chunk, 1] = Q[seq, Q_LAST] if Q[seq, Q_LEN] > 0 else -1
        Q[seq, Q_LAST] = chunk
    T[Q[seq, Q_LAST] * CHUNK + offset] = token
    Q[seq, Q_LEN] += 1
    G[G_TOKENS] += 1


@_inner
def _forget(
    S: Any, B: Any, R: Any, G: Any, P: Any, H: Any, a: int, new: int, token: int
) -> int:
    """Take one occurrence of every word that ends at a token out of the global tree.

    a is the state of the text before the token, new that of the text with it. Returns how many
    states lost their last occurrence: new and the first of those that its links lead to.
    """
    limit = G[G_DEPTH] - 1
    root = R[0, R_ROOT]
    ordered = G[G_EXACT] != 0
    died = np.int64(0)
    w = new
    while w != root:
        S[w, COUNT] -= 1
        if S[w, COUNT] == 0:
            died += 1
        w = np.int64(S[w, LINK])
    p = _extendable(S, G, a)
    w = new
    while p >= 0:
        length = min(S[p, META] & LEN_MASK, limit) + 1
        while S[S[w, LINK], META] & LEN_MASK >= length:
            w = np.int64(S[w, LINK])
        in_order = ordered and p != root
        if S[w, COUNT] == 0:
            _remove(S, B, G, P, H, in_order, p, token)
        elif p != root:
            _fall(S, B, P, H, in_order, p, token, w)
        p = np.int64(S[p, LINK])
    return died


@_inner
def _evict(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, G: Any, P: Any, H: Any, seq: int
) -> int:
    """Take a response out of the global tree front to back, as the peer does, and free its text.

    States that die at one token still carry edges to those that die at the next: they are freed one
    token later.
    """
    following = np.int64(-1)
    chunk = Q[seq, Q_LAST]
    while Q[seq, Q_LEN] > 0 and chunk >= 0:  # turn the list of text chunks round
        before = np.int64(C[chunk, 1])
        C[chunk, 1] = following
        following = chunk
        chunk = before
    chunk = following
    a = R[0, R_ROOT]
    dying = np.int64(0)
    length = Q[seq, Q_LEN]
    for position in range(length):
        offset = position % CHUNK
        token = np.int64(T[chunk * CHUNK + offset])
        new = _find(S, B, _extendable(S, G, a), token)
        if new < 0:
            return -CORRUPT
        died = _forget(S, B, R, G, P, H, a, new, token)
        _free_states(S, R, G, a, dying)
        dying = died
        a = new
        if offset == CHUNK - 1 or position == length - 1:
            done = chunk
            chunk = np.int64(C[chunk, 1])
            C[done, 1] = G[G_TFREE]
            G[G_TFREE] = done
    _free_states(S, R, G, a, dying)
    G[G_TOKENS] -= length
    Q[seq, Q_LEN] = 0
    return np.int64(0)


@_inner
def _evict_end(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, G: Any, P: Any, H: Any, seq: int,
    tokens: Any, states: Any,
) -> int:
    """Take the last text chunk of a response out of the global tree; return what is left of it.

    Back to front, so that the tree is that of the shortened response after every call. tokens and
    states have room for depth + CHUNK + 1 entries.
    """
    depth = G[G_DEPTH]
    length = Q[seq, Q_LEN]
    last = Q[seq, Q_LAST]
    count = (length - 1) % CHUNK + 1
    begin = max(length - count - depth, 0)  # the words that end in the chunk begin here or later
    chunk = last
    position = length - 1
    while position >= begin:
        tokens[position - begin] = T[chunk * CHUNK + position % CHUNK]
        if position % CHUNK == 0:
            chunk = np.int64(C[chunk, 1])
        position -= 1
    a = R[0, R_ROOT]
    states[0] = a
    for i in range(length - begin):
        if i >= depth:  # the word so far has no room for one more token
            a = _extendable(S, G, a)
        a = _find(S, B, a, np.int64(tokens[i]))
        if a < 0:
            return np.int64(-CORRUPT)
        states[i + 1] = a
    for i in range(length - begin - 1, length - begin - 1 - count, -1):
        new = np.int64(states[i + 1])
        died = _forget(S, B, R, G, P, H, np.int64(states[i]), new, np.int64(tokens[i]))
        _free_states(S, R, G, new, died)
    Q[seq, Q_LAST] = C[last, 1]
    C[last, 1] = G[G_TFREE]
    G[G_TFREE] = last
    Q[seq, Q_LEN] = length - count
    G[G_TOKENS] -= count
    return length - count


@_inner
def _free_states(S: Any, R: Any, G: Any, v: int, n: int) -> None:
    """Free v and what its links lead to: n states of the global tree that have no edges left."""
    for _ in range(n):
        following = np.int64(S[v, LINK])
        S[v, LINK] = G[G_STATEFREE]
        G[G_STATEFREE] = v
        R[0, R_STATES] -= 1
        v = following


# -- requests --------------------------------------------------------------------------------------


@_inner
def _feed(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, W: Any, G: Any, P: Any, H: Any,
    tree: int, tokens: Any, begin: int, end: int, own: bool, response: bool,
) -> int:
    """Append checked tokens to a request's own tree, and to the global one as its response.

    Returns how many fitted into the tables.
    """
    depth = G[G_DEPTH]
    seq = R[tree, R_SEQ] if response else np.int64(-1)
    local = R[tree, R_STATE]
    shared = R[tree, R_GSTATE]
    i = begin
    while i < end:
        if (  # room for one more token, whatever it splits and rehashes
            G[G_SCHUNKS] + 8 > G[G_SCAP] // CHUNK
            or G[G_TCHUNKS] + 8 > G[G_TCAP] // CHUNK
            or G[G_BNEXT] + ((4 * depth + 8) << (G[G_TOPCLASS] + 2)) > G[G_BCAP]
        ):
            break
        token = np.int64(tokens[i])
        if own:
            local = _extend(S, B, C, R, G, P, H, tree, local, token)
        if seq >= 0:
            shared = _extend(S, B, C, R, G, P, H, np.int64(0), shared, token)
            _store_token(T, C, Q, G, seq, token)
        i += 1
    fed = i - begin
    R[tree, R_STATE] = local
    R[tree, R_FED] += fed
    if seq >= 0:
        R[tree, R_GSTATE] = shared
        R[tree, R_RLEN] += fed
    kept = max(depth - fed, 0)
    for k in range(kept):
        W[tree, k] = W[tree, k + fed]
    for k in range(kept, depth):
        W[tree, k] = tokens[i - depth + k]
    return fed


@_inner
def _match(S: Any, B: Any, root: int, depth: int, tokens: Any, known: int) -> tuple[int, int]:
    """State and length of the longest suffix of the last `known` of `depth` tokens in a tree."""
    v = root
    matched = np.int64(0)
    for i in range(depth - known, depth):
        token = np.int64(tokens[i])
        q = _find(S, B, v, token)
        while q < 0 and v != root:
            v = np.int64(S[v, LINK])
            matched = np.int64(S[v, META] & LEN_MASK)
            q = _find(S, B, v, token)
        if q >= 0:
            v = q
            matched += 1
    return v, matched


@_inner
def _limit(length: int, max_tokens: int, factor: float, offset: float) -> int:
    """How many tokens may rest on a match of this length; float32 up to the last addition."""
    wanted = np.float64(np.float32(length) * factor + offset) + 1e-6
    if 1.0 <= wanted < 2147483648.0:
        return min(max_tokens, np.int64(wanted))
    return np.int64(0)  # also where it is no number


@_inner
def _draft_path(
    S: Any, G: Any, P: Any, v: int, longest: int, min_prob: float,
    tokens: Any, probs: Any, prefix: Any,
) -> int:
    """Follow first edges from v while the path is probable enough; return how far.

    Where a word has reached the full depth, its first token is dropped to go on; in exact mode the
    draft ends there. prefix[n] is the score of the first n tokens.
    """
    n = np.int64(0)
    prob = np.float32(1.0)
    score = np.float32(0.0)
    w = v
    while n < longest:
        if P is None:
            w = _extendable(S, G, w)
        if S[w, TOK] < 0 or S[w, LINK] < 0:
            break
        d = np.int64(S[w, DST])
        prob *= np.float32(S[d, COUNT]) / np.float32(S[w, COUNT])
        if not prob >= min_prob:
            break
        tokens[n] = S[w, TOK]
        probs[n] = prob
        score += prob
        n += 1
        prefix[n] = score
        w = d
    return n


@_inner
def _push(
    heap_prob: Any, heap: Any, size: int, prob: float, state: int, length: int, token: int,
    parent: int,
) -> None:
    """Sift an entry up past strictly less probable ones, as push_heap of the GNU C++ library."""
    at = size
    while at > 0 and heap_prob[(at - 1) // 2] < prob:
        up = (at - 1) // 2
        heap_prob[at] = heap_prob[up]
        for k in range(4):
            heap[at, k] = heap[up, k]
        at = up
    heap_prob[at] = prob
    heap[at, 0] = state
    heap[at, 1] = length
    heap[at, 2] = token
    heap[at, 3] = parent


@_inner
def _draft_tree(
    S: Any, B: Any, G: Any, P: Any, H: Any, v: int, matched: int, longest: int, min_prob: float,
    tokens: Any, probs: Any, parents: Any, heap_prob: Any, heap: Any,
) -> tuple[int, float]:
    """Take the most probable continuation of anything taken so far, again and again.

    Where a word goes on in one way only, that way waits in the heap (token >= 0); where it branches
    or may end, the word itself does (token -1), and its continuations join when it is taken out.
    Returns the number of tokens, -1 where the heap was too small, and the score.
    """
    depth = G[G_DEPTH]
    n = np.int64(0)
    score = np.float32(0.0)
    size = np.int64(0)
    state = v
    length = matched
    prob = np.float32(1.0)
    parent = np.int64(-1)
    while n < longest:
        # what follows the word (state, length), reached with prob at index parent
        if (
            length < depth
            and S[state, TOK] >= 0
            and S[S[state, DST], COUNT] == S[state, COUNT]
        ):
            _push(
                heap_prob, heap, size, prob, np.int64(S[state, DST]), length + 1,
                np.int64(S[state, TOK]), parent,
            )
        else:
            _push(heap_prob, heap, size, prob, state, length, np.int64(-1), parent)
        size += 1
        token = np.int64(-1)
        while token < 0 and size > 0:
            prob = heap_prob[0]
            state = np.int64(heap[0, 0])
            length = np.int64(heap[0, 1])
            token = np.int64(heap[0, 2])
            parent = np.int64(heap[0, 3])
            size -= 1
            if size > 0:  # move the hole down to a leaf, then sift the last entry up from there
                at = np.int64(0)
                while 2 * at + 1 < size:
                    child = 2 * at + 2
                    if child >= size or heap_prob[child] < heap_prob[child - 1]:
                        child -= 1
                    heap_prob[at] = heap_prob[child]
                    for k in range(4):
                        heap[at, k] = heap[child, k]
                    at = child
                last = size
                _push(
                    heap_prob, heap, at, heap_prob[last], np.int64(heap[last, 0]),
                    np.int64(heap[last, 1]), np.int64(heap[last, 2]), np.int64(heap[last, 3]),
                )
            if token < 0 and length < depth and S[state, TOK] >= 0:
                pair = np.int64(-1)
                following = np.int64(S[state, TOK])
                d = np.int64(S[state, DST])
                while True:
                    child_prob = (
                        prob * np.float32(S[d, COUNT]) / np.float32(S[state, COUNT])
                    )
                    if child_prob < min_prob:
                        break
                    if size + 1 >= len(heap_prob):
                        return np.int64(-1), score
                    _push(heap_prob, heap, size, child_prob, d, length + 1, following, parent)
                    size += 1
                    if pair >= 0:
                        pair = np.int64(P[pair, AFTER])
                    else:
                        pair = np.int64(H[state, HEAD]) if S[state, BLK] >= 0 else np.int64(-1)
                    if pair < 0:
                        break
                    following = np.int64(B[pair, 0])
                    d = np.int64(B[pair, 1])
        if token < 0:
            break
        tokens[n] = token
        probs[n] = prob
        parents[n] = parent
        score += prob
        parent = n
        n += 1
    return n, score


@_inner
def _draft_from(
    S: Any, B: Any, G: Any, P: Any, H: Any, v: int, matched: int,
    max_tokens: int, factor: float, offset: float, min_prob: float, as_tree: bool,
    tokens: Any, probs: Any, parents: Any, scratch: Any, scratch_probs: Any,
    heap_prob: Any, heap: Any,
) -> tuple[int, float, int]:
    """The best draft over all suffixes of the word of `matched` tokens in state v.

    Writes it into tokens, probs, parents; returns its length, its score and its match length.
    Descends from the longest match and stops when no shorter one can score higher.
    """
    depth = G[G_DEPTH]
    best_n = np.int64(0)
    best_score = np.float32(0.0)
    best_match = matched
    while S[v, LINK] >= 0:
        high = matched
        low = np.int64(S[S[v, LINK], META] & LEN_MASK) + 1
        if factor >= 0.0 and best_score >= _limit(high, max_tokens, factor, offset):
            break
        n = np.int64(0)
        if not as_tree:
            longest = np.int64(0)
            for length in range(low, high + 1):
                cap = _limit(length, max_tokens, factor, offset)
                if P is not None:
                    cap = min(cap, depth - length)
                longest = max(longest, cap)
            n = _draft_path(
                S, G, P, v, longest, min_prob, scratch[0], scratch_probs[0], scratch_probs[1]
            )
        improved = False
        if heap is not None:
            if as_tree:
                for length in range(high, low - 1, -1):
                    cap = _limit(length, max_tokens, factor, offset)
                    m, score = _draft_tree(
                        S, B, G, P, H, v, length, cap, min_prob,
                        scratch[0], scratch_probs[0], scratch[1], heap_prob, heap,
                    )
                    if m < 0:
                        return np.int64(-1), best_score, length
                    if score > best_score:
                        best_score = score
                        best_n = m
                        best_match = length
                        for i in range(m):
                            tokens[i] = scratch[0, i]
                            probs[i] = scratch_probs[0, i]
                            parents[i] = scratch[1, i]
        if n > 0 and scratch_probs[1, n] > best_score:
            for length in range(high, low - 1, -1):
                m = min(n, _limit(length, max_tokens, factor, offset))
                if P is not None:
                    m = min(m, depth - length)
                if m > 0 and scratch_probs[1, m] > best_score:
                    best_score = scratch_probs[1, m]
                    best_n = m
                    best_match = length
                    improved = True
        if improved:
            for i in range(best_n):
                tokens[i] = scratch[0, i]
                probs[i] = scratch_probs[0, i]
                parents[i] = i - 1
        v = np.int64(S[v, LINK])
        matched = np.int64(S[v, META] & LEN_MASK)
    return best_n, best_score, best_match


@_inner
def _draft(
    S: Any, B: Any, R: Any, W: Any, G: Any, P: Any, H: Any,
    tree: int, context: Any, known: int, at_end: bool,
    max_tokens: int, factor: float, offset: float, min_prob: float, as_tree: bool,
    out_tokens: Any, out_probs: Any, parents: Any, scratch: Any, scratch_probs: Any,
    heap_prob: Any, heap: Any,
) -> tuple[int, float, int]:
    """The better of the local and the global draft, the local one where they score the same.

    context int32 [depth] holds the last `known` tokens, right-aligned; at_end says that they are
    the last ones that the request was given.
    """
    depth = G[G_DEPTH]
    if at_end:
        v = R[tree, R_STATE]
        matched = known
    else:
        v, matched = _match(S, B, R[tree, R_ROOT], depth, context, known)
    strict = G[G_EXACT] != 0 and known > 0  # the peer's matches are shorter than the context
    if strict and matched == known:
        matched -= 1
        if matched <= S[S[v, LINK], META] & LEN_MASK:
            v = np.int64(S[v, LINK])
    n, score, match = _draft_from(
        S, B, G, P, H, v, matched, max_tokens, factor, offset, min_prob, as_tree,
        out_tokens, out_probs, parents[0], scratch, scratch_probs, heap_prob, heap,
    )
    if n < 0:
        return n, score, match
    if at_end and R[tree, R_SEQ] >= 0 and R[tree, R_RLEN] >= depth:
        v = R[tree, R_GSTATE]
        matched = depth
    else:
        v, matched = _match(S, B, R[0, R_ROOT], depth, context, known)
    if strict and matched == known:
        matched -= 1
        if matched <= S[S[v, LINK], META] & LEN_MASK:
            v = np.int64(S[v, LINK])
    shared_n, shared_score, shared_match = _draft_from(
        S, B, G, P, H, v, matched, max_tokens, factor, offset, min_prob, as_tree,
        scratch[2], scratch_probs[2], parents[1], scratch, scratch_probs, heap_prob, heap,
    )
    if shared_n >= 0 and not shared_score > score:
        return n, score, match
    for i in range(shared_n):
        out_tokens[i] = scratch[2, i]
        out_probs[i] = scratch_probs[2, i]
        parents[0, i] = parents[1, i]
    return shared_n, shared_score, shared_match


@_inner
def _first_bad(tokens: Any, begin: int, end: int) -> int:
    """Position of the first entry that is no token id, or -1."""
    for i in range(begin, end):
        if tokens[i] < 0 or tokens[i] == 2147483647:
            return i
    return np.int64(-1)


# -- the entry point: one compiled call from Python ------------------------------------------------


@_entry
def run(
    op: int,
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, W: Any, G: Any, P: Any, H: Any,
    handles: Any, rows: Any, token_ids: Any, num_tokens: Any, max_tokens: Any, begin: int,
    factor: float, offset: float, min_prob: float, as_tree: bool,
    out_tokens: Any, out_probs: Any, out_info: Any, out_scores: Any,
    parents: Any, scratch: Any, scratch_probs: Any, heap_prob: Any, heap: Any,
) -> int:
    """Do one operation.

    INIT        make the global tree
    START       begin request handles[0] with response row rows[0] (-1: none) and feed it the prompt
    FEED        append token_ids[0, begin:] to handles[0]; as prompt, or as response for rows[0] 1,
                or for 2 as response in the global tree only
    STOP        end request handles[0]
    EVICT       take up to rows[0] tokens of response row handles[0] out of the global tree, all in
                exact mode, and return how many are left
    SPECULATE   draft for handles[0] after its own tokens (rows[0] < 0), or after the last rows[0]
                tokens of token_ids[0], which has `depth` columns
    STEP        append and draft for each of handles[begin:], from rows of token_ids

    START and FEED return how many tokens fitted, or -1 - position of a bad token id. STEP returns
    the index of the first request that did not fit, or their number. The others return a status.

    Shapes: handles, rows int64 [n]; token_ids int32 [rows, width]; num_tokens int32 [rows];
    max_tokens int32 [n]; out_tokens int32 [n, k], out_probs float32 [n, k], out_info int32 [3, n],
    out_scores float32 [n]; parents int32 [2, m], scratch int32 [3, m], scratch_probs float32
    [3, m + 1] with m above depth + CHUNK and k; heap_prob float32 [h], heap int32 [h, 4].
    """
    depth = G[G_DEPTH]
    f = np.float32(factor)
    o = np.float32(offset)
    limit_prob = np.float32(min_prob)
    if op == INIT:
        _new_tree(S, B, C, R, G, np.int64(0))
        return OK
    if op == EVICT:
        left = Q[handles[0], Q_LEN]
        if P is not None:
            return _evict(S, B, T, C, R, Q, G, P, H, handles[0])
        while left > 0 and rows[0] > 0:
            left = _evict_end(
                S, B, T, C, R, Q, G, P, H, handles[0], scratch[0], scratch[1]
            )
            rows[0] -= CHUNK
        return left
    if op == STOP:
        _free_tree(S, C, R, G, handles[0])
        return OK
    if op in (START, FEED):
        tree = handles[0]
        end = np.int64(token_ids.shape[1])
        bad = _first_bad(token_ids[0], begin, end)
        if bad >= 0:
            return -1 - bad
        response = op == FEED and rows[0] > 0
        own = op == START or rows[0] < 2
        if op == START:
            _new_tree(S, B, C, R, G, tree)
            seq = rows[0]
            R[tree, R_SEQ] = seq
            if seq >= 0:
                Q[seq, Q_LEN] = 0
        return _feed(S, B, T, C, R, Q, W, G, P, H, tree, token_ids[0], begin, end, own, response)

    for i in range(begin, len(handles)):
        out_info[OUT_LENGTH, i] = 0
        out_info[OUT_MATCH, i] = 0
        out_scores[i] = 0.0
        tree = handles[i]
        row = rows[i]
        known = np.int64(0)
        at_end = True
        context = W[0]
        if tree <= 0 or tree >= len(R) or R[tree, R_ALIVE] == 0:
            out_info[OUT_STATUS, i] = BAD_HANDLE
            continue
        if op == STEP:
            if row < 0 or row >= min(len(num_tokens), len(token_ids)):
                out_info[OUT_STATUS, i] = BAD_HANDLE
                continue
            n = np.int64(num_tokens[row])
            fed = R[tree, R_FED]
            status = MISMATCH if n < fed or n > token_ids.shape[1] else OK
            k = max(fed - depth, 0)
            while k < fed and status == OK:
                if token_ids[row, k] != W[tree, depth - fed + k]:
                    status = MISMATCH
                k += 1
            if status == OK and n > fed:
                if _first_bad(token_ids[row], fed, n) >= 0:
                    status = BAD_TOKEN
                elif n - fed > _feed(
                    S, B, T, C, R, Q, W, G, P, H,
                    tree, token_ids[row], fed, n, op == STEP, op == STEP,
                ):  # fmt: skip
                    return i
            out_info[OUT_STATUS, i] = status
            if status != OK:
                continue
        known = min(R[tree, R_FED], depth)
        context = W[tree]
        if op == SPECULATE and row >= 0:
            at_end = known == row
            known = min(row, depth)
            context = token_ids[0]
            for k in range(depth - known, depth):
                if context[k] != W[tree, k]:
                    at_end = False
        most = np.int64(min(max_tokens[i], out_tokens.shape[1]))
        if most > 0 or op == SPECULATE:
            length, score, match = _draft(
                S, B, R, W, G, P, H, tree, context, known, at_end,
                most, f, o, limit_prob, as_tree,
                out_tokens[i], out_probs[i], parents, scratch, scratch_probs, heap_prob, heap,
            )
            if length < 0:
                return -1 - i
            out_info[OUT_LENGTH, i] = length
            out_info[OUT_MATCH, i] = match
            out_scores[i] = score
    return len(handles)
