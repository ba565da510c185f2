// The fused kernels of the exchange for CUDA, float32. comm/kernels/fused_reference.py says what each computes, to the
// last bit; comm/kernels/cuda/kernels.py calls them. It needs no header and no define: NVRTC compiles it as it is.
//
// A thread block of THREADS does one block of values; where that lies, its record says. Loads and stores of vectors are
// of four values, 16 bytes; neighbouring threads take neighbouring fours. Every sum and product is rounded for itself:
// the *_rn functions are never contracted. Sums of squares go in the order of the reference: lane l of 64 adds
// x[64 k + l]^2 over k, then lanes fold 32 + 32, 16 + 16, ... 1 + 1.

#define THREADS 256
#define AT_ONCE 5  // blocks of a multiprocessor, at least: 48 registers a thread; without it sm_120 spills
#define FOUR 4u
#define BYTE 8u
#define LANES 64u
#define WARP 32u
#define ALL 0xffffffffu
#define SIGN 0x80000000u
#define TOLD 4u     // floats of shared memory in front of a block's new sums, which stay aligned to 16 bytes
#define PARTS 128u  // the most parts of one launch: kernel arguments have room for 4 kB

typedef unsigned char byte;

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
__device__ __forceinline__ float widened(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
__device__ __forceinline__ float4 gradient4(const unsigned short* g, unsigned i, bool aligned) {
    if (!aligned) return make_float4(widened(g[i]), widened(g[i + 1]), widened(g[i + 2]), widened(g[i + 3]));
    uint2 two = *reinterpret_cast<const uint2*>(g + i);
    return make_float4(__uint_as_float(two.x << 16), __uint_as_float(two.x & 0xffff0000u),
                       __uint_as_float(two.y << 16), __uint_as_float(two.y & 0xffff0000u));
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

// Every loop over fours: load(i, r) of two groups, then use(i, r) of them, so that their loads wait together.
template <typename Load, typename Use>
__device__ __forceinline__ void in_pairs(unsigned size, Load load, Use use) {
    for (unsigned i = FOUR * threadIdx.x; i < size; i += 2u * FOUR * THREADS) {
        bool both = i + FOUR * THREADS < size;
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

// A block's new sums lie in shared memory: write its scale and signs, and keep the sums and the scale where the sum of
// their squares is finite. values, bits: of the wire memory that is written.
__device__ __forceinline__ void finish(const Block& b, float* shared, const long long* dead, float* c, float* scale,
                                       float* values, byte* bits) {
    float *told = shared, *fresh = shared + TOLD;
    unsigned padded = (b.size + LANES - 1u) / LANES * LANES;
    for (unsigned i = b.size + threadIdx.x; i < padded; i += THREADS) fresh[i] = 0.f;
    __syncthreads();
    if (b.dead != b.dead_stop) {
        for (unsigned k = b.dead + threadIdx.x; k < b.dead_stop; k += THREADS) fresh[dead[k] - b.at] = 0.f;
        __syncthreads();
    }
    if (threadIdx.x < WARP) {
        float sum = sum_of_squares(fresh, padded);
        if (threadIdx.x == 0) {
            float root = __fsqrt_rn(__fdiv_rn(sum, b.live));
            told[0] = is_finite(sum) ? 1.f : 0.f;
            values[b.scale] = is_finite(sum) ? root : __uint_as_float(0x7fc00000u);
            if (is_finite(sum)) *scale = root;
        }
    }
    __syncthreads();
    bool finite = told[0] != 0.f;
    for (unsigned from = 0; from < b.size; from += FOUR * THREADS) {
        unsigned i = from + FOUR * threadIdx.x;
        float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
        if (i < b.size) {
            x = four(fresh, i);
            if (finite) put_four(c + b.at, i, x);
        }
        unsigned own = signs4(x), next = __shfl_down_sync(ALL, own, 1);
        if (i < b.size && !(threadIdx.x & 1u)) bits[b.bits + i / BYTE] = (byte)(own << 4 | next);
    }
}

__device__ __forceinline__ void zero_dead(const Block& b, const long long* dead, float* x) {
    if (b.dead == b.dead_stop) return;
    __syncthreads();
    for (unsigned k = b.dead + threadIdx.x; k < b.dead_stop; k += THREADS) x[dead[k]] = 0.f;
}

// c <- e + x; the rows of it.
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
encode_sum(float* c, float* scale, const float* x, const Block* blocks, const long long* dead, float* values,
           byte* bits) {
    extern __shared__ float shared[];
    Block b = blocks[blockIdx.x];
    float sent = scale[blockIdx.x];
    bool aligned = is_aligned(x);
    float4 kept[2], given[2];
    in_pairs(
        b.size,
        [&](unsigned i, unsigned r) {
            kept[r] = four(c + b.at, i);
            given[r] = gradient4(x + b.at, i, aligned);
        },
        [&](unsigned i, unsigned r) { put_four(shared + TOLD, i, with_error4(kept[r], sent, given[r])); });
    finish(b, shared, dead, c, scale + blockIdx.x, values, bits);
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

template <typename G>
__device__ __forceinline__ void new_lerp(const Block& b, const float* c, float sent, const G* g, float weight,
                                         float m_size, const byte* m_bits, float* fresh) {
    __builtin_assume(__isGlobal(g));  // else its loads might be of shared memory, and wait for stores to that
    bool aligned = is_aligned(g);
    float4 kept[2], given[2];
    unsigned signs[2];
    in_pairs(
        b.size,
        [&](unsigned i, unsigned r) {
            kept[r] = four(c + b.at, i);
            given[r] = gradient4(g, i, aligned);
            signs[r] = bits4(m_bits, i);
        },
        [&](unsigned i, unsigned r) {
            put_four(fresh, i, with_error4(kept[r], sent, lerp4(given[r], signed4(signs[r], i, m_size), weight)));
        });
}

// c <- e + m + weight (g - m); the rows of it. m: what the rows `last_*` say. first: number of the launch's first
// block.
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
encode_lerp(float* c, float* scale, const __grid_constant__ Parts parts, unsigned first, float weight,
            const float* last_values, const byte* last_bits, const Block* blocks, const long long* dead, float* values,
            byte* bits) {
    extern __shared__ float shared[];
    unsigned number = first + blockIdx.x, part = part_of(parts, number);
    Block b = blocks[number];
    float sent = scale[number], m_size = last_values[b.scale];
    unsigned long long base = parts.part[part].base;
    if (parts.part[part].narrow)
        new_lerp(b, c, sent, reinterpret_cast<const unsigned short*>(base) + b.at, weight, m_size, last_bits + b.bits,
                 shared + TOLD);
    else
        new_lerp(b, c, sent, reinterpret_cast<const float*>(base) + b.at, weight, m_size, last_bits + b.bits,
                 shared + TOLD);
    finish(b, shared, dead, c, scale + number, values, bits);
}

// Eight elements from i on of the mean of the rows, added up in their order. values, bits: of row 0 of this block.
struct Eight {
    float x[BYTE];
};
__device__ __forceinline__ Eight mean8(const float* values, const byte* bits, unsigned num_rows, unsigned row_bytes,
                                       unsigned i) {
    Eight total;
#pragma unroll
    for (unsigned k = 0; k < BYTE; ++k) total.x[k] = 0.f;
#pragma unroll 4
    for (unsigned row = 0; row < num_rows; ++row) {
        unsigned long long begin = (unsigned long long)row * row_bytes;
        unsigned minus = __float_as_uint(values[begin / sizeof(float)]) ^ SIGN, top = bits[begin + i / BYTE] << 24;
#pragma unroll
        for (unsigned k = 0; k < BYTE; ++k) total.x[k] = __fadd_rn(total.x[k], signed_by(top, minus, k));
    }
    float n = (float)num_rows;
    if (num_rows & (num_rows - 1u)) {
#pragma unroll
        for (unsigned k = 0; k < BYTE; ++k) total.x[k] = __fdiv_rn(total.x[k], n);
    } else {  // the share is exact, so the product is the quotient, bit for bit
        float share = __fdiv_rn(1.f, n);
#pragma unroll
        for (unsigned k = 0; k < BYTE; ++k) total.x[k] = __fmul_rn(total.x[k], share);
    }
    return total;
}
__device__ __forceinline__ float4 half_of(const Eight& z, unsigned from) {
    return make_float4(z.x[from], z.x[from + 1], z.x[from + 2], z.x[from + 3]);
}

// b <- e + mean of the rows; the row of it.
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
serve(float* c, float* scale, const float* row_values, const byte* row_bits, unsigned num_rows, unsigned row_bytes,
      const Block* blocks, const long long* dead, float* values, byte* bits) {
    extern __shared__ float shared[];
    Block b = blocks[blockIdx.x];
    float sent = scale[blockIdx.x];
    for (unsigned i = BYTE * threadIdx.x; i < b.size; i += BYTE * THREADS) {
        float4 low = four(c + b.at, i), high = four(c + b.at, i + FOUR);
        Eight z = mean8(row_values + b.scale, row_bits + b.bits, num_rows, row_bytes, i);
        put_four(shared + TOLD, i, with_error4(low, sent, half_of(z, 0)));
        put_four(shared + TOLD, i + FOUR, with_error4(high, sent, half_of(z, FOUR)));
    }
    finish(b, shared, dead, c, scale + blockIdx.x, values, bits);
}

// out <- s sgn, 0 where dead.
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
decode(const float* values, const byte* bits, const Block* blocks, const long long* dead, float* out) {
    Block b = blocks[blockIdx.x];
    float size = values[b.scale];
    unsigned signs[2];
    in_pairs(
        b.size, [&](unsigned i, unsigned r) { signs[r] = bits4(bits + b.bits, i); },
        [&](unsigned i, unsigned r) { put_four(out + b.at, i, signed4(signs[r], i, size)); });
    zero_dead(b, dead, out);
}

__device__ __forceinline__ void take_back4(float* c, unsigned i, float4 x, float4 z) {
    put_four(c, i, make_float4(__fsub_rn(x.x, z.x), __fsub_rn(x.y, z.y), __fsub_rn(x.z, z.z), __fsub_rn(x.w, z.w)));
}

// c <- c - x, s <- 0 where the scale in `written` is no NaN.
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
undo_sum(float* c, float* scale, const float* x, const float* written, const Block* blocks, const long long* dead) {
    Block b = blocks[blockIdx.x];
    if (is_nan(written[b.scale])) return;
    bool aligned = is_aligned(x);
    for (unsigned i = FOUR * threadIdx.x; i < b.size; i += FOUR * THREADS)
        take_back4(c + b.at, i, four(c + b.at, i), gradient4(x + b.at, i, aligned));
    if (threadIdx.x == 0) scale[blockIdx.x] = 0.f;
    zero_dead(b, dead, c);
}

template <typename G>
__device__ __forceinline__ void take_back_lerp(const Block& b, float* c, const G* g, float weight, float m_size,
                                               const byte* m_bits) {
    __builtin_assume(__isGlobal(g));
    bool aligned = is_aligned(g);
    for (unsigned i = FOUR * threadIdx.x; i < b.size; i += FOUR * THREADS) {
        float4 m = signed4(bits4(m_bits, i), i, m_size);
        take_back4(c + b.at, i, four(c + b.at, i), lerp4(gradient4(g, i, aligned), m, weight));
    }
}

// c <- c - (m + weight (g - m)), s <- 0, as above.
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
undo_lerp(float* c, float* scale, const __grid_constant__ Parts parts, unsigned first, float weight,
          const float* last_values, const byte* last_bits, const float* written, const Block* blocks,
          const long long* dead) {
    unsigned number = first + blockIdx.x, part = part_of(parts, number);
    Block b = blocks[number];
    if (is_nan(written[b.scale])) return;
    float m_size = last_values[b.scale];
    unsigned long long base = parts.part[part].base;
    if (parts.part[part].narrow)
        take_back_lerp(b, c, reinterpret_cast<const unsigned short*>(base) + b.at, weight, m_size, last_bits + b.bits);
    else
        take_back_lerp(b, c, reinterpret_cast<const float*>(base) + b.at, weight, m_size, last_bits + b.bits);
    if (threadIdx.x == 0) scale[number] = 0.f;
    zero_dead(b, dead, c);
}

// b <- b - mean of the rows, s <- 0, as above.
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
undo_serve(float* c, float* scale, const float* row_values, const byte* row_bits, unsigned num_rows,
           unsigned row_bytes, const float* written, const Block* blocks, const long long* dead) {
    Block b = blocks[blockIdx.x];
    if (is_nan(written[b.scale])) return;
    for (unsigned i = BYTE * threadIdx.x; i < b.size; i += BYTE * THREADS) {
        float4 low = four(c + b.at, i), high = four(c + b.at, i + FOUR);
        Eight z = mean8(row_values + b.scale, row_bits + b.bits, num_rows, row_bytes, i);
        take_back4(c + b.at, i, low, half_of(z, 0));
        take_back4(c + b.at, i + FOUR, high, half_of(z, FOUR));
    }
    if (threadIdx.x == 0) scale[blockIdx.x] = 0.f;
    zero_dead(b, dead, c);
}

// Of each row that has blocks: 1 where all of its scales are finite, else 0. row_starts: number of its first block.
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
flag_rows(const long long* row_starts, const long long* flag_at, const Block* blocks, const float* values, byte* bits) {
    long long first = row_starts[blockIdx.x], stop = row_starts[blockIdx.x + 1];
    if (first == stop) return;
    int finite = 1;
    for (long long k = first + threadIdx.x; k < stop; k += THREADS) finite &= is_finite(values[blocks[k].scale]);
    finite = __syncthreads_and(finite);
    if (threadIdx.x == 0) bits[flag_at[blockIdx.x]] = (byte)(finite != 0);
}
