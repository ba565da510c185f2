"""Faults that people make in kernels, each as a change of one place of exchange.cu, and who must find it."""

from __future__ import annotations

from dataclasses import dataclass

DIFFERS = "differ"
"""Nothing that a check of memory could see: the result is another than that of plain torch."""
LANES_RACE = "in a race: another lane of its block"
BLOCKS_RACE = "in a race: block"
OUTSIDE = "outside of its memory"
UNWRITTEN = "shared memory that nobody has written"


@dataclass(frozen=True)
class Fault:
    """name: what is wrong. old, new: its text; old is there exactly once. kernel: that shows it. found: as what."""

    name: str
    old: str
    new: str
    kernel: str
    found: str

    def planted_in(self, source: str) -> str:
        """The source with it."""
        assert source.count(self.old) == 1, f"{self.old!r} is there {source.count(self.old)} times"
        return source.replace(self.old, self.new)


_FOLD = "sum = __fadd_rn(sum, __shfl_down_sync(ALL, sum, half));\n    return sum"
_LAST_BARRIER = "    __syncthreads();\n    bool finite"
FAULTS = [
    Fault(
        "no barrier before the sum of squares",
        "fresh[i] = 0.f;\n    __syncthreads();\n    if (b.dead",
        "fresh[i] = 0.f;\n    if (b.dead",
        "encode_sum",
        f"{LANES_RACE}|{UNWRITTEN}",
    ),
    Fault(
        "no barrier behind the dead elements",
        "fresh[dead[k] - b.at] = 0.f;\n        __syncthreads();",
        "fresh[dead[k] - b.at] = 0.f;",
        "encode_sum",
        LANES_RACE,
    ),
    Fault(
        "no barrier before what the first warp tells",
        _LAST_BARRIER,
        "    bool finite",
        "encode_lerp",
        f"{LANES_RACE}|{UNWRITTEN}",
    ),
    Fault(
        "no barrier before dead elements are zeroed in memory",
        "dead_stop) return;\n    __syncthreads();\n",
        "dead_stop) return;\n",
        "decode",
        LANES_RACE,
    ),
    Fault(
        "a warp's barrier for a block's",
        _LAST_BARRIER,
        "    __syncwarp();\n    bool finite",
        "serve",
        f"{LANES_RACE}|{UNWRITTEN}",
    ),
    Fault("a mask of half a warp", _FOLD, _FOLD.replace("ALL", "0xffffu"), "encode_sum", "mask"),
    Fault(
        "a mask that is not the same for all lanes",
        "__shfl_down_sync(ALL, own, 1)",
        "__shfl_down_sync(threadIdx.x & 1u ? ALL : 0x7fffffffu, own, 1)",
        "encode_sum",
        "mask",
    ),
    Fault("blocks write one scale", "values[b.scale] = is_finite", "values[2] = is_finite", "encode_sum", BLOCKS_RACE),
    Fault(
        "blocks keep one scale",
        "finish(b, shared + MEANS, dead, c, scale + blockIdx.x",
        "finish(b, shared + MEANS, dead, c, scale",
        "serve",
        BLOCKS_RACE,
    ),
    Fault(
        "a block writes into the next",
        "if (finite) put_four(kept, 0, values)",
        "if (finite) put_four(kept, FOUR, values)",
        "encode_sum",
        f"{BLOCKS_RACE}|{OUTSIDE}",
    ),
    Fault(
        "an index off by one",
        "*signs = (byte)",
        "signs[1] = (byte)",
        "encode_sum",
        f"{BLOCKS_RACE}|{OUTSIDE}",
    ),
    Fault("reads past the end", "        if (both) load(", "        load(", "encode_sum", f"{OUTSIDE}|{BLOCKS_RACE}"),
    Fault(
        "sixteen bytes at an address that four share",
        "return aligned ? four(g, i) : make_float4(g[i]",
        "return true ? four(g, i) : make_float4(g[i]",
        "encode_lerp",
        "not aligned",
    ),
    Fault("the end of a block is not filled", "fresh[i] = 0.f;", ";", "encode_sum", UNWRITTEN),
    Fault(
        "filled beyond the shared memory",
        "(b.size + PADDED - 1u) / PADDED * PADDED",
        "(b.size / PADDED + 2u) * PADDED",
        "encode_sum",
        OUTSIDE,
    ),
    Fault(
        "a lane leaves before a barrier",
        "    float *told = shared,",
        "    if (threadIdx.x == 77) return;\n    float *told = shared,",
        "encode_sum",
        "barrier",
    ),
    Fault(
        "a lane leaves before a shuffle",
        _LAST_BARRIER,
        _LAST_BARRIER.replace("bool", "if (threadIdx.x == 7) return;\n    bool"),
        "encode_sum",
        "do(es)? not come",
    ),
    Fault(
        "a barrier in a branch",
        "    if (threadIdx.x < WARP) {\n",
        "    if (threadIdx.x < WARP) {\n        __syncthreads();\n",
        "encode_sum",
        "barriers of one block at lines",
    ),
    Fault(
        "a product and a sum in one rounding",
        "__fadd_rn(__fmul_rn(__fsub_rn(x, m), weight), m)",
        "__fmaf_rn(__fsub_rn(x, m), weight, m)",
        "encode_lerp",
        DIFFERS,
    ),
    Fault(
        "another order of a sum",
        "half = WARP / 2; half; half /= 2",
        "half = 1; half < WARP; half *= 2",
        "encode_sum",
        DIFFERS,
    ),
    Fault("signs in another order", "own << 4 | next", "next << 4 | own", "encode_sum", DIFFERS),
    Fault("the sign of zero", "(x.x >= 0.f ? 8u", "(x.x > 0.f ? 8u", "encode_sum", DIFFERS),
    Fault(
        "a block that is not finite is kept",
        "bool finite = told[0] != 0.f;",
        "bool finite = true;",
        "encode_sum",
        DIFFERS,
    ),
    Fault(
        "the part before",
        "parts.part[middle].stop > block",
        "parts.part[middle].stop >= block",
        "encode_lerp",
        f"{DIFFERS}|{OUTSIDE}",
    ),
    Fault(
        "halves of a bfloat16 pair change places",
        "make_float4(__uint_as_float(two.x << 16), __uint_as_float(two.x & UPPER)",
        "make_float4(__uint_as_float(two.x & UPPER), __uint_as_float(two.x << 16)",
        "encode_lerp",
        DIFFERS,
    ),
    Fault(
        "no barrier behind the table of means",
        "(float)rows.count) : total;\n    __syncthreads();",
        "(float)rows.count) : total;",
        "serve",
        f"{LANES_RACE}|{UNWRITTEN}",
    ),
    Fault("rows and elements do not change places", "(x ^ x >> 14)", "(x ^ x >> 13)", "serve", DIFFERS),
    Fault("one draw for all elements", "rounded(x.y, w + STRIDE)", "rounded(x.y, w)", "encode_sum, narrow", DIFFERS),
    Fault(
        "signs of bfloat16 in another order",
        "signs4(low) << 4 | signs4(high)",
        "signs4(high) << 4 | signs4(low)",
        "encode_sum, narrow",
        DIFFERS,
    ),
    Fault(
        "the sums of rows from the fifth on are left out",
        "if (rows.count > HALF)",
        "if (rows.count > FEW)",
        "serve of many",
        DIFFERS,
    ),
    Fault(
        "the first piece of a block alone",
        "stop = cut.first[number + 1u]; piece",
        "stop = cut.first[number] + 1; piece",
        "encode_scaled",
        UNWRITTEN,
    ),
    Fault(
        "flags of the first row alone",
        "first = row_starts[blockIdx.x], stop = row_starts[blockIdx.x + 1]",
        "first = row_starts[0], stop = row_starts[1]",
        "encode_sum",
        f"{DIFFERS}|{BLOCKS_RACE}",
    ),
]
ALWAYS = [
    "no barrier before the sum of squares",
    "reads past the end",
]
"""Of these the search is part of every test run; of all in the slow one."""
