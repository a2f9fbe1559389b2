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
  siblings: the first edge, then the pairs of a small block, or a list through those of a table.

Arrays
    S      int32 [states, 6]     LINK, COUNT, TOK, DST, BLK, META
    B      int32 [pairs, 2]      blocks of edges (token, state)
    T      int32 [chunks * 64]   texts of the responses in the global tree
    C      int32 [chunks, 2]     the state chunk after, the text chunk before this one
    R      int64 [trees, 24]     one row per tree: row 0 the global one, others per handle
    Q      int64 [sequences, 2]  last text chunk and length of each response in the global tree
    W      int32 [trees, w]      the last `depth` tokens that each request was given, right-aligned;
                                 in default mode then its last draft: how many tokens, the tokens,
                                 the cells of the calibration that they were judged by, and how
                                 many of them the caller was given
    G      int64 [g]             sizes, free lists, counters, addresses; in default mode then the
                                 calibration: a pair (tried, right) per cell
    P                            B in exact mode, else None

The address of G is the only argument of a call from Python; G says what is to be done, and where
the other tables are, which become `Rows` (`_rows.py`): a number as an argument costs 0.04 µs at
every call, an array 0.2 µs. Functions take one request's row of W.

What keeps compiling short: one entry point for each mode (`run`, `run_exact`), helpers that are
compiled only as its parts (`_parts.py`), without Python wrappers and without reference counts, and
int64 for every scalar, so that each helper is compiled once. What keeps calling short: one
argument. Numba drops the branches under `if P is not None` (exact mode) before it types them, so
these cost the default mode nothing.
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
from numba import njit, types

from drafter_core._parts import Part, Whole, load_quickly
from drafter_core._rows import maker, prefetch

# fields of S
LINK, COUNT, TOK, DST, BLK, META = 0, 1, 2, 3, 4, 5
STATE_FIELDS = 6

# A hash table begins with its header: how many edges it holds, then in order a bound of their
# counts, else what leads and ends the order of siblings, and what leads those with each low count.
HEADER = 3  # pairs
BOUND = 1
HEAD, TAIL = 1, 0  # TAIL is in the second pair
LEAD_FIELD = 2  # the leader of those that occur c times is number 2 + c of the header
LEADS = 3
"""Exact mode: a table knows the leaders of the siblings which occur 1 to 3 times. Most siblings
occur that rarely; a place among them is not searched."""
BEFORE, AFTER = 0, 1  # what a table has behind its pairs, for each of them

LEN_MASK = 0xFFFF
CLASS_SHIFT = 16

# fields of R
R_ALIVE, R_ROOT, R_STATE, R_FED, R_SEQ, R_GSTATE, R_RLEN, R_LEAD = 0, 1, 2, 3, 4, 5, 6, 7
R_STATES, R_NEXT, R_END, R_CHUNK, R_TAIL = 8, 9, 10, 11, 12  # its states, and where they are
R_BNEXT, R_BEND = 13, 14  # its pairs: what is left of the newest of its chunks,
R_BFREE, R_BCHUNK, R_BTAIL = 16, 20, 21  # 4 free lists, the newest and the oldest chunk
R_NEXT_ENDED = 22
TREE_FIELDS = 24

# fields of Q
Q_LAST, Q_LEN = 0, 1
SEQ_FIELDS = 2

# fields of G
G_DEPTH, G_SCHUNKS, G_SFREE, G_STATEFREE, G_BNEXT, G_TCHUNKS, G_TFREE = 0, 1, 2, 3, 4, 5, 6
G_SCAP, G_BCAP, G_TCAP, G_TOPCLASS, G_TOKENS, G_EXACT = 7, 8, 9, 10, 11, 12
G_DRAFTED, G_ACCEPTED, G_VERIFY = 13, 14, 15
G_TREES, G_WIDTH = 16, 17  # rows of R and W, columns of W
G_WIDEST = 18  # the results have room for drafts of max_tokens up to this
G_ENDED = 19  # the last request that ended and still has its tree, or 0
G_HANDLES, G_LIMITS, G_ROWS = 20, 21, 22  # a step: addresses of its handles, limits and rows,
G_IDS, G_ID_COLUMNS, G_COUNTS, G_ID_ROWS = 23, 24, 25, 26  # of its token ids and their numbers
G_TEXT, G_CONTEXT = 27, 28  # addresses of what is fed, and of what is drafted after
G_BFREE = 32  # 32 free lists of tables, one per size class, and of pair chunks
G_TABLES = 64  # addresses of S, B, T, C, R, Q, W
G_OUT = 72  # addresses of the results: tokens, probs, info, scores; then columns and rows
G_SCRATCH = 80  # addresses of ints, probs, heap probs, heap; columns, heap size; walks, trail
G_CALL = 88  # op, first, second, begin, end; then as float64 factor, offset, min_prob
HEADER_FIELDS = 96

# what a drafted token is judged by: tree, match length, occurrences, share of them, place in draft
LENGTHS, COUNTS, SHARES, PLACES = 9, 5, 6, 2
CELLS = 2 * LENGTHS * COUNTS * SHARES * PLACES

LEARNED = 64
"""Tokens of a draft that the calibration learns from."""

PRIOR = 8.0
"""Drafted tokens that a cell must have seen to be believed as much as its share of counts."""

DOUBT = 1.5
"""Occurrences of something else that are assumed behind a match of one token; behind one of m
tokens, DOUBT / m."""

LENIENCY = 0.5
"""A draft ends below this times `min_token_prob`: estimates are lower than shares of counts."""

STRICTNESS = 0.8
"""Beyond `max_spec_factor`, a draft goes on while it is this times as probable as drafts were."""

CANDIDATES = 3
"""Suffixes whose drafts are compared, in each tree."""

MEMORY = 4096
"""Drafted tokens after which what was seen before counts half."""

LEVELS = 64
"""Steps of probability in which drafted tokens are weighed against the load."""

LEAD = 1 << 30
"""Added to the tokens of a prompt that come before its response in the global tree: a response may
follow them, but no context of real tokens meets them, and they are never drafted."""

CHUNK = 64
"""States per state chunk, tokens per text chunk."""

SPARE_CHUNKS = 8
"""Chunks of states, and of text, that are left before a token is fed."""

SMALL = 3
"""Blocks of up to 2**SMALL edges are scanned; larger ones are hash tables."""

PAIRS = 128
"""Pairs per pair chunk. A tree's small blocks lie in chunks of its own: what is read together lies
together, and all are given back at once. The first pair of a chunk names the chunk before."""

PAIR_CHUNKS = 31
"""The list of G_BFREE of the pair chunks that are free."""

LINE = 8
"""Pairs that lie in one line of a processor's cache."""

UNKNOWN = 2147483647
"""The bound of a table whose counts were not looked at yet."""

# operations of `run`
INIT, START, FEED, STEP, FREE, EVICT, SPECULATE = 0, 1, 2, 3, 4, 5, 6

# results per request
OK, MISMATCH, BAD_TOKEN, BAD_HANDLE, CORRUPT = 0, 1, 2, 3, 4
TOO_NARROW = -(1 << 61)  # of STEP as a whole

# what is fetched before a step: requests at a time, tokens of each, links behind each token
FETCH_GROUP, FETCH_TOKENS, FETCH_LINKS = 16, 16, 3
FETCH_WALKS = 2 * FETCH_GROUP
FETCH_ENDS = FETCH_WALKS * FETCH_TOKENS  # in the trail: what comes before, then the walks' ends
WALK_STATE, WALK_TOKEN, WALK_END, WALK_SLOT = 0, 1, 2, 3
WALK_FIELDS = 4

# rows of the integer results
OUT_LENGTH, OUT_MATCH, OUT_STATUS = 0, 1, 2
OUT_ROWS = 3

# rows of the scratch ints and probs
SCRATCH_INTS = 5
PARENTS, SPARE = 2, 3  # rows of the ints: the parents of the draft; one that drafts leave alone
SCRATCH_PROBS = 3
HEAP_FIELDS = 4

_states = maker(types.int32, STATE_FIELDS)
_pairs = maker(types.int32, 2)
_trees = maker(types.int64, TREE_FIELDS)
_sequences = maker(types.int64, SEQ_FIELDS)
_heap = maker(types.int32, HEAP_FIELDS)
_walks = maker(types.int64, WALK_FIELDS)
_int32 = maker(types.int32, 1)
_int64 = maker(types.int64, 1)
_float32 = maker(types.float32, 1)
_float64 = maker(types.float64, 1)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _inner(function: _Function) -> _Function:
    return njit(
        error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False,
        pipeline_class=Part,
    )(function)


def _entry(function: _Function) -> _Function:
    # The GIL is kept: a step is shorter than the wait for getting it back.
    options = {"error_model": "numpy", "no_cfunc_wrapper": True, "pipeline_class": Whole}
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
    base = block + HEADER
    h = ((token * 0x9E3779B1) >> 12) & mask
    while True:
        held = B[base + h, 0]
        if held == token:
            return base + h
        if held < 0:
            return -1 - (base + h)
        h = (h + 1) & mask


@_inner
def _from_pool(B: Any, G: Any, kind: int, pairs: int) -> int:
    """A table or a chunk: one that is free, or a new one that begins with a line."""
    block = G[G_BFREE + kind]
    if block >= 0:
        G[G_BFREE + kind] = B[block, 1]
    else:
        block = G[G_BNEXT]
        G[G_BNEXT] = block + (pairs + LINE - 1) // LINE * LINE
    return block


@_inner
def _new_block(B: Any, R: Any, G: Any, ordered: bool, tree: int, size_class: int) -> int:
    """A block with no edges; a small one is crossed by as few lines as can be."""
    pairs = 1 << size_class
    if size_class > SMALL:
        kind = size_class + (1 if ordered else 0)
        block = _from_pool(B, G, kind, HEADER + (1 << kind))
        G[G_TOPCLASS] = max(G[G_TOPCLASS], kind)
        for i in range(HEADER):
            B[block + i, 0] = -1
            B[block + i, 1] = -1
        B[block, 0] = 0
        if not ordered:
            B[block, 1] = UNKNOWN
        first = block + HEADER
    else:
        block = R[tree, R_BFREE + size_class]
        if block >= 0:
            R[tree, R_BFREE + size_class] = B[block, 1]
        else:
            block = R[tree, R_BNEXT]
            end = R[tree, R_BEND]
            while block + pairs > end or block & (pairs - 1):
                if block < end:  # what is left over is a small block itself
                    piece = np.int64(0)
                    while piece < SMALL and block & (1 << piece) == 0:
                        piece += 1
                    _free_block(B, R, G, False, tree, block, piece)
                    block += 1 << piece
                else:
                    chunk = _from_pool(B, G, np.int64(PAIR_CHUNKS), np.int64(PAIRS))
                    if R[tree, R_BCHUNK] < 0:
                        R[tree, R_BTAIL] = chunk
                    B[chunk, 1] = R[tree, R_BCHUNK]
                    R[tree, R_BCHUNK] = chunk
                    block = chunk + 1
                    end = chunk + PAIRS
            R[tree, R_BNEXT] = block + pairs
            R[tree, R_BEND] = end
        first = block
    for i in range(first, first + pairs):
        B[i, 0] = -1
    return block


@_inner
def _free_block(
    B: Any, R: Any, G: Any, ordered: bool, tree: int, block: int, size_class: int
) -> None:
    if size_class > SMALL:
        kind = size_class + (1 if ordered else 0)
        B[block, 1] = G[G_BFREE + kind]
        G[G_BFREE + kind] = block
    else:
        B[block, 1] = R[tree, R_BFREE + size_class]
        R[tree, R_BFREE + size_class] = block


@_inner
def _put(B: Any, block: int, size_class: int, token: int, state: int) -> int:
    """Add an edge to a block that has room and does not hold the token; return its pair.

    In a small block it comes last.
    """
    i = -1 - _slot(B, block, size_class, token)
    B[i, 0] = token
    B[i, 1] = state
    if size_class > SMALL:
        B[block, 0] += 1
    return i


# -- the order of siblings, in exact mode ----------------------------------------------------------
#
# A small block holds its pairs in their order. A table has a list through them: behind its pairs
# come as many with the pairs before and after each. A place is counted from the table's first pair.


@_inner
def _links(block: int, size_class: int) -> int:
    """What is the pair before and after that at a place of a table is behind here."""
    return block + HEADER + (1 << size_class)


@_inner
def _link_after(B: Any, block: int, size_class: int, place: int, before: int) -> None:
    """Put a pair of a table behind another in the order; in front of all for -1."""
    links = _links(block, size_class)
    following = B[links + before, AFTER] if before >= 0 else B[block, HEAD]
    B[links + place, BEFORE] = before
    B[links + place, AFTER] = following
    if before >= 0:
        B[links + before, AFTER] = place
    else:
        B[block, HEAD] = place
    if following >= 0:
        B[links + following, BEFORE] = place
    else:
        B[block + 1, TAIL] = place


@_inner
def _unlink(B: Any, block: int, size_class: int, place: int) -> None:
    """Take a pair of a table out of the order."""
    links = _links(block, size_class)
    before = B[links + place, BEFORE]
    following = B[links + place, AFTER]
    if before >= 0:
        B[links + before, AFTER] = following
    else:
        B[block, HEAD] = following
    if following >= 0:
        B[links + following, BEFORE] = before
    else:
        B[block + 1, TAIL] = before


@_inner
def _leader(B: Any, block: int, count: int) -> int:
    """The place of the first pair of a table that occurs `count` times, up to LEADS, or -1."""
    return B[block + ((LEAD_FIELD + count) >> 1), (LEAD_FIELD + count) & 1]


@_inner
def _set_leader(B: Any, block: int, count: int, place: int) -> None:
    B[block + ((LEAD_FIELD + count) >> 1), (LEAD_FIELD + count) & 1] = place


@_inner
def _count_at(S: Any, B: Any, block: int, place: int) -> int:
    """How often the sibling at a place of a table occurs."""
    return S[B[block + HEADER + place, 1], COUNT]


@_inner
def _join(S: Any, B: Any, block: int, size_class: int, place: int, count: int) -> None:
    """Note in a table that a pair now stands with those that occur `count` times."""
    if count <= LEADS:
        before = B[_links(block, size_class) + place, BEFORE]
        if before < 0 or _count_at(S, B, block, before) != count:
            _set_leader(B, block, count, place)


@_inner
def _leave(S: Any, B: Any, block: int, size_class: int, place: int, count: int) -> None:
    """Note in a table that a pair no longer stands with those that occur `count` times."""
    if count <= LEADS and _leader(B, block, count) == place:
        following = B[_links(block, size_class) + place, AFTER]
        if following >= 0 and _count_at(S, B, block, following) != count:
            following = np.int64(-1)
        _set_leader(B, block, count, following)


@_inner
def _shift(B: Any, i: int, j: int) -> None:
    """Move pair i of a small block to where pair j is, and those between by one."""
    token = B[i, 0]
    state = B[i, 1]
    step = 1 if j > i else -1
    while i != j:
        B[i, 0] = B[i + step, 0]
        B[i, 1] = B[i + step, 1]
        i += step
    B[j, 0] = token
    B[j, 1] = state


@_inner
def _small_end(B: Any, block: int, size_class: int, i: int) -> int:
    """The pair behind the last edge of a small block, from pair i on."""
    end = block + (1 << size_class)
    while i < end and B[i, 0] >= 0:
        i += 1
    return i


@_inner
def _first_sibling(B: Any, block: int, size_class: int) -> int:
    """The pair that comes first in the order."""
    return block if size_class <= SMALL else block + HEADER + B[block, HEAD]


@_inner
def _next_sibling(B: Any, block: int, size_class: int, i: int) -> int:
    """The pair that comes after pair i in the order, or -1."""
    if size_class <= SMALL:
        i += 1
        return i if i < block + (1 << size_class) and B[i, 0] >= 0 else np.int64(-1)
    base = block + HEADER
    place = B[_links(block, size_class) + i - base, AFTER]
    return base + place if place >= 0 else np.int64(-1)


# -- edges of a state ------------------------------------------------------------------------------


@_inner
def _find(S: Any, B: Any, v: int, token: int) -> int:
    """The state that the token leads to from v, or -1."""
    if S[v, TOK] == token:
        return S[v, DST]
    block = S[v, BLK]
    if block < 0:
        return np.int64(-1)
    i = _slot(B, block, S[v, META] >> CLASS_SHIFT, token)
    return B[i, 1] if i >= 0 else np.int64(-1)


@_inner
def _move_pair(B: Any, ordered: bool, block: int, size_class: int, i: int, j: int) -> None:
    """Move pair i of a table to the empty pair j."""
    B[j, 0] = B[i, 0]
    B[j, 1] = B[i, 1]
    if ordered:
        old = i - block - HEADER
        new = j - block - HEADER
        before = B[_links(block, size_class) + old, BEFORE]
        _unlink(B, block, size_class, old)
        _link_after(B, block, size_class, new, before)
        for count in range(1, LEADS + 1):
            if _leader(B, block, count) == old:
                _set_leader(B, block, count, new)


@_inner
def _clear_pair(B: Any, P: Any, ordered: bool, block: int, size_class: int, i: int) -> None:
    """Take pair i out of a block and close the gap."""
    hole = i
    if size_class <= SMALL:
        last = _small_end(B, block, size_class, i) - 1
        if P is not None:
            _shift(B, i, last)
        if P is None:
            B[i, 0] = B[last, 0]
            B[i, 1] = B[last, 1]
        hole = last
    else:
        mask = (1 << size_class) - 1
        base = block + HEADER
        if P is not None:
            if ordered:
                _unlink(B, block, size_class, i - base)
        j = i - base
        while True:  # whatever probed past the gap moves back
            j = (j + 1) & mask
            token = B[base + j, 0]
            if token < 0:
                break
            home = ((token * 0x9E3779B1) >> 12) & mask
            if ((j - home) & mask) >= ((j - (hole - base)) & mask):
                if P is not None:
                    _move_pair(B, ordered, block, size_class, base + j, hole)
                if P is None:
                    _move_pair(B, False, block, size_class, base + j, hole)
                hole = base + j
        B[block, 0] -= 1
    B[hole, 0] = -1


@_inner
def _resize(
    S: Any, B: Any, R: Any, G: Any, P: Any, ordered: bool, tree: int, v: int, new_class: int
) -> None:
    """Move the edges of v's block to a block of another class."""
    old = S[v, BLK]
    old_class = S[v, META] >> CLASS_SHIFT
    new = _new_block(B, R, G, ordered, tree, new_class)
    if P is not None:
        if ordered:
            i = _first_sibling(B, old, old_class)
            while i >= 0:
                j = _put(B, new, new_class, B[i, 0], B[i, 1])
                if new_class > SMALL:
                    place = j - new - HEADER
                    _link_after(B, new, new_class, place, B[new + 1, TAIL])
                    _join(S, B, new, new_class, place, S[B[i, 1], COUNT])
                i = _next_sibling(B, old, old_class, i)
    if not ordered:
        first = old + (HEADER if old_class > SMALL else 0)
        for i in range(first, first + (1 << old_class)):
            if B[i, 0] >= 0:
                _put(B, new, new_class, B[i, 0], B[i, 1])
        if old_class > SMALL and new_class > SMALL:
            B[new, BOUND] = B[old, BOUND]
    _free_block(B, R, G, ordered, tree, old, old_class)
    S[v, BLK] = new
    S[v, META] = (S[v, META] & LEN_MASK) | (new_class << CLASS_SHIFT)


@_inner
def _add(
    S: Any, B: Any, R: Any, G: Any, P: Any,
    ordered: bool, tree: int, v: int, token: int, state: int,
) -> None:
    """Add an edge that v lacks, to a state that will occur once; it is last in the order."""
    if S[v, TOK] < 0:
        S[v, TOK] = token
        S[v, DST] = state
        return
    size_class = S[v, META] >> CLASS_SHIFT
    block = S[v, BLK]
    if block < 0:
        size_class = np.int64(0)
        block = _new_block(B, R, G, ordered, tree, size_class)
        S[v, BLK] = block
        S[v, META] &= LEN_MASK
    else:
        grown = size_class
        if size_class > SMALL:
            if (B[block, 0] + 1) * 4 > 3 << size_class:
                grown += 1
        elif B[block + (1 << size_class) - 1, 0] >= 0:
            grown += 1 if size_class < SMALL else 2
        if grown != size_class:
            _resize(S, B, R, G, P, ordered, tree, v, grown)
            block = S[v, BLK]
            size_class = grown
    i = _put(B, block, size_class, token, state)
    if P is not None:
        if ordered and size_class > SMALL:
            place = i - block - HEADER
            _link_after(B, block, size_class, place, B[block + 1, TAIL])
            if _leader(B, block, np.int64(1)) < 0:
                _set_leader(B, block, np.int64(1), place)


@_inner
def _redirect(S: Any, B: Any, v: int, token: int, state: int, onto: int) -> bool:
    """Let the edge of v for the token lead onto another state, if it leads to this one."""
    if S[v, TOK] == token:
        if S[v, DST] != state:
            return False
        S[v, DST] = onto
        return True
    i = _slot(B, S[v, BLK], S[v, META] >> CLASS_SHIFT, token)
    if B[i, 1] != state:
        return False
    B[i, 1] = onto
    return True


@_inner
def _swap_first(S: Any, B: Any, v: int, i: int) -> None:
    """Let the first edge and pair i of a small block change places."""
    token = S[v, TOK]
    state = S[v, DST]
    S[v, TOK] = B[i, 0]
    S[v, DST] = B[i, 1]
    B[i, 0] = token
    B[i, 1] = state


@_inner
def _make_first(S: Any, B: Any, P: Any, ordered: bool, v: int, i: int) -> int:
    """Make pair i the first edge; the edge that was first goes into the block: return its pair.

    In the order of a table that one is then missing; pair i must not lead any more.
    """
    block = S[v, BLK]
    size_class = S[v, META] >> CLASS_SHIFT
    if size_class <= SMALL:
        _swap_first(S, B, v, i)
        return i
    token = S[v, TOK]
    state = S[v, DST]
    S[v, TOK] = B[i, 0]
    S[v, DST] = B[i, 1]
    _clear_pair(B, P, ordered, block, size_class, i)
    if not ordered:
        B[block, BOUND] = max(B[block, BOUND], S[state, COUNT])
    return _put(B, block, size_class, token, state)


@_inner
def _best_pair(S: Any, B: Any, v: int) -> int:
    """The pair of v's block with the highest count, the smallest token among equals."""
    block = S[v, BLK]
    size_class = S[v, META] >> CLASS_SHIFT
    first = block + (HEADER if size_class > SMALL else 0)
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
def _rise(S: Any, B: Any, P: Any, ordered: bool, v: int, token: int, state: int) -> None:
    """Put an edge of v that is not the first in its place after its count rose by one, above 1.

    Unordered: it comes first when it occurs more often than the first: the first to reach a count
    is first among equals. Ordered, as the peer does it: the leader of a group of equals leads
    the group above, any other goes to the end of the group above.
    """
    count = S[state, COUNT]
    top = S[S[v, DST], COUNT]
    block = S[v, BLK]
    size_class = S[v, META] >> CLASS_SHIFT
    if P is not None:
        if ordered:
            i = _slot(B, block, size_class, token)
            if size_class <= SMALL:
                _rise_in_small(S, B, v, block, i, count, top)
            else:
                _rise_in_table(S, B, P, v, block, size_class, i, count, top)
            return
    if count > top:
        _make_first(S, B, P, ordered, v, _slot(B, block, size_class, token))
    elif size_class > SMALL and count > B[block, BOUND]:
        B[block, BOUND] = count


@_inner
def _rise_in_small(
    S: Any, B: Any, v: int, block: int, i: int, count: int, top: int
) -> None:
    """`_rise` of pair i of a small block; `top` is the count of the first edge."""
    j = i - 1
    above = S[B[j, 1], COUNT] if j >= block else top
    passed = count - 1 if above == count - 1 else count
    while j >= block and S[B[j, 1], COUNT] == passed:
        j -= 1
    if j + 1 != i:
        _shift(B, i, j + 1)
    if j < block and top == passed:
        _swap_first(S, B, v, block)


@_inner
def _rise_in_table(
    S: Any, B: Any, P: Any, v: int, block: int, size_class: int, i: int, count: int, top: int
) -> None:
    """`_rise` of pair i of a table; `top` is the count of the first edge."""
    links = _links(block, size_class)
    place = i - block - HEADER
    has_leads = count - 1 <= LEADS
    before = B[links + place, BEFORE]
    passed = count - 1
    if has_leads:  # no other sibling's count need be read then
        leader = _leader(B, block, count - 1)
        if leader != place:
            before = B[links + leader, BEFORE]
        else:
            _leave(S, B, block, size_class, place, count - 1)
            if before >= 0 or top != count - 1:
                passed = count
                if count <= LEADS and _leader(B, block, count) >= 0:
                    before = B[links + _leader(B, block, count), BEFORE]
    elif (_count_at(S, B, block, before) if before >= 0 else top) != count - 1:
        passed = count
    if count > LEADS:
        while before >= 0 and _count_at(S, B, block, before) == passed:
            before = B[links + before, BEFORE]
    if before < 0 and top == passed:
        place = _make_first(S, B, P, True, v, i) - block - HEADER
        _link_after(B, block, size_class, place, np.int64(-1))
        if has_leads and top <= LEADS:
            _set_leader(B, block, top, place)
        return
    if before != B[links + place, BEFORE]:
        _unlink(B, block, size_class, place)
        _link_after(B, block, size_class, place, before)
    if has_leads and count <= LEADS and (passed == count or _leader(B, block, count) < 0):
        _set_leader(B, block, count, place)


@_inner
def _fall(S: Any, B: Any, P: Any, ordered: bool, v: int, token: int, state: int) -> None:
    """Put an edge of v in its place after the count of its state fell by one, not to zero.

    Unordered: when the first falls below another, the most frequent comes first, the smallest token
    among equals. Ordered: it leads the group below.
    """
    block = S[v, BLK]
    if block < 0:
        return
    count = S[state, COUNT]
    is_first = S[v, TOK] == token
    size_class = S[v, META] >> CLASS_SHIFT
    if P is not None:
        if ordered:
            if size_class <= SMALL:
                _fall_in_small(S, B, v, block, size_class, token, count)
            else:
                _fall_in_table(S, B, P, v, block, size_class, token, count)
            return
    if not is_first:
        return
    if size_class > SMALL and B[block, BOUND] <= count:
        return
    i = _best_pair(S, B, v)
    best = S[B[i, 1], COUNT]
    if best > count:
        _make_first(S, B, P, ordered, v, i)
    elif size_class > SMALL:
        B[block, BOUND] = best


@_inner
def _fall_in_small(
    S: Any, B: Any, v: int, block: int, size_class: int, token: int, count: int
) -> None:
    """`_fall` of the first edge of v, or of one of a small block."""
    i = block
    if S[v, TOK] == token:
        if S[B[block, 1], COUNT] <= count:
            return
        _swap_first(S, B, v, block)
    else:
        i = _slot(B, block, size_class, token)
    j = i
    end = block + (1 << size_class)
    while j + 1 < end and B[j + 1, 0] >= 0 and S[B[j + 1, 1], COUNT] > count:
        j += 1
    if j != i:
        _shift(B, i, j)


@_inner
def _fall_in_table(
    S: Any, B: Any, P: Any, v: int, block: int, size_class: int, token: int, count: int
) -> None:
    """`_fall` of the first edge of v, or of one of a table."""
    if S[v, TOK] == token:
        following = B[block, HEAD]
        if _count_at(S, B, block, following) <= count:
            return
        _leave(S, B, block, size_class, following, count + 1)
        i = _make_first(S, B, P, True, v, block + HEADER + following)
        place = i - block - HEADER
        before = _last_above(S, B, block, size_class, np.int64(-1), B[block, HEAD], count)
        _link_after(B, block, size_class, place, before)
    else:
        place = _slot(B, block, size_class, token) - block - HEADER
        links = _links(block, size_class)
        following = B[links + place, AFTER]
        _leave(S, B, block, size_class, place, count + 1)
        if following >= 0 and _count_at(S, B, block, following) > count:
            before = B[links + place, BEFORE]
            _unlink(B, block, size_class, place)
            before = _last_above(S, B, block, size_class, before, following, count)
            _link_after(B, block, size_class, place, before)
    _join(S, B, block, size_class, place, count)


@_inner
def _last_above(
    S: Any, B: Any, block: int, size_class: int, before: int, following: int, count: int
) -> int:
    """The last place, `before` or after it, of those that occur more than `count` times.

    following is the place after `before`.
    """
    links = _links(block, size_class)
    if count <= LEADS:
        for below in range(count, 0, -1):
            leader = _leader(B, block, below)
            if leader >= 0:
                return B[links + leader, BEFORE]
        return B[block + 1, TAIL]
    while following >= 0 and _count_at(S, B, block, following) > count:
        before = following
        following = B[links + before, AFTER]
    return before


@_inner
def _remove(
    S: Any, B: Any, R: Any, G: Any, P: Any, ordered: bool, v: int, token: int
) -> None:
    """Remove an edge of v, a state of the global tree; give back memory that is not needed."""
    block = S[v, BLK]
    size_class = S[v, META] >> CLASS_SHIFT
    if S[v, TOK] == token:
        if block < 0:
            S[v, TOK] = -1
            return
        i = np.int64(-1)
        if P is not None:
            if ordered:
                i = _first_sibling(B, block, size_class)
        if not ordered:
            i = _best_pair(S, B, v)
        S[v, TOK] = B[i, 0]
        S[v, DST] = B[i, 1]
        count = S[B[i, 1], COUNT]
    else:
        i = _slot(B, block, size_class, token)
        count = np.int64(1)  # until now
    if P is not None:
        if ordered and size_class > SMALL:
            _leave(S, B, block, size_class, i - block - HEADER, count)
    _clear_pair(B, P, ordered, block, size_class, i)
    if size_class <= SMALL:
        if B[block, 0] < 0:
            _free_block(B, R, G, ordered, np.int64(0), block, size_class)
            S[v, BLK] = -1
    elif B[block, 0] * 8 <= 1 << size_class:
        fewer = size_class - 1 if size_class > SMALL + 2 else np.int64(SMALL)
        _resize(S, B, R, G, P, ordered, np.int64(0), v, fewer)


# -- states ----------------------------------------------------------------------------------------


@_inner
def _new_state(S: Any, B: Any, C: Any, R: Any, G: Any, tree: int, length: int) -> int:
    if tree == 0 and G[G_STATEFREE] >= 0:
        v = G[G_STATEFREE]
        following = S[v, LINK]
        G[G_STATEFREE] = following
        prefetch(S, following)  # those that were freed lie apart
    else:
        v = R[tree, R_NEXT]
        if v == R[tree, R_END]:
            chunk = G[G_SFREE]
            if chunk >= 0:
                G[G_SFREE] = C[chunk, 0]
                for u in range(chunk * CHUNK, chunk * CHUNK + CHUNK):
                    size_class = S[u, META] >> CLASS_SHIFT
                    if S[u, BLK] >= 0 and size_class > SMALL:
                        ordered = G[G_EXACT] != 0 and S[u, LINK] >= 0
                        _free_block(B, R, G, ordered, tree, S[u, BLK], size_class)
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
    S: Any, B: Any, C: Any, R: Any, G: Any, P: Any,
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
    block = S[q, BLK]
    size_class = S[q, META] >> CLASS_SHIFT
    copy = block
    if length == depth - 1 and S[q, META] & LEN_MASK == depth:
        # Only the words of full depth stay in q, and those have no successors.
        S[q, TOK] = -1
        S[q, BLK] = -1
    elif block >= 0:
        copy = _new_block(B, R, G, ordered, tree, size_class)
        pairs = 1 << size_class
        if size_class > SMALL:
            pairs = HEADER + (pairs << (1 if ordered else 0))
        for i in range(pairs):
            B[copy + i, 0] = B[block + i, 0]
            B[copy + i, 1] = B[block + i, 1]
    S[r, BLK] = copy
    S[r, META] = length | (size_class << CLASS_SHIFT)
    while p >= 0 and _redirect(S, B, p, token, q, r):
        p = S[p, LINK]
    return r


@_inner
def _extendable(S: Any, G: Any, a: int) -> int:
    """The state of the longest suffix of a's longest word that has room for one more token."""
    if S[a, META] & LEN_MASK == G[G_DEPTH]:
        link = S[a, LINK]
        if S[link, META] & LEN_MASK == G[G_DEPTH] - 1:
            return link
    return a


@_inner
def _extend(
    S: Any, B: Any, C: Any, R: Any, G: Any, P: Any, tree: int, a: int, token: int
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
            _add(S, B, R, G, P, ordered and p != root, tree, p, token, new)
            p = S[p, LINK]
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
            suffix = _split(S, B, C, R, G, P, ordered, tree, q, length, p, token)
    if new == q:
        new = suffix
    else:
        S[new, LINK] = suffix
    if new != suffix:  # its edges are new, and last already
        S[new, COUNT] = 1
    if p >= 0:
        w = suffix
        S[w, COUNT] += 1
        while p != root:  # the root keeps no order: nothing is drafted from it
            length = min(S[p, META] & LEN_MASK, limit) + 1
            link = S[w, LINK]
            while S[link, META] & LEN_MASK >= length:
                w = link
                S[w, COUNT] += 1
                link = S[w, LINK]
            if S[p, TOK] != token:
                _rise(S, B, P, ordered, p, token, w)
            p = S[p, LINK]
        w = S[w, LINK]
        while w != root:
            S[w, COUNT] += 1
            w = S[w, LINK]
    return new


@_inner
def _window(G: Any, tree: int) -> Any:
    """The row of W of a request."""
    return _int32(G[G_TABLES + 6] + 4 * G[G_WIDTH] * tree)


@_inner
def _new_tree(S: Any, B: Any, C: Any, R: Any, G: Any, tree: int) -> None:
    R[tree, R_ALIVE] = 1
    R[tree, R_NEXT] = 0
    R[tree, R_END] = 0
    R[tree, R_CHUNK] = -1
    R[tree, R_STATES] = 0
    R[tree, R_BNEXT] = 0
    R[tree, R_BEND] = 0
    R[tree, R_BCHUNK] = -1
    for size_class in range(SMALL + 1):
        R[tree, R_BFREE + size_class] = -1
    root = _new_state(S, B, C, R, G, tree, np.int64(0))
    S[root, LINK] = -1
    R[tree, R_ROOT] = root
    R[tree, R_STATE] = root
    R[tree, R_FED] = 0
    R[tree, R_SEQ] = -1
    R[tree, R_RLEN] = 0
    R[tree, R_LEAD] = 0
    R[tree, R_GSTATE] = R[0, R_ROOT]
    if G[G_EXACT] == 0:
        _window(G, tree)[G[G_DEPTH]] = 0


@_inner
def _free_tree(S: Any, B: Any, C: Any, R: Any, G: Any, tree: int) -> None:
    """Give back the states and small blocks of a request's tree, in constant time.

    Its hash tables are given back when a chunk of states is used again.
    """
    for v in range(R[tree, R_NEXT], R[tree, R_END]):
        S[v, BLK] = -1
    C[R[tree, R_TAIL], 0] = G[G_SFREE]
    G[G_SFREE] = R[tree, R_CHUNK]
    if R[tree, R_BCHUNK] >= 0:
        B[R[tree, R_BTAIL], 1] = G[G_BFREE + PAIR_CHUNKS]
        G[G_BFREE + PAIR_CHUNKS] = R[tree, R_BCHUNK]
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
    S: Any, B: Any, R: Any, G: Any, P: Any, a: int, new: int, token: int
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
        w = S[w, LINK]
    p = _extendable(S, G, a)
    w = new
    while p >= 0:
        length = min(S[p, META] & LEN_MASK, limit) + 1
        while S[S[w, LINK], META] & LEN_MASK >= length:
            w = S[w, LINK]
        in_order = ordered and p != root
        if S[w, COUNT] == 0:
            _remove(S, B, R, G, P, in_order, p, token)
        elif p != root:
            _fall(S, B, P, in_order, p, token, w)
        p = S[p, LINK]
    return died


@_inner
def _evict(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, G: Any, P: Any, seq: int
) -> int:
    """Take a response out of the global tree front to back, as the peer does, and free its text.

    States that die at one token still carry edges to those that die at the next: they are freed one
    token later.
    """
    following = np.int64(-1)
    chunk = Q[seq, Q_LAST]
    while Q[seq, Q_LEN] > 0 and chunk >= 0:  # turn the list of text chunks round
        before = C[chunk, 1]
        C[chunk, 1] = following
        following = chunk
        chunk = before
    chunk = following
    a = R[0, R_ROOT]
    dying = np.int64(0)
    length = Q[seq, Q_LEN]
    for position in range(length):
        offset = position % CHUNK
        token = T[chunk * CHUNK + offset]
        new = _find(S, B, _extendable(S, G, a), token)
        if new < 0:
            return -CORRUPT
        died = _forget(S, B, R, G, P, a, new, token)
        _free_states(S, R, G, a, dying)
        dying = died
        a = new
        if offset == CHUNK - 1 or position == length - 1:
            done = chunk
            chunk = C[chunk, 1]
            C[done, 1] = G[G_TFREE]
            G[G_TFREE] = done
    _free_states(S, R, G, a, dying)
    G[G_TOKENS] -= length
    Q[seq, Q_LEN] = 0
    return np.int64(0)


@_inner
def _evict_end(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, G: Any, P: Any, seq: int,
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
            chunk = C[chunk, 1]
        position -= 1
    a = R[0, R_ROOT]
    states[0] = a
    for i in range(length - begin):
        if i >= depth:  # the word so far has no room for one more token
            a = _extendable(S, G, a)
        a = _find(S, B, a, tokens[i])
        if a < 0:
            return np.int64(-CORRUPT)
        states[i + 1] = a
    for i in range(length - begin - 1, length - begin - 1 - count, -1):
        new = np.int64(states[i + 1])
        died = _forget(S, B, R, G, P, np.int64(states[i]), new, tokens[i])
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
        following = S[v, LINK]
        S[v, LINK] = G[G_STATEFREE]
        G[G_STATEFREE] = v
        R[0, R_STATES] -= 1
        v = following


# -- requests --------------------------------------------------------------------------------------


@_inner
def _has_room(G: Any) -> bool:
    """Whether the tables have room for one more token, whatever it splits and rehashes."""
    return (
        G[G_SCHUNKS] + SPARE_CHUNKS <= G[G_SCAP] // CHUNK
        and G[G_TCHUNKS] + SPARE_CHUNKS <= G[G_TCAP] // CHUNK
        and G[G_BNEXT] + ((4 * G[G_DEPTH] + 8) << (G[G_TOPCLASS] + 2)) <= G[G_BCAP]
    )


@_inner
def _feed(
    S: Any, B: Any, T: Any, C: Any, R: Any, Q: Any, W: Any, G: Any, P: Any,
    tree: int, tokens: Any, begin: int, end: int, own: bool, response: bool,
) -> int:
    """Append checked tokens to a request's own tree, and to the global one as its response.

    In default mode the end of the prompt, marked by LEAD, comes before the response in the global
    tree, so that the same question finds the same answer from its second token on. Returns how many
    fitted into the tables.
    """
    depth = G[G_DEPTH]
    seq = R[tree, R_SEQ] if response else np.int64(-1)
    local = R[tree, R_STATE]
    shared = R[tree, R_GSTATE]
    if P is None:
        if seq >= 0 and R[tree, R_LEAD] >= 0 and end > begin:
            lead = min(R[tree, R_FED], depth)
            for k in range(depth - lead, depth):
                if W[k] >= LEAD - 1:  # cannot be marked
                    lead = np.int64(0)
            done = R[tree, R_LEAD]
            while done < lead and _has_room(G):
                token = W[depth - lead + done] + LEAD
                shared = _extend(S, B, C, R, G, P, np.int64(0), shared, token)
                _store_token(T, C, Q, G, seq, token)
                done += 1
            R[tree, R_LEAD] = done if done < lead else -1
            R[tree, R_GSTATE] = shared
            R[tree, R_RLEN] = done
            if done < lead:
                return np.int64(0)
    i = begin
    while i < end and _has_room(G):
        token = tokens[i]
        if own:
            local = _extend(S, B, C, R, G, P, tree, local, token)
        if seq >= 0:
            shared = _extend(S, B, C, R, G, P, np.int64(0), shared, token)
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
        W[k] = W[k + fed]
    for k in range(kept, depth):
        W[k] = tokens[i - depth + k]
    return fed


@_inner
def _match(S: Any, B: Any, root: int, depth: int, tokens: Any, known: int) -> tuple[int, int]:
    """State and length of the longest suffix of the last `known` of `depth` tokens in a tree."""
    v = root
    matched = np.int64(0)
    for i in range(depth - known, depth):
        token = tokens[i]
        q = _find(S, B, v, token)
        while q < 0 and v != root:
            v = S[v, LINK]
            matched = S[v, META] & LEN_MASK
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
    S: Any, v: int, longest: int, min_prob: float, tokens: Any, probs: Any, prefix: Any
) -> int:
    """Follow first edges from v while the path is probable enough; return how far.

    prefix[n] is the score of the first n tokens.
    """
    n = np.int64(0)
    prob = np.float32(1.0)
    score = np.float32(0.0)
    w = v
    while n < longest:
        if S[w, TOK] < 0 or S[w, LINK] < 0:
            break
        d = S[w, DST]
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
    S: Any, B: Any, G: Any, P: Any, v: int, matched: int, longest: int, min_prob: float,
    tokens: Any, probs: Any, parents: Any, heap_prob: Any, heap: Any, room: int,
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
                heap_prob, heap, size, prob, S[state, DST], length + 1,
                S[state, TOK], parent,
            )
        else:
            _push(heap_prob, heap, size, prob, state, length, np.int64(-1), parent)
        size += 1
        token = np.int64(-1)
        while token < 0 and size > 0:
            prob = heap_prob[0]
            state = heap[0, 0]
            length = heap[0, 1]
            token = heap[0, 2]
            parent = heap[0, 3]
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
                    heap_prob, heap, at, heap_prob[last], heap[last, 0],
                    heap[last, 1], heap[last, 2], heap[last, 3],
                )
            if token < 0 and length < depth and S[state, TOK] >= 0:
                pair = np.int64(-1)
                following = S[state, TOK]
                d = S[state, DST]
                while True:
                    child_prob = (
                        prob * np.float32(S[d, COUNT]) / np.float32(S[state, COUNT])
                    )
                    if child_prob < min_prob:
                        break
                    if size + 1 >= room:
                        return np.int64(-1), score
                    _push(heap_prob, heap, size, child_prob, d, length + 1, following, parent)
                    size += 1
                    block = S[state, BLK]
                    if block < 0:
                        break
                    size_class = S[state, META] >> CLASS_SHIFT
                    if pair >= 0:
                        pair = _next_sibling(B, block, size_class, pair)
                        if pair < 0:
                            break
                    else:
                        pair = _first_sibling(B, block, size_class)
                    following = B[pair, 0]
                    d = B[pair, 1]
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
def _cap(G: Any, length: int, max_tokens: int, factor: float, offset: float) -> int:
    """How many tokens may follow a match of this length."""
    return min(_limit(length, max_tokens, factor, offset), G[G_DEPTH] - length)


@_inner
def _draft_from(
    S: Any, B: Any, G: Any, P: Any, v: int, matched: int,
    max_tokens: int, factor: float, offset: float, min_prob: float, as_tree: bool,
    least: float, tokens: Any, probs: Any, parents: Any,
) -> tuple[int, float, int]:
    """The best draft over all suffixes of the word of `matched` tokens in state v.

    Writes it into tokens, probs, parents; returns its length, its score and its match length. With
    none that scores higher than `least`: 0, `least`, `matched`. Descends from the longest match and
    stops when no shorter one can score higher.
    """
    width = G[G_SCRATCH + 4]
    ints = G[G_SCRATCH]
    floats = G[G_SCRATCH + 1]
    some = _int32(ints)
    some_parents = _int32(ints + 4 * width)
    some_probs = _float32(floats)
    prefix = _float32(floats + 4 * width)
    best_n = np.int64(0)
    best_score = np.float32(least)
    best_match = matched
    while S[v, LINK] >= 0:
        high = matched
        link = S[v, LINK]
        low = (S[link, META] & LEN_MASK) + 1
        if factor >= 0.0 and best_score >= _limit(high, max_tokens, factor, offset):
            break
        if as_tree:
            for length in range(high, low - 1, -1):
                m, score = _draft_tree(
                    S, B, G, P, v, length, _limit(length, max_tokens, factor, offset),
                    min_prob, some, some_probs, some_parents,
                    _float32(G[G_SCRATCH + 2]), _heap(G[G_SCRATCH + 3]), G[G_SCRATCH + 5],
                )
                if m < 0:
                    return np.int64(-1), best_score, length
                if score > best_score:
                    best_score = score
                    best_n = m
                    best_match = length
                    for i in range(m):
                        tokens[i] = some[i]
                        probs[i] = some_probs[i]
                        parents[i] = some_parents[i]
        else:
            longest = np.int64(0)
            for length in range(low, high + 1):
                longest = max(longest, _cap(G, length, max_tokens, factor, offset))
            n = np.int64(0)
            if longest > best_score:  # no token adds more than one to the score
                n = _draft_path(S, v, longest, min_prob, some, some_probs, prefix)
            if n > 0 and prefix[n] > best_score:
                length = high
                m = min(n, _cap(G, length, max_tokens, factor, offset))
                # The scores of prefixes rise: the longest match that has the highest of them.
                while length > low and (m <= 0 or prefix[m] < prefix[n]):
                    length -= 1
                    m = min(n, _cap(G, length, max_tokens, factor, offset))
                best_score = prefix[m]
                best_n = m
                best_match = length
                for i in range(m):
                    tokens[i] = some[i]
                    probs[i] = some_probs[i]
                    parents[i] = i - 1
        v = link
        matched = low - 1
    return best_n, best_score, best_match


@_inner
def _occurs(S: Any, B: Any, root: int, tokens: Any, begin: int, end: int) -> bool:
    """Whether the word tokens[begin:end] is in a tree."""
    v = root
    for i in range(begin, end):
        v = _find(S, B, v, tokens[i])
        if v < 0:
            return False
    return True


@_inner
def _local_match(
    S: Any, B: Any, R: Any, G: Any, tree: int, context: Any, known: int, at_end: bool
) -> tuple[int, int]:
    """State and length of the longest match in a request's own tree."""
    if at_end:
        return R[tree, R_STATE], known
    return _match(S, B, R[tree, R_ROOT], G[G_DEPTH], context, known)


@_inner
def _global_match(
    S: Any, B: Any, R: Any, G: Any, tree: int, context: Any, known: int, at_end: bool
) -> tuple[int, int]:
    """State and length of the longest match in the global tree.

    It is the whole response (in default mode, the end of the prompt and the response) where that is
    as long as a match may be, or there is no more context, or nothing longer occurs: because the
    response occurs nowhere else, or never behind the last token of its prompt.
    """
    depth = G[G_DEPTH]
    root = R[0, R_ROOT]
    if at_end and R[tree, R_SEQ] >= 0:
        v = R[tree, R_GSTATE]
        length = R[tree, R_RLEN]
        if length >= depth or (length > 0 and (
            G[G_EXACT] == 0 or S[v, COUNT] == 1 or known <= length
            or not _occurs(S, B, root, context, depth - length - 1, depth)
        )):  # fmt: skip
            return v, min(length, depth)
    return _match(S, B, root, depth, context, known)


@_inner
def _draft(
    S: Any, B: Any, R: Any, G: Any, P: Any,
    tree: int, context: Any, known: int, at_end: bool,
    max_tokens: int, factor: float, offset: float, min_prob: float, as_tree: bool,
    out_tokens: Any, out_probs: Any,
) -> tuple[int, float, int]:
    """Exact mode: the better of the local and the global draft, the local one among equals.

    context int32 [depth] holds the last `known` tokens, right-aligned; at_end says that they are
    the last ones that the request was given.
    """
    width = G[G_SCRATCH + 4]
    ints = G[G_SCRATCH]
    parents = _int32(ints + 4 * PARENTS * width)
    v, matched = _local_match(S, B, R, G, tree, context, known, at_end)
    strict = known > 0  # the peer's matches are shorter than the context
    if strict and matched == known:
        matched -= 1
        if matched <= S[S[v, LINK], META] & LEN_MASK:
            v = S[v, LINK]
    n, score, match = _draft_from(
        S, B, G, P, v, matched, max_tokens, factor, offset, min_prob, as_tree,
        np.float32(0.0), out_tokens, out_probs, parents,
    )
    if n < 0:
        return n, score, match
    v, matched = _global_match(S, B, R, G, tree, context, known, at_end)
    if strict and matched == known:
        matched -= 1
        if matched <= S[S[v, LINK], META] & LEN_MASK:
            v = S[v, LINK]
    shared_tokens = _int32(ints + 4 * SPARE * width)
    shared_parents = _int32(ints + 4 * (SPARE + 1) * width)
    shared_probs = _float32(G[G_SCRATCH + 1] + 8 * width)
    shared_n, shared_score, shared_match = _draft_from(
        S, B, G, P, v, matched, max_tokens, factor, offset, min_prob, as_tree,
        score, shared_tokens, shared_probs, shared_parents,
    )
    if shared_n >= 0 and not shared_score > score:
        return n, score, match
    for i in range(shared_n):
        out_tokens[i] = shared_tokens[i]
        out_probs[i] = shared_probs[i]
        parents[i] = shared_parents[i]
    return shared_n, shared_score, shared_match


# -- drafts of the default mode --------------------------------------------------------------------


@_inner
def _cell(shared: int, length: int, count: int, chosen: int, at: int) -> int:
    """Where the calibration keeps what is known of drafted tokens like this one.

    shared: 1 for the global tree; length of the match, with what was drafted so far; it occurred
    `count` times, `chosen` of them before this token; at: its place in the draft.
    """
    if length <= 6:
        a = length - 1
    elif length <= 9:
        a = 6
    else:
        a = 7 if length <= 15 else 8
    if count <= 2:
        b = count - 1
    elif count <= 4:
        b = 2
    else:
        b = 3 if count <= 8 else 4
    share = chosen / count
    if chosen == count:
        c = 0
    elif share >= 0.6:
        c = 1 if share >= 0.8 else 2
    elif share >= 0.3:
        c = 3
    else:
        c = 4 if share >= 0.15 else 5
    cell = ((shared * LENGTHS + a) * COUNTS + b) * SHARES + c
    return np.int64(cell * PLACES + min(at, PLACES - 1))


@_inner
def _learn(W: Any, G: Any, tokens: Any, begin: int, end: int) -> None:
    """Compare a request's last draft with what came instead, tokens[begin:end].

    Also what was left out of the draft, so that nothing is left out for ever.
    """
    depth = G[G_DEPTH]
    n = W[depth]
    if n == 0 or begin >= end:
        return
    given = min(W[depth + 1 + 2 * LEARNED], LEARNED)
    W[depth] = 0
    i = np.int64(0)
    while i < n and begin + i < end:
        at = HEADER_FIELDS + 2 * W[depth + 1 + LEARNED + i]
        right = tokens[begin + i] == W[depth + 1 + i]
        G[at] += 1
        if right:
            G[at + 1] += 1
        if G[at] >= MEMORY:
            G[at] >>= 1
            G[at + 1] >>= 1
        if not right:
            break
        i += 1
    G[G_ACCEPTED] += min(i, given)
    G[G_DRAFTED] += given if begin + i < end else min(i, given)
    if G[G_DRAFTED] >= MEMORY:
        G[G_DRAFTED] >>= 1
        G[G_ACCEPTED] >>= 1


@_inner
def _weighed_path(
    S: Any, G: Any, v: int, matched: int, cap: int, most: int, shared: int,
    least: float, least_beyond: float, tokens: Any, probs: Any, cells: Any,
) -> tuple[int, int, float]:
    """Follow first edges from v while it is probable enough that all of them are right.

    Where a word has reached the full depth, its first token is dropped to go on. From the global
    tree no token of a prompt is drafted, nor one that looks as if marked so. Behind `cap`
    tokens the path must be at least `least_beyond` probable. Returns its length, the same with the
    token that was not probable enough, if there was one, and the score.
    """
    n = np.int64(0)
    prob = 1.0
    score = 0.0
    w = v
    while n < most:
        w = _extendable(S, G, w)
        token = S[w, TOK]
        if token < 0 or S[w, LINK] < 0 or (shared == 1 and token >= LEAD):
            break
        d = S[w, DST]
        count = S[w, COUNT]
        chosen = S[d, COUNT]
        length = matched + n
        cell = _cell(shared, length, count, chosen, n)
        at = HEADER_FIELDS + 2 * cell
        prior = chosen / (count + DOUBT / length)
        prob *= (G[at + 1] + PRIOR * prior) / (G[at] + PRIOR)
        tokens[n] = token
        probs[n] = prob
        cells[n] = cell
        if not prob >= (least if n < cap else least_beyond):
            return n, n + 1, score
        score += prob
        n += 1
        w = d
    return n, n, score


@_inner
def _weighed_from(
    S: Any, G: Any, v: int, matched: int, shared: int, max_tokens: int, factor: float,
    offset: float, least: float, least_beyond: float, best_n: int, best_judged: int,
    best_score: float, best_match: int, out_tokens: Any, out_probs: Any, out_cells: Any,
) -> tuple[int, int, float, int]:
    """The best of a draft and those that rest on the suffixes of the word of v, longest first.

    A word of full depth has no successors, so a match is shorter. Suffixes that occur equally often
    go on in the same way, so only the longest of them counts.
    out_cells holds the cells of the best, `best_judged` of them: one more where the path went on
    that was not probable enough.
    """
    width = G[G_SCRATCH + 4]
    tokens = _int32(G[G_SCRATCH])
    cells = _int32(G[G_SCRATCH] + 4 * width)
    probs = _float32(G[G_SCRATCH + 1])
    tried = np.int64(0)
    before = np.int64(-1)
    v = _extendable(S, G, v)
    matched = min(matched, G[G_DEPTH] - 1)
    while S[v, LINK] >= 0 and tried < CANDIDATES:
        count = S[v, COUNT]
        if S[v, TOK] >= 0 and count != before:
            cap = _limit(matched, max_tokens, factor, offset)
            if factor >= 0.0 and best_score >= cap:
                break
            before = count
            tried += 1
            n = np.int64(0)
            judged = np.int64(0)
            score = 0.0
            if cap > 0:
                n, judged, score = _weighed_path(
                    S, G, v, matched, cap, max_tokens, shared, least, least_beyond,
                    tokens, probs, cells,
                )
            if score > best_score or (best_judged == 0 and judged > 0):
                best_n = n
                best_judged = judged
                best_score = score
                best_match = matched if n > 0 else 0
                for i in range(judged):
                    out_tokens[i] = tokens[i]
                    out_probs[i] = probs[i]
                    out_cells[i] = cells[i]
        v = S[v, LINK]
        matched = S[v, META] & LEN_MASK
    return best_n, best_judged, best_score, best_match


@_inner
def _draft_weighed(
    S: Any, B: Any, R: Any, W: Any, G: Any, tree: int, context: Any, known: int, at_end: bool,
    max_tokens: int, factor: float, offset: float, min_prob: float,
    out_tokens: Any, out_probs: Any,
) -> tuple[int, float, int]:
    """The draft that most tokens of are expected to be right, of both trees.

    It is kept beside the request's last tokens, to learn from what comes. context, known and at_end
    as in `_draft`.
    """
    parents = _int32(G[G_SCRATCH] + 4 * PARENTS * G[G_SCRATCH + 4])
    cells = _int32(G[G_SCRATCH] + 4 * SPARE * G[G_SCRATCH + 4])
    least = LENIENCY * min_prob
    least_beyond = max(least, STRICTNESS * (G[G_ACCEPTED] / max(G[G_DRAFTED], 1)))
    v, matched = _local_match(S, B, R, G, tree, context, known, at_end)
    n, judged, score, match = _weighed_from(
        S, G, v, matched, np.int64(0), max_tokens, factor, offset, least, least_beyond,
        np.int64(0), np.int64(0), 0.0, np.int64(0), out_tokens, out_probs, cells,
    )
    v, matched = _global_match(S, B, R, G, tree, context, known, at_end)
    n, judged, score, match = _weighed_from(
        S, G, v, matched, np.int64(1), max_tokens, factor, offset, least, least_beyond,
        n, judged, score, match, out_tokens, out_probs, cells,
    )
    for i in range(n):
        parents[i] = i - 1
    if at_end:
        depth = G[G_DEPTH]
        W[depth] = min(judged, LEARNED)
        W[depth + 1 + 2 * LEARNED] = n
        for i in range(min(judged, LEARNED)):
            W[depth + 1 + i] = out_tokens[i]
            W[depth + 1 + LEARNED + i] = cells[i]
    return n, score, match


@_inner
def _fit_to_load(G: Any, handles: Any, n_handles: int) -> None:
    """Cut the drafts of a step to the tokens that are worth verifying.

    A step over t tokens takes as long as G_VERIFY + t: then one more token pays as long as its
    probability is above the rate at which the step yields tokens, (requests + expected) /
    (G_VERIFY + requests + drafted). The most probable tokens of all requests come first, in LEVELS
    steps. Probabilities fall along a draft, so each is cut in one place.
    """
    counts = _int32(G[G_SCRATCH])
    sums = _float32(G[G_SCRATCH + 1])
    columns = G[G_OUT + 4]
    info = _int32(G[G_OUT + 2])
    scores = _float32(G[G_OUT + 3])
    lengths = OUT_LENGTH * G[G_OUT + 5]
    statuses = OUT_STATUS * G[G_OUT + 5]
    for level in range(LEVELS):
        counts[level] = 0
        sums[level] = np.float32(0.0)
    requests = np.int64(0)
    for i in range(n_handles):
        if info[statuses + i] == OK:
            requests += 1
            probs = _float32(G[G_OUT + 1] + 4 * columns * i)
            for j in range(info[lengths + i]):
                level = min(np.int64(probs[j] * LEVELS), LEVELS - 1)
                counts[level] += 1
                sums[level] += probs[j]
    yielded = np.float64(requests)
    taken = np.float64(G[G_VERIFY] + requests)
    least = np.int64(LEVELS)
    while least > 0:
        level = least - 1
        if counts[level] > 0:
            if sums[level] * taken < yielded * counts[level]:
                break
            yielded += sums[level]
            taken += counts[level]
        least = level
    for i in range(n_handles):
        if info[statuses + i] == OK:
            probs = _float32(G[G_OUT + 1] + 4 * columns * i)
            n = info[lengths + i]
            while n > 0 and min(np.int64(probs[n - 1] * LEVELS), LEVELS - 1) < least:
                n -= 1
                scores[i] -= probs[n]
            if n < info[lengths + i]:
                info[lengths + i] = n
                _window(G, handles[i])[G[G_DEPTH] + 1 + 2 * LEARNED] = n
                if n == 0:
                    scores[i] = np.float32(0.0)


@_inner
def _first_bad(tokens: Any, begin: int, end: int) -> int:
    """Position of the first entry that is no token id, or -1."""
    for i in range(begin, end):
        if tokens[i] < 0 or tokens[i] == 2147483647:
            return i
    return np.int64(-1)


# -- a step ---------------------------------------------------------------------------------------


@_inner
def _fetch(
    S: Any, B: Any, R: Any, G: Any, P: Any, handles: Any, rows: Any, begin: int, end: int
) -> None:
    """Ask for what appending to handles[begin:end] will read, so that it need not wait for it.

    Between two steps the caches are lost to the model. Appending follows edges and links, each of
    which must be read before the next is known: a wait for every one. So here all requests of a
    group take one such step, then all take the next, and none is waited for. Changes nothing; a
    wrong guess costs a line.

    First along the text, from state to state in both trees; then from all of these states along
    their links, and from the last along the first edges, where a draft will go.
    """
    token_ids = G[G_IDS]
    width = G[G_ID_COLUMNS]
    num_tokens = _int32(G[G_COUNTS])
    walks = _walks(G[G_SCRATCH + 6])
    trail = _pairs(G[G_SCRATCH + 7])
    parts = _int64(G[G_TABLES + 4])
    for i in range(begin, end):
        for part in range(0, TREE_FIELDS, 8):
            prefetch(parts, handles[i] * TREE_FIELDS + part)
    going = np.int64(0)
    n = np.int64(0)
    for i in range(begin, end):
        tree = handles[i]
        stop = num_tokens[rows[i]]
        new = stop - R[tree, R_FED]
        if new <= 0 or stop > width:
            continue
        tokens = token_ids + 4 * (width * rows[i] + R[tree, R_FED])
        prefetch(_int32(tokens), np.int64(0))
        prefetch(_window(G, tree), np.int64(0))
        for shared in range(2):
            if shared == 1 and R[tree, R_SEQ] < 0:
                continue
            v = R[tree, R_GSTATE] if shared == 1 else R[tree, R_STATE]
            prefetch(S, v)
            walks[going, WALK_STATE] = v
            walks[going, WALK_TOKEN] = tokens
            walks[going, WALK_END] = tokens + 4 * min(new, FETCH_TOKENS)
            walks[going, WALK_SLOT] = 0
            going += 1
    for walk in range(going):
        trail[n, 0] = walks[walk, WALK_STATE]
        trail[n, 1] = _int32(walks[walk, WALK_TOKEN])[0]
        n += 1
    ended = np.int64(FETCH_ENDS)
    while going > 0:
        walk = np.int64(0)
        while walk < going:
            place = walks[walk, WALK_TOKEN]
            token = _int32(place)[0]
            v = walks[walk, WALK_STATE]
            following = np.int64(-1)
            if walks[walk, WALK_SLOT] != 0:
                walks[walk, WALK_SLOT] = 0
                i = _slot(B, S[v, BLK], S[v, META] >> CLASS_SHIFT, token)
                if i >= 0:
                    following = B[i, 1]
            elif S[v, TOK] == token:
                following = S[v, DST]
            elif S[v, BLK] >= 0:
                walks[walk, WALK_SLOT] = 1
                prefetch(B, _probable_slot(S, v, token))
                walk += 1
                continue
            moved = following >= 0
            if not moved:
                following = S[v, LINK]
                if following < 0:  # a token that the tree does not know
                    following = v
                    moved = True
            prefetch(S, following)
            if moved:
                place += 4
                if place < walks[walk, WALK_END]:
                    trail[n, 0] = following
                    trail[n, 1] = _int32(place)[0]
                    n += 1
                else:  # the last of those that go on takes its place
                    trail[ended, 0] = following
                    ended += 1
                    going -= 1
                    for field in range(WALK_FIELDS):
                        walks[walk, field] = walks[going, field]
                    continue
                walks[walk, WALK_TOKEN] = place
            walks[walk, WALK_STATE] = following
            walk += 1
    for _ in range(FETCH_LINKS):
        kept = np.int64(0)
        for k in range(n):
            u = trail[k, 0]
            link = S[u, LINK]
            if link < 0:
                continue
            prefetch(S, link)
            token = trail[k, 1]
            if S[u, TOK] != token:
                prefetch(S, S[u, DST])
                block = S[u, BLK]
                if block >= 0:
                    slot = _probable_slot(S, u, token)
                    prefetch(B, slot)
                    if P is not None:
                        size_class = S[u, META] >> CLASS_SHIFT
                        if size_class > SMALL:  # its header and the links of the pair
                            prefetch(B, block)
                            prefetch(B, slot + (1 << size_class))
            trail[kept, 0] = link
            trail[kept, 1] = token
            kept += 1
        n = kept
        for k in range(FETCH_ENDS, ended):
            u = trail[k, 0]
            prefetch(S, S[u, LINK])
            if S[u, TOK] >= 0:
                trail[k, 0] = S[u, DST]
                prefetch(S, S[u, DST])


@_inner
def _probable_slot(S: Any, v: int, token: int) -> int:
    """The pair where the search for a token in v's block begins."""
    block = S[v, BLK]
    size_class = S[v, META] >> CLASS_SHIFT
    if size_class <= SMALL:
        return block
    return block + HEADER + (((token * 0x9E3779B1) >> 12) & ((1 << size_class) - 1))


@_inner
def _all_known(R: Any, G: Any, handles: Any, rows: Any, begin: int, end: int) -> bool:
    """Whether handles[begin:end] are requests and have rows."""
    for i in range(begin, end):
        if not (_is_alive(R, G, handles[i]) and 0 <= rows[i] < G[G_ID_ROWS]):
            return False
    return True


@_inner
def _is_alive(R: Any, G: Any, handle: int) -> bool:
    return 0 < handle < G[G_TREES] and R[handle, R_ALIVE] != 0


# -- the entry points: one compiled call from Python -----------------------------------------------


@_entry
def run(header: int) -> int:
    """Do one operation of a drafter in default mode.

    header is the address of G. From G_CALL on it holds the operation and what it is to be done
    with: op, first, second, begin, end; and for STEP and SPECULATE factor, offset, min_prob.

    INIT        make the global tree
    START       begin request `first` with response row `second` (-1: none) and feed it text[:end],
                its prompt
    FEED        append text[begin:end] to request `first`: as prompt for second 0, as response for
                1, or for 2 as response in the global tree only
    FREE        nothing but what comes before each operation: the trees of requests that were
                stopped, a list from G_ENDED along R_NEXT_ENDED, are freed
    EVICT       take up to `second` tokens of response row `first` out of the global tree, all in
                exact mode, and return how many are left
    SPECULATE   draft at most `begin` tokens for request `first`, after its own tokens (second < 0)
                or after the last `second` tokens of a context; as a tree for end 1
    STEP        append and draft for the requests `begin` to `first` of the step's inputs

    START and FEED return how many tokens fitted, or -1 - position of a bad token id. STEP returns
    the number of the first request that did not fit, or `first`; TOO_NARROW where the results need
    more room. SPECULATE returns 0 where the heap needs more room, else 1. The others return 0.

    Where G says so are
    inputs   of a step of n requests: handles, rows int64 [n], token_ids int32 [r, c], num_tokens
             int32 [r] and limits, the longest drafts, int32 [n]; text int32 [end]; context
             int32 [depth]
    results  tokens int32 [n, k], probs float32 [n, k], info int32 [3, n], scores float32 [n]
    scratch  ints int32 [5, m] and probs float32 [3, m] with m above depth + CHUNK and k; the heap's
             probs float32 [h] and entries int32 [h, 4]; what `_fetch` keeps
    """
    G = _int64(header)
    return _run(header, G, _states(G[G_TABLES]), _pairs(G[G_TABLES + 1]), None)


@_entry
def run_exact(header: int) -> int:
    """Do one operation of a drafter in exact mode; as `run`."""
    G = _int64(header)
    pairs = _pairs(G[G_TABLES + 1])
    return _run(header, G, _states(G[G_TABLES]), pairs, pairs)


@_inner
def _run(header: int, G: Any, S: Any, B: Any, P: Any) -> int:
    """`run` with its tables."""
    op = G[G_CALL]
    first = G[G_CALL + 1]
    second = G[G_CALL + 2]
    begin = G[G_CALL + 3]
    end = G[G_CALL + 4]
    settings = _float64(header + 8 * (G_CALL + 5))
    factor = np.float32(settings[0])
    offset = np.float32(settings[1])
    min_prob = np.float32(settings[2])
    T = _int32(G[G_TABLES + 2])
    C = _pairs(G[G_TABLES + 3])
    R = _trees(G[G_TABLES + 4])
    Q = _sequences(G[G_TABLES + 5])
    depth = G[G_DEPTH]
    while G[G_ENDED] > 0:
        ended = G[G_ENDED]
        G[G_ENDED] = R[ended, R_NEXT_ENDED]
        _free_tree(S, B, C, R, G, ended)
    if op == INIT:
        _new_tree(S, B, C, R, G, np.int64(0))
        return np.int64(OK)
    if op == FREE:
        return np.int64(OK)
    if op == EVICT:
        left = Q[first, Q_LEN]
        if P is not None:
            return _evict(S, B, T, C, R, Q, G, P, first)
        while left > 0 and second > 0:
            ints = G[G_SCRATCH]
            left = _evict_end(
                S, B, T, C, R, Q, G, P, first, _int32(ints), _int32(ints + 4 * G[G_SCRATCH + 4])
            )
            second -= CHUNK
        return left
    handles = _int64(G[G_HANDLES])
    limits = _int32(G[G_LIMITS])
    rows = _int64(G[G_ROWS])
    token_ids = G[G_IDS]
    width = G[G_ID_COLUMNS]
    columns = G[G_OUT + 4]
    n_out = G[G_OUT + 5]
    info = _int32(G[G_OUT + 2])
    scores = _float32(G[G_OUT + 3])
    feeding = op in (START, FEED)
    n = np.int64(1)
    i = np.int64(0)
    if op == STEP:
        n = first
        i = begin
        if n > n_out:
            return np.int64(TOO_NARROW)
        for j in range(n):
            if limits[j] > G[G_WIDEST]:
                return np.int64(TOO_NARROW)
    fetched = i
    while i < n:
        tree = first
        row = np.int64(0)
        status = np.int64(OK)
        if op == STEP:
            if i == fetched:
                fetched = min(i + FETCH_GROUP, n)
                if _all_known(R, G, handles, rows, i, fetched):
                    _fetch(S, B, R, G, P, handles, rows, i, fetched)
            tree = handles[i]
            row = rows[i]
            if not (_is_alive(R, G, tree) and 0 <= row < G[G_ID_ROWS]):
                status = np.int64(BAD_HANDLE)
        window = _window(G, tree)

        # what is appended: tokens[fed:stop]
        tokens = _int32(token_ids + 4 * width * row)
        fed = np.int64(0)
        stop = np.int64(0)
        own = True
        response = op != START
        if feeding:
            tokens = _int32(G[G_TEXT])
            fed = begin
            stop = end
            if op == FEED:
                own = second < 2
                response = second > 0
        elif op == STEP and status == OK:
            fed = R[tree, R_FED]
            stop = _int32(G[G_COUNTS])[row]
            if stop < fed or stop > width:
                status = np.int64(MISMATCH)
            k = max(fed - depth, 0)
            while k < fed and status == OK:
                if tokens[k] != window[depth - fed + k]:
                    status = np.int64(MISMATCH)
                k += 1
        if status == OK and stop > fed:
            bad = _first_bad(tokens, fed, stop)
            if bad >= 0:
                if feeding:
                    return -1 - bad
                status = np.int64(BAD_TOKEN)
        if status == OK:
            if P is None:
                if own and response:
                    _learn(window, G, tokens, fed, stop)
            if op == START:
                _new_tree(S, B, C, R, G, tree)
                R[tree, R_SEQ] = second
                if second >= 0:
                    Q[second, Q_LEN] = 0
            if stop > fed:
                done = _feed(
                    S, B, T, C, R, Q, window, G, P, tree, tokens, fed, stop, own, response
                )
                if feeding:
                    return done
                if done < stop - fed:
                    return i
        if feeding:
            return np.int64(0)

        # what is drafted
        if op == STEP:
            info[OUT_STATUS * n_out + i] = status
        info[OUT_LENGTH * n_out + i] = 0
        info[OUT_MATCH * n_out + i] = 0
        scores[i] = np.float32(0.0)
        if status == OK:
            at_end = True
            context = window
            known = min(R[tree, R_FED], depth)
            most = np.int64(begin)
            if op == STEP:
                most = min(limits[i], columns)
            elif second >= 0:
                at_end = known == second
                known = min(second, depth)
                context = _int32(G[G_CONTEXT])
                for k in range(depth - known, depth):
                    if context[k] != window[k]:
                        at_end = False
            if P is None:
                if at_end:
                    window[depth] = 0
            if most > 0 or op == SPECULATE:
                out_tokens = _int32(G[G_OUT] + 4 * columns * i)
                out_probs = _float32(G[G_OUT + 1] + 4 * columns * i)
                length = np.int64(0)
                match = np.int64(0)
                if P is None:
                    length, weighed_score, match = _draft_weighed(
                        S, B, R, window, G, tree, context, known, at_end, most, factor, offset,
                        min_prob, out_tokens, out_probs,
                    )
                    scores[i] = np.float32(weighed_score)
                if P is not None:
                    length, score, match = _draft(
                        S, B, R, G, P, tree, context, known, at_end, most, factor, offset,
                        min_prob, end != 0, out_tokens, out_probs,
                    )
                    scores[i] = score
                if length < 0:
                    return np.int64(0)
                info[OUT_LENGTH * n_out + i] = length
                info[OUT_MATCH * n_out + i] = match
        i += 1
    if op == STEP and G[G_VERIFY] > 0:
        _fit_to_load(G, handles, n)
    return n


def prepare(exact: bool) -> Any:
    """The entry point of a mode: compiled, or loaded from the cache.

    It is called without Numba's dispatcher, which looks at the type of every argument.
    """
    signature = (types.int64,)
    kernel: Any = run_exact if exact else run
    if signature not in kernel.overloads:
        with load_quickly(kernel):
            kernel.compile(signature)
    return kernel.overloads[signature].entry_point
