// 1-bit LAMB's compressed step for CUDA, float32, in three launches: measure, rates, move; and LAMB's own on a gradient:
// measure, trust, move. optim/kernels/lamb_loops.py says what each computes: these are equal to it bit for bit, for
// every operation is rounded for itself and sums go in its order. It needs no header and no define. Vectors begin at multiples of 16 bytes, tensors at multiples of 8 elements.
//
// A thread block does one tile of one tensor. A momentum is read as what was received over k, a number for each tensor:
// from rows, a sign an element and a size a block of values, or from floats.
//
// The sum over a tile: lane l of 8 adds the squares of elements 8 j + l over j, then lanes fold 4 + 4, 2 + 2, 1 + 1, and
// the elements behind the last whole eight are added to that, which a tensor may end with. The sum over a tensor adds its
// tiles one after the other, in LAMB's own step in double. So the number of threads, and of tiles at a time, is in no result.

#define THREADS 256
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 4)
#define FOUR 4u
#define BYTE 8u
#define WARP 32u
#define ALL 0xffffffffu
#define SIGN 0x80000000u
#define SLAB (FOUR * THREADS)
#define KINDS 3u              // of squares: of the direction, of the update, of the parameters
#define ROOM (SLAB + BYTE)    // for those of one kind, so that three lanes with one number read from three banks
#define TOLD (THREADS + BYTE)  // the same of what is found of tiles
#define LEAST_LEFT 0.015625f   // 1 / q^2 lies between them: MOST and LEAST of optim/lamb_math.py
#define MOST_LEFT 4.f

typedef unsigned char byte;

struct Block {
    long long at;
    unsigned size, scale, bits, dead, dead_stop;
    float live;
};
// Elements of one tensor that lie together. at: the first, a multiple of 8. size: without dead elements behind the last.
struct Tile {
    long long at;
    unsigned size, tensor;
};

__device__ __forceinline__ float4 four(const float* x, long long i) { return *reinterpret_cast<const float4*>(x + i); }
__device__ __forceinline__ void put_four(float* x, long long i, float4 values) {
    *reinterpret_cast<float4*>(x + i) = values;
}
// One of the four, k = 0 .. 3.
__device__ __forceinline__ float& at(float4& x, unsigned k) { return k == 0 ? x.x : k == 1 ? x.y : k == 2 ? x.z : x.w; }
__device__ __forceinline__ float larger(float x, float y) { return y > x ? y : x; }  // x where y is no number
__device__ __forceinline__ double larger(double x, float y) { return y > x ? y : x; }
__device__ __forceinline__ float sum_of(float x, float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ double sum_of(double x, float y) { return __dadd_rn(x, (double)y); }
__device__ __forceinline__ float square(float x) { return __fmul_rn(x, x); }

// What a step's numbers are. beta1, weight1: of the gradient that two momenta imply; weight2: of its square. Where SUMS,
// v_fresh is A of optim/lamb_math.py: it takes in m - beta1 m_before, and no ratio is looked for.
struct Numbers {
    float beta1, weight1, beta2, weight2, eps, decay;
};

// Momenta in rows. block: the number of a block that the tile begins in; each thread goes on to the one that it needs.
struct FromRows {
    const float *values, *values_before;
    const byte *bits, *bits_before;
    const Block* blocks;
    float k, k_before;
    unsigned block;
    Block b;
    float size, steady, moving;

    __device__ __forceinline__ void begin(unsigned first) { block = first, b = blocks[first]; }
    __device__ __forceinline__ bool go_on(long long i) {
        bool moves = i >= b.at + b.size;
        while (i >= b.at + b.size) b = blocks[++block];
        return moves;
    }
    // Its size, and what the square of the implied gradient adds where signs have stayed and where they have turned.
    template <bool SUMS>
    __device__ __forceinline__ void measure(const Numbers& n) {
        size = __fdiv_rn(values[b.scale], k);
        float before = __fmul_rn(n.beta1, __fdiv_rn(values_before[b.scale], k_before));
        steady = __fsub_rn(size, before), moving = __fadd_rn(size, before);
        if (SUMS) return;
        float agreed = __fdiv_rn(steady, n.weight1), turned = __fdiv_rn(moving, n.weight1);
        steady = __fmul_rn(__fmul_rn(n.weight2, agreed), agreed);
        moving = __fmul_rn(__fmul_rn(n.weight2, turned), turned);
    }
    __device__ __forceinline__ unsigned signs(const byte* of, long long i) const {
        return (unsigned)of[b.bits + (unsigned)(i - b.at) / BYTE] << (i & FOUR ? 28 : 24);
    }
    __device__ __forceinline__ float4 signed4(unsigned signs) const {
        unsigned minus = __float_as_uint(size) ^ SIGN;
        float4 m;
#pragma unroll
        for (unsigned k = 0; k < FOUR; ++k) at(m, k) = __uint_as_float(minus ^ ((signs << k) & SIGN));
        return m;
    }
    template <bool SUMS>
    __device__ __forceinline__ void both4(long long i, const Numbers& n, float4& m, float4& adds) {
        if (go_on(i)) measure<SUMS>(n);
        unsigned now = signs(bits, i), differ = now ^ signs(bits_before, i), minus = SUMS ? ~now : 0u;
        m = signed4(now);
#pragma unroll
        for (unsigned k = 0; k < FOUR; ++k) {
            float given = (differ << k) & SIGN ? moving : steady;
            at(adds, k) = __uint_as_float(__float_as_uint(given) ^ ((minus << k) & SIGN));
        }
    }
    __device__ __forceinline__ float4 m4(long long i) {
        if (go_on(i)) size = __fdiv_rn(values[b.scale], k);
        return signed4(signs(bits, i));
    }
};

// Momenta in floats.
struct FromFloats {
    const float *z, *before;
    float k, k_before;

    __device__ __forceinline__ float4 m4(long long i) const {
        float4 m = four(z, i);
#pragma unroll
        for (unsigned j = 0; j < FOUR; ++j) at(m, j) = __fdiv_rn(at(m, j), k);
        return m;
    }
    template <bool SUMS>
    __device__ __forceinline__ void both4(long long i, const Numbers& n, float4& m, float4& adds) const {
        m = m4(i), adds = four(before, i);
#pragma unroll
        for (unsigned j = 0; j < FOUR; ++j) {
            float was = __fmul_rn(n.beta1, __fdiv_rn(at(adds, j), k_before));
            at(adds, j) = __fsub_rn(at(m, j), was);
            if (SUMS) continue;
            float implied = __fdiv_rn(at(adds, j), n.weight1);
            at(adds, j) = __fmul_rn(__fmul_rn(n.weight2, implied), implied);
        }
    }
};

// found, float[4, tiles] <- of the tile, in the row behind its own, the sum of squares of each kind from FIRST on.
// use(i, ends, of): of four elements the squares, of kinds from FIRST on; i: where in the tile; ends: does the tensor end
// among them or before? Slabs are squared into two places in turns, so that one warp adds up the one before.
template <unsigned FIRST, typename Use>
__device__ __forceinline__ void sum_squares(const Tile& tile, float* found, Use use) {
    extern __shared__ float shared[];
    float sum = 0.f, rest = 0.f;
    unsigned lane = threadIdx.x % BYTE, kind = threadIdx.x / BYTE, whole = tile.size / BYTE * BYTE;
    for (unsigned begin = 0, turn = 0; begin < tile.size; begin += SLAB, turn ^= 1u) {
        float* squares = shared + turn * KINDS * ROOM;
        unsigned inside = FOUR * threadIdx.x;
        if (unsigned i = begin + inside; i < (tile.size + BYTE - 1u) / BYTE * BYTE) {
            float4 of[KINDS];
            use(i, i + FOUR > tile.size, of);
#pragma unroll
            for (unsigned j = FIRST; j < KINDS; ++j) put_four(squares, j * ROOM + inside, of[j]);
        }
        __syncthreads();
        if (FIRST <= kind && kind < KINDS) {
            const float* own = squares + kind * ROOM;
            unsigned end = whole > begin ? whole - begin : 0u, stop = tile.size - begin;
            if (end > SLAB) end = SLAB;
            if (stop > SLAB) stop = SLAB;
#pragma unroll 8
            for (unsigned k = lane; k < end; k += BYTE) sum = __fadd_rn(sum, own[k]);
            if (lane == 0)
#pragma unroll 1
                for (unsigned k = end; k < stop; ++k) rest = __fadd_rn(rest, own[k]);
        }
    }
    if (threadIdx.x < WARP)
        for (unsigned half = BYTE / 2u; half; half /= 2u) sum = __fadd_rn(sum, __shfl_down_sync(ALL, sum, half));
    if (FIRST <= kind && kind < KINDS && lane == 0)
        found[(1u + kind) * gridDim.x + blockIdx.x] = __fadd_rn(sum, rest);
}

// v_fresh, and of the tile the largest ratio of roots and the sums of the three squares.
// Behind a tensor v_fresh becomes 0, where only its last thread looks for dead elements.
template <bool SUMS, typename From>
__device__ __forceinline__ void measure(From from, const Tile& tile, const float* p, const float* v, float* fresh_v,
                                        const Numbers& n, float* found) {
    extern __shared__ float shared[];
    float most = 0.f;
    sum_squares<0u>(tile, found, [&](unsigned i, bool ends, float4* of) {
        float4 p4 = four(p, tile.at + i), v4 = four(v, tile.at + i), f4 = four(fresh_v, tile.at + i);
        float4 m4, adds;
        from.template both4<SUMS>(tile.at + i, n, m4, adds);
#pragma unroll
        for (unsigned k = 0; k < FOUR; ++k) {
            float d = __fadd_rn(__fsqrt_rn(at(v4, k)), n.eps);
            at(f4, k) = __fadd_rn(SUMS ? at(f4, k) : __fmul_rn(n.beta2, at(f4, k)), at(adds, k));
            float u0 = __fdiv_rn(at(m4, k), d), u = __fadd_rn(u0, __fmul_rn(n.decay, at(p4, k)));
            at(of[0], k) = square(u0), at(of[1], k) = square(u), at(of[2], k) = square(at(p4, k));
            if (SUMS) continue;
            float ratio = __fdiv_rn(d, __fadd_rn(__fsqrt_rn(at(f4, k)), n.eps));
            if (!ends || i + k < tile.size) most = larger(most, ratio);
        }
        if (ends)
#pragma unroll
            for (unsigned k = 0; k < FOUR; ++k) at(f4, k) = i + k < tile.size ? at(f4, k) : 0.f;
        put_four(fresh_v, tile.at + i, f4);
    });
    for (unsigned half = WARP / 2u; half; half /= 2u) most = larger(most, __shfl_down_sync(ALL, most, half));
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = most;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (unsigned warp = 1; warp < THREADS / WARP; ++warp) most = larger(most, shared[warp]);
        found[blockIdx.x] = most;
    }
}

// Of momenta in rows. block_of: of each tile, the number of the block that it begins in.
KERNEL measure_rows(const Tile* tiles, const unsigned* block_of, const float* p, const float* v, float* fresh_v,
                   const float* scaling, const float* scaling_before, const float* values, const byte* bits,
                   const float* values_before, const byte* bits_before, const Block* blocks,
                   const __grid_constant__ Numbers numbers, float* found) {
    Tile tile = tiles[blockIdx.x];
    FromRows from = {values, values_before, bits, bits_before, blocks, scaling[tile.tensor], scaling_before[tile.tensor]};
    from.begin(block_of[blockIdx.x]);
    from.measure<false>(numbers);
    measure<false>(from, tile, p, v, fresh_v, numbers, found);
}
KERNEL sum_rows(const Tile* tiles, const unsigned* block_of, const float* p, const float* v, float* fresh_v,
               const float* scaling, const float* scaling_before, const float* values, const byte* bits,
               const float* values_before, const byte* bits_before, const Block* blocks,
               const __grid_constant__ Numbers numbers, float* found) {
    Tile tile = tiles[blockIdx.x];
    FromRows from = {values, values_before, bits, bits_before, blocks, scaling[tile.tensor], scaling_before[tile.tensor]};
    from.begin(block_of[blockIdx.x]);
    from.measure<true>(numbers);
    measure<true>(from, tile, p, v, fresh_v, numbers, found);
}
// Of momenta in floats.
KERNEL measure_floats(const Tile* tiles, const float* p, const float* v, float* fresh_v, const float* scaling,
                     const float* scaling_before, const float* z, const float* before,
                     const __grid_constant__ Numbers numbers, float* found) {
    Tile tile = tiles[blockIdx.x];
    FromFloats from = {z, before, scaling[tile.tensor], scaling_before[tile.tensor]};
    measure<false>(from, tile, p, v, fresh_v, numbers, found);
}
KERNEL sum_floats(const Tile* tiles, const float* p, const float* v, float* fresh_v, const float* scaling,
                 const float* scaling_before, const float* z, const float* before,
                 const __grid_constant__ Numbers numbers, float* found) {
    Tile tile = tiles[blockIdx.x];
    FromFloats from = {z, before, scaling[tile.tensor], scaling_before[tile.tensor]};
    measure<true>(from, tile, p, v, fresh_v, numbers, found);
}

// LAMB on the gradient g, first pass: m <- m + w1 (g - m); v <- beta2 v + w2 g^2; and of the tile the sums of squares of
// u = m / (sqrt(v) + eps) + decay p and of p. The second is move_floats, where k is 1.
KERNEL measure_gradient(const Tile* tiles, const float* p, const float* g, float* m, float* v,
                       const __grid_constant__ Numbers numbers, float* found) {
    Tile tile = tiles[blockIdx.x];
    sum_squares<1u>(tile, found, [&](unsigned i, bool, float4* of) {
        float4 p4 = four(p, tile.at + i), g4 = four(g, tile.at + i), m4 = four(m, tile.at + i), v4 = four(v, tile.at + i);
#pragma unroll
        for (unsigned k = 0; k < FOUR; ++k) {
            float x = at(g4, k), mean = at(m4, k);
            mean = __fadd_rn(mean, __fmul_rn(numbers.weight1, __fsub_rn(x, mean)));
            float adds = __fmul_rn(__fmul_rn(numbers.weight2, x), x);
            at(v4, k) = __fadd_rn(__fmul_rn(numbers.beta2, at(v4, k)), adds), at(m4, k) = mean;
            float u0 = __fdiv_rn(mean, __fadd_rn(__fsqrt_rn(at(v4, k)), numbers.eps));
            at(of[1], k) = square(__fadd_rn(u0, __fmul_rn(numbers.decay, at(p4, k)))), at(of[2], k) = square(at(p4, k));
        }
        put_four(m, tile.at + i, m4), put_four(v, tile.at + i, v4);
    });
}

// Of what was found of a tensor's tiles, in thread `row` from FIRST on, the largest of row 0 or the sum of another; the
// tensor has the tiles [first[t], first[t + 1]). tiles: of all tensors.
template <unsigned FIRST, typename Sum>
__device__ __forceinline__ Sum total_of(const long long* first, const float* found, unsigned tiles) {
    extern __shared__ float shared[];
    unsigned row = threadIdx.x;
    long long stop = first[blockIdx.x + 1u];
    Sum total = 0;
    for (long long begin = first[blockIdx.x]; begin < stop; begin += THREADS) {
        if (begin + threadIdx.x < stop)
#pragma unroll
            for (unsigned r = FIRST; r <= KINDS; ++r)
                shared[r * TOLD + threadIdx.x] = found[r * tiles + begin + threadIdx.x];
        __syncthreads();
        if (FIRST <= row && row <= KINDS) {
            unsigned count = stop - begin < THREADS ? (unsigned)(stop - begin) : THREADS;
#pragma unroll 8
            for (unsigned k = 0; k < count; ++k) {
                float x = shared[row * TOLD + k];
                total = row ? sum_of(total, x) : larger(total, x);
            }
        }
        __syncthreads();
    }
    return total;
}

// Of each tensor c = |x| / |u|, clipped, 1 where either is 0, and rates <- lr c / k: what was measured is k times u.
KERNEL trust_of(const long long* first, const float* found, unsigned tiles, double k, float least, float most, float lr,
                float* coeff, float* rates) {
    extern __shared__ float shared[];
    unsigned tensor = blockIdx.x, row = threadIdx.x;
    double total = total_of<2u, double>(first, found, tiles);
    if (row == KINDS) shared[1] = __double2float_rn(__dsqrt_rn(total));
    if (row == KINDS - 1u) shared[0] = __double2float_rn(__ddiv_rn(__dsqrt_rn(total), k));
    __syncthreads();
    if (threadIdx.x != 0) return;
    float update = shared[0], size = shared[1], trust = 1.f;
    if (size > 0.f && update > 0.f) {
        trust = larger(__fdiv_rn(size, update), least);
        trust = most < trust ? most : trust;
    }
    coeff[tensor] = trust;
    rates[tensor] = __fdiv_rn(__fmul_rn(trust, lr), __double2float_rn(k));
}

// Bounds of r, of its change, of the trust ratio c, and by how many times that a step is bounded; bounded: is it? weighs:
// r counts for the part of an update that is not decay. follows: factors are |u_0|^2 of exact momenta, 1 where that is
// not known, and stay.
struct Bounds {
    float least_factor, most_factor, slower, faster, least_coeff, most_coeff, longest, lr;
    unsigned bounded, weighs, follows, unused;
};

// rates <- lr min(c_avg r, longest c) of each tensor, from what was found of its tiles; factor <- r. A block for each.
KERNEL rates_of(const long long* first, const float* found, unsigned tiles, const float* coeff, float* factor,
                const __grid_constant__ Bounds bounds, float* rates) {
    extern __shared__ float shared[];
    unsigned tensor = blockIdx.x, row = threadIdx.x;
    float total = total_of<0u, float>(first, found, tiles);
    if (row <= KINDS) shared[row] = row ? __fsqrt_rn(total) : total;
    __syncthreads();
    if (threadIdx.x != 0) return;
    float r = shared[0] > 0.f ? shared[0] : 1.f;  // 0: every element was floored
    float direction = shared[1], update = shared[2], size = shared[3], before = factor[tensor];
    if (bounds.weighs) {
        float part = __fdiv_rn(direction, update);
        part = part < 1.f ? part : 1.f;
        r = __fadd_rn(__fmul_rn(r, part), __fsub_rn(1.f, part));
    }
    float slower = __fmul_rn(before, bounds.slower), faster = __fmul_rn(before, bounds.faster);
    r = larger(r, bounds.least_factor), r = bounds.most_factor < r ? bounds.most_factor : r;
    r = larger(r, slower), r = faster < r ? faster : r;
    float trust = 1.f;
    if (size > 0.f && update > 0.f) {
        trust = larger(__fdiv_rn(size, update), bounds.least_coeff);
        trust = bounds.most_coeff < trust ? bounds.most_coeff : trust;
    }
    if (!bounds.follows) factor[tensor] = r;
    float rate = __fmul_rn(coeff[tensor], bounds.follows ? 1.f : r), longest = __fmul_rn(bounds.longest, trust);
    if (bounds.bounded && longest < rate) rate = longest;
    if (bounds.follows && before != 1.f && before > 0.f) {
        rate = trust;
        if (update > 0.f) {
            float surplus = __fsub_rn(square(direction), before);
            float left = __fsub_rn(1.f, __fdiv_rn(surplus, square(update)));
            left = larger(left, LEAST_LEFT), left = MOST_LEFT < left ? MOST_LEFT : left;
            rate = __fdiv_rn(trust, __fsqrt_rn(left));
        }
    }
    rates[tensor] = __fmul_rn(rate, bounds.lr);
}

// p <- p - rate (m / (sqrt(v) + eps) + decay p), 0 behind a tensor.
template <typename From>
__device__ __forceinline__ void move(From from, const Tile& tile, float* p, const float* v, float eps, float decay,
                                     float rate) {
    for (unsigned i = FOUR * threadIdx.x, end = (tile.size + BYTE - 1u) / BYTE * BYTE; i < end; i += 2u * SLAB) {
        unsigned both = i + SLAB < end;
        float4 p4[2], v4[2], m4[2];
        p4[0] = four(p, tile.at + i), v4[0] = four(v, tile.at + i);
        if (both) p4[1] = four(p, tile.at + i + SLAB), v4[1] = four(v, tile.at + i + SLAB);
        m4[0] = from.m4(tile.at + i);
        if (both) m4[1] = from.m4(tile.at + i + SLAB);
#pragma unroll
        for (unsigned j = 0; j < 2u; ++j) {
            unsigned own = i + j * SLAB;
            if (j && !both) break;
#pragma unroll
            for (unsigned k = 0; k < FOUR; ++k) {
                float u0 = __fdiv_rn(at(m4[j], k), __fadd_rn(__fsqrt_rn(at(v4[j], k)), eps));
                float x = at(p4[j], k), u = __fadd_rn(u0, __fmul_rn(decay, x));
                at(p4[j], k) = own + k < tile.size ? __fsub_rn(x, __fmul_rn(rate, u)) : 0.f;
            }
            put_four(p, tile.at + own, p4[j]);
        }
    }
}
KERNEL move_rows(const Tile* tiles, const unsigned* block_of, float* p, const float* v, const float* scaling,
                 const float* values, const byte* bits, const Block* blocks, float eps, float decay,
                 const float* rates) {
    Tile tile = tiles[blockIdx.x];
    FromRows from = {values, values, bits, bits, blocks, scaling[tile.tensor], 1.f};
    from.begin(block_of[blockIdx.x]);
    from.size = __fdiv_rn(values[from.b.scale], from.k);
    move(from, tile, p, v, eps, decay, rates[tile.tensor]);
}
KERNEL move_floats(const Tile* tiles, float* p, const float* v, const float* scaling, const float* z, float eps,
                   float decay, const float* rates) {
    Tile tile = tiles[blockIdx.x];
    FromFloats from = {z, z, scaling[tile.tensor], 1.f};
    move(from, tile, p, v, eps, decay, rates[tile.tensor]);
}
