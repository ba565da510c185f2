// Values in 8 bits for CUDA, float32: the rows of a bucket at a time. comm/kernels/int8_reference.py says what a row
// holds, to the last bit; comm/kernels/cuda/int8.py calls these. It needs no header and no define.
//
// A row is |flag, HEADER bytes|a scale for each run of `run` values|a whole number of 8 bits for each value|. Row r holds
// the elements [starts[r], starts[r + 1]) of the bucket, in fours. A warp encodes one run: it reads it twice, the second
// time from the cache.

#define THREADS 256
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define FOUR 4u
#define WARP 32u
#define ALL 0xffffffffu
#define HEADER 8u
#define LEVELS 127.f
#define LEAST 7.888609052210118e-31f  // 2^-100
#define MAGIC 12582912.f              // 1.5 2^23: adding it rounds to a whole number, ties to even

typedef unsigned char byte;

// Rows as they lie: the next one begins row_bytes bytes later.
struct Rows {
    unsigned count, row_bytes, run, most;  // most: elements of the longest
};

__device__ __forceinline__ float4 four(const float* x, long long i) { return *reinterpret_cast<const float4*>(x + i); }
__device__ __forceinline__ void put_four(float* x, long long i, float4 values) {
    *reinterpret_cast<float4*>(x + i) = values;
}
__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }
__device__ __forceinline__ unsigned larger(unsigned x, unsigned y) { return x > y ? x : y; }

__device__ __forceinline__ const float* scales_of(const byte* row) { return reinterpret_cast<const float*>(row + HEADER); }
__device__ __forceinline__ unsigned runs_of(unsigned numel, unsigned run) { return (numel + run - 1u) / run; }
// Four numbers of a row of so many elements: the lowest byte is the first.
__device__ __forceinline__ unsigned numbers_at(const byte* row, unsigned numel, unsigned run, unsigned i) {
    return *reinterpret_cast<const unsigned*>(row + HEADER + sizeof(float) * runs_of(numel, run) + i);
}
__device__ __forceinline__ float decoded(float scale, unsigned numbers, unsigned k) {
    return __fmul_rn(scale, (float)(signed char)(numbers >> (8u * k)));
}
__device__ __forceinline__ float4 decoded4(const byte* row, unsigned numel, unsigned run, unsigned i) {
    float scale = scales_of(row)[i / run];
    unsigned numbers = numbers_at(row, numel, run, i);
    return make_float4(decoded(scale, numbers, 0), decoded(scale, numbers, 1), decoded(scale, numbers, 2),
                       decoded(scale, numbers, 3));
}

// The largest |x| is the largest of its bits: infinities and NaN are above all numbers.
__device__ __forceinline__ unsigned size_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ unsigned number(float x, float by) {
    return (unsigned)(int)__fsub_rn(__fadd_rn(__fmul_rn(x, by), MAGIC), MAGIC) & 255u;
}

// Scales and numbers of all rows; a scale that is not finite says that a value is not.
KERNEL encode_rows(const float* x, const long long* starts, byte* rows, Rows r) {
    unsigned warp = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    unsigned runs = runs_of(r.most, r.run), row = warp / runs, begin = warp % runs * r.run;
    if (row >= r.count) return;
    unsigned numel = (unsigned)(starts[row + 1u] - starts[row]);
    if (begin >= numel) return;
    unsigned end = begin + r.run < numel ? begin + r.run : numel, most = 0u;
    const float* own = x + starts[row];
#pragma unroll 2
    for (unsigned i = begin + FOUR * lane; i < end; i += FOUR * WARP) {
        float4 v = four(own, i);
        most = larger(larger(larger(most, size_bits(v.x)), size_bits(v.y)), larger(size_bits(v.z), size_bits(v.w)));
    }
    for (unsigned half = WARP / 2u; half; half /= 2u) most = larger(most, __shfl_down_sync(ALL, most, half));
    float peak = __uint_as_float(__shfl_sync(ALL, most, 0));
    bool is_sent = peak >= LEAST;
    float by = is_sent ? __fdiv_rn(LEVELS, peak) : 0.f;
    byte* to = rows + (unsigned long long)row * r.row_bytes + HEADER;
    if (lane == 0) {
        float scale = is_sent ? __fdiv_rn(peak, LEVELS) : peak < LEAST ? 0.f : peak;
        reinterpret_cast<float*>(to)[begin / r.run] = scale;
    }
    unsigned* numbers = reinterpret_cast<unsigned*>(to + sizeof(float) * runs_of(numel, r.run));
#pragma unroll 2
    for (unsigned i = begin + FOUR * lane; i < end; i += FOUR * WARP) {
        float4 v = four(own, i);
        numbers[i / FOUR] = number(v.x, by) | number(v.y, by) << 8 | number(v.z, by) << 16 | number(v.w, by) << 24;
    }
}

// Of each row: 1 where all of its scales are finite, and the flags of all of these others are 1; else 0.
KERNEL flag_rows(const long long* starts, byte* rows, Rows r, const byte* others, unsigned num_others) {
    byte* row = rows + (unsigned long long)blockIdx.x * r.row_bytes;
    unsigned runs = runs_of((unsigned)(starts[blockIdx.x + 1u] - starts[blockIdx.x]), r.run);
    int good = 1;
    for (unsigned k = threadIdx.x; k < runs; k += THREADS) good &= is_finite(scales_of(row)[k]);
    for (unsigned k = threadIdx.x; k < num_others; k += THREADS)
        good &= others[(unsigned long long)k * r.row_bytes] == 1;
    good = __syncthreads_and(good);
    if (threadIdx.x == 0) row[0] = (byte)(good != 0);
}

// sum <- the mean of the rows, added up in their order, + error: of one chunk of `most` elements.
KERNEL mean_of_rows(const byte* rows, Rows r, const float* error, unsigned has_error, float* sum) {
    unsigned i = FOUR * (blockIdx.x * THREADS + threadIdx.x);
    if (i >= r.most) return;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (unsigned k = 0; k < r.count; ++k) {
        float4 z = decoded4(rows + (unsigned long long)k * r.row_bytes, r.most, r.run, i);
        total = make_float4(__fadd_rn(total.x, z.x), __fadd_rn(total.y, z.y), __fadd_rn(total.z, z.z),
                            __fadd_rn(total.w, z.w));
    }
    float n = (float)r.count;
    total = make_float4(__fdiv_rn(total.x, n), __fdiv_rn(total.y, n), __fdiv_rn(total.z, n), __fdiv_rn(total.w, n));
    if (has_error) {
        float4 e = four(error, i);
        total = make_float4(__fadd_rn(total.x, e.x), __fadd_rn(total.y, e.y), __fadd_rn(total.z, e.z),
                            __fadd_rn(total.w, e.w));
    }
    put_four(sum, i, total);
}

// This thread's four of all rows: which row, and where in it; false where there are none.
__device__ __forceinline__ bool find(const long long* starts, const Rows& r, unsigned& row, unsigned& numel, unsigned& i) {
    unsigned blocks = (r.most + FOUR * THREADS - 1u) / (FOUR * THREADS);
    row = blockIdx.x / blocks, i = FOUR * (blockIdx.x % blocks * THREADS + threadIdx.x);
    numel = (unsigned)(starts[row + 1u] - starts[row]);
    return i < numel;
}
// out <- what the rows say.
KERNEL decode_rows(const byte* rows, const long long* starts, Rows r, float* out) {
    unsigned row, numel, i;
    if (!find(starts, r, row, numel, i)) return;
    put_four(out, starts[row] + i, decoded4(rows + (unsigned long long)row * r.row_bytes, numel, r.run, i));
}
// out <- x - what the rows say. out may be x.
KERNEL left_out_of_rows(const byte* rows, const long long* starts, Rows r, const float* x, float* out) {
    unsigned row, numel, i;
    if (!find(starts, r, row, numel, i)) return;
    float4 z = decoded4(rows + (unsigned long long)row * r.row_bytes, numel, r.run, i), v = four(x, starts[row] + i);
    put_four(out, starts[row] + i,
             make_float4(__fsub_rn(v.x, z.x), __fsub_rn(v.y, z.y), __fsub_rn(v.z, z.z), __fsub_rn(v.w, z.w)));
}
