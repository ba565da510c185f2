// The fused kernels of the exchange for CUDA, float32. comm/kernels/fused_reference.py says what each computes, to the
// last bit; comm/kernels/cuda/kernels.py calls them. It needs no header and no define: NVRTC compiles it as it is.
//
// A thread block of THREADS does one block of values; where that lies, its record says. Loads and stores of vectors are
// of four values, 16 bytes; neighbouring threads take neighbouring fours. Every sum and product is rounded for itself:
// the *_rn functions are never contracted. Sums of squares go in the order of the reference: lane l of 64 adds
// x[64 k + l]^2 over k, then lanes fold 32 + 32, 16 + 16, ... 1 + 1.
//
// Kept sums are floats, or bfloat16 that are rounded at random as comm/kernels/bf16.py says: kernels for those are called
// *_narrow. All that such a kernel writes is what the rounded sums are.

#define THREADS 256
#define AT_ONCE 5  // blocks of a multiprocessor, at least: 48 registers a thread; without it sm_120 spills
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
#define FOUR 4u
#define BYTE 8u
#define LANES 64u
#define WARP 32u
#define PADDED 128u  // new sums are filled up to a multiple of it, so that whole warps go over them
#define ALL 0xffffffffu
#define SIGN 0x80000000u
#define TOLD 4u     // floats of shared memory in front of a block's new sums, which stay aligned to 16 bytes
#define PARTS 128u  // the most parts of one launch: kernel arguments have room for 4 kB
#define FEW 8u      // rows whose sums are looked up
#define HALF (FEW / 2u)
#define MEANS 256u  // floats of shared memory in front of all that, where rows are averaged: one for each of their signs
#define STRIDE 0x61c88647u
#define FACTOR 0x735a2d97u
#define LARGEST 0x7f7f0000u  // bfloat16
#define UPPER 0xffff0000u
#define NAN_BITS 0x7fc00000u

typedef unsigned char byte;
typedef unsigned short narrow;  // a bfloat16

// One block of values. at: its first element in the vector. size: a multiple of 8. scale, bits: where in wire memory
// its scale is, in floats, and its signs begin, in bytes. dead: its part of the list of dead elements. live: at least 1.
struct Block {
    long long at;
    unsigned size, scale, bits, dead, dead_stop;
    float live;
};

// Where gradients lie. base: the address of element 0 of the vector, if all of it lay as these blocks do; stop: number
// of the first block behind them; narrow: they are bfloat16.
struct Part {
    unsigned long long base;
    unsigned stop, narrow;
};
struct Parts {
    Part part[PARTS];
    unsigned count, unused;
};

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
__device__ __forceinline__ bool is_nan(float x) { return x != x; }

__device__ __forceinline__ float4 four(const float* x, unsigned i) { return *reinterpret_cast<const float4*>(x + i); }
__device__ __forceinline__ void put_four(float* x, unsigned i, float4 values) {
    *reinterpret_cast<float4*>(x + i) = values;
}

// Four values of a gradient, which may begin anywhere. aligned: at a multiple of four of them.
template <typename G>
__device__ __forceinline__ bool is_aligned(const G* g) {
    return (reinterpret_cast<unsigned long long>(g) & (FOUR * sizeof(G) - 1u)) == 0;
}
__device__ __forceinline__ float4 gradient4(const float* g, unsigned i, bool aligned) {
    return aligned ? four(g, i) : make_float4(g[i], g[i + 1], g[i + 2], g[i + 3]);
}
__device__ __forceinline__ float widened(narrow bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ __forceinline__ float4 four(const narrow* x, unsigned i) {
    uint2 two = *reinterpret_cast<const uint2*>(x + i);
    return make_float4(__uint_as_float(two.x << 16), __uint_as_float(two.x & UPPER), __uint_as_float(two.y << 16),
                       __uint_as_float(two.y & UPPER));
}
__device__ __forceinline__ float4 gradient4(const narrow* g, unsigned i, bool aligned) {
    return aligned ? four(g, i) : make_float4(widened(g[i]), widened(g[i + 1]), widened(g[i + 2]), widened(g[i + 3]));
}

// What is drawn to round by. start: where in the flat vector the table's first element lies.
struct Noise {
    unsigned key, start;
};
// By what element i of the table is rounded; the next one by STRIDE more.
__device__ __forceinline__ unsigned noise_of(Noise noise, long long i) {
    return (noise.start + (unsigned)i) * STRIDE + noise.key;
}
__device__ __forceinline__ unsigned drawn(unsigned w) { return (w ^ w >> 16) * FACTOR >> 16; }
__device__ __forceinline__ float rounded(float x, unsigned w) {
    unsigned nan = is_nan(x) ? NAN_BITS : 0u;  // whatever is added to it, it stays one
    // What becomes infinite here is too large for its square, and is not kept.
    return __uint_as_float(((__float_as_uint(x) + drawn(w)) & UPPER) | nan);
}
__device__ __forceinline__ bool is_above(float x) { return (__float_as_uint(x) & ~SIGN) > LARGEST; }
// Four elements, as sums of this type are kept; the first is rounded by w.
__device__ __forceinline__ float4 kept4(float4 x, const float*, unsigned) { return x; }
__device__ __forceinline__ float4 kept4(float4 x, const narrow*, unsigned w) {
    return make_float4(rounded(x.x, w), rounded(x.y, w + STRIDE), rounded(x.z, w + 2u * STRIDE),
                       rounded(x.w, w + 3u * STRIDE));
}
// The upper halves of two numbers.
__device__ __forceinline__ unsigned pair(unsigned low, unsigned high) { return low >> 16 | (high & UPPER); }
// Four that are bfloat16 already.
__device__ __forceinline__ void put_four(narrow* x, unsigned i, float4 values) {
    uint2 two;
    two.x = pair(__float_as_uint(values.x), __float_as_uint(values.y));
    two.y = pair(__float_as_uint(values.z), __float_as_uint(values.w));
    *reinterpret_cast<uint2*>(x + i) = two;
}

// Eight of them, in one load or store of 16 bytes.
__device__ __forceinline__ void eight(const float* x, unsigned i, float4& low, float4& high) {
    low = four(x, i), high = four(x, i + FOUR);
}
__device__ __forceinline__ void eight(const narrow* x, unsigned i, float4& low, float4& high) {
    uint4 all = *reinterpret_cast<const uint4*>(x + i);
    low = make_float4(__uint_as_float(all.x << 16), __uint_as_float(all.x & UPPER), __uint_as_float(all.y << 16),
                      __uint_as_float(all.y & UPPER));
    high = make_float4(__uint_as_float(all.z << 16), __uint_as_float(all.z & UPPER), __uint_as_float(all.w << 16),
                       __uint_as_float(all.w & UPPER));
}
__device__ __forceinline__ void put_eight(narrow* x, unsigned i, float4 low, float4 high) {
    uint4 all;
    all.x = pair(__float_as_uint(low.x), __float_as_uint(low.y));
    all.y = pair(__float_as_uint(low.z), __float_as_uint(low.w));
    all.z = pair(__float_as_uint(high.x), __float_as_uint(high.y));
    all.w = pair(__float_as_uint(high.z), __float_as_uint(high.w));
    *reinterpret_cast<uint4*>(x + i) = all;
}

// size, or -size where the bit that is shifted to the top is 0. minus: the bits of -size.
__device__ __forceinline__ float signed_by(unsigned bits, unsigned minus, unsigned shift) {
    return __uint_as_float(minus ^ ((bits << shift) & SIGN));
}
// The signs of elements i .. i + 3, i a multiple of 4; element 8 k is the highest bit of byte k.
__device__ __forceinline__ unsigned bits4(const byte* bits, unsigned i) { return bits[i / BYTE]; }
__device__ __forceinline__ float4 signed4(unsigned bits, unsigned i, float size) {
    unsigned minus = __float_as_uint(size) ^ SIGN, top = bits << (i & FOUR ? 28 : 24);
    return make_float4(signed_by(top, minus, 0), signed_by(top, minus, 1), signed_by(top, minus, 2),
                       signed_by(top, minus, 3));
}
__device__ __forceinline__ unsigned signs4(float4 x) {
    return (x.x >= 0.f ? 8u : 0u) | (x.y >= 0.f ? 4u : 0u) | (x.z >= 0.f ? 2u : 0u) | (x.w >= 0.f ? 1u : 0u);
}

// e + z, the error e being c - s sgn(c).
__device__ __forceinline__ float with_error(float c, float s, float z) {
    return __fadd_rn(__fsub_rn(c, c >= 0.f ? s : -s), z);
}
__device__ __forceinline__ float4 with_error4(float4 c, float s, float4 z) {
    return make_float4(with_error(c.x, s, z.x), with_error(c.y, s, z.y), with_error(c.z, s, z.z),
                       with_error(c.w, s, z.w));
}
__device__ __forceinline__ float lerp(float x, float m, float weight) {
    return __fadd_rn(__fmul_rn(__fsub_rn(x, m), weight), m);
}
__device__ __forceinline__ float4 lerp4(float4 x, float4 m, float weight) {
    return make_float4(lerp(x.x, m.x, weight), lerp(x.y, m.y, weight), lerp(x.z, m.z, weight), lerp(x.w, m.w, weight));
}
__device__ __forceinline__ float4 times4(float4 x, float factor) {
    return make_float4(__fmul_rn(factor, x.x), __fmul_rn(factor, x.y), __fmul_rn(factor, x.z), __fmul_rn(factor, x.w));
}

// Every loop over fours: load(i, r) of two groups, then use(i, r) of them, so that their loads wait together.
template <typename Load, typename Use>
__device__ __forceinline__ void in_pairs(unsigned begin, unsigned end, Load load, Use use) {
    for (unsigned i = begin + FOUR * threadIdx.x; i < end; i += 2u * FOUR * THREADS) {
        bool both = i + FOUR * THREADS < end;
        load(i, 0);
        if (both) load(i + FOUR * THREADS, 1);
        use(i, 0);
        if (both) use(i + FOUR * THREADS, 1);
    }
}

// The sum of squares of fresh[0 .. padded), by one warp. The result is lane 0's.
__device__ __forceinline__ float sum_of_squares(const float* fresh, unsigned padded) {
    float low = 0.f, high = 0.f;
#pragma unroll 8
    for (unsigned k = threadIdx.x; k < padded; k += LANES) {
        float a = fresh[k], b = fresh[k + WARP];
        low = __fadd_rn(low, __fmul_rn(a, a));
        high = __fadd_rn(high, __fmul_rn(b, b));
    }
    float sum = __fadd_rn(low, high);
    for (unsigned half = WARP / 2; half; half /= 2) sum = __fadd_rn(sum, __shfl_down_sync(ALL, sum, half));
    return sum;
}

// The signs of new sums, and where they are finite the sums. Of floats each thread keeps fours, and its neighbour's four
// signs make a byte of them; eight bfloat16 are as many bytes.
__device__ __forceinline__ void keep(const Block& b, const float* fresh, bool finite, float* c, byte* bits) {
    unsigned padded = (b.size + PADDED - 1u) & ~(PADDED - 1u);
    float* kept = c + b.at + FOUR * threadIdx.x;
    byte* signs = bits + b.bits + threadIdx.x / 2u;
    const float* x = fresh + FOUR * threadIdx.x;
    for (unsigned i = FOUR * threadIdx.x; i < padded; i += FOUR * THREADS) {  // all of a warp, or none
        float4 values = four(x, 0);
        unsigned own = signs4(values), next = __shfl_down_sync(ALL, own, 1);
        if (i < b.size) {
            if (finite) put_four(kept, 0, values);
            if (!(threadIdx.x & 1u)) *signs = (byte)(own << 4 | next);
        }
        x += FOUR * THREADS, kept += FOUR * THREADS, signs += FOUR * THREADS / BYTE;
    }
}
__device__ __forceinline__ void keep(const Block& b, const float* fresh, bool finite, narrow* c, byte* bits) {
    for (unsigned i = BYTE * threadIdx.x; i < b.size; i += BYTE * THREADS) {
        float4 low = four(fresh, i), high = four(fresh, i + FOUR);
        if (finite) put_eight(c + b.at, i, low, high);
        bits[b.bits + i / BYTE] = (byte)(signs4(low) << 4 | signs4(high));
    }
}

// A block's new sums lie in shared memory: write its scale and signs, and keep the sums and the scale where the sum of
// their squares is finite. values, bits: of the wire memory that is written.
template <typename K>
__device__ __forceinline__ void finish(const Block& b, float* shared, const long long* dead, K* c, float* scale,
                                       float* values, byte* bits) {
    float *told = shared, *fresh = shared + TOLD;
    unsigned padded = (b.size + PADDED - 1u) / PADDED * PADDED;
    if (unsigned i = b.size + threadIdx.x; i < padded) fresh[i] = 0.f;
    __syncthreads();
    if (b.dead != b.dead_stop) {
#pragma unroll 1
        for (unsigned k = b.dead + threadIdx.x; k < b.dead_stop; k += THREADS) fresh[dead[k] - b.at] = 0.f;
        __syncthreads();
    }
    if (threadIdx.x < WARP) {
        float sum = sum_of_squares(fresh, padded);
        if (threadIdx.x == 0) {
            float root = __fsqrt_rn(__fdiv_rn(sum, b.live));
            told[0] = is_finite(sum) ? 1.f : 0.f;
            values[b.scale] = is_finite(sum) ? root : __uint_as_float(NAN_BITS);
            if (is_finite(sum)) *scale = root;
        }
    }
    __syncthreads();
    bool finite = told[0] != 0.f;
    keep(b, fresh, finite, c, bits);
}

__device__ __forceinline__ void zero_dead(const Block& b, const long long* dead, float* x) {
    if (b.dead == b.dead_stop) return;
    __syncthreads();
#pragma unroll 1
    for (unsigned k = b.dead + threadIdx.x; k < b.dead_stop; k += THREADS) x[dead[k]] = 0.f;
}

template <typename K>
__device__ __forceinline__ void encode_sum_of(K* c, float* scale, const float* x, const Block* blocks,
                                              const long long* dead, float* values, byte* bits, Noise noise) {
    extern __shared__ float shared[];
    Block b = blocks[blockIdx.x];
    float sent = scale[blockIdx.x];
    unsigned w = noise_of(noise, b.at);
    bool aligned = is_aligned(x);
    float4 kept[2], given[2];
    in_pairs(
        0, b.size,
        [&](unsigned i, unsigned r) {
            kept[r] = four(c + b.at, i);
            given[r] = gradient4(x + b.at, i, aligned);
        },
        [&](unsigned i, unsigned r) {
            float4 z = with_error4(kept[r], sent, given[r]);
            put_four(shared + TOLD, i, kept4(z, c, w + i * STRIDE));
        });
    finish(b, shared, dead, c, scale + blockIdx.x, values, bits);
}
// c <- e + x; the rows of it.
KERNEL encode_sum(float* c, float* scale, const float* x, const Block* blocks, const long long* dead, float* values,
                  byte* bits, Noise noise) {
    encode_sum_of(c, scale, x, blocks, dead, values, bits, noise);
}
KERNEL encode_sum_narrow(narrow* c, float* scale, const float* x, const Block* blocks, const long long* dead,
                         float* values, byte* bits, Noise noise) {
    encode_sum_of(c, scale, x, blocks, dead, values, bits, noise);
}

// The part of a block: the first that ends behind it.
__device__ __forceinline__ unsigned part_of(const Parts& parts, unsigned block) {
    unsigned low = 0, high = parts.count - 1u;
    while (low < high) {
        unsigned middle = (low + high) / 2u;
        if (parts.part[middle].stop > block) high = middle; else low = middle + 1u;
    }
    return low;
}

// do(g) with where the block's gradient lies, in the type that it has. In the first place that is read in global memory:
// else its loads might be of shared memory, and wait for stores to that.
template <typename Do>
__device__ __forceinline__ void with_gradient(const Parts& parts, unsigned number, const Block& b, Do use) {
    unsigned part = part_of(parts, number);
    unsigned long long base = parts.part[part].base;
    if (parts.part[part].narrow) {
        const narrow* g = reinterpret_cast<const narrow*>(base) + b.at;
        __builtin_assume(__isGlobal(g));
        use(g);
    } else {
        const float* g = reinterpret_cast<const float*>(base) + b.at;
        __builtin_assume(__isGlobal(g));
        use(g);
    }
}

template <typename K>
__device__ __forceinline__ void encode_lerp_of(K* c, float* scale, const Parts& parts, unsigned first, float weight,
                                               const float* last_values, const byte* last_bits, const Block* blocks,
                                               const long long* dead, float* values, byte* bits, Noise noise) {
    extern __shared__ float shared[];
    unsigned number = first + blockIdx.x;
    Block b = blocks[number];
    float sent = scale[number], m_size = last_values[b.scale];
    unsigned w = noise_of(noise, b.at);
    const byte* m_bits = last_bits + b.bits;
    with_gradient(parts, number, b, [&](auto g) {
        bool aligned = is_aligned(g);
        float4 kept[2], given[2];
        unsigned signs[2];
        in_pairs(
            0, b.size,
            [&](unsigned i, unsigned r) {
                kept[r] = four(c + b.at, i);
                given[r] = gradient4(g, i, aligned);
                signs[r] = bits4(m_bits, i);
            },
            [&](unsigned i, unsigned r) {
                float4 z = lerp4(given[r], signed4(signs[r], i, m_size), weight);
                put_four(shared + TOLD, i, kept4(with_error4(kept[r], sent, z), c, w + i * STRIDE));
            });
    });
    finish(b, shared, dead, c, scale + number, values, bits);
}
// c <- e + m + weight (g - m); the rows of it. m: what the rows `last_*` say. first: number of the launch's first
// block.
KERNEL encode_lerp(float* c, float* scale, const __grid_constant__ Parts parts, unsigned first, float weight,
                   const float* last_values, const byte* last_bits, const Block* blocks, const long long* dead,
                   float* values, byte* bits, Noise noise) {
    encode_lerp_of(c, scale, parts, first, weight, last_values, last_bits, blocks, dead, values, bits, noise);
}
KERNEL encode_lerp_narrow(narrow* c, float* scale, const __grid_constant__ Parts parts, unsigned first, float weight,
                          const float* last_values, const byte* last_bits, const Block* blocks, const long long* dead,
                          float* values, byte* bits, Noise noise) {
    encode_lerp_of(c, scale, parts, first, weight, last_values, last_bits, blocks, dead, values, bits, noise);
}

// What a momentum and a sum become with a gradient, or what is added of them. lost: is all of it NaN?
struct Advanced {
    const float *m, *u;
    const byte* lost;
    float weight, rate, keep, unused;
};
template <bool SUMS>
__device__ __forceinline__ void encode_advanced_of(float* c, float* scale, const Parts& parts, unsigned first,
                                                   const Advanced& z, const Block* blocks, const long long* dead,
                                                   float* values, byte* bits) {
    extern __shared__ float shared[];
    unsigned number = first + blockIdx.x;
    Block b = blocks[number];
    float sent = *z.lost ? __uint_as_float(NAN_BITS) : scale[number];  // NaN in every error, and so in every sum
    const float *own_m = z.m + b.at, *own_u = z.u + b.at;
    __builtin_assume(__isGlobal(own_m));
    if (SUMS) __builtin_assume(__isGlobal(own_u));
    with_gradient(parts, number, b, [&](auto g) {
        bool aligned = is_aligned(g);
        if (SUMS) {  // four loads wait together: eight take more registers than there are
#pragma unroll 1
            for (unsigned i = FOUR * threadIdx.x; i < b.size; i += FOUR * THREADS) {
                float4 kept = four(c + b.at, i), given = gradient4(g, i, aligned), m = four(own_m, i);
                float4 u = times4(four(own_u, i), z.keep), x = times4(lerp4(given, m, z.weight), z.rate);
                x = make_float4(__fadd_rn(u.x, x.x), __fadd_rn(u.y, x.y), __fadd_rn(u.z, x.z), __fadd_rn(u.w, x.w));
                put_four(shared + TOLD, i, with_error4(kept, sent, x));
            }
            return;
        }
        float4 kept[2], given[2], m[2];
        in_pairs(
            0, b.size,
            [&](unsigned i, unsigned r) {
                kept[r] = four(c + b.at, i), given[r] = gradient4(g, i, aligned), m[r] = four(own_m, i);
            },
            [&](unsigned i, unsigned r) {
                float4 x = times4(lerp4(given[r], m[r], z.weight), z.rate);
                put_four(shared + TOLD, i, with_error4(kept[r], sent, x));
            });
    });
    finish(b, shared, dead, c, scale + number, values, bits);
}
// c <- e + keep u + rate (m + weight (g - m)); the rows of it.
KERNEL encode_advanced(float* c, float* scale, const __grid_constant__ Parts parts, unsigned first,
                       const __grid_constant__ Advanced z, const Block* blocks, const long long* dead, float* values,
                       byte* bits) {
    encode_advanced_of<true>(c, scale, parts, first, z, blocks, dead, values, bits);
}
// The same without u.
KERNEL encode_first_advanced(float* c, float* scale, const __grid_constant__ Parts parts, unsigned first,
                             const __grid_constant__ Advanced z, const Block* blocks, const long long* dead,
                             float* values, byte* bits) {
    encode_advanced_of<false>(c, scale, parts, first, z, blocks, dead, values, bits);
}

// The pieces of blocks, all of one run of the vector, and what is sent of a run: so many times the momentum.
struct Cut {
    const long long *starts, *first, *run;
    const float* factor;
};
// do(begin, end, factor, size) of each piece of a block; size: of the momentum, which the rows say times the factor.
template <typename Do>
__device__ __forceinline__ void in_pieces(const Cut& cut, unsigned number, const Block& b, float said, Do use) {
    for (long long piece = cut.first[number], stop = cut.first[number + 1u]; piece < stop; ++piece) {
        float factor = cut.factor[cut.run[piece]];
        unsigned begin = (unsigned)(cut.starts[piece] - b.at), end = (unsigned)(cut.starts[piece + 1] - b.at);
        use(begin, end, factor, __fdiv_rn(said, factor));
    }
}

// c <- e + f (m + weight (g - m)), f a factor for each piece; the rows of it. f m: what the rows `last_*` say.
KERNEL encode_scaled(float* c, float* scale, const __grid_constant__ Parts parts, unsigned first, float weight,
                     const float* last_values, const byte* last_bits, const __grid_constant__ Cut cut,
                     const Block* blocks, const long long* dead, float* values, byte* bits) {
    extern __shared__ float shared[];
    unsigned number = first + blockIdx.x;
    Block b = blocks[number];
    float sent = scale[number];
    const byte* m_bits = last_bits + b.bits;
    with_gradient(parts, number, b, [&](auto g) {
        bool aligned = is_aligned(g);
        in_pieces(cut, number, b, last_values[b.scale], [&](unsigned begin, unsigned end, float factor, float m_size) {
            float4 kept[2], given[2];
            unsigned signs[2];
            in_pairs(
                begin, end,
                [&](unsigned i, unsigned r) {
                    kept[r] = four(c + b.at, i);
                    given[r] = gradient4(g, i, aligned);
                    signs[r] = bits4(m_bits, i);
                },
                [&](unsigned i, unsigned r) {
                    float4 z = times4(lerp4(given[r], signed4(signs[r], i, m_size), weight), factor);
                    put_four(shared + TOLD, i, with_error4(kept[r], sent, z));
                });
        });
    });
    finish(b, shared, dead, c, scale + number, values, bits);
}

// Rows of one block, from several ranks. values, bits: of row 0 of it.
struct Rows {
    const float* values;
    const byte* bits;
    unsigned count, row_bytes;
    __device__ float size(unsigned row) const { return values[(unsigned long long)row * row_bytes / sizeof(float)]; }
    __device__ unsigned signs(unsigned row, unsigned i) const {
        return bits[(unsigned long long)row * row_bytes + i / BYTE];
    }
};

// What the first rows, FEW at most, add up to in their order, for each of the signs that they may have: bit r of the
// place is the sign of row r. Where there are no more rows it is the mean already. A sum and a quotient for each of 256
// places, in the place of those for each element. sizes: room of FEW floats. What is not there counts as zero, which no
// sum sees: none is -0.
__device__ __forceinline__ void make_means(float* means, float* sizes, const Rows& rows) {
    if (threadIdx.x < FEW) sizes[threadIdx.x] = threadIdx.x < rows.count ? rows.size(threadIdx.x) : 0.f;
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (unsigned row = 0; row < FEW; ++row)
        total = __fadd_rn(total, signed_by(threadIdx.x, __float_as_uint(sizes[row]) ^ SIGN, 31u - row));
    means[threadIdx.x] = rows.count <= FEW ? __fdiv_rn(total, (float)rows.count) : total;
    __syncthreads();
}
// Of each of the first rows, HALF at most, a byte with the signs of eight elements. Rows and elements change places: in
// squares of two, of four; those of eight are left. [Warren 2013, section 7-3]
__device__ __forceinline__ unsigned bytes_of_rows(const byte* at, unsigned row_bytes, unsigned count) {
    unsigned x = *at;
#pragma unroll
    for (unsigned row = 1; row < HALF; ++row)
        if (row < count) x |= (unsigned)at[(unsigned long long)row * row_bytes] << (BYTE * row);
    unsigned t = (x ^ x >> 7) & 0x00aa00aau;
    x ^= t ^ t << 7;
    t = (x ^ x >> 14) & 0x0000ccccu;
    return x ^ t ^ t << 14;
}
// Four elements a word, the first in its highest byte: of each the signs of FEW rows, bit r that of row r.
__device__ __forceinline__ uint2 signs_of_rows(const Rows& rows, unsigned i) {
    uint2 x = {0u, 0u};
    const byte* at = rows.bits + i / BYTE;
    x.x = bytes_of_rows(at, rows.row_bytes, rows.count);
    if (rows.count > HALF) x.y = bytes_of_rows(at + (unsigned long long)HALF * rows.row_bytes, rows.row_bytes, rows.count - HALF);
    uint2 found;
    found.x = (x.y & 0xf0f0f0f0u) | (x.x >> 4 & 0x0f0f0f0fu);
    found.y = (x.y << 4 & 0xf0f0f0f0u) | (x.x & 0x0f0f0f0fu);
    return found;
}
__device__ __forceinline__ float4 means4(const float* means, unsigned signs) {
    return make_float4(means[signs >> 24], means[signs >> 16 & 255u], means[signs >> 8 & 255u], means[signs & 255u]);
}
// What further rows add to four elements from i on, and the mean of all.
__device__ __forceinline__ float4 with_more4(float4 x, const Rows& rows, unsigned i) {
#pragma unroll 1
    for (unsigned row = FEW; row < rows.count; ++row) {
        float4 one = signed4(rows.signs(row, i), i, rows.size(row));
        x = make_float4(__fadd_rn(x.x, one.x), __fadd_rn(x.y, one.y), __fadd_rn(x.z, one.z), __fadd_rn(x.w, one.w));
    }
    float n = (float)rows.count;
    return make_float4(__fdiv_rn(x.x, n), __fdiv_rn(x.y, n), __fdiv_rn(x.z, n), __fdiv_rn(x.w, n));
}

// MORE: are there more rows than FEW?
template <bool MORE, typename K>
__device__ __forceinline__ void serve_of(K* c, float* scale, const float* row_values, const byte* row_bits,
                                         unsigned num_rows, unsigned row_bytes, const Block* blocks,
                                         const long long* dead, float* values, byte* bits, Noise noise) {
    extern __shared__ float shared[];
    Block b = blocks[blockIdx.x];
    float sent = scale[blockIdx.x], *fresh = shared + MEANS + TOLD;
    Rows rows = {row_values + b.scale, row_bits + b.bits, num_rows, row_bytes};
    unsigned w = noise_of(noise, b.at);
    make_means(shared, fresh, rows);
    for (unsigned i = BYTE * threadIdx.x; i < b.size; i += BYTE * THREADS) {
        float4 low, high;
        eight(c + b.at, i, low, high);
        uint2 signs = signs_of_rows(rows, i);
        float4 z = means4(shared, signs.x);
        if (MORE) z = with_more4(z, rows, i);
        put_four(fresh, i, kept4(with_error4(low, sent, z), c, w + i * STRIDE));
        z = means4(shared, signs.y);
        if (MORE) z = with_more4(z, rows, i + FOUR);
        put_four(fresh, i + FOUR, kept4(with_error4(high, sent, z), c, w + (i + FOUR) * STRIDE));
    }
    finish(b, shared + MEANS, dead, c, scale + blockIdx.x, values, bits);
}
// b <- e + mean of the rows; the row of it. For FEW rows at most.
KERNEL serve(float* c, float* scale, const float* row_values, const byte* row_bits, unsigned num_rows,
             unsigned row_bytes, const Block* blocks, const long long* dead, float* values, byte* bits, Noise noise) {
    serve_of<false>(c, scale, row_values, row_bits, num_rows, row_bytes, blocks, dead, values, bits, noise);
}
KERNEL serve_narrow(narrow* c, float* scale, const float* row_values, const byte* row_bits, unsigned num_rows,
                    unsigned row_bytes, const Block* blocks, const long long* dead, float* values, byte* bits,
                    Noise noise) {
    serve_of<false>(c, scale, row_values, row_bits, num_rows, row_bytes, blocks, dead, values, bits, noise);
}
// The same for more rows.
KERNEL serve_more(float* c, float* scale, const float* row_values, const byte* row_bits, unsigned num_rows,
                  unsigned row_bytes, const Block* blocks, const long long* dead, float* values, byte* bits,
                  Noise noise) {
    serve_of<true>(c, scale, row_values, row_bits, num_rows, row_bytes, blocks, dead, values, bits, noise);
}
KERNEL serve_more_narrow(narrow* c, float* scale, const float* row_values, const byte* row_bits, unsigned num_rows,
                         unsigned row_bytes, const Block* blocks, const long long* dead, float* values, byte* bits,
                         Noise noise) {
    serve_of<true>(c, scale, row_values, row_bits, num_rows, row_bytes, blocks, dead, values, bits, noise);
}

// out <- s sgn, 0 where dead.
KERNEL decode(const float* values, const byte* bits, const Block* blocks, const long long* dead, float* out) {
    Block b = blocks[blockIdx.x];
    float size = values[b.scale];
    unsigned signs[2];
    in_pairs(
        0, b.size, [&](unsigned i, unsigned r) { signs[r] = bits4(bits + b.bits, i); },
        [&](unsigned i, unsigned r) { put_four(out + b.at, i, signed4(signs[r], i, size)); });
    zero_dead(b, dead, out);
}

// out <- rounded(x), four elements a thread. What is above the largest bfloat16 stays below infinity.
KERNEL narrow_all(const float* x, narrow* out, long long numel, Noise noise) {
    long long i = ((long long)blockIdx.x * THREADS + threadIdx.x) * FOUR;
    if (i >= numel) return;
    float4 given = four(x + i, 0), z = kept4(given, out, noise_of(noise, i));
    z.x = __uint_as_float(is_above(given.x) ? __float_as_uint(given.x) & UPPER : __float_as_uint(z.x));
    z.y = __uint_as_float(is_above(given.y) ? __float_as_uint(given.y) & UPPER : __float_as_uint(z.y));
    z.z = __uint_as_float(is_above(given.z) ? __float_as_uint(given.z) & UPPER : __float_as_uint(z.z));
    z.w = __uint_as_float(is_above(given.w) ? __float_as_uint(given.w) & UPPER : __float_as_uint(z.w));
    put_four(out + i, 0, z);
}

// Of each row that has blocks: 1 where all of its scales are finite, else 0. row_starts: number of its first block.
KERNEL flag_rows(const long long* row_starts, const long long* flag_at, const Block* blocks, const float* values,
                 byte* bits) {
    long long first = row_starts[blockIdx.x], stop = row_starts[blockIdx.x + 1];
    if (first == stop) return;
    int finite = 1;
    for (long long k = first + threadIdx.x; k < stop; k += THREADS) finite &= is_finite(values[blocks[k].scale]);
    finite = __syncthreads_and(finite);
    if (threadIdx.x == 0) bits[flag_at[blockIdx.x]] = (byte)(finite != 0);
}
