// Updates of parameters and moments for CUDA, float32, each in one pass over memory. optim/kernels/loops.py says what
// each computes and in which order: these are equal to those bit for bit, for every operation is rounded for itself. It
// needs no header and no define. Vectors are multiples of 8 long and begin at multiples of 16 bytes.
//
// A thread block does SPAN elements of a vector: each thread two fours, THREADS fours apart, so that neighbouring
// threads read neighbouring memory and the loads of both wait together. `descend` goes over blocks of values instead:
// what received rows say of those is one scale and a sign an element (comm/kernels/cuda/exchange.cu has the record).

#define THREADS 256
#define FOUR 4u
#define BYTE 8u
#define SPAN (2u * FOUR * THREADS)
#define SIGN 0x80000000u

typedef unsigned char byte;

struct Block {
    long long at;
    unsigned size, scale, bits, dead, dead_stop;
    float live;
};

__device__ __forceinline__ float4 four(const float* x, long long i) { return *reinterpret_cast<const float4*>(x + i); }
__device__ __forceinline__ float4 four(const unsigned short* x, long long i) {  // bfloat16
    uint2 two = *reinterpret_cast<const uint2*>(x + i);
    return make_float4(__uint_as_float(two.x << 16), __uint_as_float(two.x & 0xffff0000u),
                       __uint_as_float(two.y << 16), __uint_as_float(two.y & 0xffff0000u));
}
__device__ __forceinline__ void put_four(float* x, long long i, float4 values) {
    *reinterpret_cast<float4*>(x + i) = values;
}

// One of the four, k = 0 .. 3.
__device__ __forceinline__ float& at(float4& x, unsigned k) { return k == 0 ? x.x : k == 1 ? x.y : k == 2 ? x.z : x.w; }

// load(i, r) of this thread's two fours, then use(i, r) of them.
template <typename Load, typename Use>
__device__ __forceinline__ void in_pairs(long long first, long long stop, Load load, Use use) {
    long long i = first + FOUR * threadIdx.x, next = i + FOUR * THREADS;
    if (i < stop) load(i, 0);
    if (next < stop) load(next, 1);
    if (i < stop) use(i, 0);
    if (next < stop) use(next, 1);
}

__device__ __forceinline__ float lerp(float x, float m, float weight) {
    return __fadd_rn(m, __fmul_rn(weight, __fsub_rn(x, m)));
}

// m <- m + w1 (g - m); v <- beta2 v + w2 g^2; p <- keep p - rate m / (sqrt(v) / correction + eps).
extern "C" __global__ void __launch_bounds__(THREADS)
adam(float* p, const float* g, float* m, float* v, float weight1, float beta2, float weight2, float correction,
     float eps, float keep, float rate, long long numel) {
    float4 p4[2], g4[2], m4[2], v4[2];
    long long first = (long long)blockIdx.x * SPAN;
    in_pairs(
        first, numel,
        [&](long long i, unsigned r) {
            p4[r] = four(p, i), g4[r] = four(g, i), m4[r] = four(m, i), v4[r] = four(v, i);
        },
        [&](long long i, unsigned r) {
#pragma unroll
            for (unsigned k = 0; k < FOUR; ++k) {
                float x = at(g4[r], k), mean = lerp(x, at(m4[r], k), weight1);
                float square = __fadd_rn(__fmul_rn(beta2, at(v4[r], k)), __fmul_rn(__fmul_rn(weight2, x), x));
                float divisor = __fadd_rn(__fdiv_rn(__fsqrt_rn(square), correction), eps);
                at(m4[r], k) = mean, at(v4[r], k) = square;
                at(p4[r], k) = __fsub_rn(__fmul_rn(keep, at(p4[r], k)), __fdiv_rn(__fmul_rn(rate, mean), divisor));
            }
            put_four(m, i, m4[r]), put_four(v, i, v4[r]), put_four(p, i, p4[r]);
        });
}

template <typename V>
__device__ __forceinline__ void descend_by(float* p, const V* v, const float* values, const byte* bits, float eps,
                                           float rate, float keep, const Block* blocks, const long long* dead) {
    Block b = blocks[blockIdx.x];
    unsigned minus = __float_as_uint(values[b.scale]) ^ SIGN;
    for (long long from = 0; from < b.size; from += SPAN) {
        float4 p4[2], v4[2];
        unsigned signs[2];
        in_pairs(
            from, b.size,
            [&](long long i, unsigned r) {
                p4[r] = four(p + b.at, i), v4[r] = four(v + b.at, i);
                signs[r] = (unsigned)bits[b.bits + i / BYTE] << (i & FOUR ? 28 : 24);
            },
            [&](long long i, unsigned r) {
#pragma unroll
                for (unsigned k = 0; k < FOUR; ++k) {
                    float m = __uint_as_float(minus ^ ((signs[r] << k) & SIGN));
                    float inverse = __fdiv_rn(1.f, __fadd_rn(__fsqrt_rn(at(v4[r], k)), eps));
                    float step = __fmul_rn(__fmul_rn(m, inverse), rate);
                    at(p4[r], k) = __fsub_rn(__fmul_rn(at(p4[r], k), keep), step);
                }
                put_four(p + b.at, i, p4[r]);
            });
    }
    if (b.dead == b.dead_stop) return;
    __syncthreads();
    for (unsigned k = b.dead + threadIdx.x; k < b.dead_stop; k += THREADS) p[dead[k]] = 0.f;
}
// p <- p keep - rate (m / (sqrt(v) + eps)), m being what the rows say; 0 where dead.
extern "C" __global__ void __launch_bounds__(THREADS)
descend(float* p, const float* v, const float* values, const byte* bits, float eps, float rate, float keep,
        const Block* blocks, const long long* dead) {
    descend_by(p, v, values, bits, eps, rate, keep, blocks, dead);
}
// The same of v in bfloat16.
extern "C" __global__ void __launch_bounds__(THREADS)
descend_narrow(float* p, const unsigned short* v, const float* values, const byte* bits, float eps, float rate,
               float keep, const Block* blocks, const long long* dead) {
    descend_by(p, v, values, bits, eps, rate, keep, blocks, dead);
}

// 0/1 Adam's divisor: sqrt(v) + eps.
__device__ __forceinline__ float divisor_of(float v, float eps) { return __fadd_rn(__fsqrt_rn(v), eps); }

// x where these are all bits, 0 where none is.
__device__ __forceinline__ float if_any(float x, unsigned bits) { return __uint_as_float(__float_as_uint(x) & bits); }

// m <- m + w (g - m); u <- keep u + rate m; p <- keep p - rate m / d. lost: g counts as 0.
extern "C" __global__ void __launch_bounds__(THREADS)
local(float* p, const float* g, float* m, float* u, const float* v, float weight, float keep, float rate, float eps,
      const byte* lost, long long numel) {
    unsigned counts = *lost ? 0u : ~0u;
    float4 p4[2], g4[2], m4[2], u4[2], v4[2];
    long long first = (long long)blockIdx.x * SPAN;
    in_pairs(
        first, numel,
        [&](long long i, unsigned r) {
            p4[r] = four(p, i), g4[r] = four(g, i), m4[r] = four(m, i), u4[r] = four(u, i), v4[r] = four(v, i);
        },
        [&](long long i, unsigned r) {
#pragma unroll
            for (unsigned k = 0; k < FOUR; ++k) {
                float mean = lerp(if_any(at(g4[r], k), counts), at(m4[r], k), weight), moved = __fmul_rn(rate, mean);
                float step = __fdiv_rn(moved, divisor_of(at(v4[r], k), eps));
                at(m4[r], k) = mean;
                at(u4[r], k) = __fadd_rn(__fmul_rn(keep, at(u4[r], k)), moved);
                at(p4[r], k) = __fsub_rn(__fmul_rn(keep, at(p4[r], k)), step);
            }
            put_four(m, i, m4[r]), put_four(u, i, u4[r]), put_four(p, i, p4[r]);
        });
}

// begun <- p, and local of u = 0; u is not read.
extern "C" __global__ void __launch_bounds__(THREADS)
first_local(float* p, const float* g, float* m, float* u, float* begun, const float* v, float weight, float keep,
            float rate, float eps, const byte* lost, long long numel) {
    unsigned counts = *lost ? 0u : ~0u;
    float4 p4[2], g4[2], m4[2], v4[2];
    long long first = (long long)blockIdx.x * SPAN;
    in_pairs(
        first, numel,
        [&](long long i, unsigned r) {
            p4[r] = four(p, i), g4[r] = four(g, i), m4[r] = four(m, i), v4[r] = four(v, i);
        },
        [&](long long i, unsigned r) {
            float4 u4;
            put_four(begun, i, p4[r]);
#pragma unroll
            for (unsigned k = 0; k < FOUR; ++k) {
                float mean = lerp(if_any(at(g4[r], k), counts), at(m4[r], k), weight), moved = __fmul_rn(rate, mean);
                float step = __fdiv_rn(moved, divisor_of(at(v4[r], k), eps));
                at(m4[r], k) = mean, at(u4, k) = moved;
                at(p4[r], k) = __fsub_rn(__fmul_rn(keep, at(p4[r], k)), step);
            }
            put_four(m, i, m4[r]), put_four(u, i, u4), put_four(p, i, p4[r]);
        });
}

// z <- rate (m + w (g - m)).
extern "C" __global__ void __launch_bounds__(THREADS)
first_proposal(float* z, const float* g, const float* m, float weight, float rate, long long numel) {
    float4 g4[2], m4[2];
    long long first = (long long)blockIdx.x * SPAN;
    in_pairs(
        first, numel, [&](long long i, unsigned r) { g4[r] = four(g, i), m4[r] = four(m, i); },
        [&](long long i, unsigned r) {
#pragma unroll
            for (unsigned k = 0; k < FOUR; ++k)
                at(m4[r], k) = __fmul_rn(rate, lerp(at(g4[r], k), at(m4[r], k), weight));
            put_four(z, i, m4[r]);
        });
}

// z <- keep u + rate (m + w (g - m)).
extern "C" __global__ void __launch_bounds__(THREADS)
propose(float* z, const float* g, const float* m, const float* u, float weight, float keep, float rate,
        long long numel) {
    float4 g4[2], m4[2], u4[2];
    long long first = (long long)blockIdx.x * SPAN;
    in_pairs(
        first, numel, [&](long long i, unsigned r) { g4[r] = four(g, i), m4[r] = four(m, i), u4[r] = four(u, i); },
        [&](long long i, unsigned r) {
#pragma unroll
            for (unsigned k = 0; k < FOUR; ++k) {
                float mean = lerp(at(g4[r], k), at(m4[r], k), weight);
                at(u4[r], k) = __fadd_rn(__fmul_rn(keep, at(u4[r], k)), __fmul_rn(rate, mean));
            }
            put_four(z, i, u4[r]);
        });
}

// x where -longest d <= x <= longest d, else what of these is next to it; NaN stays.
__device__ __forceinline__ float cut(float x, float longest, float d) {
    float high = __fmul_rn(longest, d), low = -high;
    x = x > high ? high : x;
    return x < low ? low : x;
}

// z <- cut(sign z, longest d); m <- z / divisor; p <- keep start - z / d. z is not written; start may be p.
extern "C" __global__ void __launch_bounds__(THREADS)
receive(float* p, const float* start, const float* z, const float* v, float* m, float sign, float divisor,
        float longest, float keep, float eps, long long numel) {
    float4 s4[2], z4[2], v4[2];
    long long first = (long long)blockIdx.x * SPAN;
    in_pairs(
        first, numel, [&](long long i, unsigned r) { s4[r] = four(start, i), z4[r] = four(z, i), v4[r] = four(v, i); },
        [&](long long i, unsigned r) {
            float4 m4;
#pragma unroll
            for (unsigned k = 0; k < FOUR; ++k) {
                float d = divisor_of(at(v4[r], k), eps), x = cut(__fmul_rn(sign, at(z4[r], k)), longest, d);
                at(m4, k) = __fdiv_rn(x, divisor);
                at(s4[r], k) = __fsub_rn(__fmul_rn(keep, at(s4[r], k)), __fdiv_rn(x, d));
            }
            put_four(m, i, m4), put_four(p, i, s4[r]);
        });
}

// receive of what the rows say; 0 where dead.
extern "C" __global__ void __launch_bounds__(THREADS)
receive_rows(float* p, const float* start, const float* v, float* m, const float* values, const byte* bits, float sign,
             float divisor, float longest, float keep, float eps, const Block* blocks, const long long* dead) {
    Block b = blocks[blockIdx.x];
    unsigned minus = __float_as_uint(__fmul_rn(sign, values[b.scale])) ^ SIGN;
    for (long long from = 0; from < b.size; from += SPAN) {
        float4 s4[2], v4[2];
        unsigned signs[2];
        in_pairs(
            from, b.size,
            [&](long long i, unsigned r) {
                s4[r] = four(start + b.at, i), v4[r] = four(v + b.at, i);
                signs[r] = (unsigned)bits[b.bits + i / BYTE] << (i & FOUR ? 28 : 24);
            },
            [&](long long i, unsigned r) {
                float4 m4;
#pragma unroll
                for (unsigned k = 0; k < FOUR; ++k) {
                    float d = divisor_of(at(v4[r], k), eps);
                    float x = cut(__uint_as_float(minus ^ ((signs[r] << k) & SIGN)), longest, d);
                    at(m4, k) = __fdiv_rn(x, divisor);
                    at(s4[r], k) = __fsub_rn(__fmul_rn(keep, at(s4[r], k)), __fdiv_rn(x, d));
                }
                put_four(m + b.at, i, m4), put_four(p + b.at, i, s4[r]);
            });
    }
    if (b.dead == b.dead_stop) return;
    __syncthreads();
    for (unsigned k = b.dead + threadIdx.x; k < b.dead_stop; k += THREADS) p[dead[k]] = m[dead[k]] = 0.f;
}
