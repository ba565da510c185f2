// Values in 8 bits for CUDA, float32: the rows of a bucket at a time. comm/kernels/int8_reference.py says what a row
// holds, to the last bit; comm/kernels/cuda/int8.py calls these. It needs no header and no define.
//
// A row is |flag, HEADER bytes|a scale for each run of `run` values|a whole number of 8 bits for each value|. Row r holds
// the elements [starts[r], starts[r + 1]) of the bucket, in fours. A warp does one run. What it encodes it keeps in
// registers until the scale is known, HELD fours a lane; a longer run it reads twice, the second time from the cache.

#define THREADS 256
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define FOUR 4u
#define WARP 32u
#define HELD 2u
#define ALL 0xffffffffu
#define HEADER 8u
#define LEVELS 127.f
#define LEAST 7.888609052210118e-31f  // 2^-100
#define MAGIC 12582912.f              // 1.5 2^23: adding it rounds to a whole number, ties to even, in the lowest bits
#define EIGHTS 0x80808080u
#define WHOLE 0x4b000000u             // 2^23; a byte in its lowest bits is added to it
#define MIDDLE 8388736.f              // 2^23 + 128

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
__device__ __forceinline__ float4 added4(float4 x, float4 y) {
    return make_float4(__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y), __fadd_rn(x.z, y.z), __fadd_rn(x.w, y.w));
}
__device__ __forceinline__ float4 less4(float4 x, float4 y) {
    return make_float4(__fsub_rn(x.x, y.x), __fsub_rn(x.y, y.y), __fsub_rn(x.z, y.z), __fsub_rn(x.w, y.w));
}

// One run of one row: what a warp does. inside: of the row. row: its bytes from the scales on.
struct Run {
    unsigned row, number, numel, begin, end, runs;

    // False where this warp has none.
    __device__ __forceinline__ bool find(const long long* starts, const Rows& r) {
        unsigned warp = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP, most = (r.most + r.run - 1u) / r.run;
        row = warp / most, number = warp % most, begin = number * r.run;
        if (row >= r.count) return false;
        numel = (unsigned)(starts[row + 1u] - starts[row]);
        end = begin + r.run < numel ? begin + r.run : numel, runs = (numel + r.run - 1u) / r.run;
        return begin < numel;
    }
    __device__ __forceinline__ byte* scales(byte* rows, const Rows& r) const {
        return rows + (unsigned long long)row * r.row_bytes + HEADER;
    }
};

// The largest |x| is the largest of its bits: infinities and NaN are above all numbers.
__device__ __forceinline__ unsigned size_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ unsigned larger4(unsigned most, float4 x) {
    return larger(larger(larger(most, size_bits(x.x)), size_bits(x.y)), larger(size_bits(x.z), size_bits(x.w)));
}
// The whole number next to x by, |x by| <= 127, is the lowest byte of this; so no number is converted.
__device__ __forceinline__ unsigned number(float x, float by) {
    return __float_as_uint(__fadd_rn(__fmul_rn(x, by), MAGIC)) & 255u;
}
// Four: the lowest byte is the first.
__device__ __forceinline__ unsigned numbers4(float4 x, float by) {
    return number(x.x, by) | number(x.y, by) << 8 | number(x.z, by) << 16 | number(x.w, by) << 24;
}
// bytes: numbers + 128, so that nothing is converted here either.
__device__ __forceinline__ float decoded(float scale, unsigned bytes, unsigned k) {
    return __fmul_rn(scale, __fsub_rn(__uint_as_float(WHOLE | (bytes >> (8u * k) & 255u)), MIDDLE));
}
__device__ __forceinline__ float4 decoded4(float scale, unsigned numbers) {
    unsigned bytes = numbers ^ EIGHTS;
    return make_float4(decoded(scale, bytes, 0), decoded(scale, bytes, 1), decoded(scale, bytes, 2),
                       decoded(scale, bytes, 3));
}

// Scale and numbers of one run of values make(i); a scale that is not finite says that a value is not. store(i, x),
// again(i): where a run is read twice, keeps them from the first time for the second. left(i, x, z): of each four, what
// was encoded, and what that says.
template <typename Make, typename Store, typename Again, typename Left>
__device__ __forceinline__ void encode_run(const Run& run, byte* to, Make make, Store store, Again again, Left left) {
    unsigned lane = threadIdx.x % WARP, first = run.begin + FOUR * lane, most = 0u;
    float4 held[HELD];
    bool fits = run.end - run.begin <= HELD * FOUR * WARP;
    if (fits) {
#pragma unroll
        for (unsigned k = 0; k < HELD; ++k)
            if (unsigned i = first + k * FOUR * WARP; i < run.end) held[k] = make(i);
#pragma unroll
        for (unsigned k = 0; k < HELD; ++k)
            if (first + k * FOUR * WARP < run.end) most = larger4(most, held[k]);
    } else {
#pragma unroll 1
        for (unsigned i = first; i < run.end; i += FOUR * WARP) {
            float4 x = make(i);
            store(i, x);
            most = larger4(most, x);
        }
    }
    for (unsigned half = WARP / 2u; half; half /= 2u) most = larger(most, __shfl_down_sync(ALL, most, half));
    float peak = __uint_as_float(__shfl_sync(ALL, most, 0));
    bool is_sent = peak >= LEAST;
    float by = is_sent ? __fdiv_rn(LEVELS, peak) : 0.f;
    float scale = is_sent ? __fdiv_rn(peak, LEVELS) : peak < LEAST ? 0.f : peak;
    if (lane == 0) reinterpret_cast<float*>(to)[run.number] = scale;
    unsigned* numbers = reinterpret_cast<unsigned*>(to + sizeof(float) * run.runs);
    auto put = [&](unsigned i, float4 x) {
        unsigned four_of_them = numbers4(x, by);
        numbers[i / FOUR] = four_of_them;
        left(i, x, decoded4(scale, four_of_them));
    };
    if (fits) {
#pragma unroll
        for (unsigned k = 0; k < HELD; ++k)
            if (unsigned i = first + k * FOUR * WARP; i < run.end) put(i, held[k]);
    } else {
#pragma unroll 1
        for (unsigned i = first; i < run.end; i += FOUR * WARP) put(i, again(i));
    }
}

// Scales and numbers of all rows.
KERNEL encode_rows(const float* x, const long long* starts, byte* rows, Rows r) {
    Run run;
    if (!run.find(starts, r)) return;
    const float* own = x + starts[run.row];
    auto given = [&](unsigned i) { return four(own, i); };
    encode_run(run, run.scales(rows, r), given, [](unsigned, float4) {}, given, [](unsigned, float4, float4) {});
}
// The same of x + error; left <- x + error - what the rows say.
KERNEL encode_left(const float* x, const float* error, float* left, const long long* starts, byte* rows, Rows r) {
    Run run;
    if (!run.find(starts, r)) return;
    const float *own = x + starts[run.row], *e = error + starts[run.row];
    float* out = left + starts[run.row];
    encode_run(
        run, run.scales(rows, r), [&](unsigned i) { return added4(four(own, i), four(e, i)); },
        [&](unsigned i, float4 v) { put_four(out, i, v); }, [&](unsigned i) { return four(out, i); },
        [&](unsigned i, float4 v, float4 z) { put_four(out, i, less4(v, z)); });
}

// Of each row: 1 where all of its scales are finite, and the flags of all of these others are 1; else 0.
KERNEL flag_rows(const long long* starts, byte* rows, Rows r, const byte* others, unsigned num_others) {
    byte* row = rows + (unsigned long long)blockIdx.x * r.row_bytes;
    const float* scales = reinterpret_cast<const float*>(row + HEADER);
    unsigned runs = ((unsigned)(starts[blockIdx.x + 1u] - starts[blockIdx.x]) + r.run - 1u) / r.run;
    int good = 1;
#pragma unroll 4
    for (unsigned k = threadIdx.x; k < runs; k += THREADS) good &= is_finite(scales[k]);
    for (unsigned k = threadIdx.x; k < num_others; k += THREADS)
        good &= others[(unsigned long long)k * r.row_bytes] == 1;
    good = __syncthreads_and(good);
    if (threadIdx.x == 0) row[0] = (byte)(good != 0);
}

// The row of the mean of `given`, rows of one chunk, added up in their order, + error; left <- that - what the row says.
// Without an error left <- the mean. given_r: of those rows; r: of the one.
KERNEL serve_rows(const byte* given, Rows given_r, const float* error, unsigned has_error, float* left,
                  const long long* starts, byte* rows, Rows r) {
    Run run;
    if (!run.find(starts, r)) return;
    const byte* scales = given + HEADER;
    const byte* numbers = scales + sizeof(float) * run.runs;
    float n = (float)given_r.count;
    auto mean = [&](unsigned i) {
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
        for (unsigned k = 0; k < given_r.count; ++k) {
            unsigned long long at = (unsigned long long)k * given_r.row_bytes;
            float scale = reinterpret_cast<const float*>(scales + at)[run.number];
            total = added4(total, decoded4(scale, *reinterpret_cast<const unsigned*>(numbers + at + i)));
        }
        total = make_float4(__fdiv_rn(total.x, n), __fdiv_rn(total.y, n), __fdiv_rn(total.z, n), __fdiv_rn(total.w, n));
        return has_error ? added4(total, four(error, i)) : total;
    };
    encode_run(
        run, run.scales(rows, r), mean, [&](unsigned i, float4 v) { put_four(left, i, v); },
        [&](unsigned i) { return four(left, i); },
        [&](unsigned i, float4 v, float4 z) { put_four(left, i, has_error ? less4(v, z) : v); });
}

// out <- what the rows say.
KERNEL decode_rows(const byte* rows, const long long* starts, Rows r, float* out) {
    Run run;
    if (!run.find(starts, r)) return;
    const byte* scales = rows + (unsigned long long)run.row * r.row_bytes + HEADER;
    float scale = reinterpret_cast<const float*>(scales)[run.number], *own = out + starts[run.row];
    const unsigned* numbers = reinterpret_cast<const unsigned*>(scales + sizeof(float) * run.runs);
#pragma unroll 2
    for (unsigned i = run.begin + FOUR * (threadIdx.x % WARP); i < run.end; i += FOUR * WARP)
        put_four(own, i, decoded4(scale, numbers[i / FOUR]));
}
